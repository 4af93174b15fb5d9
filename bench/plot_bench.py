#!/usr/bin/env python3
"""Plots what `sluice bench --json` wrote: step time and bytes moved against the context.

    bench/plot_bench.py bench.json [MORE.json ...] [--output PLOT.png]

One curve for each policy, cap and number of sequences. Steps over a modelled bus are dashed. With
`--transfer` two more panels have the bytes and the time of the rows that were missed, by the way of
bringing them. Writes a PNG and an SVG beside each file, or with --output one plot of all files.
Needs matplotlib (Debian: python3-matplotlib).
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


def by_way(found: dict[str, list[Cell]]) -> dict[str, list[tuple[int, Cell]]]:
    """Contexts and transfers of each curve by the way in which missed rows were brought."""
    ways: dict[str, list[tuple[int, Cell]]] = {}
    for label, cells in found.items():
        for cell in cells:
            for transfer in cell.get("transfers", []):
                ways.setdefault(f"{label}, {transfer['way']}", []).append((cell["context"], transfer))
    return ways


def draw_ways(size: Any, time: Any, ways: dict[str, list[tuple[int, Cell]]]) -> None:
    for number, (label, points) in enumerate(ways.items()):
        style = "os^vD*Pp<>"[number % 10] + "-"
        contexts = [context for context, _ in points]
        size.plot(contexts, [t["bytes"] for _, t in points], style, label=label)
        time.plot(contexts, [t["ms"]["p50"] for _, t in points], style, label=label)
    size.set_ylabel("bytes of missed rows per step")
    time.set_ylabel("ms to bring missed rows, median")
    size.set_yscale("symlog", linthresh=1024)
    time.set_yscale("log")


def read(path: Path) -> Cell:
    try:
        report: Cell = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}")
    if report.get("schema") != "sluice-bench-1" or not curves(report.get("results", [])):
        sys.exit(f"{path}: has no finished cells of sluice bench")
    return report


def machine_of(reports: list[Cell]) -> str:
    names = [report["run"]["machine"] for report in reports]
    return ", ".join(dict.fromkeys(name.get("gpu", name["processor"]) for name in names))


def legend(axes: Any, handles: list[Any], labels: list[str]) -> None:
    axes.legend(handles, labels, loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)


def plot(reports: list[Cell], output: Path) -> None:
    found = curves([cell for report in reports for cell in report["results"]])
    ways = by_way(found)
    rows = 2 if ways else 1
    figure, panels = plt.subplots(rows, 2, figsize=(15, 5 * rows), squeeze=False)
    time, moved = panels[0]
    for number, (label, cells) in enumerate(found.items()):
        draw(time, cells, label, "step_ms", number)
        draw_modelled(time, cells, number)
        counted = [cell for cell in cells if cell.get("crossed_bytes") is not None]
        if counted:
            draw(moved, counted, label, "crossed_bytes", number)
    time.set_ylabel("ms per decode step, median")
    moved.set_ylabel("bytes moved between tiers per step")
    moved.set_yscale("symlog", linthresh=1024)
    time.set_yscale("log")
    if ways:
        draw_ways(*panels[1], ways)
        legend(panels[1][1], *panels[1][1].get_legend_handles_labels())
    for axes in panels.flat:
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of context")
        axes.grid(alpha=0.3)
    time.set_title(machine_of(reports))
    legend(moved, *time.get_legend_handles_labels())
    figure.tight_layout()
    for suffix in (".png", ".svg"):
        figure.savefig(output.with_suffix(suffix), dpi=110)
        print(output.with_suffix(suffix))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, help="one plot of all files, as PNG and SVG")
    args = parser.parse_args()
    reports = [read(path) for path in args.files]
    if args.output:
        return plot(reports, args.output)
    for path, report in zip(args.files, reports):
        plot([report], path)


if __name__ == "__main__":
    main()
