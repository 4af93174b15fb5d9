"""`--scorer FILE.so`: scorers that were built outside, and files that are none."""

import json
import os
import tempfile
import unittest
from pathlib import Path

from command import MODEL, ROOT, sluice

SCORERS = Path(os.environ["SLUICE_SCORERS"])
BOOK = ROOT / "data" / "war-and-peace.txt"
CONTEXT, TOKENS = 700, 4


def bench(scorer, policies, *more):
    return sluice(
        "bench", "-m", MODEL, "-t", BOOK, "--context", CONTEXT, "--steps", TOKENS, "--warm-up", 0,
        "--scorer", scorer, "--policy", *policies, *more,
    )  # fmt: skip


class Scorer(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.report = Path(folder.name) / "report.json"

    def cells(self):
        return {cell["policy"]: cell for cell in json.loads(self.report.read_text())["results"]}

    def test_the_example_is_measured_by_every_command(self):
        policy = "select=signs prune=top_k(64)"
        done = sluice("eval", "-m", MODEL, "-t", BOOK, "--length", CONTEXT, "--task", "agreement",
                      "--rounds", 1, "--tokens", 8, "--scorer", SCORERS / "signs.so",
                      "--scorer", SCORERS / "faulty.so", "--policy", policy,
                      "--policy", "select=faulty prune=top_k(64)")  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(policy, done.stdout)
        done = sluice("generate", "-m", MODEL, "-p", "Well, Prince,", "--max-tokens", 4,
                      "--scorer", SCORERS / "signs.so", "--policy", policy)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_files_that_are_no_scorers_are_refused(self):
        for file, code, why in (
            ("absent.so", 3, "no such file"),
            (".", 3, "no such file"),
            ("other.so", 4, "exports no 'sluice_scorer'"),
            ("old.so", 5, "version 2 of scorers"),
            ("none.so", 5, "makes no scorer"),
            (ROOT / "README.md", 4, "README.md"),
        ):
            with self.subTest(file):
                done = bench(SCORERS / file, ["values"])
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(why, done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_a_name_is_taken_once(self):
        done = bench(SCORERS / "faulty.so", ["values"], "--scorer", SCORERS / "faulty.so")
        self.assertEqual(done.returncode, 2)
        self.assertIn("there is a 'faulty' already", done.stderr)

    def test_a_scorer_that_throws_ends_a_cell_and_leaves_the_others(self):
        for fault, why in (
            (1, "the scorer 'faulty' in score(): the scorer's own reason"),
            (2, "the scorer 'faulty' in build(): the scorer's own reason"),
            (4, "the scorer 'faulty' in score(): threw what is no std::exception"),
        ):
            with self.subTest(why):
                wrong = f"select=faulty(fault={fault}) prune=top_k(64)"
                done = bench(SCORERS / "faulty.so", ["streaming", wrong, "quest"],
                             "--json", self.report, "--force")  # fmt: skip
                self.assertEqual(done.returncode, 5, done.stderr)
                cells = self.cells()
                self.assertEqual(set(cells), {"dense", "streaming", wrong, "quest"})
                self.assertIn(why, cells[wrong]["error"]["message"])
                self.assertIn("step_ms", cells["quest"])

    def test_a_scorer_that_cannot_be_planned_is_refused_before_the_run(self):
        done = bench(SCORERS / "faulty.so", ["select=faulty(fault=3) prune=top_k(64)"])
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("the scorer 'faulty' in needs(): the scorer's own reason",
                      done.stderr + done.stdout)  # fmt: skip

    def test_estimates_that_are_no_numbers_leave_what_was_finished(self):
        done = bench(SCORERS / "faulty.so", ["streaming", "select=faulty(fault=5) prune=top_k(64)"],
                     "--json", self.report)  # fmt: skip
        self.assertEqual(done.returncode, 11, done.stderr)
        self.assertEqual(set(self.cells()), {"dense", "streaming"})

    def test_resuming_refuses_another_scorer(self):
        copy = self.report.parent / "mine.so"
        copy.write_bytes((SCORERS / "signs.so").read_bytes())
        policy = "select=signs prune=top_k(64)"
        done = bench(copy, [policy], "--json", self.report)
        self.assertEqual(done.returncode, 0, done.stderr)
        copy.write_bytes((SCORERS / "signs.so").read_bytes() + b"another build")
        done = bench(copy, [policy], "--json", self.report, "--resume")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("other scorers", done.stderr)


if __name__ == "__main__":
    unittest.main()
