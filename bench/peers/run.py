#!/usr/bin/env python3
"""Measures Sluice beside llama.cpp and Hugging Face transformers on this machine's CPU.

    bench/peers/setup.sh
    scripts/build.sh release
    bench/peers/run.py

Everybody runs models/sluice-22m, the same tokens of War and Peace and the same number of threads:
one prefill to the last logits, then greedy decoding at that depth. With bfloat16 weights peers
first prove, on a golden continuation, that they compute the same model; in quantised files, which
transformers does not read, the first token has to be the same.

    bench/peers/run.py --type Q8_0 Q4_0 --tokens 32 8192 32768 --without-transformers

The precision of the rest is the peer's own choice. llama.cpp computes attention with an f16 or bf16
KV cache, transformers with everything in bfloat16 or float32. So each peer has several variants;
all are tried once, at the first depth from 1,024 tokens on, and the one best at prefill and the one
best at decode go on to the rounds of every depth. In a round each contestant runs once, one after
the other, so that a slow minute of the machine hits all. Peers run one warm-up before they measure, in the same process; Sluice runs as a fresh command. The
result, with every single run, goes to bench/results/peers_cpu.json.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("bench/peers")
WORK = Path("build/peers")
MODEL = Path("models/sluice-22m")
TYPES = ("BF16", "F16", "F32", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
PHASES = ("prefill", "decode")


class Contestant(NamedTuple):
    """A program with fixed options."""

    peer: str  # "sluice", "llama.cpp", "transformers"
    variant: str  # the options that matter, for people
    command: list[str]


Rates = dict[str, float]  # tokens per second by phase


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def machine(threads: int) -> dict[str, Any]:
    """The properties of this machine that affect the numbers."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    memory = Path("/proc/meminfo").read_text(encoding="utf-8")
    flags = set(re.search(r"^flags\s*: (.*)$", cpu, re.M)[1].split())
    return {
        "cpu": re.search(r"^model name\s*: (.*)$", cpu, re.M)[1],
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "threads_used": threads,
        "memory_gib": round(int(re.search(r"^MemTotal:\s*(\d+)", memory)[1]) / 2**20, 1),
    }


def versions(python: Path, sluice_binary: Path) -> dict[str, str]:
    """Returns the versions of everything measured."""
    listed = json.loads(output_of(str(python), "-m", "pip", "list", "--format=json"))
    wanted = ("llama_cpp_python", "llama-cpp-python", "torch", "transformers")
    found = {item["name"]: item["version"] for item in listed if item["name"] in wanted}
    found["sluice"] = output_of(str(sluice_binary), "--version").split()[-1]
    found["sluice_commit"] = output_of("git", "describe", "--always", "--dirty")
    return found


