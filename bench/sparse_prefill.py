#!/usr/bin/env python3
"""TTFT of dense and of sparse prefill, over lengths of the prompt and shares of attention.

    bench/sparse_prefill.py build/release/bin/sluice -m models/sluice-22m --device cuda \\
        --tokens 8192 32768 131072 --tau 0.9 0.975 0.99 --json OUT.json

Prompts are the beginning of a text, repeated if it is too short. Every round runs `generate` once
for every prompt and policy, so that what drifts over minutes meets all of them; the first round is
not reported, unless --warm-up says otherwise. Beside the median of TTFT stands the share of the
pairs of queries and keys that attention looks at, for pages as the command reports it, for others
from the ledger: rows attended, piece by piece, by those of a dense prefill. A policy that evicts
leaves out queries as well as keys; its share is the mean of the squares over layers, as if every
piece had as many important tokens. With --attention every prompt and policy is run once more with a
trace, whose operations are waited for one by one: what those took that attend, and those that choose
what is attended to.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = 50_000  # characters that tell how many make a token


def generate(flags: argparse.Namespace, text: str, policy: str,
             trace: Path | None = None) -> dict[str, Any]:
    """The report of a `generate` run with one token."""
    with tempfile.TemporaryDirectory() as folder:
        prompt, report = Path(folder, "prompt.txt"), Path(folder, "report.json")
        prompt.write_text(text, encoding="utf-8")
        command = [flags.sluice, "generate", "-m", flags.model, "--device", flags.device,
                   "--chunk", str(flags.chunk), "--policy", policy, "-f", str(prompt), "-n", "1",
                   "-q", "--json", str(report)]  # fmt: skip
        if flags.device_memory:
            command += ["--device-memory", flags.device_memory]
        if trace:
            command += ["--trace", str(trace)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(report.read_text(encoding="utf-8"))


def policies_of(flags: argparse.Namespace) -> list[str]:
    """The policy lines to measure."""
    rules = [f"zipvl({tau},{kind})" for tau in flags.tau for kind in flags.kinds]
    rules += [f"pages({share})" for share in flags.pages]
    return ["dense"] + [f"select=dense prefill={rule}" for rule in rules]


def rows_attended(report: dict[str, Any]) -> list[int]:
    """Rows attended in prefill, by layer."""
    layers = report["ledger"]["prefill"]["layers"]
    return [sum(e["rows"] for e in layer if e["cause"] == "hit") for layer in layers]


def share_of(report: dict[str, Any], dense: dict[str, Any]) -> float:
    """The attended share of a dense prefill's query-key pairs."""
    if "pages" in report["policy"]:
        return report["prefill_share"]
    shares = [a / b for a, b in zip(rows_attended(report), rows_attended(dense), strict=True)]
    power = 2 if "evict" in report["policy"] else 1
    return statistics.fmean(share**power for share in shares)


def attention_of(flags: argparse.Namespace, text: str, policy: str) -> dict[str, float]:
    """Seconds of a prefill's attention, and of selecting its rows."""
    kinds = ["attend", "select", "index", "scan", "gather"]
    seconds = dict.fromkeys(kinds, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        generate(flags, text, policy, trace)
        for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
            if event["ph"] == "X" and event["cat"] in seconds:
                seconds[event["cat"]] += event["dur"] / 1e6
    return {"attention_seconds": seconds["attend"],
            "choosing_seconds": sum(seconds[kind] for kind in kinds[1:])}  # fmt: skip


def measure(flags: argparse.Namespace, prompts: dict[int, str]) -> list[dict[str, Any]]:
    """All results, the dense one first for every length."""
    seconds: dict[tuple[int, str], list[float]] = {}
    reports: dict[tuple[int, str], dict[str, Any]] = {}
    for number in range(flags.rounds + flags.warm_up):
        for tokens, text in prompts.items():
            for policy in policies_of(flags):
                report = generate(flags, text, policy)
                reports[tokens, policy] = report
                if number >= flags.warm_up:
                    found = report["timings"]["first_token_seconds"]
                    seconds.setdefault((tokens, policy), []).append(found)
    results = []
    for (tokens, policy), all_seconds in seconds.items():
        report, dense = reports[tokens, policy], reports[tokens, "dense"]
        median = statistics.median(all_seconds)
        results.append({
            "prompt_tokens": report["timings"]["prefill_tokens"],
            "policy": policy,
            "first_token_seconds": all_seconds,
            "median_seconds": median,
            "of_dense": median / statistics.median(seconds[tokens, "dense"]),
            "pairs_share": share_of(report, dense),
            "compact_rows": report["plan"]["compact_rows"],
            "device_peak_bytes": report["memory"]["device_peak_bytes"],
        })  # fmt: skip
        if flags.attention:
            results[-1] |= attention_of(flags, prompts[tokens], policy)
            print(f"{'':>8} {results[-1]['attention_seconds']:.3f} s of attention, "
                  f"{results[-1]['choosing_seconds']:.3f} s of choosing", flush=True)  # fmt: skip
        print(f"{results[-1]['prompt_tokens']:>8} {policy:<40} {median:8.3f} s "
              f"{results[-1]['of_dense']:6.2f} of dense, {results[-1]['pairs_share']:.3f} of pairs",
              flush=True)  # fmt: skip
    return results


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("sluice", help="the command to measure")
    parser.add_argument("-m", "--model", default=str(ROOT / "models" / "sluice-22m"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--device-memory", help="cap on the device tier")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--text", type=Path, default=ROOT / "data" / "war-and-peace.txt")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--tau", type=float, nargs="*", default=[0.9, 0.975, 0.99])
    parser.add_argument("--pages", type=float, nargs="*", default=[0.8, 0.9, 0.95])
    kinds = ["demote", "evict"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that are not reported")
    parser.add_argument("--attention", action="store_true", help="time attention by itself")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    flags = parser.parse_args()
    text = flags.text.read_text(encoding="utf-8")
    sample = generate(flags, text[:SAMPLE], "dense")
    characters = len(text[:SAMPLE]) / sample["timings"]["prefill_tokens"]
    prompts = {}
    for tokens in flags.tokens:
        length = int(tokens * characters)
        prompts[tokens] = (text * (length // len(text) + 1))[:length]
    results = measure(flags, prompts)
    if flags.json:
        report = {
            "command": " ".join(sys.argv),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "model": Path(flags.model).name,
            "device": flags.device,
            "chunk": flags.chunk,
            "text": flags.text.name,
            "results": results,
        }
        flags.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
