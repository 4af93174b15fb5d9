"""What the command does under the limits of a container, of the shell and of its processors.

Containers are made up: a mount namespace of its own in which /sys/fs/cgroup is a folder of the test's files.
"""

import os
import re
import resource
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from command import MODEL, ROOT, sluice

BOOK = ROOT / "data" / "war-and-peace.txt"
MIB = 2**20
# Binds the folder $1 over /sys/fs/cgroup where nobody else sees it, and runs the rest.
ENTER = 'mount --make-rprivate / && mount --bind "$1" /sys/fs/cgroup && shift && exec "$@"'


def can_unshare() -> bool:
    """Whether this process may make mount namespaces."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = ["unshare", "-m", "sh", "-c", ENTER, "sh", folder, "true"]
            return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
        except OSError:
            return False


class Container:
    """A folder that stands for /sys/fs/cgroup."""

    def __init__(self, **files: str):
        self.folder = tempfile.TemporaryDirectory()
        for name, text in files.items():
            self.write(name.replace("_", ".", 1), text)

    def write(self, name: str, text: str) -> None:
        (Path(self.folder.name) / name).write_text(text + "\n")

    def command(self, *arguments: object) -> list[str]:
        return ["unshare", "-m", "sh", "-c", ENTER, "sh", self.folder.name, os.environ["SLUICE_BINARY"],
                *map(str, arguments)]  # fmt: skip

    def sluice(self, *arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=300)


def most_threads(command: list[str]) -> int:
    """The threads that computed in a process at most while it ran; it has to succeed."""
    most = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        while running.poll() is None:
            try:
                most = max(most, len(os.listdir(f"/proc/{running.pid}/task")))
            except FileNotFoundError:
                pass
            time.sleep(0.002)
    assert running.returncode == 0, running.returncode
    return most - 1  # that waits for Ctrl-C


@unittest.skipUnless(can_unshare(), "mount namespaces are not permitted here (unshare -m)")
class Containers(unittest.TestCase):
    def container(self, **files: str) -> Container:
        container = Container(**files)
        self.addCleanup(container.folder.cleanup)
        return container

    def generate(self, container: Container, *arguments: object) -> subprocess.CompletedProcess:
        return container.sluice("generate", "-m", MODEL, "-p", "hello", "-n", 2, *arguments)

    def test_a_plan_beyond_the_memory_limit_is_refused(self):
        container = self.container(memory_max=str(128 * MIB), memory_current=str(32 * MIB))
        done = self.generate(container, "--context", 200000)
        self.assertEqual(done.returncode, 8, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, r"(?m)^sluice: the plan needs another .*memory limit \(memory\.max of /\): 96\.0 MiB left")
        self.assertNotIn("load", done.stderr)
        capped = self.generate(container, "--context", 200000, "--host-memory", "8GiB")
        self.assertEqual((capped.returncode, capped.stdout), (8, ""), capped.stderr)
        self.assertIn("memory.max", capped.stderr)

    def test_a_plan_within_the_memory_limit_runs(self):
        container = self.container(memory_max=str(228 * MIB), memory_current=str(100 * MIB))
        done = self.generate(container, "--context", 2000)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_cached_files_are_no_use_of_memory(self):
        container = self.container(memory_max=str(256 * MIB), memory_current=str(250 * MIB))
        self.assertEqual(self.generate(container, "--context", 2000).returncode, 8)
        container.write("memory.stat", f"anon 1\ninactive_file {200 * MIB}")
        done = self.generate(container, "--context", 2000)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_limits_that_say_nothing_are_none(self):
        for text in ("max", "", "garbage", "-1", "99999999999999999999999", "9223372036854771712"):
            container = self.container(memory_max=text, memory_current="0", cpu_max=text)
            done = self.generate(container, "--context", 2000)
            self.assertEqual(done.returncode, 0, text + done.stderr)

    # Stopped right behind the plan, so that the prompt is read under the new limit.
    def test_a_limit_that_shrinks_while_a_prompt_is_read_is_an_error(self):
        container = self.container(memory_max=str(4096 * MIB), memory_current=str(100 * MIB))
        with tempfile.TemporaryDirectory() as folder:
            prompt = Path(folder) / "prompt.txt"
            prompt.write_bytes(BOOK.read_bytes()[:60000])
            command = container.command("generate", "-m", MODEL, "-f", prompt, "-n", 2, "--threads", 2)
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
                errors = ""
                while "at its peak" not in errors:
                    errors += running.stderr.readline()
                running.send_signal(signal.SIGSTOP)
                container.write("memory.max", str(101 * MIB))
                running.send_signal(signal.SIGCONT)
                out, rest = running.communicate(timeout=300)
        self.assertEqual(running.returncode, 8, errors + rest)
        self.assertRegex(rest, r"(?m)^sluice: .*needs another .*memory\.max of /\): 1\.00 MiB left")

    def test_a_quota_of_a_processor_is_a_thread(self):
        for quota, threads in (("100000 100000", 1), ("50000 100000", 1), ("150000 100000", 2)):
            container = self.container(cpu_max=quota)
            shown = container.sluice("topology", "--size", 0)
            self.assertEqual(shown.returncode, 0, shown.stderr)
            usable = int(re.search(r"(?m)^usable +(\d+) cores", shown.stdout)[1])
            expected = min(threads, usable)
            self.assertRegex(shown.stdout, rf"(?m)^computes with +{expected} thread")
            self.assertRegex(shown.stdout, r"(?m)^ +limit .* processors?: .*cpu\.max of /")
            arguments = ("generate", "-m", MODEL, "-p", "War and", "-n", 20)
            self.assertEqual(most_threads(container.command(*arguments)), expected, quota)
        # What is asked for is what is used.
        container = self.container(cpu_max="100000 100000")
        self.assertEqual(most_threads(container.command(*arguments, "--threads", 3)), 3)

    def test_topology_shows_limits_and_where_they_come_from(self):
        container = self.container(memory_max=str(128 * MIB), memory_high=str(100 * MIB), memory_current=str(32 * MIB))
        shown = container.sluice("topology", "--size", 0).stdout
        self.assertRegex(shown, r"(?m)^memory +.*, 68\.0 MiB available$")
        self.assertRegex(shown, r"(?m)^ +limit +100\.0 MiB, 68\.0 MiB left: .*memory\.high of /")
        self.assertRegex(shown, r"(?m)^ +limit +128\.0 MiB, 96\.0 MiB left: .*memory\.max of /")
        self.assertRegex(shown, r"(?m)^ +limit .* left: the free memory of this machine$")


class Shells(unittest.TestCase):
    def test_an_affinity_mask_bounds_the_threads(self):
        processors = sorted(os.sched_getaffinity(0))
        command = [os.environ["SLUICE_BINARY"], "topology", "--size", "0"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60,
                               preexec_fn=lambda: os.sched_setaffinity(0, processors[:1]))  # fmt: skip
        self.assertRegex(shown.stdout, r"(?m)^usable +1 cores, 1 threads")
        self.assertRegex(shown.stdout, r"(?m)^computes with +1 thread$")

    def test_a_limit_of_address_space_is_named(self):
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (1024 * MIB, 1024 * MIB))

        done = sluice("generate", "-m", MODEL, "-p", "hello", "-n", 2, "--context", 200000, preexec_fn=limit)
        self.assertEqual((done.returncode, done.stdout), (8, ""), done.stderr)
        self.assertRegex(done.stderr, r"(?m)^sluice: the plan needs another .*\(RLIMIT_AS, ulimit -v\): .* left")

    def test_a_limit_of_data_is_named(self):
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_DATA, (512 * MIB, 512 * MIB))

        done = sluice("generate", "-m", MODEL, "-p", "hello", "-n", 2, "--context", 200000, preexec_fn=limit)
        self.assertEqual((done.returncode, done.stdout), (8, ""), done.stderr)
        self.assertRegex(done.stderr, r"(?m)^sluice: the plan needs another .*\(RLIMIT_DATA, ulimit -d\): .* left")

    def test_what_is_accepted_under_a_limit_of_address_space_runs(self):
        works = False
        for size in range(120, 420, 14):
            def limit(size: int = size) -> None:
                resource.setrlimit(resource.RLIMIT_AS, (size * MIB, size * MIB))

            done = sluice("generate", "-m", MODEL, "-p", BOOK.read_text()[:1500], "-n", 2, "-q",
                          "--threads", 2, preexec_fn=limit)  # fmt: skip
            with self.subTest(mebibytes=size):
                if done.returncode == 0:
                    works = True
                else:
                    self.assertEqual((done.returncode, done.stdout), (8, ""), done.stderr)
                    self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                    self.assertFalse(works, "a smaller limit was enough")
        self.assertTrue(works)

    def test_a_server_has_room_for_the_threads_of_its_connections(self):
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (600 * MIB, 600 * MIB))

        done = sluice("serve", "-m", MODEL, "--context", 512, "--running", 1, "--cached", 0, "--port", 0,
                      "--connections", 200, preexec_fn=limit)  # fmt: skip
        self.assertEqual((done.returncode, done.stdout), (8, ""), done.stderr)
        self.assertRegex(done.stderr, r"(?m)^sluice: the threads of 200 --connections need another .*left; have fewer")


class Threads(unittest.TestCase):
    # Few threads take what they took before; many are planned for, though not each has work on a small machine.
    def test_the_plan_counts_what_threads_take(self):
        for threads, slack in ((1, 16), (2, 16), (64, 40)):
            with self.subTest(threads=threads):
                planned, taken = self.peaks("--threads", threads)
                self.assertLessEqual(taken, planned)
                self.assertLess(planned - taken, slack * MIB)

    def test_the_plan_counts_what_threads_take_to_choose_important_tokens(self):
        planned, taken = self.peaks("--threads", 32, "--policy", "zipvl")
        self.assertLessEqual(taken, planned)

    def peaks(self, *arguments: object) -> tuple[int, int]:
        """Bytes that the process was to have at its peak, and had."""
        with tempfile.TemporaryDirectory() as folder:
            prompt = Path(folder) / "prompt.txt"
            prompt.write_bytes(BOOK.read_bytes()[20000:36000])
            command = [os.environ["SLUICE_BINARY"], "generate", "-m", MODEL, "-f", prompt, "-n", 4, *arguments]
            with subprocess.Popen([str(c) for c in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
                errors = running.stderr.read().decode()
                _, status, usage = os.wait4(running.pid, 0)
                running.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(running.returncode, 0, errors)
        planned = float(re.search(r"at its peak +([\d.]+) MiB", errors)[1])
        return int(planned * MIB), usage.ru_maxrss * 1024


if __name__ == "__main__":
    unittest.main()
