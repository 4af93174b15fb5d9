"""`sluice bench --check` and `--transfer`: what moved, counted apart and brought otherwise."""

import csv
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from command import MODEL, ROOT, sluice

BOOK = ROOT / "data" / "war-and-peace.txt"
FLAGS = ["-m", MODEL, "-t", BOOK, "--steps", 3, "--warm-up", 1]
KEY = ("policy", "context", "device_memory", "sequences")
ROW = 256  # bytes: 64 channels of key and value in bf16
LAYERS, HEADS = 12, 2
PAGE = 128
COUNTED = ("append", "write_back", "hit", "miss")
DIFFERENCE, USAGE = 1, 2


class Reports(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.report = self.folder / "bench.json"

    def bench(self, *arguments, code=0):
        done = sluice("bench", *arguments, "--json", self.report, "--force")
        self.assertEqual(done.returncode, code, done.stderr)
        return json.loads(self.report.read_text())

    def cells(self, *arguments, code=0):
        return {tuple(cell[name] for name in KEY): cell
                for cell in self.bench(*arguments, code=code)["results"]}  # fmt: skip

    def refused(self, code, words, *arguments):
        done = sluice("bench", *arguments)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)


def moved(entries):
    """Rows and bytes by what is counted, from the ledger's or the counter's entries."""
    return {(e["from"], e["to"], e["cause"]): (e["rows"], e["bytes"])
            for e in entries if e["cause"] in COUNTED}  # fmt: skip


class Check(Reports):
    def test_ledgers_have_what_was_counted(self):
        cells = self.cells(*FLAGS, "--policy", "quest prune=top_k(64)", "values", "twilight",
                           "select=double_sparsity prune=top_k(64)", "--context", 600,
                           "--device-memory", "none", "3MiB", "--sequences", 2, "--check")  # fmt: skip
        self.assertEqual(len(cells), 10)
        for key, cell in cells.items():
            with self.subTest(key):
                self.assertEqual(cell["checked"]["steps"], 3)
                self.assertEqual(moved(cell["checked"]["counted"]), moved(cell["traffic"]))
                attended = sum(e["rows"] for e in cell["checked"]["counted"]
                               if e["cause"] in ("hit", "miss"))  # fmt: skip
                if key[0] == "dense":
                    self.assertEqual(attended, 2 * LAYERS * HEADS * (600 + 1 + 2))
                    self.assertEqual(moved(cell["traffic"]).keys() >= {("host", "device", "miss")},
                                     key[2] == "3MiB")  # fmt: skip
                else:
                    self.assertLess(0, attended)

    def test_a_cache_of_rows_is_seen(self):
        cells = self.cells(*FLAGS, "--policy", "quest prune=top_k(256)", "--context", "1K", "--row-cache",
                           "512KiB", "--device-memory", "4MiB", "--no-baseline", "--check")  # fmt: skip
        (cell,) = cells.values()
        self.assertGreater(cell["plan"]["cache_rows"], 0)
        self.assertEqual(moved(cell["checked"]["counted"]), moved(cell["traffic"]))

    def test_a_difference_ends_the_cell_and_no_other(self):
        # The ledger counts the keys of such candidates as read in place (docs/comparing.md).
        wrong = "select=exact candidates=1/4 prune=top_k(64)"
        flags = [*FLAGS, "--policy", wrong, "streaming", "--context", 600, "--device-memory", "2MiB"]
        cells = self.cells(*flags, "--check", code=DIFFERENCE)
        error = cells[wrong, 600, "2MiB", 1]["error"]
        self.assertEqual(error["exit_code"], DIFFERENCE)
        for words in ("the ledger is wrong: step 1", "index_read from host to device", "counted were"):
            self.assertIn(words, error["message"])
        self.assertIn("checked", cells["streaming", 600, "2MiB", 1])
        # Without the check its cell is measured.
        self.assertIn("step_ms", self.cells(*flags)[wrong, 600, "2MiB", 1])

    def test_bad_input(self):
        self.refused(USAGE, ["--disk", "--check"], *FLAGS, "--check", "--disk", self.folder)
        self.refused(USAGE, ["--transfer page12", "page16"], *FLAGS, "--transfer", "page12")
        self.refused(USAGE, ["--transfer pages"], *FLAGS, "--transfer", "pages")
        self.refused(USAGE, ["--disk", "--transfer"], *FLAGS, "--transfer", "rows", "--disk", self.folder)


