"""The man page and the completion that were built have every command and flag of --help."""

import os
import re
import shutil
import subprocess
import unittest
from pathlib import Path

from command import sluice

DOCS = Path(os.environ["SLUICE_DOCS"])
PAGE = DOCS / "sluice.1"
COMPLETION = DOCS / "sluice.bash"


def commands() -> list[str]:
    listed = sluice("--help").stdout.split("Subcommands:")[1].split("Exit codes:")[0]
    return re.findall(r"^  (\w+)", listed, flags=re.MULTILINE)


def flags(*command: str) -> list[str]:
    text = sluice(*command, "--help").stdout
    heads = re.findall(r"^  (-\S+)", text, flags=re.MULTILINE)
    return [name for head in heads for name in head.split(",")]


def completed(*words: str) -> list[str]:
    """What Tab offers for the last of the words."""
    script = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sluice; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-euc", script, "bash", COMPLETION, "sluice", *words],
                          capture_output=True, text=True, check=True)  # fmt: skip
    return done.stdout.split()


class ManPage(unittest.TestCase):
    def shown(self) -> str:
        if shutil.which("groff") is None:
            self.skipTest("groff is not there to show the page")
        done = subprocess.run(["groff", "-man", "-ww", "-Tascii", "-P-c", "-P-bou", PAGE],
                              capture_output=True, text=True, check=True)  # fmt: skip
        self.assertEqual(done.stderr, "")
        return done.stdout

    def test_has_every_command_and_flag(self):
        page = PAGE.read_text(encoding="utf-8").replace("\\-", "-")
        sections = dict(zip(re.findall(r"^\.SS sluice (\w+)", page, flags=re.MULTILINE),
                            re.split(r"^\.SS .*$", page, flags=re.MULTILINE)[1:]))  # fmt: skip
        self.assertEqual(list(sections), commands())
        self.assertGreater(len(sections), 5)
        for command, section in sections.items():
            heads = re.findall(r"^\.B (\S+)", section.split(".SH ")[0], flags=re.MULTILINE)
            self.assertEqual([name for head in heads for name in head.split(",")], flags(command))
            self.assertGreater(len(heads), 1)

    def test_is_shown_without_warnings(self):
        text = self.shown()
        for part in ("NAME", "COMMANDS", "POLICIES", "EXIT STATUS", "twilight", "/reset", "130 interrupted"):
            self.assertIn(part, text)


class Completion(unittest.TestCase):
    def test_offers_every_command_and_flag(self):
        self.assertEqual(completed(""), [*commands(), *flags()])
        self.assertEqual(completed("ge"), ["generate"])
        for command in commands():
            self.assertEqual(completed(command, ""), flags(command))
        self.assertEqual(completed("chat", "--sys"), ["--system"])
        self.assertEqual(completed("generate", "--chat", "--sys"), ["--system"])

    def test_offers_values(self):
        self.assertEqual(completed("info", "--kv-dtype", ""), ["bf16", "f16", "f32", "int8", "k8v4"])
        self.assertIn("twilight", completed("eval", "--policy", ""))
        self.assertNotIn("auto", completed("eval", "--policy", ""))
        self.assertEqual(completed("chat", "--policy", "au"), ["auto"])
        # Files, which the shell knows.
        self.assertEqual(completed("generate", "-f", ""), [])


if __name__ == "__main__":
    unittest.main()
