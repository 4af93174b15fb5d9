#!/usr/bin/env python3
"""Makes a checkpoint of a large model's shape that computes what sluice-22m computes.

    bench/stretch.py /tmp/stretched
    bench/stretch.py /tmp/stretched --shape qwen2.5-7b
    build/release/bin/sluice generate -m /tmp/stretched --device cuda -f FILE

Made-up weights take the time that trained ones take, but attend flatly, so they tell nothing about
which rows are selected. This checkpoint has the time of the one and the attention of the other:

  heads    every KV head of the small model stands several times in a layer, with its query heads,
           some of them twice where the group is larger; copies share the output evenly
  head_dim 64 channels are spread over 128: the pair that turns by theta^(-2i/64) becomes the one
           that turns by theta^(-4i/128). Query weights times sqrt(2) make up for 1/sqrt(128)
  layers   the shape's, or as many as are asked for. Copies of a layer whose output is zero come
           before the layer itself, so that they see, and select, what it does
  hidden   what the small model does not have is zero in the residual stream; norms are scaled
  the rest gate, up and input columns that nothing depends on are random, of deviation 0.02
  vocabulary the shape's, of which the last are as improbable as the BOS token

Differences are those of rounding to bf16. Needs numpy.
"""

import argparse
import json
import shutil
import struct
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
DIM = 128


class Shape(NamedTuple):
    """What a large model has more of."""

    layers: int
    heads: int
    kv_heads: int
    hidden: int
    inner: int
    vocabulary: int


