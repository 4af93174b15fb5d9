"""Shared by the peers' workers: reads the job from a file and times a run.

Each worker is a separate program, so that one peer's thread pool never disturbs another's. It loads
the model, proves on a golden continuation that it computes the same model, warms up, measures one
prefill and one decode, and prints one line of JSON.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol, Sequence


class Runner(Protocol):
    """One loaded model."""

    def reset(self) -> None:
        """Empties the KV cache."""

    def feed(self, ids: Sequence[int]) -> int:
        """Appends tokens and returns the most likely next one."""


def continue_greedily(runner: Runner, ids: Sequence[int], count: int) -> list[int]:
    """Returns `count` tokens after `ids`."""
    runner.reset()
    tokens = [runner.feed(ids)]
    while len(tokens) < count:
        tokens.append(runner.feed(tokens[-1:]))
    return tokens


def read_job(path: Path) -> dict[str, Any]:
    """Reads the job: the prompt's ids, decode_tokens and, of weights that are not rounded, a golden
    prompt with its continuation."""
    return json.loads(path.read_text(encoding="utf-8"))


def check_golden(runner: Runner, job: dict[str, Any]) -> None:
    """Exits unless the model continues the golden prompt, if there is one, as the reference did."""
    if "golden" not in job:
        return
    golden = job["golden"]
    got = continue_greedily(runner, golden["ids"], len(golden["greedy"]))
    if got != golden["greedy"]:
        sys.exit(f"this is not the same model: continued {got}, expected {golden['greedy']}")


def measure(runner: Runner, ids: Sequence[int], decode_tokens: int) -> dict[str, Any]:
    """Times the prefill of `ids` to the last logits, then `decode_tokens` steps."""
    runner.reset()
    start = time.perf_counter()
    tokens = [runner.feed(ids)]
    prefilled = time.perf_counter()
    for _ in range(decode_tokens):
        tokens.append(runner.feed(tokens[-1:]))
    end = time.perf_counter()
    return {
        "prefill_seconds": prefilled - start,
        "prefill_tokens": len(ids),
        "decode_seconds": end - prefilled,
        "decode_tokens": decode_tokens,
        "tokens": tokens,
    }


def report(runner: Runner, job: dict[str, Any]) -> None:
    """Warms up, measures and prints the result."""
    continue_greedily(runner, job["ids"][:1024], 4)
    print(json.dumps(measure(runner, job["ids"], job["decode_tokens"])))
