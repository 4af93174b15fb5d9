"""Peers' results as cells of `sluice bench --json`, so that bench/plot_bench.py draws both.

A peer fills the members that it measures; others that plots and tables look for are null.
"""

import datetime
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any, Sequence

SCHEMA = "sluice-bench-1"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of `values` does not exceed, nearest rank, as sluice bench has it."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


def cell(policy: str, context: int, step_seconds: Sequence[float], *, sequences: int = 1,
         device_memory: str | None = None, prompt_seconds: float | None = None,
         crossed_bytes: float | None = None) -> dict[str, Any]:  # fmt: skip
    """A cell of `policy`, the peer and its way, behind `context` tokens of each sequence.

    `step_seconds` are the measured steps; `crossed_bytes` moved between tiers per step.
    """
    mean = sum(step_seconds) / len(step_seconds)
    return {
        "policy": policy,
        "line": policy,
        "context": context,
        "device_memory": device_memory,
        "sequences": sequences,
        "steps": len(step_seconds),
        "step_ms": {
            "mean": 1e3 * mean,
            "p50": 1e3 * percentile(step_seconds, 0.5),
            "p99": 1e3 * percentile(step_seconds, 0.99),
        },
        "tokens_per_second": sequences / mean,
        "prompt_seconds": prompt_seconds,
        "crossed_bytes": crossed_bytes,
        "modelled": [],
    }


def processor() -> str:
    """The processor's name as /proc/cpuinfo has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def run(version: str, device: str, gpu: str | None, start: str) -> dict[str, Any]:
    """The circumstances of a report; `version` is that of the peer, `start` a utc_now()."""
    machine: dict[str, Any] = {"processor": processor(), "cores": len(os.sched_getaffinity(0))}
    if gpu is not None:
        machine["gpu"] = gpu
    return {"version": version, "commit": None, "command": sys.argv, "device": device,
            "machine": machine, "start": start, "end": utc_now()}  # fmt: skip
