#!/usr/bin/env python3
"""Tests scripts/check_layers.py on small trees, good and bad."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_layers.py"

GOOD = {
    "lib/include/sluice/types.h": "#include <cstdint>\n#include <stddef.h>\n",
    "lib/include/sluice/engine.h": '#include "sluice/types.h"\n#include <string_view>\n',
    "lib/backend.h": '#include "sluice/types.h"\n',
    "io/files.h": '#include "lib/backend.h"\n#include <nlohmann/json.hpp>\n',
    "cpu/backend.h": '#include "lib/backend.h"\n#include <tbb/parallel_for.h>\n',
    "cpu/backend.cc": '#include "backend.h"\n#include "sluice/types.h"\n',
    "kernels/backend.h": '#include "lib/backend.h"\n',
    "kernels/attend.cu": "#include <cuda_runtime.h>\n#include <cub/cub.cuh>\n",
    "kernels/runtime/launch.h": "#pragma once\n",
    "kernels/cuda_backend.cc": '#include "kernels/scan/tiles.h"\n',
    "kernels/scan/tiles.h": '#include "kernels/runtime/launch.h"\n',
    "kernels/select/sums.cu": '#include "kernels/runtime/launch.h"\n',
    "cpu/scan/estimate.cc": '#include "cpu/runtime/threads.h"\n',
    "cpu/runtime/threads.h": "#pragma once\n",
    "cpu/attention/attention.h": "#pragma once\n",
    "cpu/reference/backend.cc": '#include "cpu/attention/attention.h"\n',
    "offload/backends.h": '#include "lib/backend.h"\n',
    "offload/plan/planner.h": "#pragma once\n",
    "offload/tiers/host_store.h": '#include "offload/plan/planner.h"\n',
    "offload/step/kv_pool.h": '#include "offload/tiers/host_store.h"\n',
    "offload/backends.cc": '#include "cpu/backend.h"\n#include "kernels/backend.h"\n',
    "engine/weights.cc": '#include "io/files.h"\n#include "offload/backends.h"\n',
    "tools/main.cc": '#include "sluice/engine.h"\n#include "engine/weights.h"\n',
    "engine/weights.h": "#pragma once\n",
    "examples/generate.cc": '#include "sluice/engine.h"\n',
    "examples/scorer/signs.cu": '#include <sluice/engine.h>\n#include <cuda_fp16.h>\n',
    "bindings/c/sluice.h": "#include <stddef.h>\n#include <stdint.h>\n",
    "bindings/c/engine.cc": '#include "bindings/c/sluice.h"\n#include "sluice/engine.h"\n',
    "examples/c_generate.c": "#include <sluice.h>\n#include <stdio.h>\n",
    "tests/any_test.cc": '#include "cpu/backend.h"\n#include "kernels/backend.h"\n',
    "bench/any_bench.cc": '#include "cpu/backend.h"\n#include <cuda_runtime.h>\n',
}

# What is added to one file of the good tree, and a part of the complaint that must follow.
BAD = {
    "bindings see a floor": ("bindings/c/engine.cc", '#include "engine/weights.h"', "bindings may not"),
    "the C header sees C++": ("bindings/c/sluice.h", "#include <string>", "only C's standard"),
    "a C example sees a floor": ("examples/c_generate.c", '#include "lib/backend.h"', "examples may not"),
    "lib sees io": ("lib/backend.h", '#include "io/files.h"', "lib may not include io"),
    "lib sees offload": ("lib/backend.h", '#include "offload/backends.h"', "lib may not include"),
    "io sees cpu": ("io/files.h", '#include "cpu/backend.h"', "io may not include cpu"),
    "cpu sees io": ("cpu/backend.cc", '#include "io/files.h"', "cpu may not include io"),
    "cpu sees kernels": ("cpu/backend.h", '#include "kernels/backend.h"', "cpu may not include"),
    "kernels see cpu": ("kernels/backend.h", '#include "cpu/backend.h"', "kernels may not include"),
    "a folder of kernels sees another": (
        "kernels/select/sums.cu",
        '#include "kernels/scan/tiles.h"',
        "kernels/select may not include kernels/scan",
    ),
    "runtime sees what is above it": (
        "kernels/runtime/launch.h",
        '#include "kernels/scan/tiles.h"',
        "kernels/runtime may not include kernels/scan",
    ),
    "a room of cpu sees another": (
        "cpu/scan/estimate.cc",
        '#include "cpu/attention/attention.h"',
        "cpu/scan may not include cpu/attention",
    ),
    "a room of offload sees one above it": (
        "offload/tiers/host_store.h",
        '#include "offload/step/kv_pool.h"',
        "offload/tiers may not include offload/step",
    ),
    "offload sees engine": (
        "offload/backends.cc",
        '#include "engine/weights.h"',
        "offload may not include engine",
    ),
    "offload sees cpu": (
        "offload/backends.h",
        '#include "cpu/backend.h"',
        "only offload/backends.cc may include cpu",
    ),
    "engine sees cpu": (
        "engine/weights.cc",
        '#include "cpu/backend.h"',
        "only offload/backends.cc may include cpu",
    ),
    "engine sees tools": ("engine/weights.cc", '#include "tools/main.cc"', "engine may not include"),
    "tools see kernels": (
        "tools/main.cc",
        '#include "kernels/backend.h"',
        "only offload/backends.cc may include kernels",
    ),
    "public header sees lib": (
        "lib/include/sluice/types.h",
        '#include "lib/backend.h"',
        "public header",
    ),
    "public header sees a package": (
        "lib/include/sluice/types.h",
        "#include <nlohmann/json.hpp>",
        "public header",
    ),
    "public header sees POSIX": (
        "lib/include/sluice/types.h",
        "#include <unistd.h>",
        "public header",
    ),
    "example sees the inside": (
        "examples/generate.cc",
        '#include "lib/backend.h"',
        "examples may not include lib",
    ),
    "CUDA in an example's header": ("examples/generate.cc", "#include <cuda_fp16.h>", "CUDA"),
    "CUDA outside kernels": ("offload/backends.cc", "#include <cuda_runtime.h>", "CUDA"),
    "CUDA by folder": ("cpu/backend.cc", "# include <cub/cub.cuh>", "CUDA"),
    "a project header in angle brackets": (
        "io/files.h",
        "#include <cpu/backend.h>",
        "io may not include cpu",
    ),
    "a way around through the parent": (
        "io/files.h",
        '#include "../cpu/backend.h"',
        "io may not include cpu",
    ),
    "a file that is not there": ("io/files.h", '#include "io/gone.h"', "names no file"),
}


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def run(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class CheckLayersTest(unittest.TestCase):
    def test_a_good_tree_passes_silently(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_tree(Path(folder), GOOD)
            done = run(Path(folder))
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_each_breach_is_reported_with_its_line(self) -> None:
        for name, (file, line, reason) in BAD.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                write_tree(Path(folder), GOOD | {file: GOOD[file] + line + "\n"})
                done = run(Path(folder))
                place = f"{file}:{GOOD[file].count(chr(10)) + 1}: "
                self.assertEqual(done.returncode, 1)
                self.assertEqual(len(done.stdout.splitlines()), 1, done.stdout)
                self.assertTrue(done.stdout.startswith(place), done.stdout)
                self.assertIn(reason, done.stdout)


if __name__ == "__main__":
    unittest.main()