SHAPES = {
    "llama3-8b": Shape(32, 32, 8, 4096, 14336, 128256),
    "qwen2.5-7b": Shape(28, 28, 4, 3584, 18944, 152064),
}


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

    def __init__(self, small: Small, shape: Shape) -> None:
        self._small = small
        self._shape = shape
        self._filler = Filler()
        config = small.config
        self._dim = config["head_dim"]
        self._hidden = config["hidden_size"]
        self._kv_heads = config["num_key_value_heads"]
        self._heads = config["num_attention_heads"]
        group, larger = self._heads // self._kv_heads, shape.heads // shape.kv_heads
        if self._dim * 2 != DIM or group > larger or shape.kv_heads % self._kv_heads != 0:
            raise SystemExit(f"stretch: the small model needs a head_dim of {DIM // 2}, groups of at "
                             f"most {larger} and KV heads that divide {shape.kv_heads}")  # fmt: skip
        self._kv_copies = [head % self._kv_heads for head in range(shape.kv_heads)]
        self._copies = [kv * group + g % group for kv in self._kv_copies for g in range(larger)]
        half = np.arange(self._dim // 2)
        self._turned = np.concatenate([2 * half, 2 * half + DIM // 2])  # channels of q and k
        self._norm = np.sqrt(self._hidden / shape.hidden)

    def layer_of(self, layer: int) -> int:
        """The small model's layer that `layer` copies."""
        return layer * self._small.config["num_hidden_layers"] // self._shape.layers

    def acts(self, layer: int) -> bool:
        """True for the last copy of a layer, the only one that computes; the others add nothing."""
        last = layer == self._shape.layers - 1
        return last or self.layer_of(layer + 1) != self.layer_of(layer)

    def _inputs(self, values: np.ndarray, rows: int) -> np.ndarray:
        """Weights whose input is the residual stream, [rows, hidden]."""
        matrix = self._filler.matrix(rows, self._shape.hidden)
        matrix[: values.shape[0], : self._hidden] = to_bf16(values)
        return matrix

    def _outputs(self, values: np.ndarray, columns: int, acts: bool) -> np.ndarray:
        """Weights whose output is added to the residual stream, [hidden, columns]."""
        matrix = np.zeros((self._shape.hidden, columns), dtype=np.uint16)
        if acts:
            matrix[: self._hidden, : values.shape[1]] = to_bf16(values)
        return matrix

    def _norm_weight(self, values: np.ndarray) -> np.ndarray:
        weight = np.zeros(self._shape.hidden, dtype=np.float32)
        weight[: self._hidden] = values * self._norm
        return to_bf16(weight)

    def _output_projection(self, values: np.ndarray) -> np.ndarray:
        shares = np.bincount(self._copies)  # copies of each query head
        scaled = values.T / np.repeat(shares, self._dim)[:, None]
        return spread(scaled, self._heads, self._copies, np.arange(self._dim)).T

    def layer(self, layer: int) -> Iterator[tuple[str, np.ndarray]]:
        """Names and tensors of a layer."""
        acts, channels = self.acts(layer), np.arange(self._dim)
        shape = self._shape

        def of(name: str) -> np.ndarray:
            return self._small.of_layer(self.layer_of(layer), name)

        q = spread(of("self_attn.q_proj"), self._heads, self._copies, self._turned)
        k = spread(of("self_attn.k_proj"), self._kv_heads, self._kv_copies, self._turned)
        v = spread(of("self_attn.v_proj"), self._kv_heads, self._kv_copies, channels)
        o = self._output_projection(of("self_attn.o_proj"))
        yield "input_layernorm", self._norm_weight(of("input_layernorm"))
        yield "self_attn.q_proj", self._inputs(q * np.sqrt(2.0), shape.heads * DIM)
        yield "self_attn.k_proj", self._inputs(k, shape.kv_heads * DIM)
        yield "self_attn.v_proj", self._inputs(v, shape.kv_heads * DIM)
        yield "self_attn.o_proj", self._outputs(o, shape.heads * DIM, acts)
        yield "post_attention_layernorm", self._norm_weight(of("post_attention_layernorm"))
        yield "mlp.gate_proj", self._inputs(of("mlp.gate_proj"), shape.inner)
        yield "mlp.up_proj", self._inputs(of("mlp.up_proj"), shape.inner)
        yield "mlp.down_proj", self._outputs(of("mlp.down_proj"), shape.inner, acts)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Names and tensors, in the order of the file."""
        embedding = self._small.tensor("model.embed_tokens.weight")
        padded = np.zeros((self._shape.vocabulary, self._shape.hidden), dtype=np.uint16)
        padded[: len(embedding), : self._hidden] = to_bf16(embedding)
        yield "model.embed_tokens.weight", padded
        padded = self._inputs(embedding, self._shape.vocabulary)
        padded[len(embedding) :] = padded[self._small.config["bos_token_id"]]
        yield "lm_head.weight", padded
        yield "model.norm.weight", self._norm_weight(self._small.tensor("model.norm.weight"))
        for layer in range(self._shape.layers):
            for name, tensor in self.layer(layer):
                yield f"model.layers.{layer}.{name}.weight", tensor

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        shape = self._shape
        return self._small.config | {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": DIM,
            "vocab_size": shape.vocabulary,
            "rms_norm_eps": self._small.config["rms_norm_eps"] * self._hidden / shape.hidden,
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


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Tensor shapes by name, in the order of Stretched.tensors()."""
    hidden, inner, vocabulary = shape.hidden, shape.inner, shape.vocabulary
    queries, keys = shape.heads * DIM, shape.kv_heads * DIM
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(shape.layers):
        found |= {f"model.layers.{layer}.{name}.weight": s for name, s in of_layer.items()}
    return found


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folder", type=Path, help="for the checkpoint, some 15 GiB")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b", help="(llama3-8b)")
    parser.add_argument("--layers", type=int, help="the small model's or more (the shape's)")
    parser.add_argument("-m", "--model", type=Path, default=ROOT / "models" / "sluice-22m")
    flags = parser.parse_args()
    flags.folder.mkdir(parents=True, exist_ok=True)
    small = Small(flags.model)
    shape = SHAPES[flags.shape]
    if flags.layers is not None:
        shape = shape._replace(layers=flags.layers)
    if shape.layers < small.config["num_hidden_layers"]:
        parser.error(f"--layers: {shape.layers} would leave some of the small model's out")
    stretched = Stretched(small, shape)
    expected = tensor_shapes(shape)
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
