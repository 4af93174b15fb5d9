#!/usr/bin/env python3
"""Asks for a number hidden in War and Peace, by dense streaming and by selection, under one cap.

    scripts/demo.py build/release/bin/sluice [TOKENS...]

The device tier is capped at about a quarter of the KV cache: what the key index of the selecting
policy needs. Prints what each moved and how long it took. The exit status is 1 unless every answer is right
and the cap held.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "data" / "war-and-peace.txt"
MODEL = "models/sluice-22m"
ANSWER = "481926"
POLICIES = ("dense", "values")
MIB = 2**20


class Run(NamedTuple):
    """One answer: what `sluice generate --json` reported."""

    policy: str
    report: dict[str, Any]

    def per_token(self, counts: Callable[[dict[str, Any]], bool]) -> float:
        """Bytes per decoded token of the ledger's entries for which `counts` is true."""
        decode = self.report["ledger"]["decode"]
        return sum(e["bytes"] for e in decode["totals"] if counts(e)) / max(1, decode["tokens"])

    @property
    def moved(self) -> float:
        return self.per_token(lambda entry: entry["from"] != entry["to"])

    @property
    def index_read(self) -> float:
        """Bytes of quantised keys and values."""
        return self.per_token(lambda entry: entry["cause"] in ("index_read", "value_read"))

    @property
    def peak(self) -> int:
        return self.report["memory"]["device_peak_bytes"]

    def is_right(self) -> bool:
        return ANSWER in self.report["text"]


def build_prompt(tokens: int) -> str:
    """About `tokens` tokens of the book: the number a quarter of the way in, the question last."""
    book = BOOK.read_text(encoding="utf-8")
    characters = int(tokens * 2.87)  # of this book, per token of this model
    start = book.index("\n", 100_000) + 1
    middle = book.index("\n", start + characters // 4) + 1
    end = book.rindex("\n", middle, start + characters) + 1
    needle = f"The secret number of the amber falcon is {ANSWER}. Remember it.\n"
    question = "Question: What is the secret number of the amber falcon?\nAnswer: "
    return book[start:middle] + needle + book[middle:end] + question


def cap_of(tokens: int) -> int:
    """MiB that fit the key index of `tokens`, the newest page and the buffers."""
    return 2 + -(-tokens * 3 // 2048)


def run(sluice: Path, policy: str, prompt: Path, cap: int, report: Path) -> Run:
    files = [os.path.relpath(file, ROOT) for file in (sluice, prompt, report)]
    command = [files[0], "generate", "--model", MODEL, "--prompt-file", files[1]]
    command += ["--policy", policy, "--device-memory", f"{cap}MiB", "--max-tokens", "16"]
    command += ["--quiet", "--json", files[2]]
    print("$", " ".join(command), flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        sys.exit(1)  # the command has said why
    return Run(policy, json.loads(report.read_text(encoding="utf-8")))


def table(runs: list[Run]) -> str:
    rows = [("policy", "answer", "moved per token", "index read", "time per token", "prefill")]
    for one in runs:
        timings = one.report["timings"]
        rows.append((
            one.policy,
            one.report["text"].split()[0] if one.report["text"].split() else "none",
            f"{one.moved / MIB:.2f} MiB",
            f"{one.index_read / MIB:.2f} MiB",
            f"{timings['seconds_per_output_token'] * 1e3:.1f} ms",
            f"{timings['prefill_seconds']:.0f} s",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )


def demo(sluice: Path, tokens: int, work: Path) -> bool:
    cap = cap_of(tokens)
    prompt = work / f"prompt-{tokens}.txt"
    prompt.write_text(build_prompt(tokens), encoding="utf-8")
    print(f"\n== a number hidden in about {tokens} tokens of War and Peace", flush=True)
    runs = [
        run(sluice, policy, prompt, cap, work / f"{policy}-{tokens}.json") for policy in POLICIES
    ]
    dense, selected = runs
    context = dense.report["timings"]["prefill_tokens"]
    whole = dense.report["plan"]["dense_bytes"]
    peak = max(one.peak for one in runs)
    print(f"\n{table(runs)}\n")
    print(
        f"The KV cache of these {context} tokens is {whole / MIB:.0f} MiB;"
        f" the device tier held at most {peak / MIB:.1f} of {cap} MiB.\n"
        f"Selection moved 1/{dense.moved / max(selected.moved, 1):.0f} of the bytes between the"
        " tiers; its index is read inside the device tier."
    )
    right = all(one.is_right() for one in runs)
    held = peak <= cap * MIB
    if not right:
        print(f"FAILED: the hidden number is {ANSWER}")
    if not held:
        print("FAILED: the cap did not hold")
    return right and held


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sluice", type=Path, help="the command")
    parser.add_argument("tokens", type=int, nargs="*", default=[32000], help="lengths to ask at")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "demo", help="folder of prompts and reports"
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    failed = [tokens for tokens in options.tokens if not demo(options.sluice, tokens, options.work)]
    if failed:
        print(f"\nDemo FAILED at {', '.join(map(str, failed))} tokens")
        return 1
    print("\nDemo PASSED: every answer right, every byte under the cap")
    return 0


if __name__ == "__main__":
    sys.exit(main())