WAYS = ("gather", "rows", "batched", "page16", "page128")


class Transfers(Reports):
    def test_ways_differ_in_bytes_and_requests(self):
        table = self.folder / "bench.csv"
        policy = "select=int4 prune=top_k(128)"
        flags = [*FLAGS, "--policy", policy, "--context", "1K", "--device-memory", "none", "3MiB",
                 "--row-cache", 0, "--bus", "2GB/s,10us", "--transfer", *WAYS, "--csv", table]  # fmt: skip
        cells = self.cells(*flags)
        for key, cell in cells.items():
            if key[2] is None:
                self.assertNotIn("transfers", cell)
        sparse = self.check_ways(cells[policy, 1024, "3MiB", 1])
        dense = self.check_ways(cells["dense", 1024, "3MiB", 1])
        # All rows in host memory are one run of neighbours for each head.
        self.assertEqual(dense["rows"]["requests"], LAYERS * HEADS)
        self.assertGreater(sparse["page128"]["bytes"], sparse["page16"]["bytes"])
        self.assertGreater(sparse["page16"]["bytes"], sparse["gather"]["bytes"])
        self.check_csv(table, cells)
        self.check_plot()

    def check_ways(self, cell):
        ways = {transfer["way"]: transfer for transfer in cell["transfers"]}
        self.assertEqual(tuple(ways), WAYS)
        miss = next(e for e in cell["traffic"] if e["cause"] == "miss")
        for way in ("gather", "rows", "batched"):
            self.assertEqual(ways[way]["bytes"], miss["bytes"])
        for way in ("gather", "batched"):
            self.assertEqual(ways[way]["requests"], miss["requests"])
        # Brought as Sluice brings them, the step is that of the cell.
        for name in ("transfer_ms", "step_ms", "overlapped_step_ms"):
            self.assertAlmostEqual(ways["gather"]["modelled"][0][name], cell["modelled"][0][name])
        for page in (16, 128):
            transfer = ways[f"page{page}"]
            self.assertEqual(transfer["bytes"], transfer["requests"] * page * ROW)
            self.assertLessEqual(transfer["requests"], miss["rows"])
        beside = cell["crossed_bytes"] - miss["bytes"], cell["crossed_requests"] - miss["requests"]
        for transfer in ways.values():
            self.assertGreater(transfer["ms"]["p50"], 0)
            self.assertGreaterEqual(transfer["ms"]["p99"], transfer["ms"]["p50"])
            modelled = 1e3 * ((transfer["bytes"] + beside[0]) / 2e9 + 1e-5 * (transfer["requests"] + beside[1]))
            self.assertAlmostEqual(transfer["modelled"][0]["transfer_ms"], modelled)
        return ways

    def check_csv(self, path, cells):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(len(rows), len(cells) + 2 * len(WAYS))
        for row in rows:
            self.assertNotIn(None, row)
            if not row["transfer"]:
                self.assertEqual(row["brought_bytes"], "")
                continue
            cell = cells[row["policy"], 1024, row["device_memory"], 1]
            (transfer,) = [t for t in cell["transfers"] if t["way"] == row["transfer"]]
            self.assertEqual(float(row["brought_bytes"]), transfer["bytes"])
            self.assertEqual(float(row["brought_ms_p50"]), transfer["ms"]["p50"])
            self.assertEqual(float(row["transfer_ms"]), transfer["modelled"][0]["transfer_ms"])

    def check_plot(self):
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            return
        done = subprocess.run([sys.executable, ROOT / "bench" / "plot_bench.py", self.report],
                              capture_output=True, text=True, check=False)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("page128", self.report.with_suffix(".svg").read_text())


if __name__ == "__main__":
    unittest.main()
