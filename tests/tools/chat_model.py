"""A small random model that has a chat template, for the tests of conversations."""

import json
import struct
from pathlib import Path

from command import GOLDEN, ROOT

CASES = json.loads((ROOT / "tests" / "data" / "chat_cases.json").read_text(encoding="utf-8"))
VOCABULARY = 384  # of golden/qwen3


def byte_symbols() -> list[str]:
    """The byte-level alphabet: printable bytes are themselves, others come after Latin-1."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def tokenizer() -> dict:
    """Bytes first, then the control tokens, then names for all other ids of the model."""
    added = [(token["content"], token["special"]) for token in CASES["tokenizer_patch"]["added_tokens"]]
    added += [(f"<{i}>", False) for i in range(256 + len(added), VOCABULARY)]
    return {
        "added_tokens": [{"id": 256 + i, "content": content, "special": special}
                         for i, (content, special) in enumerate(added)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {s: i for i, s in enumerate(byte_symbols())}, "merges": []},
    }  # fmt: skip


def without(weights: bytes, tokens: list[int]) -> bytes:
    """The model, with 0 for the logits of these tokens: never the largest, so an answer goes on."""
    size = struct.unpack("<Q", weights[:8])[0]
    head = json.loads(weights[8 : 8 + size])["lm_head.weight"]
    changed = bytearray(weights)
    begin, end = head["data_offsets"]
    row = (end - begin) // VOCABULARY
    for token in tokens:
        at = 8 + size + begin + token * row
        changed[at : at + row] = bytes(row)
    return bytes(changed)


def write_model(folder: Path, name: str = "chatml") -> Path:
    """A checkpoint in `folder` with the template `name` of chat_cases.json."""
    shape = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    shape["eos_token_id"] = VOCABULARY - 1
    (folder / "config.json").write_text(json.dumps(shape))
    ends = range(256, 256 + len(CASES["tokenizer_patch"]["added_tokens"]))
    weights = (GOLDEN / "qwen3" / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(without(weights, [*ends, VOCABULARY - 1]))
    config = next(entry["config"] for entry in CASES["formats"] if entry["name"] == name)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    return folder
