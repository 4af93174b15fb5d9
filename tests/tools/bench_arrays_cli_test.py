"""`sluice bench` without a model: arrays of any model, and made-up ones."""

import array
import csv
import json
import math
import os
import random
import resource
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from command import MODEL, ROOT, sluice

BOOK = ROOT / "data" / "war-and-peace.txt"
KEY = ("policy", "context", "device_memory", "sequences")
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16
PAGE = 128
USAGE, NOT_FOUND, CORRUPT, UNSUPPORTED, MEMORY, IO, NUMERIC = 2, 3, 4, 5, 8, 9, 11


def to_bf16(value):
    """The nearest number below in size that bf16 has."""
    return struct.unpack("<f", b"\0\0" + struct.pack("<f", value)[2:])[0]


def to_f16(value):
    return struct.unpack("<e", struct.pack("<e", value))[0]


def to_f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


ROUND = {"F32": to_f32, "F16": to_f16, "BF16": to_bf16}


def packed(values, dtype):
    if dtype == "F32":
        return array.array("f", values).tobytes()
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    return b"".join(struct.pack("<f", value)[2:] for value in values)


class Arrays:
    """Random q, k and v with numbers that `dtype` has, and files with them."""

    def __init__(self, context, steps, dtype="F32", seed=1, layers=LAYERS):
        source = random.Random(seed)
        self.dtype, self.context, self.steps, self.layers = dtype, context, steps, layers
        tokens = context + steps
        self.shapes = {"q": [layers, steps, QUERY_HEADS, HEAD_DIM],
                       "k": [layers, tokens, KV_HEADS, HEAD_DIM],
                       "v": [layers, tokens, KV_HEADS, HEAD_DIM]}  # fmt: skip
        scale = {"q": 2.0, "k": 1.0, "v": 1.0}
        self.values = {name: [ROUND[dtype](source.gauss(0, scale[name])) for _ in range(math.prod(shape))]
                       for name, shape in self.shapes.items()}  # fmt: skip

    def row(self, name, layer, token, head):
        _, tokens, heads, dim = self.shapes[name]
        first = ((layer * tokens + token) * heads + head) * dim
        return self.values[name][first : first + dim]

    def newest(self, context):
        """The same without all but the newest tokens before the steps."""
        cut = Arrays(1, 1, self.dtype)
        cut.context, cut.steps, cut.layers = context, self.steps, self.layers
        cut.shapes = {name: list(shape) for name, shape in self.shapes.items()}
        cut.values = {"q": self.values["q"]}
        for name in "kv":
            cut.shapes[name][1] = context + self.steps
            cut.values[name] = []
            for layer in range(self.layers):
                for token in range(self.context - context, self.context + self.steps):
                    for head in range(KV_HEADS):
                        cut.values[name] += self.row(name, layer, token, head)
        return cut

    def bytes(self, name):
        return packed(self.values[name], self.dtype)

    def safetensors(self, path, **changes):
        """Writes a file, with other tensors (dtype, shape, bytes) in place of some; None: without it."""
        tensors = {name: (self.dtype, self.shapes[name], self.bytes(name)) for name in "qkv"}
        tensors.update(changes)
        write_safetensors(path, {name: tensor for name, tensor in tensors.items() if tensor})
        return path

    def npy(self, folder):
        folder.mkdir(exist_ok=True)
        for name in "qkv":
            write_npy(folder / f"{name}.npy", self.shapes[name], self.bytes(name),
                      {"F32": "<f4", "F16": "<f2"}[self.dtype])  # fmt: skip
        return folder


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_npy(path, shape, content, descr="<f4", order="False"):
    text = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {tuple(shape)}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + content)


def attention(arrays, layer, step, head, kept, scale):
    """Output and sum of weights of one query over the rows of `kept`, in fp64."""
    query = arrays.row("q", layer, step, head)
    kv_head = head // (QUERY_HEADS // KV_HEADS)
    out, total = [0.0] * HEAD_DIM, 0.0
    for token in kept:
        key = arrays.row("k", layer, token, kv_head)
        weight = math.exp(scale * sum(a * b for a, b in zip(query, key)))
        total += weight
        for i, value in enumerate(arrays.row("v", layer, token, kv_head)):
            out[i] += weight * value
    return [x / total for x in out], total


