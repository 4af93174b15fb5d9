"""`sluice bench --check`, `--transfer` and `--positions`: what moved, counted apart and otherwise."""

import csv
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from command import MODEL, ROOT, sluice

SCORERS = Path(os.environ["SLUICE_SCORERS"])
BOOK = ROOT / "data" / "war-and-peace.txt"
FLAGS = ["-m", MODEL, "-t", BOOK, "--steps", 3, "--warm-up", 1]
KEY = ("policy", "context", "device_memory", "sequences")
ROW = 256  # bytes: 64 channels of key and value in bf16
LAYERS, HEADS = 12, 2
PAGE = 128
COUNTED = ("append", "write_back", "hit", "miss")
DIFFERENCE, USAGE, NOT_FOUND, CORRUPT, UNSUPPORTED = 1, 2, 3, 4, 5


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
                           "select=double_sparsity prune=top_k(64)",
                           "select=exact candidates=1/4 prune=top_k(64)", "--context", 600,
                           "--device-memory", "none", "3MiB", "--sequences", 2, "--check")  # fmt: skip
        self.assertEqual(len(cells), 12)
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
        # This scorer selects otherwise when its steps are counted.
        wrong = "select=restless prune=top_k(64)"
        flags = [*FLAGS, "--scorer", SCORERS / "restless.so", "--policy", wrong, "streaming",
                 "--context", 600, "--device-memory", "2MiB"]  # fmt: skip
        cells = self.cells(*flags, "--check", code=DIFFERENCE)
        error = cells[wrong, 600, "2MiB", 1]["error"]
        self.assertEqual(error["exit_code"], DIFFERENCE)
        for words in ("the measured steps moved other rows", "from device to device", "counted were"):
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


