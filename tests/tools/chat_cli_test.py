"""`sluice chat` in pipes and on a terminal, and `generate --chat`."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import tempfile
import termios
import time
import unittest
from pathlib import Path

from chat_model import CASES, write_model
from command import MODEL, sluice

EXACT = ["--policy", "dense", "--compute", "f32", "--kv-dtype", "f32"]
PROMPT = b"\x1b[1;32m>\x1b[0m "


class Models(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.model = write_model(Path(folder.name))

    def edit_config(self, **changes):
        path = self.model / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class Pipes(Models):
    def chat(self, *lines, flags=()):
        return sluice("chat", "-m", self.model, "-n", 8, *EXACT, *flags, stdin="\n".join(lines) + "\n")

    def prefilled(self, stdout):
        return [int(count) for count in re.findall(r"^prefill  (\d+) tokens", stdout, re.MULTILINE)]

    def test_a_turn_costs_its_own_tokens(self):
        done = self.chat("Hello there", "/stats", "And then?", "/stats", flags=["-q"])
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        # A byte is a token here, and so is a control token. <|im_start|>, user, line break, text,
        # <|im_end|>, line break, <|im_start|>, assistant, line break.
        around = 1 + 4 + 1 + 1 + 1 + 1 + 9 + 1
        first, second = self.prefilled(done.stdout)
        self.assertEqual(first, around + len("Hello there"))
        # The last token of the answer, the end of its turn and the line break come first.
        self.assertEqual(second, 1 + 1 + 1 + around + len("And then?"))
        # The ledger's 3 layers of 2 KV heads: each token's row is written once.
        rows = re.findall(r"prefill +in host +append +(\d+)", done.stdout)
        self.assertEqual(int(rows[-1]), 6 * (first + second))
        self.assertIn("context  ", done.stdout)
        self.assertIn("ms per token (TPOT)", done.stdout)

    def test_answers_are_those_to_the_whole_conversation(self):
        for name in ("chatml", "llama3", "mistral3"):
            with self.subTest(name):
                write_model(self.model, name)
                answers = self.chat("Hello", flags=["-q"]).stdout
                alone = sluice("generate", "-m", self.model, "-n", 8, "-q", "--chat", "-p", "Hello", *EXACT)
                self.assertEqual(alone.returncode, 0, alone.stderr)
                self.assertEqual(answers, alone.stdout)
                system = ["--system", "Be brief."]
                other = self.chat("Hello", flags=["-q", *system]).stdout
                alone = sluice("generate", "-m", self.model, "-n", 8, "-q", "--chat", "-p", "Hello",
                               *EXACT, *system)  # fmt: skip
                self.assertEqual(other, alone.stdout)
                self.assertNotEqual(other, answers)

    def test_reset_begins_anew(self):
        done = self.chat("Hello", "More", "/reset", "Hello", "/stats", "/quit", "never asked", flags=["-q"])
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0], lines[2])
        self.assertIn("1 turns", lines[3])
        self.assertNotIn("never", done.stdout)

    def test_commands_and_slashes(self):
        done = self.chat("/help", "", "  ", "/frobnicate", "//Hello", "//Hello", flags=["-q"])
        self.assertEqual(done.returncode, 2)
        self.assertTrue(done.stdout.startswith("/stats"), done.stdout)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn("'/frobnicate' is no command; see /help", done.stderr)
        plain = sluice("generate", "-m", self.model, "-n", 8, "-q", "--chat", "-p", "/Hello", *EXACT)
        self.assertIn(plain.stdout.strip(), done.stdout)

    def test_a_full_context_is_one_line(self):
        question = "x" * 60
        done = self.chat("Hello", question, question, "/reset", question, flags=["--context", 100])
        errors = [line for line in done.stderr.splitlines() if line.startswith("sluice: ")]
        self.assertEqual((done.returncode, len(errors)), (7, 2), done.stderr)
        self.assertIn("the planned context of 100 has no room for an answer", errors[0])
        self.assertIn("--context", errors[0])
        self.assertEqual(done.stdout.count("\n"), 2)

    def test_text_that_is_not_utf8(self):
        done = sluice("chat", "-m", self.model, "-n", 2, "-q", stdin=b"Hello\n\xff\nHello\n")
        self.assertEqual(done.returncode, 7)
        self.assertIn("not UTF-8", done.stderr)
        self.assertEqual(done.stdout.count("\n"), 2)

    def test_a_system_text_that_moves_is_noted(self):
        write_model(self.model, "mistral3")
        done = self.chat("Hello", flags=["--system", "Be brief."])
        self.assertIn("in front of the newest question", " ".join(done.stderr.split()))
        self.assertNotIn("newest question", self.chat("Hello").stderr)

    def test_interrupts_end_an_answer_and_then_the_program(self):
        process = subprocess.Popen(
            [os.environ["SLUICE_BINARY"], "chat", "-m", str(self.model), "-n", "100000",
             "--context", "100100", "-q"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        process.stdin.write(b"Hello\n")
        process.stdin.flush()
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"/stats\n")
        process.stdin.flush()
        rest = b""
        while b"1 turns" not in rest:
            line = process.stdout.readline()
            self.assertTrue(line, rest)
            rest += line
        count = int(re.search(rb"context  (\d+) of", rest).group(1))
        self.assertLess(count, 50_000, first)
        while b"tokens" not in line or b"decode" not in line:
            line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        out, errors = process.communicate()
        self.assertEqual((process.returncode, errors), (130, b"sluice: interrupted\n"), out)


class WrongModels(Models):
    def refused(self, code, *mentions, flags=()):
        for command in (["chat"], ["generate", "--chat", "-p", "Hello"]):
            done = sluice(*command, "-m", self.model, "-n", 2, *flags, stdin="Hello\n")
            self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            for mention in mentions:
                self.assertIn(mention, done.stderr)

    def test_no_template(self):
        done = sluice("chat", "-m", MODEL, stdin="Hello\n")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (5, 1))
        self.assertIn("has no chat template", done.stderr)
        self.assertIn("give generate a prompt", done.stderr)

    def test_other_templates(self):
        self.edit_config(chat_template="{% block turn %}{% endblock %}")
        self.refused(5, "tokenizer_config.json", "'block', in line 1")
        self.edit_config(chat_template="{% for m in messages %}{{ '<turn>' + m.role + m.content }}"
                                       "{% endfor %}{{ raise_exception('odd') if messages|length > 3 }}")  # fmt: skip
        done = sluice("chat", "-m", self.model, "-n", 2, stdin="Hello\nAnd?\nMore?\n")
        self.assertEqual(done.returncode, 7)
        self.assertEqual(done.stderr.count("the template refuses this conversation: 'odd'"), 1)
        self.assertEqual(done.stdout.count("\n"), 2)

    def test_broken_files(self):
        self.edit_config(chat_template=7)
        self.refused(4, "tokenizer_config.json: chat_template is neither")
        (self.model / "tokenizer_config.json").write_text("{")
        self.refused(4, "tokenizer_config.json")

    def test_a_template_without_its_tokens(self):
        path = self.model / "tokenizer.json"
        path.write_text(path.read_text().replace("<|im_end|>", "<|over|>"))
        # As transformers has it, but not without a word.
        done = sluice("chat", "-m", self.model, "-n", 2, stdin="Hello\n")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("writes '<|im_end|>', no tokens of tokenizer.json", " ".join(done.stderr.split()))
        self.edit_config(eos_token="<|im_end|>")
        self.refused(6, "needs the token '<|im_end|>'")

    def test_no_place_for_a_system_text(self):
        write_model(self.model, "mistral1")
        self.refused(5, "no place for a text of the system", flags=["--system", "x"])

    def test_flags(self):
        done = sluice("generate", "-m", self.model, "-p", "x", "--system", "x")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--system requires --chat", done.stderr)
        done = sluice("generate", "-m", self.model, "-p", "x", "--chat", "--bos", "never")
        self.assertEqual(done.returncode, 2)


class Terminal(Models):
    """A command under a pseudo-terminal, and what it shows."""

    def start(self, *flags, **environment):
        self.shown = b""  # and not yet seen
        self.controller, terminal = pty.openpty()
        self.addCleanup(os.close, self.controller)
        env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        self.process = subprocess.Popen(
            [os.environ["SLUICE_BINARY"], "chat", "-m", str(self.model), "-q", *EXACT, *flags],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            env={**env, "TERM": "xterm", **environment},
            # The terminal's interrupts go to the command.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.addCleanup(self.process.wait)
        self.addCleanup(self.process.kill)
        self.settings = termios.tcgetattr(terminal)
        self.terminal = terminal
        self.addCleanup(os.close, terminal)

    def see(self, text: bytes, seconds: float = 30) -> bytes:
        """What comes until `text` does, and it."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self.controller], [], [], max(0, end - time.monotonic()))
            self.assertTrue(ready, self.shown)
            self.shown += os.read(self.controller, 4096)
        shown, _, self.shown = self.shown.partition(text)
        return shown + text

    def type(self, text: bytes):
        time.sleep(0.2)  # the prompt is shown before keys are read one by one
        os.write(self.controller, text)

    def ends(self, code: int):
        self.assertEqual(self.process.wait(timeout=30), code)
        # Echo and lines are as they were.
        self.assertEqual(termios.tcgetattr(self.terminal), self.settings)

    def test_editing_history_and_colours(self):
        self.start("-n", "8")
        self.see(PROMPT)
        self.type(b"/helx\x7fp\r")  # a typing error, taken back
        self.see(b"a line that begins with a slash")
        self.see(PROMPT)
        self.type("h\u00e9 \u65e5x\x7f\r".encode())
        self.see(PROMPT)
        self.type(b"/stats\r")
        shown = self.see(b"1 turns")
        # Every byte of the question is a token: h, two, a space and three.
        prefilled = int(re.search(rb"prefill  (\d+) tokens", self.see(b"TTFT")).group(1))
        self.assertEqual(prefilled, 1 + 4 + 1 + 7 + 1 + 1 + 1 + 9 + 1, shown)
        self.see(PROMPT)
        self.type(b"\x1b[A\x1b[A\x1b[A\r")  # up, to the first line
        self.see(b"a line that begins with a slash")
        self.see(PROMPT)
        self.type(b"\x04")
        self.ends(0)

    def test_no_colours_on_request(self):
        for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            with self.subTest(environment):
                self.start(**environment)
                self.assertNotIn(b"\x1b[1;32m", self.see(b"> "))
                self.type(b"\x04")
                self.ends(0)

    def test_interrupts(self):
        self.start("-n", "100000", "--context", "100100")
        self.see(PROMPT)
        self.type(b"Hello\r")
        self.see(b"\r\n")
        time.sleep(0.3)
        self.type(b"\x03")
        self.see(b"(interrupted)")
        self.see(PROMPT)
        self.type(b"/stats\r")
        self.see(b"1 turns")
        self.see(PROMPT)
        self.type(b"half a line\x03")
        self.see(b"sluice: interrupted")
        self.ends(130)

    def test_an_end_from_outside_leaves_the_terminal_as_it_was(self):
        self.start()
        self.see(PROMPT)
        self.type(b"half a line")
        self.see(b"half a line")
        self.process.terminate()
        self.ends(-signal.SIGTERM)

    def test_a_stop_at_the_prompt_and_going_on(self):
        self.start("-n", "2")
        self.see(PROMPT)
        self.type(b"/he")
        self.see(b"/he")
        self.process.send_signal(signal.SIGSTOP)
        edited = termios.tcgetattr(self.terminal)
        # As a shell does that goes on with something else.
        termios.tcsetattr(self.terminal, termios.TCSANOW, self.settings)
        self.process.send_signal(signal.SIGCONT)
        self.see(b"/he")  # is drawn again
        self.assertEqual(termios.tcgetattr(self.terminal)[3], edited[3])
        self.type(b"x\x7flp\r")
        self.see(b"a line that begins with a slash")
        self.type(b"/quit\r")
        self.ends(0)

    def test_the_end_of_the_terminal(self):
        self.start()
        self.see(PROMPT)
        self.process.send_signal(signal.SIGHUP)
        self.process.wait(timeout=30)


class Recorded(unittest.TestCase):
    def test_every_family_is_there(self):
        families = {entry["family"] for entry in CASES["formats"]}
        self.assertEqual(families, {"ChatML", "Llama 3", "Mistral"})


if __name__ == "__main__":
    unittest.main()
