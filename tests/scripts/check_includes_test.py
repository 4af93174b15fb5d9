#!/usr/bin/env python3
"""Tests that scripts/check_includes.py misses no header that is precompiled for tests."""

import contextlib
import io
import re
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import check_includes  # noqa: E402
import run_clang_tidy  # noqa: E402

USES = {
    "gtest/gtest.h": "TEST(Any, Thing) {}\n",
    "gmock/gmock.h": "void f() { EXPECT_THAT(1, 1); }\n",
    "algorithm": "int a = std::max(1, 2);\n",
    "cmath": "double b = std::sqrt(2.0);\n",
    "functional": "std::function<void()> c;\n",
    "memory": "std::unique_ptr<int> d;\n",
    "string": "std::string e;\n",
    "vector": "std::vector<int> g;\n",
}


class CheckIncludes(unittest.TestCase):
    def found(self, files: dict[str, str]) -> tuple[int, list[str]]:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
            root = Path(folder).resolve()
            for module in (check_includes, run_clang_tidy):
                patches.enter_context(mock.patch.object(module, "ROOT", root))
            run_clang_tidy.project_includes.cache_clear()
            for name, text in files.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            printed = patches.enter_context(contextlib.redirect_stdout(io.StringIO()))
            return check_includes.main(), printed.getvalue().splitlines()

    def test_every_precompiled_header_is_missed(self) -> None:
        precompiled = (ROOT / "tests" / "CMakeLists.txt").read_text()
        precompiled = precompiled[precompiled.index("sluice_test_headers PRIVATE") :]
        self.assertEqual(sorted(re.findall(r"<(.+?)>", precompiled)), sorted(USES))
        for header, text in USES.items():
            with self.subTest(header):
                code, lines = self.found({"tests/a_test.cc": text})
                self.assertEqual((code, lines), (1, [f"tests/a_test.cc: add #include <{header}>"]))
                include = f"#include <{header}>\n"
                self.assertEqual(self.found({"tests/a_test.cc": include + text})[0], 0)
                by_header = {"tests/a_test.cc": '#include "tests/a.h"\n' + text, "tests/a.h": include}
                self.assertEqual(self.found(by_header)[0], 0)

    def test_words_in_comments_and_other_names_are_no_use(self) -> None:
        text = "// std::string, TEST(A, B)\nint max(int a);\nstd::string_view a;\n"
        self.assertEqual(self.found({"tests/a_test.cc": text}), (0, ["includes: clean"]))


if __name__ == "__main__":
    unittest.main()
