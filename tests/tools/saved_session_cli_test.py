"""--save-session and --load-session of `sluice generate` and `sluice chat`."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from chat_model import write_model
from command import GOLDEN, MODEL, ROOT, sluice

TEXT = (ROOT / "data" / "tinyshakespeare.txt").read_text()[:2000]


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.saved = self.folder / "session"

    def contents(self):
        return {path.name: path.read_bytes() for path in self.saved.iterdir()}


class Text(Folder):
    def generate(self, tokens, *flags, prompt=TEXT):
        return sluice("generate", "-m", MODEL, "-n", tokens, "-q", "-p", prompt, *flags)

    def text(self, *arguments, **options):
        done = self.generate(*arguments, **options)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout[:-1]

    def test_text_goes_on_as_if_it_had_not_been_cut_off(self):
        for flags in (
            ["--policy", "values"],
            ["--temperature", "0.8", "--seed", "7", "--repetition-penalty", "1.2"],
        ):
            with self.subTest(flags=flags):
                whole = self.text(24, *flags)
                first = self.text(9, *flags, "--save-session", self.saved)
                # A session may be loaded as often as one likes, and saved over itself.
                for _ in range(2):
                    rest = self.text(15, *flags, "--load-session", self.saved, prompt="")
                    self.assertEqual(first + rest, whole)
                second = self.text(
                    5, *flags, "--load-session", self.saved, "--save-session", self.saved, prompt=""
                )
                last = self.text(10, *flags, "--load-session", self.saved, prompt="")
                self.assertEqual(first + second + last, whole)

    def test_a_prompt_follows_the_saved_text_and_nothing_is_computed_again(self):
        self.text(1, "--save-session", self.saved)
        report = self.folder / "report.json"
        self.text(3, "--load-session", self.saved, "--json", report, prompt=" Then")
        timings = json.loads(report.read_text())["timings"]
        self.assertLess(timings["prefill_tokens"], 8)
        ledger = json.loads(report.read_text())["ledger"]
        self.assertEqual(ledger["prefill"]["tokens"], timings["prefill_tokens"])

    def test_wrong_directories_are_one_line(self):
        self.text(1, "--save-session", self.saved)
        rows = next(self.saved.glob("rows-*"))
        before = self.contents()
        other = self.folder / "other"
        other.mkdir()
        (other / "mine.txt").write_text("mine")
        save, load = "--save-session", "--load-session"
        cases = [
            (3, "no saved session", [load, other]),
            (3, "cannot be opened", [load, self.folder / "none"]),
            (2, "mine.txt", [save, other]),
            (9, "cannot be written", [save, self.folder / "none" / "session"]),
            (2, "kv_dtype", [load, self.saved, "--kv-dtype", "f16"]),
            (2, "kv_dtype", [load, self.saved, "--kv-dtype", "int8"]),
            (7, "context", [load, self.saved, "--context", 100]),
        ]
        for code, text, flags in cases:
            with self.subTest(flags=flags):
                done = self.generate(1, *flags)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(text.replace("kv_dtype", "--kv-dtype").replace("context", "--context"), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                self.assertEqual(done.stdout, "")
        self.assertEqual(self.contents(), before)
        self.assertEqual((other / "mine.txt").read_text(), "mine")
        done = sluice("generate", "-m", GOLDEN / "qwen2", "-p", "x", "-n", 1, "-q", load, self.saved)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("another model", done.stderr)
        rows.write_bytes(rows.read_bytes()[:-100])
        done = self.generate(1, load, self.saved)
        self.assertEqual(done.returncode, 4)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_a_refused_run_makes_no_directory(self):
        for flags in (["--host-memory", "1MiB"], ["--policy", "nonsense"]):
            done = self.generate(1, "--save-session", self.saved, *flags)
            self.assertIn(done.returncode, (2, 8), done.stderr)
            self.assertFalse(self.saved.exists(), flags)


class Prompts(Folder):
    """Prompts that were not read to their end."""

    def setUp(self):
        super().setUp()
        self.book = self.folder / "book.txt"
        self.book.write_bytes((ROOT / "data" / "war-and-peace.txt").read_bytes()[:9_000])
        self.command = [os.environ["SLUICE_BINARY"], "generate", "-m", MODEL, "-n", "8",
                        "--policy", "values"]  # fmt: skip
        self.flags = ["-f", self.book, "--save-session", self.saved]

    def end_by(self, number):
        """Ends the command by a signal once it saved a part of the prompt; exit code and errors."""
        command = [*self.command, *self.flags, "--save-every", "512"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:  # fmt: skip
            while process.poll() is None and not (self.saved / "manifest.json").exists():
                time.sleep(0.02)
            process.send_signal(number)
            _, errors = process.communicate(timeout=120)
        return process.returncode, errors.decode()

    def answer(self, *flags):
        done = sluice(*self.command[1:], "-q", *flags)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_an_interrupted_prompt_goes_on(self):
        code, errors = self.end_by(signal.SIGINT)
        self.assertEqual(code, 130, errors)
        left, of = re.search(r"(\d+) of (\d+) tokens of the prompt were not read", errors).groups()
        self.assertTrue(0 < int(left) < int(of), errors)
        report = self.folder / "report.json"
        whole = self.answer("-f", self.book)
        load = ["--load-session", self.saved]
        self.assertEqual(self.answer(*load, "-p", "", "--json", report), whole)
        self.assertEqual(json.loads(report.read_text())["timings"]["prefill_tokens"], int(left))
        # The same command again, which names the prompt, does the same.
        self.assertEqual(self.answer(*load, "-f", self.book), whole)
        done = sluice(*self.command[1:], "-q", *load, "-p", "Another prompt")
        self.assertEqual(done.returncode, 7)
        self.assertIn("this is another", done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_a_killed_prompt_goes_on_from_its_latest_save(self):
        code, _ = self.end_by(signal.SIGKILL)
        self.assertEqual(code, -signal.SIGKILL)
        report = self.folder / "report.json"
        rest = self.answer("--load-session", self.saved, "-p", "", "--json", report)
        self.assertEqual(rest, self.answer("-f", self.book))
        saved = json.loads(report.read_text())["timings"]["prefill_tokens"]
        self.assertTrue(0 < saved < len(self.book.read_bytes()) / 2, saved)

    def test_saving_while_reading_changes_nothing(self):
        short = self.folder / "short.txt"
        short.write_bytes(self.book.read_bytes()[:4_000])
        whole = self.answer("-f", short, "--repetition-penalty", "1.3")
        often = self.answer("-f", short, "--repetition-penalty", "1.3", "--save-session", self.saved,
                            "--save-every", 1)  # fmt: skip
        self.assertEqual(often, whole)

    def test_what_cannot_be_saved_in_between_is_refused(self):
        for tokens in (0, -1):
            done = sluice(*self.command[1:6], *self.flags, "--save-every", tokens)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("give 1 or more", done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for flags, text in ((["--policy", "zipvl"], "zipvl"), ([], "--save-session")):
            save = self.flags if flags else self.flags[:2]
            done = sluice(*self.command[1:6], *flags, *save, "--save-every", 512)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(text, done.stderr)


class Chats(Folder):
    def chat(self, *lines, flags=()):
        return sluice(
            "chat", "-m", self.model, "-n", 8, "-q", *flags, stdin="".join(line + "\n" for line in lines)
        )

    def setUp(self):
        super().setUp()
        model = self.folder / "model"
        model.mkdir()
        self.model = write_model(model)

    def test_a_conversation_goes_on(self):
        system = ["--system", "Be brief."]
        whole = self.chat("Hello there", "And then?", "Why?", flags=system)
        self.assertEqual((whole.returncode, whole.stderr), (0, ""))
        first = self.chat("Hello there", flags=[*system, "--save-session", self.saved])
        again = ["--load-session", self.saved, "--save-session", self.saved]
        second = self.chat("And then?", flags=again)
        third = self.chat("Why?", flags=again)
        for done in (first, second, third):
            self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(first.stdout + second.stdout + third.stdout, whole.stdout)

    def test_conversations_and_texts_are_told_apart(self):
        save, load = "--save-session", "--load-session"
        self.chat("Hello", flags=[save, self.saved])
        done = sluice("generate", "-m", self.model, "-p", "x", "-n", 1, "-q", load, self.saved)
        self.assertEqual(done.returncode, 2)
        self.assertIn("sluice chat", done.stderr)
        done = self.chat("Hello", flags=[load, self.saved, "--system", "Be long."])
        self.assertEqual(done.returncode, 2)
        self.assertIn("another text of the system", done.stderr)
        text = self.folder / "text"
        sluice("generate", "-m", self.model, "-p", "x", "-n", 1, "-q", save, text)
        done = self.chat("Hello", flags=[load, text])
        self.assertEqual(done.returncode, 2)
        self.assertIn("no conversation", done.stderr)

    def test_an_empty_conversation_is_not_saved(self):
        done = self.chat(flags=["--save-session", self.saved])
        self.assertEqual(done.returncode, 0)
        self.assertFalse((self.saved / "manifest.json").exists())


if __name__ == "__main__":
    unittest.main()
