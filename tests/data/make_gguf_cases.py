"""Writes gguf_cases.json: blocks of every GGUF type that Sluice decodes, and their weights.

The codes are random and so are the scales, of both signs and some of them subnormal; the weights are
what the gguf package makes of them, as the bits of fp32.

    pip install gguf==0.19.0 && python3 tests/data/make_gguf_cases.py
"""

import json
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np

SEED = 42
# Offsets of the f16 scales and minima in a block.
SCALES = {
    "F32": [],
    "F16": [0],
    "BF16": [],
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}


def random_blocks(random: np.random.Generator, name: str, count: int, size: int) -> np.ndarray:
    """Random bytes, except that floating-point numbers in them are finite."""
    blocks = random.integers(0, 256, (count, size), np.uint8)
    if name == "F32":
        return random.normal(size=(count, 1)).astype(np.float32).view(np.uint8)
    if name == "BF16":
        values = random.normal(size=(count, 1)).astype(np.float32).view(np.uint32)
        return (values >> 16).astype(np.uint16).view(np.uint8)
    for offset in SCALES[name]:
        magnitude = 10.0 ** random.uniform(-7, 1, count)
        scales = (magnitude * random.choice([-1, 1], count)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


def main() -> None:
    random = np.random.default_rng(SEED)
    cases = []
    for name in SCALES:
        kind = gguf.GGMLQuantizationType[name]
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        count = max(3, 96 // weights)
        blocks = random_blocks(random, name, count, size)
        values = gguf.dequantize(blocks.reshape(1, -1), kind).astype(np.float32)
        assert np.isfinite(values).all() and values.size == count * weights
        cases.append(
            {
                "name": name,
                "id": int(kind),
                "block": weights,
                "bytes": size,
                "stored": blocks.tobytes().hex(),
                "weights": values.astype(">f4").tobytes().hex(),
            }
        )
    out = Path(__file__).parent / "gguf_cases.json"
    data = {"gguf": version("gguf"), "seed": SEED, "types": cases}
    out.write_text(json.dumps(data, indent=0) + "\n", encoding="utf-8")


main()
