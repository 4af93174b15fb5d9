#!/usr/bin/env python3
"""Times transformers' decoding on a GPU with caches of transformers and of Sluice.

    bench/peers/transformers_cache.py CHECKPOINT --text FILE --tokens 131072 --json OUT.json
    torchrun --nproc-per-node 2 bench/peers/transformers_cache.py ...    a part of each layer per GPU

A cache is `resident` (DynamicCache), `offloaded` (the same, in host memory but for one layer) or a
policy of a SluiceCache. The prompt is read in pieces, and the text goes on as it is, whatever the
model finds likely, so all caches see the same tokens; the report has the likeliest token of every
step, which caches and numbers of GPUs can be compared by. Results are cells of `sluice bench` with
more members, and bench/plot_bench.py draws both. Needs torch, transformers 5, tokenizers and, for
Sluice's caches, the package `sluice`. On a CPU with `--device cpu`.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import bench_cells
import torch
import transformers
from tokenizers import Tokenizer

PIECE = 4096
WARM_UP = 2
OF_TRANSFORMERS = ("resident", "offloaded")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def new_cache(model: Any, name: str, flags: argparse.Namespace) -> Any:
    """An empty cache; the model attends by it from here on."""
    if name in OF_TRANSFORMERS:
        model.set_attn_implementation("sdpa")
        return transformers.DynamicCache(config=model.config, offloading=name == "offloaded")
    from sluice.transformers import SluiceCache

    model.set_attn_implementation("sluice")
    memory = None if flags.device_memory is None else int(flags.device_memory * 2**30)
    return SluiceCache(model.config, context=flags.tokens, policies=[name], chunk=PIECE,
                       device_memory=memory)  # fmt: skip


def moved_per_token(cache: Any) -> dict[str, float]:
    """Bytes of a decode step between or within tiers, from a SluiceCache's ledger."""
    decode = cache.ledger()["decode"]
    moved: dict[str, float] = {}
    for total in decode["totals"]:
        name = f"{total['from']} -> {total['to']}"
        moved[name] = moved.get(name, 0) + total["bytes"] / decode["tokens"]
    return moved


def crossed(moved: dict[str, float]) -> float:
    """The part between two different tiers."""
    return sum(size for name, size in moved.items() if len(set(name.split(" -> "))) == 2)


def cap_of(name: str, flags: argparse.Namespace) -> str | None:
    """The cap on a SluiceCache."""
    if name in OF_TRANSFORMERS or flags.device_memory is None:
        return None
    return f"{flags.device_memory:g}GiB"


@torch.inference_mode()
def measure(model: Any, ids: torch.Tensor, name: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the prompt and of every step after it."""
    device = ids.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cache = new_cache(model, name, flags)
    likeliest: list[int] = []

    def feed(piece: torch.Tensor) -> float:
        wait(device)
        start = time.perf_counter()
        answer = model(piece[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        likeliest.append(int(answer.logits[0, -1].argmax()))
        wait(device)
        return time.perf_counter() - start

    prompt = ids[: -WARM_UP - flags.steps]
    first_token = sum(feed(piece) for piece in prompt.split(PIECE))
    likeliest.clear()
    seconds = [feed(token) for token in ids[len(prompt) :].split(1)][WARM_UP:]
    moved = None if name in OF_TRANSFORMERS else moved_per_token(cache)
    report: dict[str, Any] = bench_cells.cell(
        f"transformers, {name}", len(prompt), seconds, prompt_seconds=first_token,
        device_memory=cap_of(name, flags),
        crossed_bytes=None if moved is None else crossed(moved))  # fmt: skip
    report |= {
        "cache": name,
        "prompt_tokens": len(prompt),
        "first_token_seconds": first_token,
        "step_seconds": seconds,
        "median_step_ms": 1e3 * statistics.median(seconds),
        "likeliest": likeliest,
    }
    if device.type == "cuda":
        report["torch_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    if name not in OF_TRANSFORMERS:
        report["sluice_memory"] = cache.kv.memory()
        report["bytes_per_token"] = moved
    return report


def load(flags: argparse.Namespace, ranks: int) -> Any:
    """The model, or under torchrun this process's part of it."""
    where: dict[str, Any] = {"tp_plan": "auto"} if ranks > 1 else {"device_map": flags.device}
    return transformers.AutoModelForCausalLM.from_pretrained(
        flags.model, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True,
        **where).eval()  # fmt: skip


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cache", nargs="+", default=["resident", "offloaded", "dense", "values"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--device-memory", type=float, help="of a SluiceCache, in GiB per GPU")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Runs the command."""
    flags = read_flags()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    start = bench_cells.utc_now()
    model = load(flags, ranks)
    tokenizer = Tokenizer.from_file(str(flags.model / "tokenizer.json"))
    text = flags.text.read_text(encoding="utf-8")[: 6 * flags.tokens]
    ids = torch.tensor(tokenizer.encode(text).ids[: flags.tokens], device=model.device)
    is_gpu = model.device.type == "cuda"
    gpu = torch.cuda.get_device_name() if is_gpu else None
    report: dict[str, Any] = {
        "schema": bench_cells.SCHEMA,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": gpu or "cpu",
        "devices": ranks,
        "model": flags.model.name,
        "results": [],
    }
    for name in flags.cache:
        report["results"].append(measure(model, ids, name, flags))
        if rank > 0:
            continue
        print(report["results"][-1] | {"step_seconds": None, "likeliest": None}, flush=True)
        report["run"] = bench_cells.run(
            f"transformers {transformers.__version__}", flags.device, gpu, start)  # fmt: skip
        if flags.json:
            flags.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
