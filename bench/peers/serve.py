#!/usr/bin/env python3
"""Measures `sluice serve` beside llama-server under the same load on this machine's CPU.

    bench/peers/setup.sh --server
    scripts/build.sh release sluice_cli
    bench/peers/serve.py

Both serve models/sluice-22m with bfloat16 weights, dense attention, the same threads, as many
sequences at a time and room for as many tokens; Sluice keeps rows in bf16, llama-server in f16, its
default. The clients are those of bench/serve_load.py: --clients of them at once, each with
--requests prompts of the book, and then one alone with --alone prompts. Prompts are token ids, so
both read the same, and answers are greedy. In a round each server runs once, one after the other,
so that a slow minute of the machine hits both; the prompts of a round are the same for both, and
the processor time is measured, too, which others on the machine change less. Both run with
OMP_WAIT_POLICY=passive: where others use the cores, too, threads of llama.cpp that spin while they
wait make it several times slower. The result, with every run, goes to
bench/results/serve_peers_cpu.json.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from run import machine, output_of  # noqa: E402
from serve_load import Load, Server, percentile, tokens_of  # noqa: E402

MODEL = Path("models/sluice-22m")
NAMES = ("sluice", "llama-server")
Answers = dict[tuple[int, int], str]  # by begin and length of the prompt


def command_of(name: str, args: argparse.Namespace) -> list[str]:
    """The server's command line."""
    # llama.cpp rounds the context of a sequence up to a multiple of 256.
    context = -(-(args.longest + args.tokens) // 256) * 256
    if name == "sluice":
        return [str(args.sluice), "serve", "--model", str(MODEL), "--port", "0",
                "--policy", "dense", "--running", str(args.slots), "--context", str(context),
                "--tokens", str(args.slots * context), "--threads", str(args.threads),
                "--cached", "0", "--connections", str(args.clients + 8)]  # fmt: skip
    # Without --cache-ram 0 it also keeps copies of finished sequences.
    return [str(args.llama), "--model", str(args.gguf), "--port", "0", "--parallel",
            str(args.slots), "--ctx-size", str(args.slots * context), "--threads",
            str(args.threads), "--threads-batch", str(args.threads), "--cache-ram", "0",
            "--threads-http", str(args.clients + 8)]  # fmt: skip


def book_of(args: argparse.Namespace) -> list[int]:
    """The text as ids, by Sluice's tokenizer."""
    server = Server(command_of("sluice", args))
    book = tokens_of(server, args.text.read_text(encoding="utf-8"))
    server.end()
    return book


def run(
    name: str, args: argparse.Namespace, book: list[int], clients: int, seed: int
) -> tuple[dict[str, Any], Answers]:
    """Starts a server, has the clients ask, ends it."""
    requests = args.requests if clients > 1 else args.alone
    busy = os.getloadavg()[0]
    server = Server(command_of(name, args))
    server.post("/v1/completions", {"prompt": book[:512], "max_tokens": 8}).read()
    flags = vars(args) | {"clients": clients, "requests": requests, "seed": seed}
    load = Load(server, argparse.Namespace(**flags), book, scores=False)
    start, cpu = time.monotonic(), server.cpu_seconds()
    load.run()
    seconds, cpu = time.monotonic() - start, server.cpu_seconds() - cpu
    peak = server.peak_resident_bytes()
    server.end()
    if load.failures:
        sys.exit(f"serve: {name}: {load.failures[0]}")
    tokens = load.prompt_tokens + load.answer_tokens
    result = {
        "server": name,
        "clients": clients,
        "seed": seed,
        "load_average_before": round(busy, 2),
        "answers": load.counts["answered"],
        "prompt_tokens": load.prompt_tokens,
        "answer_tokens": load.answer_tokens,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "tokens_per_cpu_second": round(tokens / cpu, 1),
        "first_token_seconds": {p: round(percentile(load.first, p), 4) for p in (0.5, 0.9, 0.99)},
        "between_tokens_seconds": {p: round(percentile(load.gaps, p), 5) for p in (0.5, 0.9, 0.99)},
        "peak_resident_bytes": peak,
    }
    print(json.dumps(result), flush=True)
    return result, {prompt: "".join(pieces) for prompt, pieces in load.answers.items()}


def share_of_same(ours: Answers, theirs: Answers) -> float:
    same = sum(theirs[prompt] == text for prompt, text in ours.items())
    return round(same / len(ours), 4)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sluice", type=Path, default=Path("build/release/bin/sluice"))
    parser.add_argument("--llama", type=Path, default=Path("build/peers/llama-server"))
    parser.add_argument("--gguf", type=Path, default=Path("build/peers/sluice-22m.gguf"))
    parser.add_argument("--text", type=Path, default=Path("data/war-and-peace.txt"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--slots", type=int, default=16, help="sequences at a time")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1, help="of each client")
    parser.add_argument("--alone", type=int, default=8, help="requests of the client that is alone")
    parser.add_argument("--shortest", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/serve_peers_cpu.json"))
    args = parser.parse_args()
    for file in (args.sluice, args.llama, args.gguf):
        if not file.exists():
            parser.error(f"no {file}; bench/peers/setup.sh --server and scripts/build.sh make it")
    # What the load can do to a server and this comparison does not.
    return argparse.Namespace(
        **vars(args), seconds=float("inf"), prefix=0, cancel=0.0, slow=0.0, gone=0.0
    )


def main() -> None:
    os.chdir(ROOT)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    args = parse_arguments()
    book = book_of(args)
    runs, same = [], []
    for number in range(args.rounds):
        for clients in (args.clients, 1):
            texts: list[Answers] = []
            for name in NAMES:
                result, answers = run(name, args, book, clients, number + 1)
                runs.append(result)
                texts.append(answers)
            same.append(share_of_same(*texts))
    about = subprocess.run([str(args.llama), "--version"], capture_output=True, text=True).stderr
    result = {
        "what": f"{args.clients} clients at once, and one alone, of servers with {args.slots}"
        f" slots; prompts of {args.shortest} to {args.longest} tokens, answers of {args.tokens}",
        "model": str(MODEL),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["bench/peers/serve.py", *sys.argv[1:]]),
        "servers": {name: shlex.join(command_of(name, args)) for name in NAMES},
        "machine": machine(args.threads),
        "versions": {
            "sluice": output_of(str(args.sluice), "--version").split()[-1],
            "sluice_commit": output_of("git", "describe", "--always", "--dirty"),
            "llama-server": next(line for line in about.splitlines() if "version" in line),
        },
        "same_answers": same,
        "runs": runs,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