def oracle(arrays, kept_of, scale):
    """Errors and attended weights of the steps, for the rows that a policy keeps."""
    errors, weights = [], []
    for step in range(arrays.steps):
        position = arrays.context + step
        error, weight = [], []
        for layer in range(arrays.layers):
            for head in range(QUERY_HEADS):
                dense, all_weight = attention(arrays, layer, step, head, range(position + 1), scale)
                out, some_weight = attention(arrays, layer, step, head, kept_of(position), scale)
                error.append(math.dist(out, dense) / math.hypot(*dense))
                weight.append(some_weight / all_weight)
        errors.append(statistics.mean(error))
        weights.append(statistics.mean(weight))
    return errors, weights


def sinks_and_own_page(position):
    """What streaming keeps if its newest tokens are in the newest page."""
    return [*range(4), *range(position // PAGE * PAGE, position + 1)]


class BenchArrays(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.report = self.folder / "bench.json"

    def bench(self, *arguments, code=0, **options):
        done = sluice("bench", *arguments, **options)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def cells(self, *arguments):
        """The cells of a run, by key."""
        self.report.unlink(missing_ok=True)
        self.bench(*arguments, "--json", self.report)
        return self.reported()

    def reported(self):
        report = json.loads(self.report.read_text())
        return {tuple(cell[name] for name in KEY): cell for cell in report["results"]}

    def refused(self, code, words, *arguments, **options):
        with self.subTest(words=words):
            done = self.bench(*arguments, code=code, **options)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            for word in [words] if isinstance(words, str) else words:
                self.assertIn(word, done.stderr)

    def test_outputs_are_those_of_an_oracle(self):
        policy = "streaming recent=32"
        for dtype, scale in (("F32", None), ("F32", 0.1), ("F16", None), ("BF16", None)):
            with self.subTest(dtype=dtype, scale=scale):
                # The newest page has 45 to 48 tokens, so the newest 32 are in it.
                arrays = Arrays(6 * PAGE + 44, 4, dtype)
                device = "256KiB" if dtype == "F32" else "160KiB"
                if dtype == "F16":
                    path = arrays.npy(self.folder / "arrays")
                else:
                    path = arrays.safetensors(self.folder / "arrays.safetensors")
                more = ["--scale", scale] if scale else []
                cells = self.cells("--arrays", path, "--kv-dtype", dtype.lower(), "--warm-up", 0,
                                   "--policy", policy, "--device-memory", "none", device, *more)  # fmt: skip
                errors, weights = oracle(arrays, sinks_and_own_page, scale or HEAD_DIM**-0.5)
                for cap in (None, device):
                    cell = cells[policy, arrays.context, cap, 1]
                    self.check_estimate(cell["output_error"], errors)
                    self.check_estimate(cell["attended_weight"], weights)
                    self.assertNotIn("kl", cell)
                    dense = cells["dense", arrays.context, cap, 1]
                    self.assertLess(dense["output_error"]["mean"], 1e-6)
                    self.assertAlmostEqual(dense["attended_weight"]["mean"], 1, places=5)
                self.assertGreater(cells["dense", arrays.context, device, 1]["crossed_bytes"], 0)

    def check_estimate(self, estimate, values):
        self.assertAlmostEqual(estimate["mean"], statistics.mean(values), delta=1e-5)
        self.assertAlmostEqual(estimate["standard_error"],
                               statistics.stdev(values) / math.sqrt(len(values)), delta=1e-5)  # fmt: skip

    def test_rows_are_counted(self):
        arrays = Arrays(300, 6).safetensors(self.folder / "a.safetensors")
        cells = self.cells("--arrays", arrays, "--policy", "streaming recent=32", "--sequences", 1, 3,
                           "--device-memory", "none", "256KiB", "--bus", "2GB/s,10us")  # fmt: skip
        for (policy, context, cap, sequences), cell in cells.items():
            self.assertEqual((context, cell["steps"]), (300, 2))
            for name in ("rows", "bytes", "requests"):
                sums = {}
                for part in cell["traffic_by_layer"]:
                    kind = part["from"], part["to"], part["cause"]
                    sums[kind] = sums.get(kind, 0) + part[name]
                self.assertEqual(sums, {(t["from"], t["to"], t["cause"]): t[name] for t in cell["traffic"]})
            if policy != "dense":
                continue
            # Those before the steps, four of the warm-up, and 1 and 2 of the steps themselves.
            rows = sequences * (300 + 4 + 1.5) * LAYERS * KV_HEADS
            read = sum(t["rows"] for t in cell["traffic"] if t["cause"] in ("hit", "miss"))
            self.assertEqual(read, rows)
            transfer = 1e3 * (cell["crossed_bytes"] / 2e9 + 1e-5 * cell["crossed_requests"])
            self.assertAlmostEqual(cell["modelled"][0]["transfer_ms"], transfer)
        self.check_plot()

    def check_plot(self):
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            return
        done = subprocess.run([sys.executable, ROOT / "bench" / "plot_bench.py", self.report],
                              capture_output=True, text=True, check=False)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_shorter_context_is_the_newest_part(self):
        arrays = Arrays(300, 3)
        whole = arrays.safetensors(self.folder / "whole.safetensors")
        part = arrays.newest(200).safetensors(self.folder / "part.safetensors")
        flags = ["--policy", "streaming recent=16", "--warm-up", 0, "--device-memory", "128KiB"]
        of_whole = self.cells("--arrays", whole, "--context", 200, *flags)
        of_part = self.cells("--arrays", part, *flags)
        self.assertEqual(of_whole.keys(), of_part.keys())
        for key, cell in of_part.items():
            for name in ("output_error", "attended_weight", "traffic_by_layer", "plan"):
                self.assertEqual(of_whole[key][name], cell[name])
        self.assertGreater(of_part["streaming recent=16", 200, "128KiB", 1]["output_error"]["mean"], 0.01)

    def test_components_are_those_of_the_values(self):
        policy = "select=int4 prune=none compensate=values(bits=4,components={},pages=1)"
        half, whole = policy.format("half"), policy.format("all")
        errors = {}
        for is_spanned in (True, False):
            arrays = Arrays(400, 2)
            if is_spanned:  # by half of the channels
                values = arrays.values["v"]
                arrays.values["v"] = [v if i % HEAD_DIM < HEAD_DIM // 2 else 0 for i, v in enumerate(values)]
            path = arrays.safetensors(self.folder / "a.safetensors")
            cells = self.cells("--arrays", path, "--warm-up", 0, "--policy", half, whole)
            errors[is_spanned] = [cells[p, 400, None, 1]["output_error"]["mean"] for p in (half, whole)]
        self.assertLess(errors[True][0], 1.2 * errors[True][1], errors)
        self.assertGreater(errors[False][0], 2 * errors[False][1], errors)
        done = self.bench("--shape", "llama3.2-1b", "--policy", "compact", "--no-baseline",
                          "--context", 300, "--steps", 1, "--warm-up", 0)  # fmt: skip
        self.assertIn("compact", done.stdout)
        self.assertNotIn("failed", done.stdout + done.stderr)

    def test_a_recording_replays_the_rows_and_bytes_of_its_run(self):
        recording = self.folder / "recorded.safetensors"
        for policy in ("dense", "values", "quest"):
            with self.subTest(policy):
                shared = ["--policy", policy, "--no-baseline", "--steps", 6, "--warm-up", 2]
                run = ["-m", MODEL, "-t", BOOK, "--context", 1500, *shared, "--record", recording, "--force"]
                of_model = {}
                for cap in ("none", "4MiB"):
                    of_model.update(self.cells(*run, "--device-memory", cap))
                    of_arrays = self.cells("--arrays", recording, *shared, "--device-memory", cap)
                    (key,) = of_arrays
                    for name in ("traffic_by_layer", "crossed_bytes", "crossed_requests", "index_bytes",
                                 "device_bytes", "steps"):  # fmt: skip
                        self.assertEqual(of_arrays[key][name], of_model[key][name], name)
                    for name in ("resident_tokens", "cache_rows", "stream_tokens", "chunk"):
                        self.assertEqual(of_arrays[key]["plan"][name], of_model[key]["plan"][name], name)
                self.assertGreater(of_model[policy, 1500, "4MiB", 1]["crossed_bytes"], 0)
                if policy != "dense":
                    self.assertGreater(of_arrays[key]["output_error"]["mean"], 1e-4)
        self.check_recording(recording)

    def check_recording(self, path):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        self.assertEqual(header["q"]["shape"], [12, 8, 8, 64])
        self.assertEqual((header["q"]["dtype"], header["k"]["dtype"], header["v"]["dtype"]),
                         ("F32", "BF16", "BF16"))  # fmt: skip
        for name in "kv":
            self.assertEqual(header[name]["shape"], [12, 1508, 2, 64])

    def test_recordings_of_coded_rows_and_those_that_fail(self):
        flags = ["-m", MODEL, "-t", BOOK, "--context", 200, "--steps", 1, "--policy", "dense"]
        recording = self.folder / "recorded.safetensors"
        self.bench(*flags, "--kv-dtype", "int8", "--record", recording)
        self.bench("--arrays", recording, "--kv-dtype", "int8", "--policy", "dense")
        before = recording.read_bytes()
        self.refused(USAGE, [str(recording), "--force"], *flags, "--record", recording)
        self.refused(IO, "/nowhere/r", *flags, "--record", "/nowhere/r.safetensors")
        self.refused(USAGE, "war-and-peace", *flags, "--record", BOOK, "--force")
        self.refused(USAGE, "standard output", *flags, "--record", "-")
        self.refused(USAGE, "--resume", *flags, "--record", recording, "--resume", "--json", self.report)
        self.refused(USAGE, "corrects", *flags[:-2], "--policy", "tidaldecode correct=4", "--no-baseline",
                     "--record", recording, "--force")  # fmt: skip
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
        self.refused(IO, "recorded.safetensors: cannot be written", *flags, "--record", recording,
                     "--force", preexec_fn=limit)  # fmt: skip
        self.assertEqual(recording.read_bytes(), before)
        self.assertEqual(os.listdir(self.folder), [recording.name])

    def test_an_interrupt_leaves_nothing_of_a_recording(self):
        try:
            os.close(os.open(self.folder, os.O_WRONLY | os.O_TMPFILE))
        except OSError as error:
            self.skipTest(f"the file system has no files without names: {error}")
        command = [os.environ["SLUICE_BINARY"], "bench", "-m", MODEL, "-t", BOOK, "--context", "8K",
                   "--record", self.folder / "recorded.safetensors"]  # fmt: skip
        with subprocess.Popen(map(str, command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            files = Path(f"/proc/{process.pid}/fd")
            while process.poll() is None and not self.has_file(files):
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate()
        self.assertEqual((process.returncode, stderr), (130, b"sluice: interrupted\n"))
        self.assertEqual(os.listdir(self.folder), [])

    def has_file(self, descriptors):
        """Whether a process has begun to write a file in the folder."""
        try:
            return any(os.readlink(one).startswith(str(self.folder)) and one.stat().st_size > 0
                       for one in descriptors.iterdir())  # fmt: skip
        except FileNotFoundError:
            return False

    def shape_file(self):
        path = self.folder / "config.json"
        path.write_text(json.dumps({
            "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
            "tie_word_embeddings": False}))  # fmt: skip
        return path

    def test_made_up_rows_have_the_statistics_that_are_asked_for(self):
        shape = self.shape_file()
        heavy = "select=exact prune=top_k(1/32)"
        for weight in (0.5, 0.9):
            cells = self.cells("--shape", shape, "--context", 4000, "--policy", heavy, "--heavy-share", 1 / 32,
                               "--heavy-weight", weight, "--logit-std", 0.1)  # fmt: skip
            cell = cells[heavy, 4000, None, 1]
            # Where logits hardly differ otherwise, the heaviest tokens are the heavy ones.
            self.assertAlmostEqual(cell["attended_weight"]["mean"], weight, delta=0.05)

    def test_made_up_rows_are_those_of_their_seed(self):
        flags = ["--shape", self.shape_file(), "--context", 600, "--policy", "values", "--steps", 3]
        def one(*more):
            (cell,) = [c for key, c in self.cells(*flags, *more).items() if key[0] == "values"]
            return cell["output_error"]
        self.assertEqual(one(), one("--seed", 1))
        self.assertNotEqual(one(), one("--seed", 2))
        report = json.loads(self.report.read_text())
        self.assertEqual(report["made_up"]["seed"], 2)
        self.assertIsNone(report["run"]["checkpoint"])
        config = self.shape_file()
        config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
        self.refused(USAGE, "another shape", *flags, "--seed", 2, "--json", self.report, "--resume")
        cells = self.cells("--shape", "llama3.2-1b", "--context", 200, "--steps", 1, "--policy", "quest")
        self.assertEqual(cells["quest", 200, None, 1]["plan"]["context"], 205)

    def test_persistence_shows_in_what_a_row_cache_hits(self):
        flags = ["--shape", self.shape_file(), "--context", 8000, "--policy", "select=exact prune=top_k(64)",
                 "--device-memory", "1MiB", "--no-baseline", "--heavy-share", 1 / 128, "--heavy-weight", 0.95,
                 "--logit-std", 0.1]  # fmt: skip
        moved = []
        for persistence in (1, 0.125):
            (cell,) = self.cells(*flags, "--persistence", persistence).values()
            self.assertGreater(cell["plan"]["cache_rows"], 0)
            moved.append(sum(t["rows"] for t in cell["traffic"] if t["cause"] == "miss"))
        self.assertLess(moved[0], 0.7 * moved[1])

    def test_csv_and_reports_that_are_resumed(self):
        arrays = Arrays(200, 3)
        path = arrays.safetensors(self.folder / "a.safetensors")
        table = self.folder / "bench.csv"
        flags = ["--arrays", path, "--policy", "streaming", "--json", self.report, "--csv", table]
        self.bench(*flags)
        with table.open() as file:
            for row in csv.DictReader(file):
                cell = self.reported()[row["policy"], 200, None, 1]
                self.assertEqual(float(row["output_error"]), cell["output_error"]["mean"])
                self.assertEqual(float(row["attended_weight"]), cell["attended_weight"]["mean"])
                self.assertEqual((row["kl"], row["top1_agreement"]), ("", ""))
        before = self.report.read_bytes()
        self.bench(*flags, "--resume")
        self.assertEqual(self.report.read_bytes(), before)
        arrays.values["v"][-1] += 1
        arrays.safetensors(path)
        self.refused(USAGE, "other arrays", *flags, "--resume")
        self.assertEqual(self.report.read_bytes(), before)

    def test_finished_cells_stay_when_a_later_one_fails(self):
        arrays = Arrays(300, 2)
        arrays.values["k"][5 * KV_HEADS * HEAD_DIM] = 1e6  # of token 5: more than f16 rows hold
        path = arrays.safetensors(self.folder / "a.safetensors")
        flags = ["--arrays", path, "--kv-dtype", "f16", "--policy", "dense", "--json", self.report]
        self.refused(NUMERIC, ["a.safetensors", "too large", "layer 0"], *flags, "--context", 200, 300)
        self.assertEqual([key[1] for key in self.reported()], [200])
        # Caps that are too small are a result.
        self.report.unlink()
        self.bench(*flags, "--context", 200, "--device-memory", "1KiB", code=MEMORY)
        self.assertIn("error", self.reported()["dense", 200, "1KiB", 1])

    def test_policies_that_need_a_model_end_their_cells_alone(self):
        path = Arrays(200, 2).safetensors(self.folder / "a.safetensors")
        policies = ["snapkv", "zipvl", "values early=half", "values correct=4"]
        self.bench("--arrays", path, "--policy", *policies, "values", "--json", self.report, code=UNSUPPORTED)
        for (policy, *_), cell in self.reported().items():
            self.assertEqual("error" in cell, policy in policies, policy)

    def test_bad_arrays(self):
        good = Arrays(20, 2)
        path = self.folder / "bad.safetensors"

        def refused(code, words, **changes):
            good.safetensors(path, **changes)
            self.refused(code, ["bad.safetensors", *words], "--arrays", path)

        def shaped(name, *shape):
            return {name: ("F32", shape, bytes(4 * math.prod(shape)))}

        for name in "qkv":
            refused(CORRUPT, [f"no tensor '{name}'"], **{name: None})
            refused(CORRUPT, [f"tensor '{name}'", "4 dimensions"], **shaped(name, 2, 22, 32))
            refused(CORRUPT, [f"tensor '{name}'", "has no tokens"], **shaped(name, 2, 0, 2, 16))
            refused(UNSUPPORTED, [f"tensor '{name}'", "I32"],
                    **{name: ("I32", good.shapes[name], good.bytes(name))})  # fmt: skip
        refused(CORRUPT, ["tensor 'q'", "3 layers", "2"], **shaped("q", 3, 2, 4, 16))
        refused(CORRUPT, ["tensor 'q'", "head_dim of 8", "16"], **shaped("q", 2, 2, 4, 8))
        refused(CORRUPT, ["tensor 'q'", "3 query heads", "2 KV heads"], **shaped("q", 2, 2, 3, 16))
        refused(CORRUPT, ["tensor 'q'", "22 steps", "22 tokens"], **shaped("q", 2, 22, 4, 16))
        refused(CORRUPT, ["tensor 'q'", "4 steps", "2 tokens", "[layers, tokens, heads, head_dim]"],
                **shaped("q", 2, 4, 2, 16), **shaped("k", 2, 2, 22, 16), **shaped("v", 2, 2, 22, 16))  # fmt: skip
        refused(CORRUPT, ["tensor 'v'", "[2, 21, 2, 16]"], **shaped("v", 2, 21, 2, 16))
        refused(UNSUPPORTED, ["tensor 'q'", "head_dim of 7"], **shaped("q", 2, 2, 4, 7), **shaped("k", 2, 22, 2, 7),
                **shaped("v", 2, 22, 2, 7))  # fmt: skip
        refused(UNSUPPORTED, ["tensor 'q'", "258 channels"], **shaped("q", 2, 2, 4, 258),
                **shaped("k", 2, 22, 2, 258), **shaped("v", 2, 22, 2, 258))  # fmt: skip
        for name, layer, token, word in (("q", 1, 1, "step 1"), ("k", 0, 21, "token 21"), ("v", 1, 7, "token 7")):
            for value in (math.nan, math.inf):
                bad = Arrays(20, 2)
                _, tokens, heads, dim = bad.shapes[name]
                bad.values[name][(layer * tokens + token) * heads * dim + 3] = value
                bad.safetensors(path)
                self.refused(NUMERIC, ["bad.safetensors", f"'{name}'", f"layer {layer}", word], "--arrays", path)
        good.safetensors(path)
        path.write_bytes(path.read_bytes()[:-10])
        self.refused(CORRUPT, ["bad.safetensors", "incomplete"], "--arrays", path)
        path.write_bytes(b"x" * 100)
        self.refused(CORRUPT, "bad.safetensors", "--arrays", path)
        huge = [2**31, 2**31, 2, 16]
        write_safetensors(path, {"q": ("F32", huge, b"")})
        self.refused(CORRUPT, "bad.safetensors", "--arrays", path)
        self.refused(NOT_FOUND, "nowhere", "--arrays", self.folder / "nowhere")

    def test_bad_folders_of_arrays(self):
        good = Arrays(20, 2)

        def refused(code, words, name="k", **header):
            folder = good.npy(self.folder / "arrays")
            shape = header.pop("shape", good.shapes[name])
            content = header.pop("content", good.bytes(name))
            write_npy(folder / f"{name}.npy", shape, content, **header)
            self.refused(code, [f"{name}.npy", *words], "--arrays", folder)

        refused(UNSUPPORTED, ["Fortran"], order="True")
        refused(UNSUPPORTED, ["big-endian"], descr=">f4")
        refused(UNSUPPORTED, ["<f8"], descr="<f8")
        refused(CORRUPT, ["incomplete"], content=b"")
        refused(CORRUPT, ["overflows"], shape=[2**62, 2**62, 2, 16])
        refused(CORRUPT, ["incomplete"], shape=[2**31, 2**20, 2, 16])
        refused(CORRUPT, ["dimensions"], shape=[2, 22, 32])
        refused(CORRUPT, ["its npy header"], descr="<f4', 'descr': '<f4")
        refused(CORRUPT, ["layers"], name="q", shape=[1, 4, 4, 16])
        folder = good.npy(self.folder / "arrays")
        self.refused(USAGE, "q.npy", "--arrays", folder, "--json", folder / "q.npy", "--force")
        (folder / "k.npy").write_bytes(b"garbage")
        self.refused(CORRUPT, "k.npy: is no npy file", "--arrays", folder)
        (folder / "v.npy").unlink()
        good.npy(folder)
        (folder / "v.npy").unlink()
        self.refused(NOT_FOUND, "v.npy is missing", "--arrays", folder)

    def test_bad_flags(self):
        path = Arrays(20, 3).safetensors(self.folder / "a.safetensors")
        arrays = ["--arrays", path]
        shape = ["--shape", "llama3.2-1b"]
        for arguments, words in [
            ((), "--arrays"),
            (("-t", BOOK), "--arrays"),
            (("-m", MODEL), "--text"),
            ((*arrays, "-m", MODEL, "-t", BOOK), "one of --model"),
            ((*arrays, *shape), "one of --model"),
            ((*arrays, "-t", BOOK), "--text goes with --model"),
            ((*arrays, "--record", self.folder / "r"), "--record goes with --model"),
            ((*arrays, "--weights", "int4"), "--weights goes with --model"),
            ((*arrays, "--seed", 3), "--seed goes with --shape"),
            ((*arrays, "--heavy-weight", 0.5), "--heavy-weight goes with --shape"),
            ((*shape, "--scale", 0.5), "--scale goes with --arrays"),
            ((*arrays, "--scale", 0), "--scale must be"),
            ((*arrays, "--scale", "nan"), "--scale"),
            ((*arrays, "--context", 21), ["a.safetensors", "20 tokens", "--context 21"]),
            ((*arrays, "--context", 20, "2G"), "--context"),
            ((*arrays, "--steps", 3, "--warm-up", 1), ["a.safetensors", "3 steps"]),
            ((*arrays, "--warm-up", 3), ["a.safetensors", "3 steps"]),
            ((*arrays, "--steps", 0), "--steps"),
            ((*arrays, "--policy", "fastest"), "fastest"),
            ((*arrays, "--policy", "sparq(r=99)"), "sparq(r=99)"),
            ((*arrays, "--json", path), str(path)),
            ((*arrays, "--json", path, "--force"), str(path)),
            ((*arrays, "--csv", path, "--force"), str(path)),
            ((*arrays, "--json", self.folder / "x", "--csv", self.folder / "x"), "files of their own"),
            ((*arrays, "--force"), "--force"),
            (("--shape", "llama9"), "llama9"),
            ((*shape, "--heavy-share", 0.2), "--heavy-share"),
            ((*shape, "--heavy-weight", 1), "--heavy-weight"),
            ((*shape, "--persistence", 0), "--persistence"),
            ((*shape, "--logit-std", -1), "--logit-std"),
            ((*shape, "--logit-std", "nan"), "--logit-std"),
            ((*shape, "--seed", -1), "--seed"),
        ]:
            self.refused(USAGE, words, *arguments)


if __name__ == "__main__":
    unittest.main()
