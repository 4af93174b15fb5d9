#!/usr/bin/env python3
"""Plots what `sluice eval --json` wrote: accuracy against bytes transferred per decoded token.

    bench/plot_eval.py bench/results/eval_32k_cpu.json
    bench/plot_eval.py --curves bench/results/curves_32k_h200.json

With --curves: KL divergence from dense attention of task agreement, against the bytes of the rows
that were selected and against those of the index that is kept on the device. Policies of one preset
are one curve. Writes a PNG and an SVG beside each file. Needs matplotlib (Debian:
python3-matplotlib).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple

try:
    import matplotlib
except ImportError:
    sys.exit("plot_eval: needs matplotlib; install Debian's python3-matplotlib")

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend comes first)


class Axis(NamedTuple):
    """The vertical axis of a task's plot."""

    label: str
    value: Callable[[dict[str, Any]], float]
    error: Callable[[dict[str, Any]], float]


RECALL = Axis("recall", lambda p: p["recall"]["mean"], lambda p: p["recall"]["standard_error"])
SCORE = Axis("score", lambda p: p["score"]["mean"], lambda p: p["score"]["standard_error"])
KL = Axis("KL divergence from dense, nats per token", lambda p: p["kl"], lambda p: 0.0)
AXES = {
    "perplexity": Axis(
        "NLL above dense, nats per token",
        lambda p: p["nll_change"]["mean"],
        lambda p: p["nll_change"]["standard_error"],
    ),
    "repetition": Axis(
        "characters before divergence",
        lambda p: p["characters"]["mean"],
        lambda p: p["characters"]["standard_error"],
    ),
}


def axis_of(result: dict[str, Any]) -> Axis:
    dense = result["policies"][0]
    otherwise = RECALL if "recall" in dense else SCORE if "score" in dense else KL
    return AXES.get(result["task"], otherwise)


def transferred(policy: dict[str, Any]) -> float:
    """Bytes per token that crossed between tiers, by the ledger, once a row cache is filled."""
    warm = policy.get("warm", {}).get("transferred_bytes_per_token")
    if warm is not None:
        return warm
    # Older reports lack this part, and it is empty for short tasks.
    if "transferred_bytes_per_token" in policy:
        return policy["transferred_bytes_per_token"]
    # Older reports have no ledger, so this adds the reads: rows outside the newest page and key
    # index.
    return policy["row_bytes_per_token"] + policy["index_bytes_per_token"]


def label_of(result: dict[str, Any]) -> str:
    if "transferred_bytes_per_token" in result["policies"][0]:
        return "bytes transferred between tiers per decoded token"
    return "bytes read per decoded token: rows and key index"


def draw(axes: Any, result: dict[str, Any]) -> None:
    axis = axis_of(result)
    for number, policy in enumerate(result["policies"]):
        marker = "os^vD*Pp<>hX8d"[number % 14]
        axes.errorbar(
            transferred(policy),
            axis.value(policy),
            yerr=axis.error(policy),
            fmt=marker,
            capsize=3,
            label=policy["name"],
        )
    axes.set_xscale("log")
    axes.set_xlabel(label_of(result))
    axes.set_ylabel(axis.label)
    source = f"{Path(result['data']).name}, up to " if "data" in result else ""
    axes.set_title(f"{result['task']}, {source}{result['context']} tokens")
    axes.grid(alpha=0.3)


def fetched(policy: dict[str, Any]) -> float:
    """Bytes per token that cross if only the newest page of rows is on the device."""
    new_rows = next(t for t in policy["traffic"] if t["cause"] == "append")
    return policy["selected_rows"] * new_rows["bytes_per_token"]


def families(policies: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Policies except dense, grouped by preset, the common part of their names."""
    found: dict[str, list[dict[str, Any]]] = {}
    for policy in policies[1:]:
        found.setdefault(policy["name"].split()[0], []).append(policy)
    return found


def draw_curves(
    axes: Any, result: dict[str, Any], label: str, bytes_of: Callable[[dict[str, Any]], float]
) -> None:
    for number, (name, members) in enumerate(families(result["policies"]).items()):
        points = sorted((bytes_of(policy), policy["kl"]) for policy in members)
        color = f"C{number}"
        if points[-1][0] == 0 and axes.get_xscale() == "log":
            axes.axhline(points[0][1], color=color, linestyle=":", label=f"{name}: none")
            continue
        style = "os^vD*Pp<>"[number % 10] + ("-" if len({x for x, _ in points}) > 1 else "")
        axes.plot(*zip(*points), style, color=color, label=name, alpha=0.8)
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel(KL.label)
    axes.set_title(f"{result['context']} tokens")
    axes.grid(alpha=0.3)


def plot_curves(path: Path) -> None:
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    result = next((r for r in results if r["task"] == "agreement"), None)
    if result is None:
        sys.exit(f"{path}: has no task agreement, which --curves shows")
    dense = result["policies"][0]
    new_rows = next(t for t in dense["traffic"] if t["cause"] == "append")["rows_per_token"]
    pairs = new_rows * result["context"]  # of a token and a KV head, in all layers
    figure, (bus, device) = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    bus.set_xscale("log")
    draw_curves(bus, result, "bytes of selected rows per decoded token", fetched)
    bus.axvline(fetched(dense), color="gray", linestyle="--", label="dense: all rows")
    draw_curves(
        device,
        result,
        "bytes of index per token and KV head on the device",
        lambda policy: policy["kept_index_bytes"] / pairs,
    )
    bus.legend(fontsize=8)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=110)
        print(path.with_suffix(suffix))


def plot(path: Path) -> None:
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    if not any(transferred(policy) for result in results for policy in result["policies"]):
        sys.exit(f"{path}: nothing crossed between tiers; give sluice eval a --device-memory")
    figure, all_axes = plt.subplots(1, len(results), figsize=(7 * len(results), 5), squeeze=False)
    for axes, result in zip(all_axes[0], results):
        draw(axes, result)
    all_axes[0][-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--curves", action="store_true", help="loss against two kinds of bytes")
    given = parser.parse_args()
    for path in given.files:
        (plot_curves if given.curves else plot)(path)


if __name__ == "__main__":
    main()
