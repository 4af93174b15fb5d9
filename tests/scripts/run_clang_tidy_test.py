#!/usr/bin/env python3
"""Tests which sources scripts/run_clang_tidy.py checks together, and that it misses nothing so."""

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import run_clang_tidy  # noqa: E402

FILES = {
    ".clang-tidy": "Checks: >\n  -*, misc-unused-using-decls, misc-unused-alias-decls,"
                   " modernize-use-nullptr\nWarningsAsErrors: '*'\n",
    "tests/.clang-tidy": "InheritParentConfig: true\nChecks: >\n"
                         "  -misc-unused-using-decls, -misc-unused-alias-decls\n",
    "lib/shape.h": "#pragma once\nnamespace own {\nstruct Shape { int* data = nullptr; };\n}\n",
    "lib/wrong.h": "#pragma once\ninline int* none() { return 0; }\n",
    "lib/a.cc": '#include "shape.h"\nnamespace {\nint helper() { return 1; }\n}\n'
                "int a() { return helper(); }\n",
    "lib/b.cc": '#include "shape.h"\nint b() { return 2; }\n',
    "lib/c.cc": "namespace {\nint helper() { return 3; }\n}\nint c() { return helper(); }\n",
    "lib/d.cc": "namespace own {\nnamespace {\nstruct Shape {};\n}\nint d(Shape) { return 4; }\n}\n",
    "lib/using.cc": '#include "shape.h"\nusing own::Shape;\nint e() { return 5; }\n',
    "lib/alias.cc": '#include "shape.h"\nnamespace other = own;\nint f() { return 6; }\n',
    "lib/highway.cc": '#define HWY_TARGET_INCLUDE "lib/highway.cc"\nint g() { return 7; }\n',
    "tests/using_test.cc": '#include "../lib/shape.h"\nusing own::Shape;\nint h() { return 8; }\n',
    "tests/null_test.cc": "int* i() { return 0; }\n",
    "tests/good_test.cc": "int* j() { return nullptr; }\n",
    "tests/header_test.cc": '#include "../lib/wrong.h"\nint* k() { return none(); }\n',
    "tests/broken_test.cc": "int l() { return unknown; }\n",
}  # fmt: skip
# Neither includes nor names of others tell that these cannot be one source.
CLASH = {
    "lib/macro_a.cc": "#define LIMIT 1\nint m() { return LIMIT; }\n",
    "lib/macro_b.cc": "namespace {\nconst int LIMIT = 2;\n}\nint n() { return LIMIT; }\n",
}


class RunClangTidy(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        patch = mock.patch.object(run_clang_tidy, "ROOT", self.root)
        patch.start()
        self.addCleanup(patch.stop)
        for function in (run_clang_tidy.names, run_clang_tidy.project_includes):
            function.cache_clear()

    def write(self, files: dict[str, str]) -> list[str]:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        sources = [name for name in files if name.endswith(".cc")]
        entries = [
            {"directory": str(self.root), "file": name,
             "arguments": ["c++", "-O1", "-std=c++20", "-o", name + ".o", "-c", name]}
            for name in sources
        ]  # fmt: skip
        (self.root / "compile_commands.json").write_text(json.dumps(entries))
        return sources

    def check(self, sources: list[str]) -> tuple[dict[str, bool], str]:
        """Which sources are clean, and what was printed."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            results = run_clang_tidy.check_files(sources, self.root, self.root / "cache", 2)
        return {result.file: result.clean for result in results}, printed.getvalue()

    def test_groups_have_one_meaning_of_each_name(self) -> None:
        sources = self.write(FILES)
        commands = dict.fromkeys(sources, ("-std=c++20",))
        commands["tests/good_test.cc"] = ("-std=c++23",)
        self.assertEqual(
            run_clang_tidy.groups_of(sources, commands),
            [
                ["lib/a.cc", "lib/b.cc"],
                ["lib/c.cc", "lib/d.cc"],
                ["lib/using.cc"],
                ["lib/alias.cc"],
                ["lib/highway.cc"],
                ["tests/using_test.cc", "tests/null_test.cc", "tests/header_test.cc",
                 "tests/broken_test.cc"],
                ["tests/good_test.cc"],
            ],
        )  # fmt: skip

    def test_groups_are_limited(self) -> None:
        sources = self.write({**FILES, **{f"lib/n{n}.cc": f"int n{n};\n" for n in range(30)}})
        groups = run_clang_tidy.groups_of(sources, dict.fromkeys(sources, ()))
        self.assertEqual(max(map(len, groups)), run_clang_tidy.GROUP)
        self.assertEqual(sorted(sum(groups, [])), sorted(sources))

    @unittest.skipUnless(Path(run_clang_tidy.TOOL).exists(), "no clang-tidy")
    def test_finds_in_groups_what_it_finds_alone(self) -> None:
        sources = self.write({**FILES, **CLASH})
        clean, printed = self.check(sources)
        self.assertEqual(
            {file for file, is_clean in clean.items() if not is_clean},
            {"lib/using.cc", "lib/alias.cc", "tests/null_test.cc", "tests/header_test.cc",
             "tests/broken_test.cc"},
        )  # fmt: skip
        for words in ("using.cc:2:12: error: using decl", "alias.cc:2:11: error: namespace alias",
                      "null_test.cc:1:19: error", "wrong.h:2:29: error",
                      "broken_test.cc:1:18: error"):  # fmt: skip
            self.assertEqual(printed.count(words), 1, printed)
        self.assertNotIn("LIMIT", printed)
        # What was clean is not looked at again; the rest is, and found again.
        with mock.patch.object(
            run_clang_tidy, "run_clang_tidy", wraps=run_clang_tidy.run_clang_tidy
        ) as again:
            self.assertEqual(self.check(sources)[0], clean)
        self.assertFalse({call.args[0] for call in again.call_args_list} & {"lib/a.cc", "lib/b.cc"})
        # A mended header makes its users clean.
        (self.root / "lib/wrong.h").write_text("#pragma once\ninline int* none() { return nullptr; }\n")
        self.assertTrue(self.check(["tests/header_test.cc"])[0]["tests/header_test.cc"])


if __name__ == "__main__":
    unittest.main()
