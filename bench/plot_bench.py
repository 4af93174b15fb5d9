#!/usr/bin/env python3
"""Plots what `sluice bench --json` wrote: step time and bytes moved against the context.

    bench/plot_bench.py bench.json

One curve for each policy, cap and number of sequences. Steps over a modelled bus are dashed.
Writes a PNG and an SVG beside each file. Needs matplotlib (Debian: python3-matplotlib).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    sys.exit("plot_bench: needs matplotlib; install Debian's python3-matplotlib")

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend comes first)

Cell = dict[str, Any]


def curves(cells: list[Cell]) -> dict[str, list[Cell]]:
    """Finished cells by what distinguishes their curve, each by ascending context."""
    found: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell["context"]):
        if "error" in cell:
            continue
        cap = f"cap {cell['device_memory']}" if cell["device_memory"] else "no cap"
        sequences = f", {cell['sequences']} sequences" if cell["sequences"] > 1 else ""
        found.setdefault(f"{cell['policy']}, {cap}{sequences}", []).append(cell)
    return found


def draw(axes: Any, cells: list[Cell], label: str, name: str, number: int) -> None:
    contexts = [cell["context"] for cell in cells]
    style = "os^vD*Pp<>"[number % 10] + "-"
    if name == "step_ms":
        values = [cell["step_ms"]["p50"] for cell in cells]
    else:
        values = [cell[name] for cell in cells]
    axes.plot(contexts, values, style, color=f"C{number % 10}", label=label)


def draw_modelled(axes: Any, cells: list[Cell], number: int) -> None:
    buses = [model["bus"] for model in cells[0]["modelled"]]
    for place, bus in enumerate(buses):
        values = [cell["modelled"][place]["step_ms"] for cell in cells]
        contexts = [cell["context"] for cell in cells]
        style = ["--", ":", "-."][place % 3]
        label = f"modelled over {bus}" if number == 0 else None
        axes.plot(contexts, values, style, color=f"C{number % 10}", alpha=0.6, label=label)


def plot(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    found = curves(report.get("results", []))
    if report.get("schema") != "sluice-bench-1" or not found:
        sys.exit(f"{path}: has no finished cells of sluice bench")
    figure, (time, moved) = plt.subplots(1, 2, figsize=(15, 5))
    for number, (label, cells) in enumerate(found.items()):
        draw(time, cells, label, "step_ms", number)
        draw_modelled(time, cells, number)
        draw(moved, cells, label, "crossed_bytes", number)
    time.set_ylabel("ms per decode step, median")
    moved.set_ylabel("bytes moved between tiers per step")
    moved.set_yscale("symlog", linthresh=1024)
    for axes in (time, moved):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of context")
        axes.grid(alpha=0.3)
    time.set_yscale("log")
    time.set_title(report["run"]["machine"].get("gpu", report["run"]["machine"]["processor"]))
    handles, labels = time.get_legend_handles_labels()
    moved.legend(handles, labels, loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)
    figure.tight_layout()
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=110)
        print(path.with_suffix(suffix))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    for path in parser.parse_args().files:
        plot(path)


if __name__ == "__main__":
    main()