class Cell(NamedTuple):
    """What contestants are compared at."""

    type: str  # of the weights
    tokens: int  # of the prompt
    decode_tokens: int
    threads: int

    @property
    def context(self) -> int:
        return -(-(self.tokens + self.decode_tokens + 1) // 256) * 256


def prepare(python: Path, cell: Cell) -> None:
    """Writes the prompt, as text for Sluice and as ids for the peers, and the GGUF file."""
    command = [str(python), str(HERE / "prepare.py"), str(MODEL), str(WORK), "--type", cell.type]
    command += ["--tokens", str(cell.tokens), "--decode-tokens", str(cell.decode_tokens)]
    subprocess.run(command, check=True)


def sluice(sluice_binary: Path, cell: Cell) -> list[Contestant]:
    command = [str(sluice_binary), "generate", "--model", str(WORK / "model.gguf")]
    command += ["--prompt-file", str(WORK / "prompt.txt"), "--ignore-eos", "--temperature", "0"]
    # The first token comes from the prefill's logits; the others are decode steps.
    command += ["--max-tokens", str(cell.decode_tokens + 1), "--threads", str(cell.threads)]
    command += ["--json", str(WORK / "run.json"), "--force"]
    return [Contestant("sluice", "bf16 KV", command)]


def llama_cpp(python: Path, cell: Cell) -> list[Contestant]:
    contestants = []
    for kv, flash, batch in [
        ("f16", 1, 512),
        ("f16", 1, 2048),
        ("f16", 0, 512),
        ("f16", 0, 2048),
        ("bf16", 1, 512),
        ("bf16", 0, 512),
    ]:
        command = [str(python), str(HERE / "llama_cpp_worker.py"), str(WORK / "job.json")]
        command += ["--model", str(WORK / "model.gguf"), "--context", str(cell.context)]
        command += ["--threads", str(cell.threads), "--kv", kv]
        command += ["--flash", str(flash), "--batch", str(batch)]
        attention = "flash attention" if flash else "no flash attention"
        contestants.append(Contestant("llama.cpp", f"{kv} KV, {attention}, batch {batch}", command))
    return contestants


def transformers(python: Path, cell: Cell) -> list[Contestant]:
    contestants = []
    for dtype in ("bfloat16", "float32"):
        command = [str(python), str(HERE / "transformers_worker.py"), str(WORK / "job.json")]
        command += ["--model", str(MODEL), "--threads", str(cell.threads), "--dtype", dtype]
        contestants.append(Contestant("transformers", f"{dtype}, sdpa", command))
    return contestants


class Run(NamedTuple):
    rates: Rates
    first_token: int


def run(contestant: Contestant, cell: Cell) -> Run:
    """Runs a contestant once."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(cell.threads),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(contestant.command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(contestant.command)} failed:\n{done.stderr}")
    if contestant.peer == "sluice":
        report = json.loads((WORK / "run.json").read_text(encoding="utf-8"))
        timings, first = report["timings"], report["tokens"][0]
    else:
        timings = json.loads(done.stdout.splitlines()[-1])
        first = timings["tokens"][0]
    if timings["prefill_tokens"] != cell.tokens:
        read = timings["prefill_tokens"]
        sys.exit(f"{contestant.peer} read {read} tokens instead of {cell.tokens}")
    rates = {p: timings[f"{p}_tokens"] / timings[f"{p}_seconds"] for p in PHASES}
    print(
        f"{contestant.peer:13} {contestant.variant:36}"
        f" prefill {rates['prefill']:8.1f} tok/s, decode {rates['decode']:7.2f} tok/s",
        flush=True,
    )
    return Run(rates, first)


def finalists(variants: list[Contestant], cell: Cell) -> list[str]:
    """Tries every variant once and returns the best at prefill and the best at decode."""
    tried = [(variant, run(variant, cell).rates) for variant in variants]
    best = [max(tried, key=lambda pair: pair[1][phase])[0].variant for phase in PHASES]
    return list(dict.fromkeys(best))


def summary(values: list[float]) -> dict[str, Any]:
    return {
        "min": round(min(values), 2),
        "median": round(statistics.median(values), 2),
        "max": round(max(values), 2),
        "runs": [round(value, 2) for value in values],
    }


def entry(contestant: Contestant, runs: list[Run]) -> dict[str, Any]:
    """The JSON of one contestant."""
    rates = {f"{p}_tokens_per_second": summary([r.rates[p] for r in runs]) for p in PHASES}
    command = shlex.join(contestant.command)
    return {"peer": contestant.peer, "variant": contestant.variant, "command": command} | rates


def ratios(entries: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Sluice's medians over the best median of each peer."""
    best: dict[str, Rates] = {}
    for item in entries:
        for phase in PHASES:
            rate = item[f"{phase}_tokens_per_second"]["median"]
            rates = best.setdefault(item["peer"], dict.fromkeys(PHASES, 0.0))
            rates[phase] = max(rates[phase], rate)
    own = best.pop("sluice")
    return {
        peer: {phase: round(own[phase] / rates[phase], 2) for phase in PHASES}
        for peer, rates in best.items()
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--type", nargs="+", default=["BF16"], choices=TYPES, help="of the weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="of the prompt")
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--python", type=Path, default=WORK / "venv/bin/python")
    parser.add_argument("--sluice", type=Path, default=Path("build/release/bin/sluice"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/peers_cpu.json"))
    args = parser.parse_args()
    if args.type != ["BF16"] and not args.without_transformers:
        parser.error("transformers reads no quantised files: give --without-transformers")
    return args


def contestants(args: argparse.Namespace, cell: Cell) -> list[list[Contestant]]:
    """Sluice, and every variant of each peer."""
    peers = [sluice(args.sluice, cell), llama_cpp(args.python, cell)]
    return peers if args.without_transformers else [*peers, transformers(args.python, cell)]


def compare(args: argparse.Namespace, cell: Cell, chosen: set[str]) -> dict[str, Any]:
    """The rounds of one cell, of the chosen variants."""
    prepare(args.python, cell)
    rivals = [c for peer in contestants(args, cell) for c in peer if c.variant in chosen]
    runs: dict[str, list[Run]] = {c.peer + c.variant: [] for c in rivals}
    for number in range(args.rounds):
        print(f"{cell.type}, {cell.tokens} tokens, round {number + 1} of {args.rounds}")
        for rival in rivals:
            runs[rival.peer + rival.variant].append(run(rival, cell))
    first = {one.first_token for of in runs.values() for one in of}
    if len(first) > 1:
        sys.exit(f"the contestants begin with different tokens: {sorted(first)}")
    entries = [entry(c, runs[c.peer + c.variant]) for c in rivals]
    return {
        "type": cell.type,
        "prefill_tokens": cell.tokens,
        "decode_tokens": cell.decode_tokens,
        "contestants": entries,
        "sluice_over_best_of_peer": ratios(entries),
    }


def main() -> None:
    os.chdir(ROOT)
    args = parse_arguments()
    WORK.mkdir(parents=True, exist_ok=True)
    cells = []
    for kind in args.type:
        depths = [Cell(kind, t, args.decode_tokens, args.threads) for t in sorted(args.tokens)]
        trial = next((cell for cell in depths if cell.tokens >= 1024), depths[-1])
        prepare(args.python, trial)
        own, *peers = contestants(args, trial)
        chosen = {own[0].variant}.union(*(finalists(variants, trial) for variants in peers))
        cells += [compare(args, cell, chosen) for cell in depths]
    result = {
        "what": "prefill and decode behind it, tokens per second",
        "model": str(MODEL),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["bench/peers/run.py", *sys.argv[1:]]),
        "machine": machine(args.threads),
        "versions": versions(args.python, args.sluice),
        "cells": cells,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for cell in cells:
        print(cell["type"], cell["prefill_tokens"], json.dumps(cell["sluice_over_best_of_peer"]))


if __name__ == "__main__":
    main()
