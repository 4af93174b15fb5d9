#!/usr/bin/env python3
"""How long the weights of a checkpoint take to load, beside reading the file and, if asked, torch.

    bench/load.py build/release/bin/sluice --folder /tmp/checkpoint --shape 1b --json OUT.json
    bench/load.py build/release/bin/sluice --folder /tmp/checkpoint --shape 8b --device cuda --torch

Makes a checkpoint of random bf16 weights in the folder, unless it has one: Llama's architecture
with the tokenizer of models/sluice-22m. Shape 1b is 2.75 GiB, 8b 13.1 GiB. Every round takes, one
after the other,

  cat     reading the file and nothing else, on one thread
  sluice  what `generate` reports of loading, and the time of the whole command, which computes
          two tokens besides; several commands may be given, such as one of an older build
  torch   safetensors.torch.load_file to the same device, in a process of its own

The first round brings the file into the page cache and is not reported.
"""

import argparse
import datetime
import json
import os
import platform
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "models" / "sluice-22m" / "tokenizer.json"
BLOCK = 32 << 20  # bytes that are drawn once and repeated
VOCABULARY = 4096

# The shapes of Llama 3.2 1B, with eight more layers to make up for a smaller vocabulary, and of
# Llama 3 8B.
SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}

TORCH = """
import sys, time
import torch
from safetensors.torch import load_file
if sys.argv[2] != "cpu":
    torch.cuda.init()
start = time.perf_counter()
tensors = load_file(sys.argv[1], device=sys.argv[2])
if sys.argv[2] != "cpu":
    torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def config_of(shape: str) -> dict[str, Any]:
    """The config.json of a made-up checkpoint."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        **SHAPES[shape],
    }


def tensors_of(config: dict[str, Any]) -> dict[str, list[int]]:
    """The shape of every tensor, by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": [VOCABULARY, hidden],
        "lm_head.weight": [VOCABULARY, hidden],
        "model.norm.weight": [hidden],
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [hidden, hidden],
            "self_attn.k_proj": [keys, hidden],
            "self_attn.v_proj": [keys, hidden],
            "self_attn.o_proj": [hidden, hidden],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": s for name, s in of_layer.items()}
    return shapes


def random_weights() -> bytes:
    """bf16 numbers of either sign around 0.01."""
    block = bytearray(random.Random(1).randbytes(BLOCK))
    signs = bytes(0x3C if byte < 128 else 0xBC for byte in range(256))
    block[1::2] = bytes(block[1::2]).translate(signs)
    return bytes(block)


def make_checkpoint(folder: Path, shape: str) -> None:
    """Writes config.json, tokenizer.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape)
    header: dict[str, Any] = {}
    end = 0
    for name, size in sorted(tensors_of(config).items()):
        begin, end = end, end + 2 * size[0] * (size[1] if len(size) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    block = random_weights()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, end, BLOCK):
            file.write(block[: end - begin])
    shutil.copy(TOKENIZER, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def seconds_of(command: list[str]) -> float:
    """The seconds that a command takes."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure_sluice(command: str, folder: Path, device: str) -> dict[str, Any]:
    """Loading time and memory that `generate` reports; None where an old version does not."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        flags = ["-m", str(folder), "--device", device, "-p", "Once upon a time", "-n", "2"]
        seconds = seconds_of(
            [command, "generate", *flags, "-q", "--ignore-eos", "--policy", "dense",
             "--json", file.name])  # fmt: skip
        report = json.loads(Path(file.name).read_text(encoding="utf-8"))
    memory = report["memory"]
    return {
        "load_seconds": report["timings"].get("load_seconds"),
        "load_host_peak_bytes": memory.get("load_host_peak_bytes"),
        "load_process_peak_bytes": memory.get("load_process_peak_bytes"),
        "command_seconds": seconds,
    }


def measure_torch(path: Path, device: str) -> float:
    """The time of load_file in a fresh process that has initialised the device."""
    done = subprocess.run([sys.executable, "-c", TORCH, str(path), device], check=True,
                          capture_output=True, text=True)  # fmt: skip
    return float(done.stdout)


def measure(flags: argparse.Namespace, path: Path) -> dict[str, Any]:
    """One round."""
    result: dict[str, Any] = {"cat_seconds": seconds_of(["cat", str(path)])}
    for command in flags.sluice:
        result[command] = measure_sluice(command, flags.folder, flags.device)
    if flags.torch:
        result["torch_seconds"] = measure_torch(path, flags.device)
    return result


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("sluice", nargs="+", help="commands to measure")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--torch", action="store_true", help="measure torch's safetensors, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    flags = parser.parse_args()
    path = flags.folder / "model.safetensors"
    if not (flags.folder / "config.json").exists():
        make_checkpoint(flags.folder, flags.shape)
    rounds = []
    for number in range(flags.rounds + 1):
        result = measure(flags, path)
        if number > 0:
            rounds.append(result)
            print(json.dumps(result), flush=True)
    if flags.json:
        report = {
            "command": " ".join(sys.argv),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "file_bytes": path.stat().st_size,
            "rounds": rounds,
        }
        flags.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
