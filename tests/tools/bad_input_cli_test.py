"""Wrong input: one clear line that names the file or flag, its own exit code, no partial answer."""

import json
import os
import shutil
import struct
import tempfile
import unittest
from pathlib import Path

from command import GOLDEN, MODEL, sluice

USAGE, NOT_FOUND, CORRUPT, UNSUPPORTED, TOKENIZER, PROMPT, MEMORY, IO = 2, 3, 4, 5, 6, 7, 8, 9


class BadInput(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.model = Path(self.folder.name) / "model"
        shutil.copytree(GOLDEN / "qwen2", self.model)
        shutil.copy(MODEL / "tokenizer.json", self.model)

    def refused(self, code: int, *mentions: str, flags=(), stdin="Hello", model=None, **options):
        done = sluice("generate", "-m", model or self.model, "-n", 2, *flags, stdin=stdin,
                      **options)
        self.assertEqual(done.returncode, code, done.stderr)
        lines = [line for line in done.stderr.splitlines() if line.startswith("sluice: ")]
        self.assertEqual(len(lines), 1, done.stderr)
        for mention in mentions:
            self.assertIn(mention, lines[0])
        self.assertEqual(done.stdout.strip(), "")

    def edit_config(self, **changes):
        path = self.model / "config.json"
        config = json.loads(path.read_text())
        config.update(changes)
        path.write_text(json.dumps(config))

    def edit_header(self, change):
        """Rewrites model.safetensors with change(header) applied to its header."""
        path = self.model / "model.safetensors"
        raw = path.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])

    # Flags

    def test_flags(self):
        self.refused(USAGE, "--device-memory", "lots", flags=["--device-memory", "lots"])
        self.refused(USAGE, "temperature", flags=["--temperature", "-1"])
        self.refused(USAGE, "top-p", flags=["--top-p", "1.5"])
        self.refused(USAGE, "--no-such-flag", flags=["--no-such-flag"])
        self.refused(USAGE, "--device", "abacus", flags=["--device", "abacus"],
                     model=MODEL)
        self.refused(USAGE, "--device", "cuda:x", flags=["--device", "cuda:x"], model=MODEL)
        # Where there is a GPU, not a hundred of them.
        self.refused(UNSUPPORTED, "--device cuda", flags=["--device", "cuda:99"], model=MODEL)
        self.refused(USAGE, "--kv-dtype", flags=["--kv-dtype", "int3"])
        self.refused(USAGE, "--chunk", flags=["--chunk", "0"])
        self.refused(USAGE, "--threads", flags=["--threads", "-2"])
        self.refused(USAGE, "--context", flags=["--context", "-5"], model=MODEL)
        self.refused(USAGE, "--prompt-file", flags=["-p", "x", "--prompt-file", "y"])

    def test_no_command(self):
        done = sluice()
        self.assertEqual(done.returncode, USAGE)
        self.assertEqual(len(done.stderr.splitlines()), 1)

    def test_max_tokens(self):
        done = sluice("generate", "-m", MODEL, "-p", "x", "-n", 0)
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("max-tokens", done.stderr)

    # Files

    def test_missing_files(self):
        self.refused(NOT_FOUND, "nowhere", model=Path(self.folder.name) / "nowhere")
        self.refused(NOT_FOUND, "nothing.txt", flags=["-f", "nothing.txt"], model=MODEL)
        self.refused(NOT_FOUND, self.folder.name, flags=["-f", self.folder.name], model=MODEL)
        (self.model / "model.safetensors").unlink()
        self.refused(NOT_FOUND, "model.safetensors")

    def test_missing_tokenizer(self):
        (self.model / "tokenizer.json").unlink()
        self.refused(TOKENIZER, "tokenizer.json")

    def test_broken_json(self):
        for name, code in (("config.json", CORRUPT), ("tokenizer.json", TOKENIZER)):
            path = self.model / name
            text = path.read_text()
            path.write_text(text[: len(text) // 2])
            self.refused(code, name)
            path.write_text(text)

    def test_truncated_safetensors(self):
        path = self.model / "model.safetensors"
        raw = path.read_bytes()
        for size in (0, 5, 8, 1000, len(raw) - 1):
            path.write_bytes(raw[:size])
            self.refused(CORRUPT, "model.safetensors")

    def test_oversized_header(self):
        path = self.model / "model.safetensors"
        path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
        self.refused(CORRUPT, "model.safetensors", "header")

    def test_overlapping_tensors(self):
        def overlap(header):
            names = [name for name in header if name != "__metadata__"]
            header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
            header[names[1]]["shape"] = header[names[0]]["shape"]

        self.edit_header(overlap)
        self.refused(CORRUPT, "model.safetensors")

    def test_wrong_dtype(self):
        def integers(header):
            header["model.norm.weight"]["dtype"] = "I16"

        self.edit_header(integers)
        self.refused(UNSUPPORTED, "model.norm.weight", "I16")

    def test_missing_tensor(self):
        def rename(header):
            header["model.norm.weights"] = header.pop("model.norm.weight")

        self.edit_header(rename)
        self.refused(CORRUPT, "model.norm.weight")

    def test_shape_disagrees_with_config(self):
        self.edit_config(intermediate_size=161)
        self.refused(CORRUPT, "160", "161")

    def test_unsupported_by_name(self):
        self.edit_config(use_sliding_window=True, sliding_window=128)
        self.refused(UNSUPPORTED, "sliding_window")
        self.edit_config(use_sliding_window=False, sliding_window=None, hidden_act="gelu")
        self.refused(UNSUPPORTED, "gelu")
        self.edit_config(architectures=["GPT2LMHeadModel"], model_type="gpt2")
        self.refused(UNSUPPORTED, "gpt2")

    def test_tokenizer_lacks_an_id(self):
        self.refused(TOKENIZER, "tokenizer.json")  # 4096 entries for a vocabulary of 384

    # Prompts

    def test_prompts(self):
        self.refused(PROMPT, "empty", stdin="", model=MODEL)
        self.refused(PROMPT, "UTF-8", stdin=b"caf\xe9 au lait", model=MODEL)
        self.refused(PROMPT, "--context", stdin="word " * 100, flags=["--context", "50"],
                     model=MODEL)

    # Memory and disks

    def test_caps_too_small(self):
        self.refused(MEMORY, "--device-memory", "at least", flags=["--device-memory", "1KiB"],
                     model=MODEL)
        self.refused(MEMORY, "--host-memory", "at least", flags=["--host-memory", "1MiB"],
                     model=MODEL)
        self.refused(MEMORY, "free", flags=["--context", "2000000000"], model=MODEL)

    def test_full_disk(self):
        done = sluice("generate", "-m", MODEL, "-p", "Hi", "-n", 2, "-q", "--json", "/dev/full")
        self.assertEqual(done.returncode, IO)
        self.assertIn("/dev/full", done.stderr)
        with open("/dev/full", "wb") as full:
            done = sluice("generate", "-m", MODEL, "-p", "Hi", "-n", 2, "-q", stdout=full)
        self.assertEqual(done.returncode, IO)
        self.assertIn("standard output", done.stderr)


    def test_reports_that_cannot_be_written_are_refused_before_the_work(self):
        for path in ("/nowhere/report.json", self.folder.name):
            done = sluice("generate", "-m", "/no/model", "-p", "Hi", "--json", path)
            self.assertEqual(done.returncode, IO, done.stderr)
            self.assertIn(path, done.stderr)
            done = sluice("eval", "-m", "/no/model", "--text", "/no/text", "--json", path)
            self.assertEqual(done.returncode, IO, done.stderr)

    def test_a_broken_calibration_is_refused_before_the_work(self):
        model = Path(self.folder.name) / "demo"
        shutil.copytree(MODEL, model)
        (model / "sluice.json").write_text("garbage")
        done = sluice("calibrate", "-m", model, "--text", "/no/text")
        self.assertEqual(done.returncode, CORRUPT, done.stderr)
        self.assertIn("sluice.json", done.stderr)


if __name__ == "__main__":
    unittest.main()
