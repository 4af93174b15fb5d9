"""`sluice bench` as a user runs it: real model, contexts of some hundred tokens."""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from command import MODEL, ROOT, sluice

BOOK = ROOT / "data" / "war-and-peace.txt"
FLAGS = ["-m", MODEL, "-t", BOOK, "--steps", 4, "--warm-up", 1]
ROW = 256  # bytes: 64 channels of key and value in bf16
LAYERS, HEADS = 12, 2
KEY = ("policy", "context", "device_memory", "sequences")


def bench(*arguments):
    return sluice("bench", *FLAGS, *arguments)


class Bench(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.report = Path(self.folder.name) / "bench.json"

    def cells(self):
        report = json.loads(self.report.read_text())
        return {tuple(cell[name] for name in KEY): cell for cell in report["results"]}

    def test_numbers_agree_with_each_other_and_with_arithmetic(self):
        table = Path(self.folder.name) / "bench.csv"
        done = bench(
            "--policy", "streaming", "--context", 400, "1K", "--device-memory", "4MiB",
            "--sequences", 1, 2, "--bus", "2GB/s,10us", "--json", self.report, "--csv", table,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        cells = self.cells()
        # Dense attention without a cap, and both policies under it.
        self.assertEqual(len(cells), 3 * 2 * 2)
        for (policy, context, cap, sequences), cell in cells.items():
            with self.subTest(cell=(policy, context, cap, sequences)):
                self.check_cell(cell)
                dense = policy == "dense"
                if dense and cap is None:
                    self.assertEqual(cell["crossed_bytes"], 0)
                if dense:
                    # Every row of every sequence is read in every step: the rows before the steps,
                    # one of the warm-up, and 1, 2, 3, 4 of the steps themselves.
                    rows = sequences * (context + 1 + 2.5) * LAYERS * HEADS
                    read = sum(t["rows"] for t in cell["traffic"] if t["cause"] in ("hit", "miss"))
                    self.assertEqual(read, rows)
                    self.assertLess(cell["kl"]["mean"], 1e-3)
                elif context == 1024:  # with fewer tokens it drops none
                    self.assertGreater(cell["kl"]["mean"], 0)
        capped = cells["dense", 1024, "4MiB", 2]
        self.assertGreater(capped["crossed_bytes"], 0)
        self.check_csv(table, cells)
        self.check_plot()

    def check_cell(self, cell):
        self.assertGreaterEqual(cell["step_ms"]["p99"], cell["step_ms"]["p50"])
        self.assertAlmostEqual(cell["tokens_per_second"] * cell["step_ms"]["mean"],
                               1000 * cell["sequences"], places=3)
        for name in ("rows", "bytes", "requests"):
            sums = {}
            for part in cell["traffic_by_layer"]:
                kind = part["from"], part["to"], part["cause"]
                sums[kind] = sums.get(kind, 0) + part[name]
                self.assertLessEqual(part["requests"], 1)
            self.assertEqual(sums, {(t["from"], t["to"], t["cause"]): t[name] for t in cell["traffic"]})
        crossed = [t for t in cell["traffic"] if t["from"] != t["to"]]
        self.assertEqual(cell["crossed_bytes"], sum(t["bytes"] for t in crossed))
        self.assertEqual(cell["crossed_requests"], sum(t["requests"] for t in crossed))
        for part in cell["traffic"]:
            if part["cause"] in ("hit", "miss", "append", "write_back"):
                self.assertEqual(part["bytes"], part["rows"] * ROW)
        (model,) = cell["modelled"]
        transfer = 1e3 * (cell["crossed_bytes"] / 2e9 + 1e-5 * cell["crossed_requests"])
        self.assertAlmostEqual(model["transfer_ms"], transfer)
        self.assertAlmostEqual(model["step_ms"], cell["step_ms"]["p50"] + transfer)
        self.assertAlmostEqual(model["overlapped_step_ms"], max(cell["step_ms"]["p50"], transfer))

    def check_csv(self, path, cells):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(len(rows), len(cells))
        for row in rows:
            cap = None if row["device_memory"] == "none" else row["device_memory"]
            cell = cells[row["policy"], int(row["context"]), cap, int(row["sequences"])]
            self.assertEqual(float(row["kl"]), cell["kl"]["mean"])
            self.assertEqual(float(row["crossed_bytes"]), cell["crossed_bytes"])
            self.assertEqual(float(row["step_ms_p50"]), cell["step_ms"]["p50"])
            self.assertEqual(float(row["modelled_step_ms"]), cell["modelled"][0]["step_ms"])

    def check_plot(self):
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            return
        done = subprocess.run([sys.executable, ROOT / "bench" / "plot_bench.py", self.report],
                              capture_output=True, text=True, check=False)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(self.report.with_suffix(".png").exists())

    def test_bytes_are_those_that_generate_counts(self):
        # Which rows these policies read depends on the number of tokens alone.
        policies = ["dense", "streaming recent=64"]
        prompt = Path(self.folder.name) / "prompt"
        prompt.write_text(BOOK.read_text()[:2800])
        counted = {policy: self.generated(prompt, policy) for policy in policies}
        tokens = {report["timings"]["prefill_tokens"] for report in counted.values()}
        (context,) = tokens
        done = bench("--policy", *policies, "--context", context, "--device-memory", "3MiB",
                     "--no-baseline", "--json", self.report)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        for policy, report in counted.items():
            with self.subTest(policy):
                cell = self.cells()[policy, context, "3MiB", 1]
                steps = report["ledger"]["history"]
                steps = [s for s in steps if s["phase"] == "decode"][1:]  # without the warm-up
                self.assertEqual(len(steps), 4)
                self.assertEqual(self.of_steps(steps), self.of_cell(cell))
                self.assertGreater(len(cell["traffic_by_layer"]), LAYERS)
                for name in ("device_bytes", "disk_bytes", "index_bytes"):
                    self.assertEqual(cell[name], report["plan"][name])

    def generated(self, prompt, policy):
        """The report of a prompt and the five steps after it, with the plan of a cell."""
        def run(*more):
            done = sluice("generate", "-m", MODEL, "-f", prompt, "-n", 6, "--ignore-eos", "-q",
                          "--policy", policy, "--device-memory", "3MiB", "--json", "-", *more)  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)

        return run("--context", run()["timings"]["prefill_tokens"] + 5)

    def of_steps(self, steps):
        sums = {}
        for entry in (entry for step in steps for entry in step["entries"]):
            key = entry["layer"], entry["from"], entry["to"], entry["cause"]
            rows, size = sums.get(key, (0, 0))
            sums[key] = rows + entry["rows"], size + entry["bytes"]
        return sums

    def of_cell(self, cell):
        return {(t["layer"], t["from"], t["to"], t["cause"]): (4 * t["rows"], 4 * t["bytes"])
                for t in cell["traffic_by_layer"]}  # fmt: skip

    def test_reports_are_resumed(self):
        flags = ["--policy", "streaming", "--context", 300, 600, 900, "--json", self.report]
        # Interrupted after the first cells: what was finished stays.
        begun = self.interrupted(*flags)
        done = bench(*flags, "--resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        whole = json.loads(self.report.read_text())
        self.assertEqual(whole["results"][: len(begun)], begun)
        self.assertEqual(len(self.cells()), len(whole["results"]))
        self.assertEqual(len(whole["results"]), 6)
        # A second time there is nothing to do.
        before = self.report.read_bytes()
        self.assertEqual(bench(*flags, "--resume").returncode, 0)
        self.assertEqual(self.report.read_bytes(), before)
        self.check_refusals(flags, whole)

    def interrupted(self, *arguments):
        """The results that a run leaves when it is killed as soon as there are some."""
        command = [os.environ["SLUICE_BINARY"], "bench", *map(str, [*FLAGS, *arguments])]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while not self.report.exists() and process.poll() is None:
                time.sleep(0.005)
            process.kill()
        results = json.loads(self.report.read_text())["results"]
        self.assertGreater(len(results), 0)
        return results

    def check_refusals(self, flags, whole):
        def refused(code, words, text, *more):
            self.report.write_text(text)
            done = bench(*(more or flags), "--resume")
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertIn(words, done.stderr)
            self.assertEqual(self.report.read_text(), text)

        text = json.dumps(whole)
        other = ["--policy", "streaming", "--context", 301, "--json", self.report]
        refused(2, "of another command", text, *other)
        refused(4, "bench.json", text[: len(text) // 2])
        for name, words in (("commit", "another commit"), ("version", "another version"),
                            ("checkpoint", "another checkpoint"), ("text", "another text"),
                            ("machine", "another machine")):  # fmt: skip
            changed = json.loads(text)
            changed["run"][name] = "x"
            refused(2, words, json.dumps(changed))
        changed = json.loads(text)
        changed["results"][0]["step_ms"]["p50"] = 0.001
        refused(4, "were changed", json.dumps(changed))
        refused(4, "can complete", '{"written_by": "sluice 0.1.0"}')

    def test_a_cell_that_does_not_fit_stops_no_other(self):
        table = Path(self.folder.name) / "bench.csv"
        done = bench("--policy", "values", "--context", 400, "--device-memory", "1KiB", "4MiB",
                     "--json", self.report, "--csv", table)  # fmt: skip
        self.assertEqual(done.returncode, 8, done.stderr)
        cells = self.cells()
        self.assertIn("give at least", cells["values", 400, "1KiB", 1]["error"]["message"])
        self.assertIn("step_ms", cells["values", 400, "4MiB", 1])
        self.assertIn("some cells could not run", done.stderr)
        with table.open() as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([row["error"] != "" for row in rows],
                         [row["device_memory"] == "1KiB" for row in rows])

    def test_bad_input(self):
        notes = Path(self.folder.name) / "notes"
        notes.write_text("what somebody wrote")
        for arguments, code, words in [
            (("--policy", "sparq(r=99)"), 2, "sparq(r=99)"),
            (("--context", "9000000"), 7, "give a longer text"),
            (("--context", "500K"), 2, "trained for 131072"),
            (("--policy", "fastest"), 2, "fastest"),
            (("--context", "0"), 2, "--context"),
            (("--context", "many"), 2, "--context"),
            (("--steps", 0), 2, "--steps"),
            (("--warm-up", -1), 2, "--warm-up"),
            (("--sequences", 65), 2, "--sequences"),
            (("--bus", "fast"), 2, "--bus"),
            (("--bus", "1GB/s"), 2, "--bus"),
            (("--device-memory", "x"), 2, "--device-memory"),
            (("--resume",), 2, "--json"),
            (("--json", notes), 2, "--force"),
            (("--csv", notes), 2, "--force"),
            (("--json", "/nowhere/report.json"), 9, "/nowhere/report.json"),
            (("--csv", "/nowhere/table.csv"), 9, "/nowhere"),
        ]:
            with self.subTest(arguments):
                done = bench(*arguments)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(words, done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertEqual(notes.read_text(), "what somebody wrote")


if __name__ == "__main__":
    unittest.main()
