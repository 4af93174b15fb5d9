#!/usr/bin/env python3
"""Checks who includes whom: lib <- {io, cpu, kernels} <- offload <- engine <- tools.

- A folder includes only itself and the folders below it; io, cpu and kernels never each other.
- Only the composition root, offload/backends.cc, sees cpu and kernels: everything else computes
  through lib/backend.h. Files are no such secret, so the floors above may include io.
- Within cpu and kernels a room includes only itself and the runtime beside it; the reference
  backend also uses cpu/attention, whose row cache every backend has to match bit by bit. The
  backend in the folder itself sees every room.
- Within offload a room includes only itself and the rooms before it: plan, tiers, cache,
  attention, step, kv_cache.
- Public headers (lib/include/sluice) include only the standard library and each other.
- CUDA's headers are for kernels, and for examples of code that users run on a GPU.
- bindings and examples see what a user sees: the public headers. The C header stands alone: it
  includes C's standard headers only. tests and bench include what they like.

Prints one line per breach and exits with 1 if there is one.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Iterator, NamedTuple, Optional

SUFFIXES = {".h", ".c", ".cc", ".cu", ".cuh"}
ALLOWED = {
    "lib": {"lib"},
    "io": {"lib", "io"},
    "cpu": {"lib", "cpu"},
    "kernels": {"lib", "kernels"},
    "offload": {"lib", "io", "offload"},
    "engine": {"lib", "io", "offload", "engine"},
    "tools": {"lib", "io", "offload", "engine", "tools"},
    "bindings": {"bindings"},
    "examples": {"examples"},
}
COMPOSITION_ROOT = "offload/backends.cc"
COMPOSED = {"io", "cpu", "kernels"}
OFFLOAD = ["plan", "tiers", "cache", "attention", "step", "kv_cache"]
REFERENCE = {"cpu/reference": {"cpu/attention"}}
PUBLIC = "lib/include/"
C_HEADER = "bindings/c/sluice.h"

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
CPP_STANDARD = re.compile(r"[a-z_0-9]+")
C_STANDARD = {"limits.h", "stdbool.h", "stddef.h", "stdint.h"}
CUDA = re.compile(
    r"(cuda|cublas|cudnn|curand|cusparse|nvrtc|nvtx|nvml|driver_types|device_launch|vector_types"
    r"|cooperative_groups|mma\.h|(cub|thrust|cutlass|cute|cuda|nv|nvtx3)/)"
)


class Include(NamedTuple):
    """One #include line: its line number and the included name."""

    line: int
    quoted: bool
    name: str


def includes(path: Path) -> Iterator[Include]:
    """Yields the #include lines of a source file."""
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = INCLUDE.match(text)
        if match:
            yield Include(number, match.group(1) == '"', match.group(2))


def resolve(root: Path, file: Path, name: str) -> Optional[str]:
    """Returns the included file relative to `root`, or None if it is not part of the project."""
    for base in (file.parent, root, root / PUBLIC):
        candidate = (base / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root).as_posix()
    return None


def rooms_seen(own: str) -> Optional[set[str]]:
    """Returns the rooms that files of room `own` may include; None if it has no rule."""
    folder = own.split("/")[0]
    if own == folder:
        return None
    if folder == "offload":
        floor = OFFLOAD.index(own.split("/")[1])
        root = {folder} if floor == len(OFFLOAD) - 1 else set()  # kv_cache creates its backend
        return root | {f"offload/{room}" for room in OFFLOAD[: floor + 1]}
    if folder in {"cpu", "kernels"}:
        return {own, f"{folder}/runtime"} | REFERENCE.get(own, set())
    return None


def breach_of_rooms(source: str, target: str) -> Optional[str]:
    """Says what is wrong with an include from one room of a folder to another, or returns None."""
    own, other = source.rsplit("/", 1)[0], target.rsplit("/", 1)[0]
    seen = rooms_seen(own)
    if seen is None or own.split("/")[0] != other.split("/")[0] or other in seen:
        return None
    return f"{own} may not include {other}"


def breach(source: str, target: Optional[str], include: Include) -> Optional[str]:
    """Says what is wrong with an include of `target` in `source`, or returns None."""
    layer = source.split("/")[0]
    if source == C_HEADER and include.name not in C_STANDARD:
        return "the C header may include only C's standard headers"
    if target is None:
        if include.quoted:
            return "names no file of the project"
        runs_on_gpu = layer == "kernels" or (layer == "examples" and source.endswith(".cu"))
        if CUDA.match(include.name) and not runs_on_gpu:
            return "only kernels may include CUDA headers"
        standard = CPP_STANDARD.fullmatch(include.name) or include.name in C_STANDARD
        if source.startswith(PUBLIC) and not standard:
            return "a public header may include only the standard library and sluice/*"
        return None
    if target.startswith(PUBLIC):
        return None
    if source.startswith(PUBLIC):
        return "a public header may include only the standard library and sluice/*"
    allowed = ALLOWED[layer] | (COMPOSED if source == COMPOSITION_ROOT else set())
    target_layer = target.split("/")[0]
    if target_layer in allowed:
        return breach_of_rooms(source, target)
    if target_layer in COMPOSED and "offload" in allowed:
        return f"only {COMPOSITION_ROOT} may include {target_layer}"
    return f"{layer} may not include {target_layer}"


def source_files(root: Path) -> Iterator[Path]:
    """Yields the source files of all folders that have rules, in a fixed order."""
    for layer in ALLOWED:
        for path in sorted((root / layer).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


def check_tree(root: Path) -> list[str]:
    """Returns one line for every breach in the tree at `root`."""
    root = root.resolve()
    breaches = []
    for path in source_files(root):
        source = path.relative_to(root).as_posix()
        for include in includes(path):
            reason = breach(source, resolve(root, path, include.name), include)
            if reason:
                breaches.append(f"{source}:{include.line}: includes {include.name}: {reason}")
    return breaches


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    breaches = check_tree(parser.parse_args().root)
    for line in breaches:
        print(line)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
