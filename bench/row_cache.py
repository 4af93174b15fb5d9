#!/usr/bin/env python3
"""How often a cache of rows on the device would hold the rows that a policy selects.

    bench/row_cache.py build/release/bin/sluice models/sluice-22m data/war-and-peace.txt \\
        --context 32768 --policy sluice --policy sparq --json OUT.json

Lets the model continue the text by sampling, takes from `generate --positions` what every layer and
KV head selected in each step (the newest page, which is always on the device, is not among it), and
replays that with caches of several sizes and ways of forgetting:

  last     what the step before selected, and nothing else
  lru      the row that was not selected for longest is forgotten first
  clock    a hand goes round and forgets the first row that was not selected since it came by
  decay    the row with the smallest count is forgotten first; counts fade by 0.97 a step
  best     the row that will not be selected for longest: no cache can do better

A row is fetched when it is first selected, and a step's rows are in the cache together, so nothing
holds fewer than a step selects. Sizes are multiples of the mean number of rows that a step selects
in the layer and KV head. Needs numpy, and matplotlib for --plot.
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

import numpy as np

FADE = 0.97
SIZES = (1, 2, 4, 8)
NEVER = np.iinfo(np.int64).max
Steps = list[np.ndarray]  # of one layer and KV head: the positions of every step


class Scored:
    """A cache that evicts the rows with the smallest score; subclasses define the score."""

    def __init__(self, steps: Steps, size: int):
        self.steps = steps
        self.size = size
        self.ids = np.empty(0, np.int64)
        self.scores = np.empty(0, np.float64)

    def refresh(self, step: int, hits: np.ndarray) -> None:
        """Updates the scores of the rows at these places, which the step selects."""
        raise NotImplementedError

    def fresh(self, step: int, ids: np.ndarray) -> np.ndarray:
        """The scores of newly cached rows."""
        raise NotImplementedError

    def access(self, step: int) -> int:
        wanted = self.steps[step]
        is_hit = np.isin(self.ids, wanted, assume_unique=True)
        self.refresh(step, np.flatnonzero(is_hit))
        missing = np.setdiff1d(wanted, self.ids[is_hit], assume_unique=True)
        room = max(self.size - len(wanted), 0)
        others = np.flatnonzero(~is_hit)
        if len(others) > room:
            order = np.argsort(self.scores[others], kind="stable")
            others = others[order[len(others) - room :]]
        kept = np.concatenate([np.flatnonzero(is_hit), others])
        self.scores = np.concatenate([self.scores[kept], self.fresh(step, missing)])
        self.ids = np.concatenate([self.ids[kept], missing])
        return int(is_hit.sum())


class Lru(Scored):
    def refresh(self, step: int, hits: np.ndarray) -> None:
        self.scores[hits] = step

    def fresh(self, step: int, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), float(step))


class Last(Lru):
    def __init__(self, steps: Steps, size: int):
        super().__init__(steps, 0)


class Decay(Scored):
    """Increments grow with every step, so that old counts fade without an update."""

    def refresh(self, step: int, hits: np.ndarray) -> None:
        self.scores[hits] += FADE**-step

    def fresh(self, step: int, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), FADE**-step)


class Best(Scored):
    def __init__(self, steps: Steps, size: int):
        super().__init__(steps, size)
        self.next: list[np.ndarray] = [np.empty(0)] * len(steps)
        seen: dict[int, int] = {}
        for step in range(len(steps) - 1, -1, -1):
            self.next[step] = np.array([-float(seen.get(int(i), NEVER)) for i in steps[step]])
            seen.update((int(i), step) for i in steps[step])

    def score(self, step: int, ids: np.ndarray) -> np.ndarray:
        order = np.argsort(self.steps[step])
        return self.next[step][order[np.searchsorted(self.steps[step], ids, sorter=order)]]

    def refresh(self, step: int, hits: np.ndarray) -> None:
        self.scores[hits] = self.score(step, self.ids[hits])

    def fresh(self, step: int, ids: np.ndarray) -> np.ndarray:
        return self.score(step, ids) if len(ids) else np.empty(0)


class Clock:
    def __init__(self, steps: Steps, size: int):
        self.steps = steps
        self.size = size
        self.slots: list[int] = []
        self.place: dict[int, int] = {}
        self.used: list[bool] = []
        self.hand = 0

    def access(self, step: int) -> int:
        wanted = [int(i) for i in self.steps[step]]
        now = set(wanted)
        hits = 0
        for row in wanted:
            if row in self.place:
                self.used[self.place[row]] = True
                hits += 1
        size = max(self.size, len(now))
        while len(self.slots) > size:
            self.shrink(now)
        for row in wanted:
            if row not in self.place:
                self.put(row, size, now)
        return hits

    def find_victim(self, now: set[int]) -> None:
        while self.used[self.hand] or self.slots[self.hand] in now:
            self.used[self.hand] = False
            self.hand = (self.hand + 1) % len(self.slots)

    def shrink(self, now: set[int]) -> None:
        """Evicts a row and removes a slot that a larger step had added."""
        self.find_victim(now)
        del self.place[self.slots[self.hand]]
        self.slots[self.hand] = self.slots[-1]
        self.used[self.hand] = self.used[-1]
        self.place[self.slots[-1]] = self.hand
        if self.hand == len(self.slots) - 1:
            del self.place[self.slots[-1]]
            self.hand = 0
        self.slots.pop()
        self.used.pop()

    def put(self, row: int, size: int, now: set[int]) -> None:
        if len(self.slots) < size:
            self.place[row] = len(self.slots)
            self.slots.append(row)
            self.used.append(True)
            return
        self.find_victim(now)
        del self.place[self.slots[self.hand]]
        self.slots[self.hand] = row
        self.place[row] = self.hand
        self.used[self.hand] = True
        self.hand = (self.hand + 1) % len(self.slots)


CACHES: dict[str, Callable[[Steps, int], Any]] = {
    "last": Last, "lru": Lru, "clock": Clock, "decay": Decay, "best": Best,
}  # fmt: skip


def selections(args: argparse.Namespace, policy: str) -> tuple[list[list[Steps]], int]:
    """Selections of every layer and KV head, [layers][heads][steps], and the prompt's tokens."""
    # A little over four bytes a token; the text is cut where the prompt has the requested tokens.
    text = Path(args.text).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        report = Path(folder) / "report.json"
        prompt.write_text(text[: int(args.context * args.characters)], encoding="utf-8")
        subprocess.run(
            [args.sluice, "generate", "-m", args.model, "-f", str(prompt), "-n", str(args.steps + 1),
             "--policy", policy, "--ignore-eos", "--temperature", "1", "--seed", "1", "-q",
             "--json", str(report), "--positions"],
            check=True, stdout=subprocess.DEVNULL)  # fmt: skip
        made = json.loads(report.read_text(encoding="utf-8"))
    layers: dict[int, list[Steps]] = {}
    for step in made["steps"]:
        for layer in step["layers"]:
            heads = layers.setdefault(layer["layer"], [[] for _ in layer["positions"]])
            for head, positions in zip(heads, layer["positions"]):
                head.append(np.array(positions, np.int64))
    return [layers[number] for number in sorted(layers)], made["timings"]["prefill_tokens"]


