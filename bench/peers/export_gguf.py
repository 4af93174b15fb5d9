"""Writes a Llama-family Hugging Face checkpoint as a GGUF file.

    bench/peers/export_gguf.py models/sluice-22m sluice-22m-Q8_0.gguf --type Q8_0

Weights keep their bfloat16 bits, or are rounded to one of the types that the gguf package can
write, or by llama.cpp to a mixture of its own (Q4_K_M); norms become f32, as llama.cpp wants them.
It rotates neighbouring channels where Hugging Face checkpoints rotate halves, so the rows of q_proj
and k_proj of each head are interleaved on the way.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Reads a safetensors file of bfloat16 tensors as their bits, uint16."""
    raw = path.read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    data = memoryview(raw)[8 + header_bytes :]
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + header_bytes]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path.name}: {name} is {entry['dtype']}, expected BF16")
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[begin:end], np.uint16).reshape(entry["shape"])
    return tensors


def gguf_name(name: str) -> str:
    """Translates a tensor's name."""
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleave_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders each head's output rows from halves (0, d/2, 1, ...) to neighbours."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


TYPES = ("BF16", "F16", "F32", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
MIXTURES = {"Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}  # enum llama_ftype


def widened(bits: np.ndarray) -> np.ndarray:
    """The values of bfloat16 bits as f32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def add_tensors(
    writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray], config: Any, kind: str
) -> None:
    stored_type = gguf.GGMLQuantizationType[kind]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, bits in tensors.items():
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), widened(bits))
            continue
        for projection, count in heads.items():
            if projection in name:
                bits = interleave_heads(bits, count)
        stored = np.ascontiguousarray(bits)
        if kind != "BF16":
            stored = gguf.quantize(widened(stored), stored_type)
        writer.add_tensor(gguf_name(name), stored.view(np.uint8), raw_dtype=stored_type)


def add_config(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    names = {"F32": "ALL_F32"}
    writer.add_file_type(gguf.LlamaFileType[names.get(kind, "MOSTLY_" + kind)])


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, config: Any) -> None:
    ids = dict(tokenizer["model"]["vocab"])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    ids.update({token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    tokens = sorted(ids, key=ids.__getitem__)
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)


def mix(source: Path, out: Path, kind: str) -> None:
    """Quantises a GGUF file as llama.cpp does."""
    import llama_cpp  # only here, because it has to be built

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = MIXTURES[kind]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), params) != 0:
        raise ValueError(f"{source}: llama.cpp did not quantise it")


def export(model: Path, out: Path, kind: str = "BF16") -> None:
    """Writes `model` (a checkpoint directory) to the GGUF file `out`, with matrices of `kind`."""
    if kind in MIXTURES:
        whole = out.with_suffix(".bf16.gguf")
        export(model, whole)
        mix(whole, out, kind)
        return whole.unlink()
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"{model}: only Llama checkpoints can be exported")
    writer = gguf.GGUFWriter(out, "llama")
    add_config(writer, config, kind)
    add_tokenizer(writer, tokenizer, config)
    add_tensors(writer, read_tensors(model / "model.safetensors"), config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a checkpoint as a GGUF file.")
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("out", type=Path, help="GGUF file to write")
    kinds = [*TYPES, *MIXTURES]
    parser.add_argument("--type", choices=kinds, default="BF16", help="of the matrices")
    args = parser.parse_args()
    export(args.model, args.out, args.type)


if __name__ == "__main__":
    main()
