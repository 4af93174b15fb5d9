#!/usr/bin/env python3
"""Tests that the fuzzers' driver finds faults: with faulty_fuzz, a reader that has all of them."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

FUZZER = os.environ["SLUICE_FAULTY_FUZZ"]


def run(*arguments: str, folder: str) -> subprocess.CompletedProcess:
    """Runs the faulty fuzzer in a folder, for at most a minute."""
    return subprocess.run(
        [FUZZER, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


class Driver(unittest.TestCase):
    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = holder.name

    def run_corpus(self, *arguments: str, **files: str) -> subprocess.CompletedProcess:
        """Fuzzes from these files."""
        corpus = Path(self.folder, "corpus")
        corpus.mkdir()
        for name, text in files.items():
            (corpus / name).write_text(text)
        return run("corpus", *arguments, folder=self.folder)

    def test_every_fault_is_found_and_its_input_kept(self) -> None:
        faults = {
            "abort": "signal Aborted",
            "throw": "not an Error",
            "slow": "an input takes little time",
            "large": "an input takes little memory",
            "leak": "an input leaves no memory behind",
            "internal": "an error is one bounded line with an expected code",
        }
        for word, message in faults.items():
            with self.subTest(word):
                self.setUp()
                done = self.run_corpus(ok="count=5", other=f"count {word}", refused="no")
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(message, done.stderr)
                (kept,) = Path(self.folder).glob("*.input")
                self.assertEqual(kept.read_text(), f"count {word}")
                self.assertIn(f"--input {kept.name}", done.stderr)
                self.assertNotEqual(run("--input", kept.name, folder=self.folder).returncode, 0)

    def test_changes_reach_what_the_corpus_does_not_have(self) -> None:
        done = self.run_corpus("--runs", "20000", "--seed", "7", ok="count=5")
        self.assertEqual(done.returncode, 1, done.stderr)
        (kept,) = Path(self.folder).glob("*.input")
        self.assertIn("9223372036854775807", kept.read_text())
        again = run("corpus", "--runs", "20000", "--seed", "7", folder=self.folder)
        self.assertEqual(again.stderr, done.stderr, "a seed gives the same inputs again")

    def test_files_of_the_corpus_are_what_their_names_say(self) -> None:
        done = self.run_corpus("--runs", "1", refused_not="count=5")
        self.assertIn("refused_not: counts", done.stderr)
        self.assertEqual(done.returncode, 1)

    def test_that_something_is_accepted_and_something_refused(self) -> None:
        done = self.run_corpus("--runs", "1", "--seed", "1", ok="count=5")
        self.assertIn("some changed inputs are accepted and some are refused", done.stderr)
        self.assertEqual(done.returncode, 1)

    def test_an_input_by_itself(self) -> None:
        Path(self.folder, "in").write_text("count=5")
        done = run("--input", "in", folder=self.folder)
        self.assertEqual((done.returncode, done.stdout), (0, "accepted: counts\n"))
        Path(self.folder, "in").write_text("x")
        done = run("--input", "in", folder=self.folder)
        self.assertEqual((done.returncode, done.stdout), (0, "refused: there is no count\n"))


if __name__ == "__main__":
    unittest.main()
