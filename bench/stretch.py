#!/usr/bin/env python3
"""Makes a checkpoint of Llama 3 8B's shape that computes what sluice-22m computes.

    bench/stretch.py /tmp/stretched
    build/release/bin/sluice generate -m /tmp/stretched --device cuda -f FILE

Made-up weights take the time that trained ones take, but attend flatly, so they tell nothing about
which rows are selected. This checkpoint has the time of the one and the attention of the other:

  heads    every KV head of the small model stands four times in a layer, with its query heads; each
           copy gives a quarter of the output
  head_dim 64 channels are spread over 128: the pair that turns by theta^(-2i/64) becomes the one
           that turns by theta^(-4i/128). Query weights times sqrt(2) make up for 1/sqrt(128)
  layers   32 for 12, or as many as are asked for. Copies of a layer whose output is zero come
           before the layer itself, so that they see, and select, what it does
  hidden   what the small model does not have is zero in the residual stream; norms are scaled
  the rest gate, up and input columns that nothing depends on are random, of deviation 0.02
  vocabulary 128,256, of which the last are as improbable as the BOS token

Differences are those of rounding to bf16. Needs numpy.
"""

import argparse
import json
import shutil
import struct
from pathlib import Path
from typing import Any, Iterator

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
HEADS, KV_HEADS, DIM = 32, 8, 128
HIDDEN, INNER, VOCABULARY = 4096, 14336, 128256


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The bits of bf16 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Small:
    """The checkpoint that is stretched."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        data = (folder / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        self._header = json.loads(data[8 : 8 + length])
        self._data = data[8 + length :]

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as fp32."""
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(self._data[begin:end], dtype=np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(entry["shape"])

    def of_layer(self, layer: int, name: str) -> np.ndarray:
        """A weight of a layer."""
        return self.tensor(f"model.layers.{layer}.{name}.weight")


class Filler:
    """Random weights, drawn once."""

    def __init__(self) -> None:
        random = np.random.default_rng(1)
        self._bits = to_bf16(random.standard_normal(1 << 24, dtype=np.float32) * 0.02)

    def matrix(self, rows: int, columns: int) -> np.ndarray:
        """A matrix [rows, columns] of bf16 bits."""
        return np.resize(self._bits, (rows, columns))


def spread(rows: np.ndarray, heads: int, copies: list[int], channels: np.ndarray) -> np.ndarray:
    """[heads of the small model * d, n] as [copies * DIM, n]: head copies[i] in place i."""
    by_head = rows.reshape(heads, -1, rows.shape[1])
    to = np.zeros((len(copies), DIM, rows.shape[1]), dtype=np.float32)
    to[:, channels] = by_head[copies]
    return to.reshape(-1, rows.shape[1])


class Stretched:
    """The stretched checkpoint's tensors, as bf16 bits."""

    def __init__(self, small: Small, layers: int) -> None:
        self._small = small
        self._layers = layers
        self._filler = Filler()
        config = small.config
        self._dim = config["head_dim"]
        self._hidden = config["hidden_size"]
        self._kv_heads = config["num_key_value_heads"]
        self._heads = config["num_attention_heads"]
        group = self._heads // self._kv_heads
        if group != HEADS // KV_HEADS or self._dim * 2 != DIM:
            raise SystemExit("stretch: the small model needs groups of 4 and a head_dim of 64")
        self._kv_copies = [head % self._kv_heads for head in range(KV_HEADS)]
        self._copies = [kv * group + g for kv in self._kv_copies for g in range(group)]
        half = np.arange(self._dim // 2)
        self._turned = np.concatenate([2 * half, 2 * half + DIM // 2])  # channels of q and k
        self._norm = np.sqrt(self._hidden / HIDDEN)

    def layer_of(self, layer: int) -> int:
        """The small model's layer that `layer` copies."""
        return layer * self._small.config["num_hidden_layers"] // self._layers

    def acts(self, layer: int) -> bool:
        """True for the last copy of a layer, the only one that computes; the others add nothing."""
        return layer == self._layers - 1 or self.layer_of(layer + 1) != self.layer_of(layer)

    def _inputs(self, values: np.ndarray, rows: int) -> np.ndarray:
        """Weights whose input is the residual stream, [rows, HIDDEN]."""
        matrix = self._filler.matrix(rows, HIDDEN)
        matrix[: values.shape[0], : self._hidden] = to_bf16(values)
        return matrix

    def _outputs(self, values: np.ndarray, columns: int, acts: bool) -> np.ndarray:
        """Weights whose output is added to the residual stream, [HIDDEN, columns]."""
        matrix = np.zeros((HIDDEN, columns), dtype=np.uint16)
        if acts:
            matrix[: self._hidden, : values.shape[1]] = to_bf16(values)
        return matrix

    def _norm_weight(self, values: np.ndarray) -> np.ndarray:
        weight = np.zeros(HIDDEN, dtype=np.float32)
        weight[: self._hidden] = values * self._norm
        return to_bf16(weight)

    def _output_projection(self, values: np.ndarray) -> np.ndarray:
        share = len(self._kv_copies) // self._kv_heads
        channels = np.arange(self._dim)
        return spread(values.T / share, self._heads, self._copies, channels).T

    def layer(self, layer: int) -> Iterator[tuple[str, np.ndarray]]:
        """Names and tensors of a layer."""
        acts, channels = self.acts(layer), np.arange(self._dim)

        def of(name: str) -> np.ndarray:
            return self._small.of_layer(self.layer_of(layer), name)

        q = spread(of("self_attn.q_proj"), self._heads, self._copies, self._turned)
        k = spread(of("self_attn.k_proj"), self._kv_heads, self._kv_copies, self._turned)
        v = spread(of("self_attn.v_proj"), self._kv_heads, self._kv_copies, channels)
        o = self._output_projection(of("self_attn.o_proj"))
        yield "input_layernorm", self._norm_weight(of("input_layernorm"))
        yield "self_attn.q_proj", self._inputs(q * np.sqrt(2.0), HEADS * DIM)
        yield "self_attn.k_proj", self._inputs(k, KV_HEADS * DIM)
        yield "self_attn.v_proj", self._inputs(v, KV_HEADS * DIM)
        yield "self_attn.o_proj", self._outputs(o, HEADS * DIM, acts)
        yield "post_attention_layernorm", self._norm_weight(of("post_attention_layernorm"))
        yield "mlp.gate_proj", self._inputs(of("mlp.gate_proj"), INNER)
        yield "mlp.up_proj", self._inputs(of("mlp.up_proj"), INNER)
        yield "mlp.down_proj", self._outputs(of("mlp.down_proj"), INNER, acts)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Names and tensors, in the order of the file."""
        embedding = self._small.tensor("model.embed_tokens.weight")
        padded = np.zeros((VOCABULARY, HIDDEN), dtype=np.uint16)
        padded[: len(embedding), : self._hidden] = to_bf16(embedding)
        yield "model.embed_tokens.weight", padded
        padded = self._inputs(embedding, VOCABULARY)
        padded[len(embedding) :] = padded[self._small.config["bos_token_id"]]
        yield "lm_head.weight", padded
        yield "model.norm.weight", self._norm_weight(self._small.tensor("model.norm.weight"))
        for layer in range(self._layers):
            for name, tensor in self.layer(layer):
                yield f"model.layers.{layer}.{name}.weight", tensor

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return self._small.config | {
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": self._layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "vocab_size": VOCABULARY,
            "rms_norm_eps": self._small.config["rms_norm_eps"] * self._hidden / HIDDEN,
            "tie_word_embeddings": False,
        }


def header_of(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """The header of a safetensors file, with its length."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Tensor shapes by name, in the order of Stretched.tensors()."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    of_layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    for layer in range(layers):
        found |= {f"model.layers.{layer}.{name}.weight": s for name, s in of_layer.items()}
    return found


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folder", type=Path, help="for the checkpoint, 15 GiB")
    parser.add_argument("--layers", type=int, default=32, help="the small model's or more (32)")
    parser.add_argument("-m", "--model", type=Path, default=ROOT / "models" / "sluice-22m")
    flags = parser.parse_args()
    flags.folder.mkdir(parents=True, exist_ok=True)
    small = Small(flags.model)
    if flags.layers < small.config["num_hidden_layers"]:
        parser.error(f"--layers: {flags.layers} would leave some of the small model's out")
    stretched = Stretched(small, flags.layers)
    expected = shapes(flags.layers)
    with open(flags.folder / "model.safetensors", "wb") as file:
        file.write(header_of(expected))
        for (name, shape), (made, tensor) in zip(
            expected.items(), stretched.tensors(), strict=True
        ):
            if name != made or shape != tensor.shape:
                raise AssertionError(f"{made} {tensor.shape} where {name} {shape} belongs")
            file.write(tensor.data)
    (flags.folder / "config.json").write_text(json.dumps(stretched.config(), indent=1) + "\n")
    shutil.copy(flags.model / "tokenizer.json", flags.folder)


if __name__ == "__main__":
    main()