def write_trace(path, **changes):
    """A trace of two steps of two layers, the second dense, with other tensors in place of some."""
    tensors = {
        "sizes": ("I64", [3], [300, 4, 16]),
        "counts": ("I32", [2, 2, 2], [2, 0, -1, -1, 1, 3, -1, -1]),
        "positions": ("I32", [6], [3, 255, 7, 0, 1, 2]),
    }
    tensors.update(changes)
    header, data = {}, b""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        dtype, shape, values = tensor
        content = struct.pack(f"<{len(values)}{ {'I64': 'q', 'I32': 'i', 'F32': 'f'}[dtype] }", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


class Positions(Reports):
    def recorded(self, policy, *flags):
        """The cell of a run whose positions are recorded, and their file."""
        trace = self.folder / "trace.safetensors"
        (cell,) = self.cells(*FLAGS, "--policy", policy, "--context", "1K", "--no-baseline", *flags,
                             "--record-positions", trace).values()  # fmt: skip
        return cell, trace

    def test_replays_move_what_the_run_moved(self):
        # Without an index, the replay's plan has the room that the run's has.
        tiers = ["--device-memory", "2MiB", "--row-cache", "256KiB"]
        cell, trace = self.recorded("select=exact prune=top_k(64) dense=none", *tiers)
        report = self.bench("--positions", trace, "--warm-up", 1, "--no-baseline", *tiers)
        (replayed,) = report["results"]
        self.assertEqual(replayed["policy"], "recorded")
        self.assertNotIn("kl", replayed)
        for name in ("resident_tokens", "cache_rows", "device_bytes"):
            self.assertEqual(replayed["plan"][name], cell["plan"][name])
        for cause in ("hit", "miss", "evict", "append", "write_back"):
            of_run, of_replay = ([(t["layer"], t["rows"], t["bytes"]) for t in c["traffic_by_layer"]
                                  if t["cause"] == cause] for c in (cell, replayed))  # fmt: skip
            self.assertEqual(of_replay, of_run, cause)
            self.assertGreater(sum(rows for _, rows, _ in of_run), 0)
        missed = sum(t["rows"] for t in cell["traffic"] if t["cause"] == "miss")
        self.assertEqual(sum(report["positions"]["missed_rows"][1:]), round(3 * missed))

    def test_heads_with_different_numbers_of_rows(self):
        cell, trace = self.recorded("select=int4 prune=top_p(0.9) cap=300 dense=0,3")
        (replayed,) = self.cells("--positions", trace, "--warm-up", 1, "--no-baseline").values()

        def attended(of):
            return {t["layer"]: round(3 * t["rows"]) for t in of["traffic_by_layer"] if t["cause"] == "hit"}

        self.assertEqual(attended(replayed), attended(cell))
        self.assertEqual(attended(cell)[3], HEADS * sum(1024 + 1 + i for i in (1, 2, 3)))

    def test_caches_of_other_sizes(self):
        trace = self.folder / "trace.safetensors"
        self.bench(*FLAGS, "--policy", "quest prune=top_k(256) dense=none", "--context", "1K", "--no-baseline",
                   "--device-memory", "3MiB", "--record-positions", trace)  # fmt: skip
        missed = []
        for size in ("0", "128KiB", "512KiB"):
            cells = self.cells("--positions", trace, "--no-baseline", "--device-memory", "3MiB",
                               "--row-cache", size, "--transfer", "page16", "--check")  # fmt: skip
            (cell,) = cells.values()
            missed.append(sum(e["rows"] for e in cell["traffic"] if e["cause"] == "miss"))
            self.assertEqual(moved(cell["checked"]["counted"]), moved(cell["traffic"]))
        self.assertGreater(missed[0], missed[1])
        self.assertGreater(missed[1], missed[2])

    def test_a_trace_of_another_program(self):
        # Of two selecting heads and a dense layer, at position 300, in page [256, 384).
        trace = write_trace(self.folder / "trace.safetensors")
        cells = self.cells("--positions", trace, "--warm-up", 0, "--sequences", 2)
        cell = cells["recorded", 300, None, 2]
        rows = {e["layer"]: 2 * e["rows"] for e in cell["traffic_by_layer"] if e["cause"] == "hit"}
        newest = 2 * (300 + 1 - 256) + 2 * (301 + 1 - 256)
        self.assertEqual(rows, {0: 2 * (6 + newest), 1: 2 * 2 * (301 + 302)})
        dense = cells["dense", 300, None, 2]
        self.assertEqual(sum(e["rows"] for e in dense["traffic"] if e["cause"] == "hit"),
                         2 * 2 * 2 * (301 + 302) / 2)  # fmt: skip

    def test_bad_traces(self):
        path = self.folder / "trace.safetensors"
        cases = [
            ("positions", dict(positions=("I32", [6], [255, 3, 7, 0, 1, 2])), "3 after 255"),
            ("positions", dict(positions=("I32", [6], [3, 3, 7, 0, 1, 2])), "step 0, layer 0, KV head 0"),
            ("positions", dict(positions=("I32", [6], [3, 256, 7, 0, 1, 2])), "below 256"),
            ("positions", dict(positions=("I32", [6], [-1, 3, 7, 0, 1, 2])), "ascend from 0"),
            ("positions", dict(positions=("I32", [5], [3, 255, 7, 0, 1])), "add up to 6"),
            ("positions", dict(positions=("I64", [6], [3, 255, 7, 0, 1, 2])), "is of I64, not I32"),
            ("positions", dict(positions=None), "has no tensor"),
            ("counts", dict(counts=("I32", [2, 4], [2, 0, -1, -1, 1, 3, -1, -1])), "2 dimensions, not 3"),
            ("counts", dict(counts=("I32", [2, 2, 2], [2, 0, -1, -1, 1, 3, -1, -2])), "count of -2"),
            ("positions", dict(counts=("I32", [2, 2, 2], [2, 0, -1, -1, 1, 3, -1, 0])), "layer 1, KV head 1"),
            ("sizes", dict(sizes=("I64", [2], [300, 4])), "2 numbers, not 3"),
            ("sizes", dict(sizes=("I64", [3], [300, 3, 16])), "no multiple"),
            ("sizes", dict(sizes=("I64", [3], [0, 4, 16])), "0 tokens"),
            ("missed", dict(missed=("I64", [3, 2], [0] * 6)), "steps and layers"),
        ]
        for tensor, change, words in cases:
            with self.subTest(words):
                write_trace(path, **change)
                self.refused(CORRUPT, [str(path), f"'{tensor}'", words], "--positions", path)
        write_trace(path, sizes=("I64", [3], [2**31, 4, 16]))
        self.refused(UNSUPPORTED, [str(path), "'sizes'", "2147483648 tokens"], "--positions", path)

    def test_bad_input(self):
        path = write_trace(self.folder / "trace.safetensors")
        self.refused(USAGE, [str(path), "has 2 steps"], "--positions", path, "--steps", 3)
        self.refused(USAGE, ["--policy", "--positions"], "--positions", path, "--policy", "quest")
        self.refused(USAGE, ["--context", "--positions"], "--positions", path, "--context", "1K")
        self.refused(USAGE, ["--text"], "--positions", path, "--text", BOOK)
        self.refused(USAGE, ["--record-positions"], "--positions", path, "--record-positions", "x")
        self.refused(NOT_FOUND, ["nowhere"], "--positions", self.folder / "nowhere")
        new = self.folder / "new.safetensors"
        self.refused(USAGE, ["attends to everything"], *FLAGS, "--context", 300, "--record-positions", new)
        self.refused(USAGE, ["evicts"], *FLAGS, "--context", 300, "--no-baseline", "--policy",
                     "zipvl prefill=zipvl(0.95,evict)", "--record-positions", new)  # fmt: skip
        self.refused(USAGE, [str(path), "is there already"], *FLAGS, "--record-positions", path)
        self.refused(USAGE, ["--resume"], *FLAGS, "--record-positions", new, "--resume", "--json", self.report)
        self.assertFalse(new.exists())


if __name__ == "__main__":
    unittest.main()
