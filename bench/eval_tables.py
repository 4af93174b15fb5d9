#!/usr/bin/env python3
"""Tables of docs/measurements.md that come from what `sluice eval --json` wrote.

    bench/eval_tables.py                                 prints them
    bench/eval_tables.py --write docs/measurements.md    puts them in place of those that are there
    bench/eval_tables.py --check docs/measurements.md    fails if they are not those

A table stands behind the line <!-- bench/eval_tables.py: NAME -->.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"
Policy = dict[str, Any]


def share(estimate: dict[str, float]) -> str:
    return f"{100 * estimate['mean']:.0f} ± {100 * estimate['standard_error']:.0f} %"


def recall(policy: Policy) -> str:
    """Recall with the KL, except for dense attention, which has none."""
    kl = "" if policy["policy"] == "select=dense" else f", {policy['kl']:.4f}"
    return share(policy["recall"]) + kl


def agreement(policy: Policy) -> str:
    return f"{100 * policy['top1_agreement']:.1f} %, {policy['kl']:.4f}"


def bytes_text(count: float | None) -> str:
    if count is None:
        return "-"
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.{2 if count < 10 * size else 1}f} {unit}"
    return f"{count:.0f} B"


def index_read(policy: Policy) -> str:
    return bytes_text(policy["index_bytes_per_token"] + policy["value_bytes_per_token"])


def moved(part: str) -> Callable[[Policy], str]:
    return lambda policy: bytes_text(policy[part]["transferred_bytes_per_token"])


def resident(policy: Policy) -> str:
    """Tokens whose rows stay on the device: those of dense layers, if they have their own."""
    plan = policy["plan"]

    def count(tokens: int) -> str:
        return "all" if tokens >= plan["context"] else f"{tokens:,}"

    first = count(plan["resident_tokens"])
    if not plan["dense_layers"]:
        return first
    layers = ", ".join(map(str, plan["dense_layers"]))
    return f"{first}; {count(plan['dense_resident_tokens'])} in layers {layers}"


class Column(NamedTuple):
    header: str
    file: str
    task: str
    cell: Callable[[Policy], str]


def asked(task: str) -> Column:
    return Column(f"`{task}`", "eval_tasks_8k_cpu.json", task, recall)


def planned(header: str, cell: Callable[[Policy], str]) -> Column:
    return Column(header, "eval_moved_8k_cpu.json", "agreement", cell)


def compared(header: str, task: str, cell: Callable[[Policy], str]) -> Column:
    return Column(header, "eval_baselines_8k_cpu.json", task, cell)


def halved(header: str, file: str, cell: Callable[[Policy], str] = agreement) -> Column:
    return Column(header, f"eval_components_{file}_cpu.json", "agreement", cell)


TABLES = {
    "baselines": [
        compared("needles", "needle", lambda p: share(p["recall"])),
        compared("top-1, KL", "agreement", agreement),
        compared("rows", "agreement", lambda p: f"{p['selected_rows']:,.0f}"),
        compared("rows read", "agreement", lambda p: bytes_text(p["read_bytes_per_token"])),
        compared("index read", "agreement", index_read),
    ],
    "components": [
        halved("rows", "8k", lambda p: f"{p['selected_rows']:,.0f}"),
        halved("index kept, 8K", "8k", lambda p: bytes_text(p["kept_index_bytes"])),
        halved("War and Peace, 8K: top-1, KL", "8k"),
        halved("Shakespeare", "8k_shakespeare"),
        halved("War and Peace, 32K", "32k"),
        halved("Shakespeare", "32k_shakespeare"),
    ],
    "harder": [asked(task) for task in ("needle", "multikey", "multiquery", "multiturn")],
    "moved": [
        planned("selected", lambda p: f"{p['selected_rows']:,.0f}"),
        planned("row cache", lambda p: f"{p['plan']['cache_rows']:,}"),
        planned("tokens resident", resident),
        planned("moved, cold", moved("cold")),
        planned("moved, warm", moved("warm")),
    ],
}


def policies_of(column: Column) -> dict[str, Policy]:
    results = json.loads((RESULTS / column.file).read_text(encoding="utf-8"))["results"]
    result = next(r for r in results if r["task"] == column.task)
    return {policy["name"]: policy for policy in result["policies"]}


def table(columns: list[Column]) -> str:
    policies = [policies_of(column) for column in columns]
    lines = [
        "| policy | " + " | ".join(column.header for column in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for name in policies[0]:
        cells = [column.cell(of[name]) if name in of else "" for column, of in zip(columns, policies)]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def replaced(text: str, path: Path) -> str:
    """The document with its tables regenerated."""

    def renew(match: re.Match[str]) -> str:
        if match["name"] not in TABLES:
            sys.exit(f"{path}: there is no table {match['name']}; there are {', '.join(TABLES)}")
        return match["marker"] + table(TABLES[match["name"]])

    marker = r"(?P<marker><!-- bench/eval_tables\.py: (?P<name>\w+) -->\n\n)(?:\|.*\n)*"
    return re.sub(marker, renew, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--write", type=Path, metavar="FILE", help="renew the tables of a document")
    where.add_argument("--check", type=Path, metavar="FILE", help="fail if they would differ")
    given = parser.parse_args()
    path = given.write or given.check
    if path is None:
        print("\n".join(f"{name}\n\n{table(columns)}" for name, columns in TABLES.items()), end="")
        return
    try:
        before = path.read_text(encoding="utf-8")
    except OSError as error:
        sys.exit(f"eval_tables: {error}")
    after = replaced(before, path)
    if given.write:
        path.write_text(after, encoding="utf-8")
    elif before != after:
        sys.exit(f"{path}: tables are not those of bench/results; run {sys.argv[0]} --write {path}")


if __name__ == "__main__":
    main()
