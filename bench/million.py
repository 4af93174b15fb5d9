#!/usr/bin/env python3
"""Tables of docs/million.md: what `sluice plan` says of cards and shapes, and how far its predicted
times are from measured ones.

    bench/million.py SLUICE                            prints them
    bench/million.py SLUICE --write docs/million.md    puts them in place of those that are there
    bench/million.py SLUICE --check docs/million.md    fails if they are not those
    bench/million.py SLUICE --check FILE --only compared
    bench/million.py SLUICE --plot FILE.svg            draws measured and predicted steps by context;
                                                       needs matplotlib (Debian: python3-matplotlib)

A table stands behind the line <!-- bench/million.py: NAME -->. Nothing is measured; it takes some
seconds.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

RESULTS = Path(__file__).resolve().parent / "results"
GIB = 1 << 30
CARDS = {
    "rtx4070-laptop": "8 GB: RTX 4070 laptop",
    "rtx3060-12gb": "12 GB: RTX 3060",
    "rtx4080": "16 GB: RTX 4080",
    "rtx4090": "24 GB: RTX 4090",
    "rtx5090": "32 GB: RTX 5090",
}
SHAPES = ("llama3-8b", "qwen2.5-7b-1m", "qwen3-4b", "llama3.2-3b")
CONTEXTS = ("128K", "512K", "1M")
BF16 = ("--kv-dtype", "bf16")  # of all that was measured
# Policies by what their index keeps, bytes per token and KV head at head_dim 128.
INDEXES = {
    "values": "88 B",
    "values bits=2 prune=top_k(256)": "72 B",
    "compact": "54 B",
    "tiny": "38 B",
}


class Sluice:
    def __init__(self, binary: str):
        self.binary = binary

    def plan(self, *arguments: str) -> tuple[Optional[dict[str, Any]], str]:
        """The plan, or none and why."""
        done = subprocess.run(
            [self.binary, "plan", *arguments, "--json", "-"],
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        if done.returncode == 0:
            return json.loads(done.stdout), ""
        if done.returncode != 8:
            raise RuntimeError(done.stderr)
        return None, done.stderr.strip()


def index_of(plan: dict[str, Any]) -> str:
    """The bytes of its index at head_dim 128, by the policy: codes, and scales of 4 bytes a page."""
    policy = plan["policy"]

    def of(channels: int, settings: str, bits: str) -> int:
        given = re.search(r"\bbits=(\d)", settings)
        return channels * int(given[1] if given else bits) // 8 + channels // 32

    values = re.search(r"compensate=values(\([^)]*\))?", policy)
    keys = of(128, re.sub(r"\([^)]*\)", "", policy), "4")
    if not values:
        return f"{keys} B"
    channels = 64 if "components=half" in policy else 128
    return f"{keys + of(channels, values[1] or '', '2')} B"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def gib(count: int) -> str:
    return f"{count / GIB:.0f} GiB"


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def cards(sluice: Sluice) -> list[str]:
    """Plans with rows of int8 and as much host memory as they take."""
    rows = ["| card, model | " + " | ".join(CONTEXTS) + " |", "| --- |" + " --- |" * len(CONTEXTS)]
    for machine, name in CARDS.items():
        for shape in SHAPES:
            cells = [f"{name}, `{shape}`"]
            for context in CONTEXTS:
                wish = ("--shape", shape, "--machine", machine, "--context", context,
                        "--kv-dtype", "int8")  # fmt: skip
                plan, why = sluice.plan(*wish)
                cells.append(cell(plan) if plan else shorter(why))
            rows.append(line(cells))
    return rows


def asked(weights: str) -> str:
    """What `sluice plan` is asked for."""
    return "elements" if weights == "bf16" else weights


def cell(plan: dict[str, Any]) -> str:
    weights = "bf16" if plan["weights"] in ("auto", "elements") else plan["weights"]
    predicted = plan["predicted"]
    host = plan["bytes"]["host_rows_bytes"]
    return (
        f"{weights}, {index_of(plan)}, {gib(host)}: "
        f"{1 / predicted['step_seconds']:.0f} tokens/s, {duration(predicted['prefill_seconds'])}"
    )


def shorter(why: str) -> str:
    fits = re.search(r"a --context of (\d+)", why)
    return f"no; {int(fits[1]):,} tokens fit" if fits else "no"


def longest(sluice: Sluice) -> list[str]:
    """The longest context by cap, weights and index, beside what a resident 4-bit cache reaches."""
    caps = (8, 12, 16, 24)
    rows = [
        "| model, weights, index | " + " | ".join(f"{cap} GiB" for cap in caps) + " |",
        "| --- |" + " --- |" * len(caps),
    ]
    for shape in ("llama3-8b", "qwen2.5-7b-1m", "qwen3-4b"):
        for weights in ("bf16", "int8", "int4"):
            resident = []
            for policy, index in INDEXES.items():
                cells = [f"`{shape}`, {weights}, {index}"]
                resident = []
                for cap in caps:
                    plan, _ = sluice.plan(
                        "--shape", shape, "--machine", "rtx5090", "--context", "1K",
                        "--device-memory", f"{cap}GiB", "--weights", asked(weights), "--policy", policy,
                    )  # fmt: skip
                    cells.append(f"{plan['longest_context']:,}" if plan else "-")
                    resident.append(resident_tokens(plan, cap) if plan else "-")
                rows.append(line(cells))
            rows.append(line([f"`{shape}`, {weights}, all rows in 4 bits on the device", *resident]))
    return rows


def resident_tokens(plan: dict[str, Any], cap: int) -> str:
    """Tokens of a cache that keeps every row in 4 bits with its scales, 144 bytes, and no more."""
    taken = sum(plan["bytes"][part] for part in ("weight_bytes", "activation_bytes", "backend_bytes"))
    taken -= plan["bytes"]["value_basis_bytes"]
    heads = plan["model"]["layers"] * plan["model"]["kv_heads"]
    return f"{max(0, cap * GIB - taken) // (144 * heads) // 1024 * 1024:,}"


class Measured(NamedTuple):
    name: str
    file: str
    step: Optional[float]  # ms
    prefill: Optional[float]  # s
    plan: list[str]  # arguments of `sluice plan`


def read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


def flag(command: list[str], name: str, otherwise: str = "") -> str:
    return command[command.index(name) + 1] if name in command else otherwise


def disk_runs() -> list[Any]:
    """Those without a disk: with one, host memory has held whole pages since."""
    return [run for run in read("disk_h200.json")["runs"] if "--disk" not in run["command"]]


def of_disk() -> list[Measured]:
    measured = []
    for run in disk_runs():
        command = shlex.split(run["command"])
        plan = [*BF16, "--machine", "h200", "--context", str(run["plan"]["context"]),
                "--policy", flag(command, "--policy"), "--weights", flag(command, "--weights", "elements"),
                "--device-memory", flag(command, "--device-memory")]  # fmt: skip
        where = "host memory" if run["plan"]["resident_tokens"] < run["plan"]["context"] else "device"
        # That build took steps of 4,096 tokens at most by itself.
        if "--chunk" in command:
            plan += ["--chunk", str(run["plan"]["chunk"])]
        policy = flag(command, "--policy")
        rows = "64 rows" if policy == "values" or "(64)" in policy else "16 rows"
        name = (
            f"H200, {run['plan']['context']:,} tokens, {flag(command, '--weights', 'bf16')}, "
            f"{rows}{', 4-bit keys' if rows == '16 rows' else ''}, rows: {where}"
            + (", steps of 16,384" if "--chunk" in command else "")
            + (", pages=0.9" if "bits=3" in policy else "")
        )
        timings = run["timings"]
        measured.append(
            Measured(name, "disk_h200.json", 1e3 * timings["seconds_per_output_token"],
                     timings["prefill_seconds"], plan)
        )  # fmt: skip
    return measured


def steps(file: str) -> dict[str, float]:
    return {b["name"].split("/iterations")[0]: b["real_time"] for b in read(file)["benchmarks"]}


def of_steps() -> list[Measured]:
    measured = []
    values = "select=int4 prune=top_k(16) compensate=values"
    alone = steps("decode_text_alone_h200.json")
    for policy in ("values", "sparq", "sluice select=int4 candidates=none"):
        plan = [*BF16, "--machine", "h200", "--context", "131072", "--weights", "elements",
                "--policy", values if policy == "values" else policy,
                "--device-memory", "24GiB"]  # fmt: skip
        name = f"H200, 131,072 tokens, bf16, `{policy}`" + (" with 16 rows" if policy == "values" else "")
        time = alone[f"device_memory:24GiB/decode/{policy}/tokens:131072"]
        measured.append(Measured(name, "decode_text_alone_h200.json", time, None, plan))
    for run in read("decode_text_weights_h200.json")["runs"]:
        tokens = int(run["name"].split("/")[2].removeprefix("tokens:"))
        plan = [*BF16, "--machine", "h200", "--context", str(tokens), "--weights", asked(run["weights"]),
                "--policy", "values", "--device-memory", "24GiB"]  # fmt: skip
        name = f"H200, {tokens:,} tokens, {run['weights']}, `values`"
        measured.append(Measured(name, "decode_text_weights_h200.json", run["real_time"], None, plan))
    return measured


def of_prompts(twelve: Path) -> list[Measured]:
    measured = []
    for file, machine in (("sparse_prefill_pages_512k_h100.json", "h100"),):
        for result in read(file)["results"]:
            plan = [*BF16, "--machine", machine, "--context", str(result["prompt_tokens"]), "--weights", "elements",
                    "--policy", result["policy"] if result["policy"] != "dense" else "select=dense"]  # fmt: skip
            name = f"H100, {result['prompt_tokens']:,} tokens, bf16, `{result['policy']}`"
            measured.append(Measured(name, file, None, result["median_seconds"], plan))
    dense = read("sparse_prefill_512k_h200.json")["runs"]["dense"]["timings"]
    plan = [*BF16, "--machine", "h200", "--context", str(dense["prefill_tokens"]), "--weights", "elements",
            "--policy", "dense"]  # fmt: skip
    name = f"H200, {dense['prefill_tokens']:,} tokens, bf16, `dense`"
    measured.append(
        Measured(name, "sparse_prefill_512k_h200.json", None, dense["prefill_seconds"], plan)
    )
    for result in read("prefill_chunks_h200.json")["results"]:
        if not result["model"].startswith("12 layers"):
            continue
        plan = [*BF16, "--shape", str(twelve), "--machine", "h200", "--context", str(result["prompt_tokens"]),
                "--weights", "elements", "--policy", result["policy"], "--device-memory", "24GiB",
                "--chunk", str(result["chunk"])]  # fmt: skip
        name = (
            f"H200, 12 layers, {result['prompt_tokens']:,} tokens, bf16, 16 rows, 4-bit keys, "
            f"`pages(0.1)`, steps of {result['chunk']:,}"
        )
        measured.append(
            Measured(name, "prefill_chunks_h200.json", 1e3 * result["seconds_per_output_token"],
                     result["prefill_seconds"], plan)
        )  # fmt: skip
    host = steps("decode_text_million_layers_host_h100.json")
    for tokens in (32768, 131072, 1045000):
        policy = "values prune=top_k(32) prefill=pages(0.1)"
        plan = [*BF16, "--shape", str(twelve), "--machine", "h100", "--context", str(tokens), "--weights",
                "elements", "--policy", "select=int4 prune=top_k(32) compensate=values prefill=pages(0.1)",
                "--device-memory", "24GiB"]  # fmt: skip
        name = f"H100, 12 layers, {tokens:,} tokens, bf16, 32 rows, 4-bit keys"
        time = host[f"decode/{policy}/tokens:{tokens}"]
        measured.append(
            Measured(name, "decode_text_million_layers_host_h100.json", time, None, plan)
        )
    return measured


def of_commands() -> list[Measured]:
    """Long contexts in one command, rows in host memory and below it on a disk."""
    measured = []
    for file in ("million_8b_components_h200.json", "disk_384k_h200.json", "disk_1m_h200.json",
                 "million_qwen_16gib_h200.json", "million_qwen_12gib_h200.json"):  # fmt: skip
        run = read(file)
        command = shlex.split(run["command"].split("; ")[1])
        timings = run["timings"]
        plan = ["--machine", "h200"]
        is_qwen = "--shape qwen2.5-7b" in run["command"]
        if is_qwen:
            plan += ["--shape", "qwen2.5-7b-1m", "--weights", run["weights"]]
        for name in ("--context", "--weights", "--kv-dtype", "--chunk", "--device-memory",
                     "--host-memory", "--disk"):  # fmt: skip
            if name in command:
                plan += [name, flag(command, name)]
        plan += ["--policy", run["policy"]]  # presets of the command may stand for something else
        name = (
            f"H200, {'`qwen2.5-7b-1m`, ' * is_qwen}{run['plan']['context']:,} tokens, "
            f"{flag(plan, '--weights')}, rows in {flag(command, '--kv-dtype')}"
            + (f", {flag(command, '--device-memory')}" if is_qwen else "")
            + (f", {flag(command, '--host-memory')} above a disk" if "--disk" in command else "")
            + f", `{run['policy']}`"
        )
        measured.append(
            Measured(name, file, 1e3 * timings["seconds_per_output_token"], timings["prefill_seconds"],
                     plan)
        )  # fmt: skip
    return measured


def error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.0f} %"


def with_plans(sluice: Sluice) -> list[tuple[Measured, dict[str, Any]]]:
    """All that was measured, and what `sluice plan` says of it."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
                  "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 8,
                  "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip
        twelve = Path(folder) / "config.json"
        twelve.write_text(json.dumps(config), encoding="utf-8")
        for measured in (*of_disk(), *of_steps(), *of_prompts(twelve), *of_commands()):
            shape = [] if "--shape" in measured.plan else ["--shape", "llama3-8b"]
            plan, why = sluice.plan(*shape, *measured.plan)
            if plan is None:
                raise RuntimeError(f"{measured.name}: {why}")
            pairs.append((measured, plan))
    return pairs


