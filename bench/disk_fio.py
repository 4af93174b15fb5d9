#!/usr/bin/env python3
"""Random reads of the page store beside fio's, from the same file, in interleaved rounds.

    bench/disk_fio.py build/release/bin/disk_bench --directory /var/tmp --json OUT.json

Every round runs disk_bench, which reads with the store and then with fio for each size and depth.
A round begins once few other processes want a CPU (--quiet, for at most --wait seconds); how many
did, before and after, is in the JSON. Cells have the median of the rounds, and the median of the
rounds' ratios of the store to fio. Needs fio.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ASKED_SHARE = 0.9  # of fio's reads per second
ASKED_CPU_US = 3.0  # per read


def wanting_a_cpu() -> int:
    """How many processes and threads are running or ready to, but for this one."""
    running = Path("/proc/loadavg").read_text(encoding="utf-8").split()[3].split("/")[0]
    return int(running) - 1


def load() -> float:
    """The mean number of others that want a CPU, over two seconds."""
    samples = []
    for _ in range(20):
        samples.append(wanting_a_cpu())
        time.sleep(0.1)
    return statistics.fmean(samples)


def wait_for_quiet(most: float, seconds: float) -> float:
    """Waits until few others want a CPU, and returns how many do."""
    end = time.monotonic() + seconds
    while (others := load()) > most and time.monotonic() < end:
        time.sleep(3)
    return others


def run_round(arguments: argparse.Namespace, report: Path) -> dict[str, Any]:
    """One run of disk_bench: its cells by name, and the load around it."""
    before = wait_for_quiet(arguments.quiet, arguments.wait)
    command = [
        arguments.program,
        f"--directory={arguments.directory}",
        f"--size={arguments.size}",
        f"--seconds={arguments.seconds}",
        "--depth", *map(str, arguments.depth),
        "--bytes", *map(str, arguments.bytes),
        f"--benchmark_out={report}",
        "--benchmark_out_format=json",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    document = json.loads(report.read_text(encoding="utf-8"))
    cells = {}
    for entry in document["benchmarks"]:
        who, size, depth = entry["name"].split("/")[:3]
        if entry.get("error_occurred"):
            sys.exit(f"disk_fio: {entry['name']}: {entry['error_message']}")
        cell = cells.setdefault(f"{size}/{depth}", {})
        cell[who] = {"reads_per_second": entry["reads/s"], "cpu_us": entry["cpu_us"]}
    return {
        "others_before": before,
        "others_after": load(),
        "directory": document["context"]["directory"],
        "cells": cells,
    }


def cell_of(name: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of a cell."""
    cell: dict[str, Any] = {"bytes": int(name.split("/")[0].split(":")[1])}
    cell["depth"] = int(name.split("/")[1].split(":")[1])
    for who in ("store", "fio"):
        cell[who] = {
            key: statistics.median(r["cells"][name][who][key] for r in rounds)
            for key in ("reads_per_second", "cpu_us")
        }
    cell["share"] = statistics.median(
        r["cells"][name]["store"]["reads_per_second"] / r["cells"][name]["fio"]["reads_per_second"]
        for r in rounds
    )
    return cell


def cpu_name() -> str:
    """The CPU's name."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="disk_bench")
    parser.add_argument("--directory", default="/var/tmp", help="on a disk")
    parser.add_argument("--size", default="2GiB", help="of the file")
    parser.add_argument("--seconds", type=float, default=2, help="per cell and side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--bytes", type=int, nargs="+", default=[4096, 65536])
    parser.add_argument("--quiet", type=float, default=0.3, help="others that may want a CPU")
    parser.add_argument("--wait", type=float, default=600, help="seconds, for that")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Runs all rounds and writes the report."""
    arguments = parse()
    fio = subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True)
    rounds = []
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(arguments.rounds):
            rounds.append(run_round(arguments, Path(temporary) / "report.json"))
    report = {
        "command": " ".join(["bench/disk_fio.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores of an {cpu_name()}, Linux {platform.release()}",
        "disk": rounds[0]["directory"],
        "fio": fio.stdout.strip(),
        "cells": [cell_of(name, rounds) for name in rounds[0]["cells"]],
        "rounds": rounds,
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for cell in report["cells"]:
        short = cell["share"] < ASKED_SHARE or cell["store"]["cpu_us"] > ASKED_CPU_US
        print(
            f"{cell['bytes']:6} B, depth {cell['depth']:3}: "
            f"{cell['store']['reads_per_second']:8.0f} reads/s, {100 * cell['share']:4.0f} % of "
            f"fio's, {cell['store']['cpu_us']:5.2f} us of CPU (fio {cell['fio']['cpu_us']:.2f})"
            f"{'  short' if short else ''}"
        )


if __name__ == "__main__":
    main()
