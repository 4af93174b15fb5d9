"""What somebody meets in the first minutes: prompts from anywhere, typing errors, notes, help."""

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

from command import MODEL, ROOT, sluice

TEXT = "Well, Prince, so Genoa and Lucca"
QUICK = ["generate", "-m", MODEL, "-n", 6]


class Prompts(unittest.TestCase):
    def setUp(self):
        self.expected = sluice(*QUICK, "-q", "-p", TEXT).stdout
        self.assertGreater(len(self.expected), 8)

    def test_fifo(self):
        with tempfile.TemporaryDirectory() as folder:
            fifo = Path(folder) / "prompt"
            os.mkfifo(fifo)
            writer = threading.Thread(target=lambda: fifo.write_text(TEXT))
            writer.start()
            done = sluice(*QUICK, "-q", "-f", fifo)
            writer.join()
        self.assertEqual((done.returncode, done.stdout), (0, self.expected), done.stderr)

    def test_standard_input_by_its_path(self):
        done = sluice(*QUICK, "-q", "-f", "/dev/stdin", stdin=TEXT)
        self.assertEqual((done.returncode, done.stdout), (0, self.expected), done.stderr)

    def test_terminal(self):
        controller, terminal = pty.openpty()
        process = subprocess.Popen(
            [os.environ["SLUICE_BINARY"], *map(str, QUICK), "-q"],
            stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        os.close(terminal)
        self.assertIn(b"Ctrl-D", process.stderr.readline())
        # Twice: the line is not over, and then there is no more.
        os.write(controller, TEXT.encode() + b"\x04\x04")
        out, errors = process.communicate(timeout=120)
        os.close(controller)
        self.assertEqual((process.returncode, out.decode()), (0, self.expected), errors)

    def test_interrupted_while_typing(self):
        controller, terminal = pty.openpty()
        process = subprocess.Popen(
            [os.environ["SLUICE_BINARY"], *map(str, QUICK)],
            stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        os.close(terminal)
        process.stderr.readline()
        process.send_signal(2)
        _, errors = process.communicate(timeout=20)
        os.close(controller)
        self.assertEqual(process.returncode, 130, errors)


class Mistakes(unittest.TestCase):
    def refused(self, code, mention, *arguments):
        done = sluice(*arguments)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn(mention, done.stderr)

    def test_commands(self):
        self.refused(2, "did you mean generate?", "generat", "-m", MODEL)
        self.refused(2, "did you mean eval?", "evla")
        self.refused(2, "there are generate, chat, serve, info, plan, eval", "listen")

    def test_flags(self):
        wrong = "--modle is no flag of generate; did you mean --model?"
        self.refused(2, wrong, "generate", "--modle", MODEL)
        self.refused(2, wrong, "generate", f"--modle={MODEL}")
        self.refused(2, "--serve is no flag of info (", "info", "-m", MODEL, "--serve", "8080")
        self.refused(2, "--json belongs after generate", "--json", "x", "generate", "-m", MODEL)
        self.refused(2, "did you mean --version?", "--versoin")
        self.refused(2, "--model is required", "generate", "-p", "Once")

    def test_models_that_are_files(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, start, code, mention in (
                ("model.gguf", b"GGUF", 4, "too few for a GGUF file"),
                ("model.gguf", b"GGUF\2" + bytes(40), 5, "is GGUF version 2"),
                ("model.gguf", b"ggjt" + bytes(40), 4, "is no GGUF file: it begins with 'ggjt'"),
                ("model.safetensors", b"\2\0\0\0\0\0\0\0{}", 3, "give the folder"),
            ):
                file = Path(folder) / name
                file.write_bytes(start)
                self.refused(code, mention, "info", "-m", file)
                self.refused(code, mention, "generate", "-m", file, "-p", "x")

    def test_a_plot_without_matplotlib(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "matplotlib.py").write_text("raise ImportError('not here')")
            done = subprocess.run(
                [sys.executable, ROOT / "bench" / "plot_eval.py", "x.json"],
                env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True, check=False,
            )  # fmt: skip
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn("python3-matplotlib", done.stderr)


class Notes(unittest.TestCase):
    def test_auto_says_which_cap_would_do(self):
        flags = [*QUICK, "-p", TEXT, "--context", 6500]
        lines = ("select=dense", "top_k(4096)", "components=half", "top_k(256)", "top_k(64)")
        # That each but the last falls short of.
        names = ("tiny", "compact", "values bits=2 prune=top_k(256)", "values")

        def run(cap, number):
            """The cap that the next better policy needs."""
            done = sluice(*flags, "--device-memory", cap)
            self.assertEqual(done.returncode, 0, done.stderr)
            said = [line in done.stderr for line in lines]
            self.assertEqual(said.index(True), number, done.stderr)
            if number == len(names):
                self.assertNotIn("note:", done.stderr)
                return 0
            note = " ".join(done.stderr[done.stderr.index("note:") :].split())
            instead = "is dense" if number == 0 else f"goes by the policy {names[number - 1]}"
            self.assertIn(
                f"decoding {instead}, for the policy {names[number]} does not fit", note
            )
            return int(re.search(r"give at least (\d+)B", note).group(1))

        cap = run("2MiB", 0)
        self.assertEqual(run(f"{cap - 1}B", 0), cap)
        for number in range(1, len(names)):
            better = run(f"{cap}B", number)
            self.assertGreater(better, cap)
            run(f"{better - 1}B", number)
            cap = better
        run(f"{cap}B", len(names))

    def test_contexts_past_training(self):
        with tempfile.TemporaryDirectory() as folder:
            for file in MODEL.iterdir():
                (Path(folder) / file.name).symlink_to(file)
            config = json.loads((MODEL / "config.json").read_text())
            config["max_position_embeddings"] = 64
            (Path(folder) / "config.json").unlink()
            (Path(folder) / "config.json").write_text(json.dumps(config))
            flags = ["generate", "-m", folder, "-p", TEXT, "--ignore-eos"]
            self.assertNotIn("note:", sluice(*flags, "-n", 20).stderr)
            done = sluice(*flags, "-n", 100)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("trained for 64 tokens", " ".join(done.stderr.split()))

    def test_no_line_is_wider_than_a_terminal(self):
        for flags in (["--device-memory", "2MiB"], ["--device-memory", "12MiB"], []):
            done = sluice(*QUICK, "-p", TEXT, "--context", 6500, *flags)
            self.assertLessEqual(max(map(len, done.stderr.splitlines())), 80, done.stderr)
        done = sluice("info", "-m", MODEL, "--context", 1000000, "--device-memory", "500MiB")
        self.assertLessEqual(max(map(len, done.stdout.splitlines())), 80, done.stdout)

    def test_help_explains_policies(self):
        refused = sluice("generate", "-m", MODEL, "-p", "x", "--policy", "x=1").stderr
        settings = refused[refused.index("settings are ") + 13 :].strip().split(", ")
        self.assertGreater(len(settings), 8)
        for command in ("generate", "eval"):
            text = sluice(command, "--help").stdout
            for word in [*settings, "streaming", "tidaldecode", "zipvl(TAU,evict)", "top_k(1/N)"]:
                self.assertIn(f" {word}", text)
            self.assertIn("evict loses facts that are asked for only after the prompt", " ".join(text.split()))


class Help(unittest.TestCase):
    def test_fits_a_terminal(self):
        for command in ([], ["generate"], ["chat"], ["serve"], ["eval"], ["bench"], ["calibrate"], ["info"], ["plan"], ["topology"]):
            done = sluice(*command, "--help")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual([line for line in done.stdout.splitlines() if len(line) > 80], [])


if __name__ == "__main__":
    unittest.main()
