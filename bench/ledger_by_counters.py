#!/usr/bin/env python3
"""Holds the ledger to the GPU's own counters: bytes that decoding read from host memory and wrote.

  bench/ledger_by_counters.py --sluice build/release/bin/sluice --model models/sluice-22m \\
      --prompt-file BOOK --device-memory 150MiB --policy dense --policy sluice [--json FILE]

Runs `sluice generate` under Nsight Compute (ncu), which counts the 32-byte sectors that kernels
read from and wrote to host memory, and compares them with the ledger's rows: misses, and rows
written back. Exits with 1 if they differ. Page tables and reports, a few bytes per page and KV
head, are not in the ledger (docs/comparing.md); they lie on the device or are no rows' sectors of the kernels
that are looked at.
"""

import argparse
import csv
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SECTOR = 32
READ = "lts__t_sectors_srcunit_tex_aperture_sysmem_op_read.sum"
WRITE = "lts__t_sectors_srcunit_tex_aperture_sysmem_op_write.sum"
# Kernels that touch rows while decoding.
ATTEND, APPEND = "decode_kernel", "append_batch_kernel"


def run(args: argparse.Namespace, policy: str, folder: Path) -> tuple[dict, Counter]:
    """Generates under ncu; returns the ledger's account of decoding and bytes by (kernel, metric)."""
    report, counters = folder / "report.json", folder / "counters.csv"
    command = ["ncu", "--graph-profiling", "node", "-k", f"regex:{ATTEND}|{APPEND}"]
    command += ["--metrics", f"{READ},{WRITE}", "--csv", "--log-file", str(counters)]
    command += [args.sluice, "generate", "-m", args.model, "--device", "cuda", "-q", "--ignore-eos"]
    command += ["-f", args.prompt_file, "-n", str(args.tokens), "--policy", policy]
    command += ["--device-memory", args.device_memory, "--json", str(report)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [line for line in counters.read_text().splitlines() if not line.startswith("==")]
    moved: Counter = Counter()
    for row in csv.DictReader(lines):
        kernel = ATTEND if ATTEND in row["Kernel Name"] else APPEND
        moved[kernel, row["Metric Name"]] += SECTOR * int(row["Metric Value"].replace(",", ""))
    return json.loads(report.read_text())["ledger"]["decode"], moved


def ledger_bytes(account: dict, cause: str) -> int:
    """Bytes of one cause, over all layers and tiers."""
    return sum(entry["bytes"] for entry in account["totals"] if entry["cause"] == cause)


def machine() -> str:
    """The name of the measured GPU, the first of the machine."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return names.splitlines()[0].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name in ("--sluice", "--model", "--prompt-file", "--device-memory"):
        parser.add_argument(name, required=True)
    parser.add_argument("--policy", action="append", required=True)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--json", help="write the comparison to this file")
    args = parser.parse_args()
    results = []
    for policy in args.policy:
        with tempfile.TemporaryDirectory() as folder:
            account, moved = run(args, policy, Path(folder))
        entry = {
            "policy": policy,
            "steps": account["steps"],
            "miss_ledger": ledger_bytes(account, "miss"),
            "miss_counted": moved[ATTEND, READ],
            "write_back_ledger": ledger_bytes(account, "write_back"),
            "write_back_counted": moved[APPEND, WRITE],
        }
        print(" ".join(f"{key}={value}" for key, value in entry.items()))
        results.append(entry)
    if args.json:
        context = {
            "command": shlex.join(["bench/ledger_by_counters.py", *sys.argv[1:]]),
            "machine": machine(),
            "date": datetime.date.today().isoformat(),
        }
        Path(args.json).write_text(json.dumps({"context": context, "runs": results}, indent=2) + "\n")
    agree = all(
        r["miss_ledger"] == r["miss_counted"] and r["write_back_ledger"] == r["write_back_counted"]
        for r in results
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
