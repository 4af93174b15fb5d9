#!/usr/bin/env python3
"""Compares two files that Google Benchmark wrote: times before and after, and their ratio.

    bench/compare_results.py BEFORE.json AFTER.json
    bench/compare_results.py --only slower BEFORE.json AFTER.json

Benchmarks belong together if their names say the same, whatever iterations and least times they ran
with. Arguments that only one of the files knows are dropped from the names; where several have the
same name then, the one whose arguments of that kind are 1 counts (one sequence of a batch).
"""

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from typing import Any, NamedTuple

SLOWER = 1.03  # ratios beyond this are marked, and those below its inverse
NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
# Settings for how long a benchmark ran, not for what it did.
SETTINGS = {"iterations", "min_time", "min_warmup_time", "repeats"}


class Run(NamedTuple):
    """One benchmark of a file."""

    parts: list[str]  # of its name
    time: float  # in nanoseconds; NaN if it failed

    def name(self) -> str:
        return "/".join(self.parts)

    def family(self) -> str:
        return "/".join(part for part in self.parts if ":" not in part)

    def arguments(self) -> dict[str, str]:
        return dict(part.split(":", 1) for part in self.parts if ":" in part)


def parse_run(entry: dict[str, Any]) -> Run:
    """The entry of one benchmark."""
    parts = [p for p in entry["run_name"].split("/") if p.split(":")[0] not in SETTINGS]
    failed = entry.get("error_occurred", False)
    time = math.nan if failed else entry["real_time"] * NANOSECONDS[entry["time_unit"]]
    return Run(parts, time)


def read_runs(path: str) -> list[Run]:
    """All benchmarks of a file; the medians of repeated ones."""
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)["benchmarks"]
        medians = {e["run_name"] for e in entries if e.get("aggregate_name") == "median"}
        wanted = [
            e
            for e in entries
            if (e.get("aggregate_name") == "median" if e["run_name"] in medians
                else e.get("run_type") != "aggregate")
        ]
        return [parse_run(entry) for entry in wanted]
    except OSError as error:
        raise SystemExit(f"compare_results: {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise SystemExit(f"compare_results: {path}: not what Google Benchmark writes") from None


def argument_names(runs: list[Run]) -> dict[str, set[str]]:
    """The argument names of each family."""
    names: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        names[run.family()] |= run.arguments().keys()
    return names


def by_shared_name(runs: list[Run], others: list[Run]) -> dict[str, Run]:
    """Benchmarks by names without the arguments that the other file lacks."""
    own, known = argument_names(runs), argument_names(others)
    groups: dict[str, list[Run]] = defaultdict(list)
    ones: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        extra = own[run.family()] - known.get(run.family(), set())
        shared = "/".join(part for part in run.parts if part.split(":")[0] not in extra)
        groups[shared].append(run)
        if all(run.arguments().get(name, "1") == "1" for name in extra):
            ones[shared].append(run)
    chosen = {name: group if len(group) == 1 else ones[name] for name, group in groups.items()}
    return {name: group[0] for name, group in chosen.items() if len(group) == 1}


def format_time(nanoseconds: float) -> str:
    """Formats a time with four digits, in a fitting unit."""
    if math.isnan(nanoseconds):
        return "failed"
    unit = next((u for u in ("s", "ms", "us") if nanoseconds >= NANOSECONDS[u]), "ns")
    return f"{nanoseconds / NANOSECONDS[unit]:.4g} {unit}"


def mark(ratio: float) -> str:
    """The mark for a ratio of times; FAILED if it is NaN."""
    if math.isnan(ratio):
        return "FAILED"
    if ratio > SLOWER:
        return "slower"
    return "faster" if ratio < 1 / SLOWER else ""


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of columns: names to the left, numbers to the right, then the mark."""
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for name, *numbers, word in rows:
        cells = [name.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(numbers, widths[1:4])]
        lines.append("  ".join([*cells, word]).rstrip())
    return lines


def compare(before: list[Run], after: list[Run], only: str) -> str:
    """The table, the benchmarks without a counterpart, and a summary line."""
    old, new = by_shared_name(before, after), by_shared_name(after, before)
    pairs = [(old[name], new[name]) for name in old if name in new]
    rows = [("name", "before", "after", "ratio", "")]
    counts: Counter[str] = Counter()
    for a, b in pairs:
        ratio = b.time / a.time
        word = mark(ratio)
        counts[word] += 1
        if only == "all" or word in ("slower", "FAILED"):
            rows.append((b.name(), format_time(a.time), format_time(b.time), f"{ratio:.3f}", word))
    lines = table(rows) if len(rows) > 1 else []
    if only == "all":
        lines += [f"only before: {run.name()}" for run in before if run not in [a for a, _ in pairs]]
        lines += [f"only after: {run.name()}" for run in after if run not in [b for _, b in pairs]]
    lines.append(
        f"{len(pairs)} compared: {counts['slower']} slower by more than 3 %, "
        f"{counts['faster']} faster, {counts['FAILED']} failed"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", metavar="BEFORE.json")
    parser.add_argument("after", metavar="AFTER.json")
    parser.add_argument("--only", choices=["all", "slower"], default="all", help="lines to print")
    args = parser.parse_args()
    before, after = read_runs(args.before), read_runs(args.after)
    print(compare(before, after, args.only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
