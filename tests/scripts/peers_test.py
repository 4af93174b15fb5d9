#!/usr/bin/env python3
"""Tests that peers' results have the schema of `sluice bench`, and are plotted beside its cells."""

import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "peers"))

import bench_cells  # noqa: E402  (the path comes first)


def report(*cells: dict) -> dict:
    run = bench_cells.run("peer 1.2", "cpu", None, bench_cells.utc_now())
    return {"schema": bench_cells.SCHEMA, "run": run, "results": list(cells)}


def documented(heading: str) -> set[str]:
    """Members in the first table behind these words of docs/comparing.md."""
    text = (ROOT / "docs" / "comparing.md").read_text(encoding="utf-8")
    table = text[text.index(heading) :].split("\n\n")[1]
    return set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines())))


class Peers(unittest.TestCase):
    def test_cells_have_members_of_the_schema(self) -> None:
        cell = bench_cells.cell("torch flash", 8192, [0.002, 0.001, 0.003, 0.010], sequences=2)
        self.assertLessEqual(cell.keys(), documented("and a cell is one, too:"))
        self.assertEqual(cell["step_ms"]["mean"], 4.0)
        self.assertEqual(cell["step_ms"]["p50"], 2.0)
        self.assertEqual(cell["step_ms"]["p99"], 10.0)
        self.assertEqual(cell["tokens_per_second"], 500.0)
        # What is not measured is not made up.
        self.assertIsNone(cell["crossed_bytes"])
        self.assertLessEqual(report(cell).keys(), documented("The report is one object:"))

    def test_percentiles_are_ranks(self) -> None:
        values = [float(i) for i in range(100, 0, -1)]
        self.assertEqual([bench_cells.percentile(values, share) for share in (0.01, 0.5, 0.99, 1.0)],
                         [1.0, 50.0, 99.0, 100.0])  # fmt: skip

    def test_plots_have_both(self) -> None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self.skipTest("no matplotlib")
        own = bench_cells.cell("values", 4096, [0.001], crossed_bytes=1000.0)
        own["modelled"] = [{"bus": "1GB/s,1us", "step_ms": 2.0}]
        own["transfers"] = [{"way": "page16", "bytes": 9000.0, "ms": {"p50": 0.5}}]
        with tempfile.TemporaryDirectory() as name:
            files = [Path(name) / "own.json", Path(name) / "peer.json"]
            files[0].write_text(json.dumps(report(own, own | {"context": 8192})))
            files[1].write_text(json.dumps(report(bench_cells.cell("torch flash", 8192, [0.002]))))
            both = Path(name) / "both.png"
            command = [sys.executable, ROOT / "bench" / "plot_bench.py", *files, "--output", both]
            subprocess.run(command, check=True, capture_output=True)
            drawn = both.with_suffix(".svg").read_text()
        for label in ("values, no cap", "torch flash, no cap", "values, no cap, page16"):
            self.assertIn(label, drawn)

    def test_plots_refuse_other_reports(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            for text in ('{"schema": "x", "results": []}', "{", json.dumps(report())):
                path = Path(name) / "file.json"
                path.write_text(text)
                done = subprocess.run([sys.executable, ROOT / "bench" / "plot_bench.py", path],
                                      capture_output=True, text=True, check=False)  # fmt: skip
                self.assertEqual(done.returncode, 1)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)


if __name__ == "__main__":
    unittest.main()
