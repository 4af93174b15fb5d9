#!/usr/bin/env python3
"""Decoding with row caches of several sizes: hit rates, bytes fetched and time per token.

    bench/cached_decode.py build/release/bin/sluice -m models/sluice-22m --device cuda \\
        --tokens 32768 131072 --policy 'select=int4 prune=top_k(256)' --json OUT.json

Lets the model continue a text by sampling, under the smallest cap on the device that the policy
runs with and beside that a row cache of so many times the rows that a step selects (0: none), so
that what is not in the cache is fetched. The same cap without its cache keeps no more rows on the
device; so the text must be the same for every size, and a difference is an error. Rows of the
newest page, which is always on the device, are not counted. Beside it stands the time per token
with nothing to fetch: every row on the device, if that fits.
"""

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = 128
WAY_BYTES = 12  # of a row in the cache, beside the row


def command_of(flags: argparse.Namespace, policy: str, prompt: Path) -> list[str]:
    return [flags.sluice, "generate", "-m", flags.model, "--device", flags.device, "--chunk",
            str(flags.chunk), "--policy", policy, "-f", str(prompt), "--ignore-eos", "--temperature", "1", "--seed", "1",
            "-q"]  # fmt: skip


def least_cap(flags: argparse.Namespace, policy: str, prompt: Path) -> int:
    """The least device cap in bytes that leaves streaming buffers their full size."""
    # A cap too small for the allocations before planning is refused without a least cap, so larger
    # ones are tried.
    refused = ""
    for cap in (1, 80 << 20, 300 << 20, 1 << 30):
        command = [*command_of(flags, policy, prompt), "--device-memory", f"{cap}B"]
        refused = subprocess.run(command, check=False, capture_output=True, text=True).stderr
        if found := re.search(r"give at least (\d+)B", refused):
            return int(found[1]) + flags.beside
    raise SystemExit(f"no least cap for '{policy}': {refused}")


def generate(command: list[str], steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        subprocess.run([*command, "-n", str(steps + 1), "--json", str(report)], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        return json.loads(report.read_text(encoding="utf-8"))


def rows_of(report: dict[str, Any]) -> dict[str, list[int]]:
    """Rows that decoding found on the device, and rows that it fetched, for every layer."""
    layers = report["ledger"]["decode"]["layers"]
    return {
        cause: [sum(e["rows"] for e in layer if e["cause"] == cause) for layer in layers]
        for cause in ("hit", "miss")
    }


def newest_rows(report: dict[str, Any], heads: int) -> int:
    """Rows of the newest page that a layer reads, over all steps."""
    first = report["timings"]["prefill_tokens"]
    return heads * sum((first + step) % PAGE + 1 for step in range(report["timings"]["decode_tokens"]))


def result_of(report: dict[str, Any], heads: int) -> dict[str, Any]:
    rows = rows_of(report)
    tokens = report["timings"]["decode_tokens"]
    newest = newest_rows(report, heads)
    misses, hits = sum(rows["miss"]), sum(rows["hit"]) - newest * len(rows["hit"])
    return {
        "context": report["timings"]["prefill_tokens"],
        "policy": report["policy"],
        "selected": (hits + misses) / tokens / len(rows["hit"]) / heads,
        "hit_rate": hits / max(hits + misses, 1),
        "fetched_bytes": sum(
            e["bytes"] for layer in report["ledger"]["decode"]["layers"] for e in layer
            if e["cause"] == "miss") / tokens,
        "ms": 1e3 * report["timings"]["seconds_per_output_token"],
        "prefill_seconds": report["timings"]["prefill_seconds"],
        "hit_rate_by_layer": [
            round((h - newest) / max(h - newest + m, 1), 4)
            for h, m in zip(rows["hit"], rows["miss"], strict=True)],
    }  # fmt: skip


def measure(flags: argparse.Namespace, policy: str, prompt: Path) -> list[dict[str, Any]]:
    config = json.loads(Path(flags.model, "config.json").read_text(encoding="utf-8"))
    heads = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    row = -(-4 * dim // 64) * 64
    base = least_cap(flags, policy, prompt)
    results: list[dict[str, Any]] = []
    text = None
    step = 0.0
    for times in (0, *flags.sizes):
        cache = round(times * step * (row + WAY_BYTES))
        command = [*command_of(flags, policy, prompt), "--device-memory", f"{base + cache}B",
                   "--row-cache", f"{cache}B"]  # fmt: skip
        report = generate(command, flags.steps)
        if text is not None and report["tokens"] != text:
            raise SystemExit(f"'{policy}' answers otherwise with a cache of {cache} bytes")
        text = report["tokens"]
        result = {"times": times, "cache_bytes": cache, **result_of(report, heads)}
        result["resident_tokens"] = report["plan"]["resident_tokens"]
        results.append(result)
        layers = len(result["hit_rate_by_layer"])
        if times == 0:
            step = result["selected"] * layers * heads
        print(line_of(result), flush=True)
    if flags.resident:
        resident = result_of(generate(command_of(flags, policy, prompt), flags.steps), heads)
        results.append({"times": None, **resident})
        print(line_of(results[-1]), flush=True)
    return results


def line_of(result: dict[str, Any]) -> str:
    size = "all" if result["times"] is None else f"{result['times']:g} x"
    return (f"{result['context']:7} {result['policy'][:44]:44} {result['selected']:7.0f} {size:>5}"
            f" {100 * result['hit_rate']:6.1f} {result['fetched_bytes'] / 1024:10.1f}"
            f" {result['ms']:8.2f}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sluice")
    parser.add_argument("-m", "--model", default=str(ROOT / "models" / "sluice-22m"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--text", type=Path, default=ROOT / "data" / "war-and-peace.txt")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--characters", type=float, default=3.1, help="of the text, per token")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--policy", action="append", required=True)
    parser.add_argument("--sizes", type=float, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--beside", type=int, default=16 << 20,
                        help="bytes of the cap for streaming")  # fmt: skip
    parser.add_argument("--resident", action="store_true", help="also without a cap")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    print(f"{'context':>7} {'policy':44} {'rows':>7} {'cache':>5} {'hits %':>6} {'KiB/token':>10}"
          f" {'ms':>8}")  # fmt: skip
    results = []
    for tokens in flags.tokens:
        text = flags.text.read_text(encoding="utf-8")[: int(tokens * flags.characters)]
        with tempfile.TemporaryDirectory() as folder:
            prompt = Path(folder, "prompt.txt")
            prompt.write_text(text, encoding="utf-8")
            for policy in flags.policy:
                results += measure(flags, policy, prompt)
    if flags.json:
        flags.json.write_text(json.dumps({
            "machine": platform.processor() or platform.machine(),
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["bench/cached_decode.py", *sys.argv[1:]]),
            "results": results,
        }, indent=1) + "\n", encoding="utf-8")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
