"""The command with the shipped model as a GGUF file, whole and split."""

import json
import shutil
import struct
import tempfile
import unittest
from pathlib import Path

from command import MODEL, ROOT, sluice

BOOK = ROOT / "data" / "war-and-peace.txt"
USAGE, MISSING, CORRUPT, UNSUPPORTED = 2, 3, 4, 5
U16, U32, I32, F32, STRING, ARRAY = 2, 4, 5, 6, 8, 9
PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, number) -> bytes:
    if kind == STRING:
        return text(number)
    return struct.pack({U16: "<H", U32: "<I", I32: "<i", F32: "<f"}[kind], number)


class Gguf:
    """A GGUF file in the making."""

    def __init__(self):
        self.keys, self.tensors, self.data = [], [], bytearray()

    def add(self, key: str, kind: int, number) -> None:
        self.keys.append(text(key) + struct.pack("<I", kind) + value(kind, number))

    def add_array(self, key: str, kind: int, numbers: list) -> None:
        values = b"".join(value(kind, number) for number in numbers)
        self.keys.append(text(key) + struct.pack("<IIQ", ARRAY, kind, len(numbers)) + values)

    def add_tensor(self, name: str, kind: int, shape: list, raw: bytes) -> None:
        self.data += bytes(-len(self.data) % 32)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        self.tensors.append(text(name) + sizes + struct.pack("<IQ", kind, len(self.data)))
        self.data += raw

    def write(self, path: Path) -> Path:
        head = struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.keys))
        head += b"".join(self.keys) + b"".join(self.tensors)
        path.write_bytes(head + bytes(-len(head) % 32) + self.data)
        return path


def add_metadata(gguf: Gguf) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    gguf.add("general.architecture", STRING, "llama")
    for key, name in (("embedding_length", "hidden_size"), ("block_count", "num_hidden_layers"),
                      ("feed_forward_length", "intermediate_size"),
                      ("context_length", "max_position_embeddings"),
                      ("attention.head_count", "num_attention_heads"),
                      ("attention.head_count_kv", "num_key_value_heads"),
                      ("attention.key_length", "head_dim")):  # fmt: skip
        gguf.add("llama." + key, U32, config[name])
    gguf.add("llama.rope.freq_base", F32, config["rope_theta"])
    gguf.add("llama.attention.layer_norm_rms_epsilon", F32, config["rms_norm_eps"])
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | added
    tokens = sorted(ids, key=ids.get)
    gguf.add("tokenizer.ggml.model", STRING, "gpt2")
    gguf.add("tokenizer.ggml.pre", STRING, "llama-bpe")
    gguf.add_array("tokenizer.ggml.tokens", STRING, tokens)
    gguf.add_array("tokenizer.ggml.token_type", I32, [3 if t in added else 1 for t in tokens])
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    gguf.add_array("tokenizer.ggml.merges", STRING, merges)
    gguf.add("tokenizer.ggml.bos_token_id", U32, config["bos_token_id"])
    gguf.add("tokenizer.ggml.eos_token_id", U32, config["eos_token_id"])


def shipped_tensors():
    """Names, types, shapes and bytes, as a llama GGUF file has them."""
    raw = (MODEL / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        data, shape = raw[begin:end], entry["shape"]
        if len(shape) == 1:  # norms are F32
            data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        elif "q_proj" in name or "k_proj" in name:  # channels in pairs, heads of 64
            row = 2 * shape[1]
            order = (h + half + i for h in range(0, shape[0], 64) for i in range(32) for half in (0, 32))
            data = b"".join(data[r * row : (r + 1) * row] for r in order)
        name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
        name = name.replace("model.layers.", "blk.")
        for folder, gguf in PARTS.items():
            name = name.replace(folder, gguf)
        yield name, 0 if len(shape) == 1 else 30, shape, data


class GgufFiles(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        whole = Gguf()
        add_metadata(whole)
        tensors = list(shipped_tensors())
        for tensor in tensors:
            whole.add_tensor(*tensor)
        cls.path = Path(cls.folder.name)
        cls.whole = whole.write(cls.path / "small.gguf")
        half = len(tensors) // 2
        for number, some in enumerate((tensors[:half], tensors[half:])):
            part = Gguf()
            if number == 0:
                add_metadata(part)
            part.add("split.no", U16, number)
            part.add("split.count", U16, 2)
            part.add("split.tensors.count", I32, len(tensors))
            for tensor in some:
                part.add_tensor(*tensor)
            part.write(cls.path / f"part-0000{number + 1}-of-00002.gguf")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_well(self, *arguments):
        done = sluice(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def refused(self, code, mention, *arguments):
        done = sluice(*arguments)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (code, 1), done.stderr)
        self.assertIn(mention, done.stderr)

    def test_generate_says_what_the_folder_says(self):
        flags = ["-p", "Well, Prince,", "-n", 16, "--quiet", "--temperature", 0]
        expected = self.run_well("generate", "-m", MODEL, *flags)
        for file in (self.whole, self.path / "part-00001-of-00002.gguf"):
            self.assertEqual(self.run_well("generate", "-m", file, *flags), expected)
        coded = self.run_well("generate", "-m", self.whole, "--weights", "int8", *flags)
        self.assertEqual(coded, self.run_well("generate", "-m", MODEL, "--weights", "int8", *flags))

    def test_info_and_eval(self):
        self.assertIn("in BF16, F32, matrices read as bf16)", self.run_well("info", "-m", self.whole))
        flags = ["--text", BOOK, "--task", "perplexity", "--length", 256, "--tokens", 64, "--rounds", 1]
        reports = []
        for number, model in enumerate((self.whole, MODEL)):
            report = self.path / f"report{number}"
            self.run_well("eval", "-m", model, *flags, "--json", report)
            result = json.loads(report.read_text())["results"][0]
            reports.append([policy["perplexity"] for policy in result["policies"]])
        self.assertEqual(reports[0], reports[1])

    def test_files_that_are_not_overwritten(self):
        before = self.whole.stat().st_size
        for report in (self.whole, self.path / "part-00002-of-00002.gguf"):
            self.refused(USAGE, "would overwrite", "generate", "-m", self.whole, "-p", "x", "-n", 1,
                         "--json", report, "--force")  # fmt: skip
        self.assertEqual(self.whole.stat().st_size, before)

    def test_wrong_files(self):
        self.refused(USAGE, "give the first", "info", "-m", self.path / "part-00002-of-00002.gguf")
        self.refused(MISSING, "such as", "info", "-m", self.path)
        self.refused(UNSUPPORTED, "no chat template", "generate", "-m", self.whole, "--chat", "-p", "x")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            alone = shutil.copy(self.path / "part-00001-of-00002.gguf", folder)
            self.refused(MISSING, "part-00002-of-00002.gguf: there is no such file", "info", "-m", alone)
            cut = folder / "cut.gguf"
            cut.write_bytes(self.whole.read_bytes()[:-64])
            self.refused(CORRUPT, "runs past the end of the file", "info", "-m", cut)
            (folder / "cut.sluice.json").write_text("{")
            whole = folder / "cut.gguf"
            shutil.copy(self.whole, whole)
            self.refused(CORRUPT, "cut.sluice.json", "generate", "-m", whole, "-p", "x", "-n", 1,
                         "--policy", "tidaldecode")  # fmt: skip


if __name__ == "__main__":
    unittest.main()
