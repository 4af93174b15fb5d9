"""The tables of docs/measurements.md that bench/eval_tables.py makes."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from command import ROOT

SCRIPT = ROOT / "bench" / "eval_tables.py"
DOCUMENT = ROOT / "docs" / "measurements.md"


def eval_tables(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60
    )


class EvalTables(unittest.TestCase):
    def test_the_document_has_the_numbers_of_the_files(self):
        done = eval_tables("--check", DOCUMENT)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(DOCUMENT.read_text().count("<!-- bench/eval_tables.py: "), 4)

    def test_another_number_is_found_and_mended(self):
        text = DOCUMENT.read_text()
        before, table = text.split("<!-- bench/eval_tables.py: moved -->\n\n")
        lines = table.splitlines(keepends=True)
        lines[3] = lines[3].replace("|", "| 1", 1)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "measurements.md"
            changed = before + "<!-- bench/eval_tables.py: moved -->\n\n" + "".join(lines)
            path.write_text(changed)
            done = eval_tables("--check", path)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertEqual(path.read_text(), changed)
            self.assertEqual(eval_tables("--write", path).returncode, 0)
            self.assertEqual(path.read_text(), text)

    def test_bad_input(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "measurements.md"
            path.write_text("<!-- bench/eval_tables.py: nothing -->\n\n| a |\n")
            for arguments, words in (
                (["--check", path], "no table nothing; there are baselines, components, harder, moved"),
                (["--check", Path(folder) / "none.md"], "none.md"),
            ):
                done = eval_tables(*arguments)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(words, done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)


if __name__ == "__main__":
    unittest.main()
