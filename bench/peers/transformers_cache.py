#!/usr/bin/env python3
"""Times transformers' decoding on a GPU, its KV cache on the device or offloaded to host memory.

    bench/peers/offloaded_cache.py CHECKPOINT --text FILE --tokens 131072 --json OUT.json

The prompt is read in pieces. Beside it belongs what Sluice takes behind as many tokens of the same
text in the same run: bench/decode_depth_bench. Needs torch, transformers 5 and tokenizers.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

PIECE = 4096
WARM_UP = 2


@torch.inference_mode()
def measure(model: Any, ids: torch.Tensor, offloads: bool, steps: int) -> dict[str, Any]:
    """Seconds of the prompt and of every step after it."""
    torch.cuda.reset_peak_memory_stats()
    cache = transformers.DynamicCache(config=model.config, offloading=offloads)

    def feed(piece: torch.Tensor) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(piece[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    prompt = ids[: -WARM_UP - steps]
    first_token = sum(feed(piece) for piece in prompt.split(PIECE))
    seconds = [feed(token) for token in ids[len(prompt) :].split(1)][WARM_UP:]
    return {
        "offloaded": offloads,
        "prompt_tokens": len(prompt),
        "first_token_seconds": first_token,
        "step_seconds": seconds,
        "median_step_ms": 1e3 * statistics.median(seconds),
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        flags.model, dtype=torch.bfloat16, attn_implementation="sdpa", device_map="cuda",
        local_files_only=True).eval()  # fmt: skip
    tokenizer = Tokenizer.from_file(str(flags.model / "tokenizer.json"))
    text = flags.text.read_text(encoding="utf-8")[: 6 * flags.tokens]
    ids = torch.tensor(tokenizer.encode(text).ids[: flags.tokens], device="cuda")
    report: dict[str, Any] = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "model": flags.model.name,
        "results": [],
    }
    for offloads in (False, True):
        report["results"].append(measure(model, ids, offloads, flags.steps))
        print(report["results"][-1] | {"step_seconds": None}, flush=True)
        if flags.json:
            flags.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