def hit_rate(cache: Callable[[Steps, int], Any], steps: Steps, size: int) -> tuple[int, int]:
    """Hits and selected rows of all steps except the first, which starts with an empty cache."""
    made = cache(steps, size)
    hits = [made.access(step) for step in range(len(steps))]
    return sum(hits[1:]), sum(len(step) for step in steps[1:])


def replay(layers: list[list[Steps]]) -> dict[str, Any]:
    by_layer: dict[str, dict[str, list[float]]] = {}
    total: dict[str, dict[str, float]] = {}
    for name, cache in CACHES.items():
        for size in SIZES if name != "last" else (1,):
            rates = []
            sums = np.zeros(2)
            for heads in layers:
                counts = np.zeros(2)
                for steps in heads:
                    mean = np.mean([len(step) for step in steps])
                    counts += hit_rate(cache, steps, round(size * float(mean)))
                rates.append(round(float(counts[0] / max(counts[1], 1)), 4))
                sums += counts
            by_layer.setdefault(name, {})[str(size)] = rates
            total.setdefault(name, {})[str(size)] = round(float(sums[0] / max(sums[1], 1)), 4)
    rows = [len(step) for heads in layers for steps in heads for step in steps]
    return {"rows": round(float(np.mean(rows)), 1), "hit_rate": total, "by_layer": by_layer}


def table(results: dict[str, Any], tokens: int) -> str:
    lines = [f"hit rate in %, {tokens} tokens of context; sizes in rows that a step selects", ""]
    names = [(n, s) for n in CACHES for s in (SIZES if n != "last" else (1,))]
    lines.append(f"{'policy':14}{'rows':>6}" + "".join(f"{f'{n} {s}':>9}" for n, s in names))
    for policy, result in results.items():
        rates = [100 * result["hit_rate"][n][str(s)] for n, s in names]
        lines.append(f"{policy[:13]:14}{result['rows']:6.0f}" + "".join(f"{r:9.1f}" for r in rates))
    return "\n".join(lines)


def plot(results: dict[str, Any], tokens: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4 * len(results), 3.6), sharey=True)
    for axis, (policy, result) in zip(np.atleast_1d(axes), results.items()):
        for name in CACHES:
            rates = result["hit_rate"][name]
            axis.plot([int(s) for s in rates], [100 * r for r in rates.values()], "o-", label=name)
        axis.set(title=policy, xscale="log", xticks=SIZES, xticklabels=SIZES, ylim=(0, 100),
                 xlabel="rows in the cache / selected")  # fmt: skip
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel(f"hits in % at {tokens} tokens")
    np.atleast_1d(axes)[-1].legend()
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sluice")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--context", type=int, default=32768, help="tokens of the prompt, about")
    parser.add_argument("--characters", type=float, default=3.2, help="of the text, per token")
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--policy", action="append", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="writes an SVG and a PNG of this name")
    args = parser.parse_args()
    results = {}
    tokens = 0
    for policy in args.policy:
        layers, tokens = selections(args, policy)
        results[policy] = replay(layers)
        print(table({policy: results[policy]}, tokens), flush=True)
    if args.json:
        report = {
            "machine": platform.processor() or platform.machine(),
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["bench/row_cache.py", *sys.argv[1:]]),
            "context": tokens, "steps": args.steps, "policies": results,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(results, tokens, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
