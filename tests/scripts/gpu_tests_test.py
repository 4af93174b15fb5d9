#!/usr/bin/env python3
"""Tests scripts/gpu_tests.sh on executables that say what Google Test would."""

import subprocess
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_tests.sh"

# Lists a case if the filter is the expected one, and otherwise ends as it is told to.
FAKE = """#!/bin/sh
case "$*" in
  *--gtest_list_tests*) case "$*" in *'--gtest_filter={filter}') printf 'Suite.\\n  Case\\n' ;; esac; exit ;;
esac
{body}
"""
PASSES = "echo '[  PASSED  ] 3 tests.'; echo '[  SKIPPED ] 1 test, listed below:'"
SKIPS = "echo '[  PASSED  ] 0 tests.'; echo '[  SKIPPED ] 4 tests.'"
FAILS = "echo 'expected 1, got 2'; echo '[  PASSED  ] 2 tests.'; echo '[  FAILED  ] 1 test.'; exit 1"
CRASHES = "kill -SEGV $$"


class GpuTests(unittest.TestCase):
    def run_script(self, tests: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
        with tempfile.TemporaryDirectory() as folder:
            for name, body in tests.items():
                pattern = "*" if name.startswith("kernels_") else "*cuda*"
                file = Path(folder) / name
                file.write_text(FAKE.format(filter=pattern, body=body))
                file.chmod(0o755)
            return subprocess.run(
                [SCRIPT, folder, *arguments], capture_output=True, text=True, check=False
            )

    def test_a_line_each(self) -> None:
        done = self.run_script({"kernels_a_test": PASSES, "parity_b_test": PASSES, "tool": FAILS})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(len(lines), 3)
        self.assertRegex(lines[0], r"^passed .* 3 passed +1 skipped +kernels_a_test$")
        self.assertEqual(lines[2], "PASSED: 6 cases of 2 executables")

    def test_failures_show_their_output(self) -> None:
        done = self.run_script({"kernels_a_test": FAILS, "parity_b_test": PASSES})
        self.assertEqual(done.returncode, 1)
        self.assertIn("expected 1, got 2", done.stdout)
        self.assertIn("FAILED: 1 of 2 executables", done.stdout)

    def test_crashes_and_skips_fail(self) -> None:
        self.assertEqual(self.run_script({"parity_b_test": CRASHES}).returncode, 1)
        self.assertEqual(self.run_script({"parity_b_test": SKIPS}).returncode, 1)

    def test_filter_takes_names(self) -> None:
        tests = {"kernels_a_test": FAILS, "parity_b_test": PASSES}
        self.assertEqual(self.run_script(tests, "parity_*").returncode, 0)
        self.assertEqual(self.run_script(tests, "kernels_*").returncode, 1)
        self.assertEqual(self.run_script(tests, "none").returncode, 1)

    def test_pretend_reaches_the_executables(self) -> None:
        passes_as_ada = f'[ "$SLUICE_PRETEND_GPU" = 8.9 ] || exit 1; {PASSES}'
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kernels_a_test"
            file.write_text(FAKE.format(filter="*", body=passes_as_ada))
            file.chmod(0o755)
            for arguments, status in ((["--pretend", "8.9"], 0), (["--pretend", "8.6"], 1), ([], 1)):
                done = subprocess.run(
                    [SCRIPT, *arguments, folder], capture_output=True, text=True, check=False
                )
                self.assertEqual(done.returncode, status, done.stdout + done.stderr)

    def test_usage(self) -> None:
        done = subprocess.run([SCRIPT, "/nowhere"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertTrue(done.stderr.startswith("usage:"))


if __name__ == "__main__":
    unittest.main()
