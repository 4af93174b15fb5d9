"""Ctrl-C ends every command within half a second, whatever it is doing."""

import os
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from command import MODEL, ROOT

BOOK = ROOT / "data" / "war-and-peace.txt"


def interrupted(*arguments, after: float, output: int = 0):
    """The command, interrupted `after` seconds or `output` bytes, and the seconds to its end."""
    with subprocess.Popen(
        [os.environ["SLUICE_BINARY"], *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        first = process.stdout.read(output)
        time.sleep(after)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        seconds = time.monotonic() - begin
        rest, errors = process.communicate()
    return process.returncode, seconds, (first + rest).decode(), errors.decode()


class Interrupt(unittest.TestCase):
    def ends(self, *arguments, after: float, output: int = 0):
        for _ in range(3):
            code, seconds, out, errors = interrupted(*arguments, after=after, output=output)
            self.assertEqual(code, 130, errors)
            self.assertIn("sluice: interrupted", errors)
            # Once or twice the machine may be busy with something else.
            if seconds < 0.5:
                return out
        self.fail(f"{seconds} s after the signal, as in the attempts before")

    def test_prefill(self):
        with tempfile.NamedTemporaryFile() as file:
            # Giving back the memory of the whole book would take a part of the half second.
            file.write(BOOK.read_bytes()[:600_000])
            file.flush()
            for policy in ("dense", "zipvl"):
                with self.subTest(policy):
                    out = self.ends("generate", "-m", MODEL, "-f", file.name, "-n", 1,
                                    "--policy", policy, after=4)  # fmt: skip
                    self.assertEqual(out, "")

    def test_reading_the_prompt_and_making_tokens_of_it(self):
        self.ends("generate", "-m", MODEL, after=1)
        with tempfile.NamedTemporaryFile() as file:
            file.write(BOOK.read_bytes() * 10)
            file.flush()
            self.ends("generate", "-m", MODEL, "-f", file.name, after=1)

    def test_eval_and_calibrate(self):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            self.ends("eval", "-m", MODEL, "--text", BOOK, "--json", report, after=2)
            self.assertEqual(os.listdir(folder), [])
        self.ends("calibrate", "-m", MODEL, "--text", BOOK, "--dry-run", after=2)

    def test_decoding_ends_with_a_report(self):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            out = self.ends("generate", "-m", MODEL, "-p", "Once", "-n", 100000, "--ignore-eos",
                            "--json", report, after=0, output=20)  # fmt: skip
            self.assertIn('"finish_reason": "interrupted"', report.read_text())
        self.assertGreaterEqual(len(out), 20)
        self.assertTrue(out.endswith("\n"))


if __name__ == "__main__":
    unittest.main()