def compared(sluice: Sluice) -> list[str]:
    rows = [
        "| what | measured, ms a token | predicted | | measured, s of prompt | predicted | | file |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for measured, plan in with_plans(sluice):
        predicted = plan["predicted"]
        cells = [measured.name]
        for time, by, digits in (
            (measured.step, 1e3 * predicted["step_seconds"], 2),
            (measured.prefill, predicted["prefill_seconds"], 1),
        ):
            cells += ["", "", ""] if time is None else [
                f"{time:.{digits}f}", f"{by:.{digits}f}", error(by, time)
            ]  # fmt: skip
        rows.append(line([*cells, f"`{measured.file}`"]))
    return rows


def draw(sluice: Sluice, file: Path) -> None:
    """Measured steps by context, one series per model, weights and place of rows; crosses are
    predictions."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("million: --plot needs matplotlib; install Debian's python3-matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    series: dict[str, list[tuple[int, float, float]]] = {}
    for measured, plan in with_plans(sluice):
        if measured.step is None:
            continue
        model = "Qwen2.5 7B" if plan["model"]["layers"] == 28 else f"{plan['model']['layers']} layers"
        disk = ", rows above a disk" if "--disk" in measured.plan else ""
        label = f"{measured.name.split(',')[0]}, {model}, {flag(measured.plan, '--weights')}{disk}"
        point = (plan["context"], measured.step, 1e3 * plan["predicted"]["step_seconds"])
        series.setdefault(label, []).append(point)
    plt.rcParams["svg.hashsalt"] = "sluice"  # the same file from the same numbers
    figure, axes = plt.subplots(figsize=(8, 5))
    for label, points in sorted(series.items()):
        contexts, steps_, predicted = zip(*sorted(points))
        (dots,) = axes.plot(contexts, steps_, "o", label=label)
        axes.plot(contexts, predicted, "x", color=dots.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xticks([1 << n for n in range(15, 21)], ["32K", "64K", "128K", "256K", "512K", "1M"])
    axes.set_yscale("log", base=2)
    axes.set_yticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("ms a token; x: predicted")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


TABLES: dict[str, Callable[[Sluice], list[str]]] = {
    "cards": cards,
    "longest": longest,
    "compared": compared,
}


def put(text: str, name: str, rows: list[str]) -> str:
    """`text` with the table behind the line of its name replaced; a blank line ends it."""
    mark = f"<!-- bench/million.py: {name} -->\n\n"
    if text.count(mark) != 1:
        raise RuntimeError(f"the line of table {name} stands {text.count(mark)} times")
    before, rest = text.split(mark)
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    return before + mark + "\n".join(rows) + "\n" + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sluice", help="the sluice command")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", metavar="FILE", type=Path)
    action.add_argument("--check", metavar="FILE", type=Path)
    action.add_argument("--plot", metavar="FILE", type=Path)
    parser.add_argument("--only", choices=TABLES, help="this table alone")
    arguments = parser.parse_args()
    sluice = Sluice(arguments.sluice)
    if arguments.plot:
        draw(sluice, arguments.plot)
        return 0
    names = [arguments.only] if arguments.only else list(TABLES)
    tables = {name: TABLES[name](sluice) for name in names}
    file = arguments.write or arguments.check
    if file is None:
        print("\n\n".join("\n".join(rows) for rows in tables.values()))
        return 0
    text = file.read_text(encoding="utf-8")
    new = text
    for name, rows in tables.items():
        new = put(new, name, rows)
    if arguments.write:
        file.write_text(new, encoding="utf-8")
    elif new != text:
        print(f"{file}: not what `sluice plan` says; bench/million.py SLUICE --write {file}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
