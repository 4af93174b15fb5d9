#!/usr/bin/env python3
"""Tests bench/compare_results.py on small files."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "compare_results.py"


def entry(name: str, time: float, unit: str = "us", **more: Any) -> dict[str, Any]:
    return {"run_name": name, "run_type": "iteration", "real_time": time, "time_unit": unit, **more}


class CompareResults(unittest.TestCase):
    def compare(
        self, before: list[dict[str, Any]], after: list[dict[str, Any]], *options: str
    ) -> list[list[str]]:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / "before.json", Path(folder) / "after.json"]
            for file, entries in zip(files, (before, after)):
                file.write_text(json.dumps({"benchmarks": entries}))
            done = subprocess.run(
                [sys.executable, SCRIPT, *options, *files],
                capture_output=True, text=True, check=True,
            )
            return [line.split() for line in done.stdout.splitlines()]

    def test_marks_what_is_slower(self) -> None:
        before = [entry("a", 100), entry("b", 1, "ms"), entry("c", 100)]
        lines = self.compare(before, [entry("a", 104), entry("b", 1020), entry("c", 90)])
        self.assertEqual(lines[1], ["a", "100", "us", "104", "us", "1.040", "slower"])
        self.assertEqual(lines[2], ["b", "1", "ms", "1.02", "ms", "1.020"])
        self.assertEqual(lines[3][-1], "faster")
        self.assertEqual(" ".join(lines[4]),
                         "3 compared: 1 slower by more than 3 %, 1 faster, 0 failed")
        lines = self.compare(before, [entry("a", 104), entry("c", 90)], "--only", "slower")
        self.assertEqual([line[0] for line in lines], ["name", "a", "2"])

    def test_settings_are_no_part_of_names(self) -> None:
        lines = self.compare([entry("a/n:1/iterations:20", 1)], [entry("a/n:1/min_time:0.05", 2)])
        self.assertEqual(lines[1][-2:], ["2.000", "slower"])

    def test_new_arguments_count_as_one(self) -> None:
        after = [entry("a/batch:16/n:8", 50), entry("a/batch:1/n:8", 10), entry("a/batch:4/n:9", 7)]
        lines = self.compare([entry("a/n:8", 10), entry("b", 1)], after)
        self.assertEqual(lines[1], ["a/batch:1/n:8", "10", "us", "10", "us", "1.000"])
        self.assertEqual([" ".join(line) for line in lines[2:5]],
                         ["only before: b", "only after: a/batch:16/n:8",
                          "only after: a/batch:4/n:9"])

    def test_failures_and_medians(self) -> None:
        before = [entry("a", 10), entry("b", 10)]
        failed = {"run_name": "a", "run_type": "iteration", "error_occurred": True}
        median = entry("b", 12, aggregate_name="median", run_type="aggregate")
        mean = entry("b", 10, aggregate_name="mean", run_type="aggregate")
        lines = self.compare(before, [failed, entry("b", 5), mean, median])
        self.assertEqual(lines[1][-1], "FAILED")
        self.assertEqual(lines[2][-2:], ["1.200", "slower"])

    def test_other_files_are_refused(self) -> None:
        done = subprocess.run([sys.executable, SCRIPT, __file__, __file__],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(len(done.stderr.splitlines()), 1)


if __name__ == "__main__":
    unittest.main()
