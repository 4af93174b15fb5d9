#!/usr/bin/env python3
"""Tests what scripts/build.sh asks of CMake, on machines with and without GPUs."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "build.sh"

# Notes its arguments; a dry run lists what there is to build.
CMAKE = """#!/bin/sh
echo "cmake $*" >>"$LOG"
case "$*" in *' -- -n') cat "$PLAN" ;; esac
"""


class Build(unittest.TestCase):
    def run_script(
        self, *arguments: str, gpus: str | None = None, device: bool = False, plan: str = "", **env: str
    ) -> tuple[list[str], str]:
        """CMake's calls and the script's output, where nvidia-smi, if there is one, prints `gpus`."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            smi = f"printf '{gpus}'" if gpus is not None else "exit 9"
            for tool, text in (("cmake", CMAKE), ("nvidia-smi", f"#!/bin/sh\n{smi}\n")):
                (folder / tool).write_text(text)
                (folder / tool).chmod(0o755)
            (folder / "plan").write_text(plan)
            if device:
                (folder / "nvidia0").touch()
            kept = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
            done = subprocess.run(
                [SCRIPT, *arguments],
                env={**kept, "PATH": f"{folder}:{kept['PATH']}", "LOG": str(folder / "log"),
                     "PLAN": str(folder / "plan"), "JOBS": "2",
                     "SLUICE_GPU_DEVICE": str(folder / "nvidia0"), **env},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            return (folder / "log").read_text().splitlines(), done.stdout

    def architectures(self, **how) -> str:
        return self.run_script(**how)[0][0].split()[3]

    def test_no_gpu_no_cuda(self) -> None:
        self.assertEqual(self.architectures(), "-DSLUICE_CUDA=OFF")
        self.assertEqual(self.architectures(gpus=""), "-DSLUICE_CUDA=OFF")
        self.assertEqual(self.architectures(gpus="6.1\\n"), "-DSLUICE_CUDA=OFF")

    def test_the_gpus_that_are_there(self) -> None:
        def prefix(kinds: str) -> str:
            return f"-DSLUICE_CUDA_ARCHITECTURES={kinds}"

        self.assertEqual(self.architectures(gpus="9.0\\n9.0\\n"), prefix("90a-real"))
        self.assertEqual(self.architectures(gpus="8.6\\n12.0\\n6.1\\n"), prefix("120-real;86-real"))
        # A driver without its tool does not say which.
        self.assertEqual(self.architectures(device=True), "-USLUICE_CUDA_ARCHITECTURES")

    def test_what_is_asked_for_counts(self) -> None:
        for asked, expected in (
            ("80-real;90a-real", "-DSLUICE_CUDA_ARCHITECTURES=80-real;90a-real"),
            ("all", "-USLUICE_CUDA_ARCHITECTURES"),
            ("none", "-DSLUICE_CUDA=OFF"),
        ):
            got = self.architectures(gpus="8.9\\n", SLUICE_CUDA_ARCHITECTURES=asked)
            self.assertEqual(got, expected)

    def test_targets(self) -> None:
        calls, _ = self.run_script("debug", "sluice_cli", "example_generate")
        self.assertTrue(calls[0].startswith("cmake --preset debug "))
        build = "cmake --build --preset debug --parallel 2 --target sluice_cli example_generate"
        self.assertEqual(calls[1:], [build + " -- -n", build])
        calls, _ = self.run_script()
        build = "cmake --build --preset release --parallel 2"
        self.assertEqual(calls[1:], [build + " -- -n", build])

    def test_says_beforehand_how_long(self) -> None:
        line = "[1/9] Building CXX object a.cc.o\n"
        _, few = self.run_script(plan=line * 10)
        _, many = self.run_script(plan=line * 1000)
        kernels = "[1/9] Building CUDA object a.cu.o\n" * 100
        _, one = self.run_script(plan=kernels, gpus="9.0\\n")
        _, six = self.run_script(plan=kernels, SLUICE_CUDA_ARCHITECTURES="all")
        self.assertIn("build: 10 sources, about 1 min", few)
        self.assertIn("and 100 CUDA kernels (90a-real), about ", one)
        minutes = [int(text.split("about ")[1].split(" min")[0]) for text in (few, many, one, six)]
        self.assertLess(10 * minutes[0], minutes[1])
        self.assertLess(2 * minutes[2], minutes[3])
        self.assertEqual(self.run_script(plan="ninja: no work to do.\n")[1], "")


if __name__ == "__main__":
    unittest.main()
