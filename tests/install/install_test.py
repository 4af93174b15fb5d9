"""Programs outside the tree, built against what is installed, as static and as a shared library.

    install_test.py BUILD    an existing build of static libraries; a shared one is made beside it
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "generate.cc"
C_EXAMPLE = ROOT / "examples" / "c_generate.c"
MODEL = ROOT / "models" / "sluice-22m"


def run(*command: object, **options) -> str:
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options,
    )  # fmt: skip
    if done.returncode != 0:
        raise AssertionError(f"{command}: {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def installed(build: Path, prefix: Path) -> Path:
    """The folder of its libraries."""
    run("cmake", "--install", build, "--prefix", prefix)
    return next(prefix.glob("lib*/**/cmake/sluice")).parents[1]


class Install(unittest.TestCase):
    build = Path()

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.prefix = self.folder / "prefix"

    def expect_answer(self, program: Path, **environment: str) -> None:
        text = run(program, MODEL, "Well, Prince,", env={**os.environ, **environment})
        self.assertIn("device tier, at its peak", text)

    def expect_cmake_program(self, *flags: str) -> None:
        source = ROOT / "tests" / "install" / "program"
        run("cmake", "-S", source, "-B", self.folder / "program", f"-DSOURCE={EXAMPLE}",
            f"-DCMAKE_PREFIX_PATH={self.prefix}", *flags)  # fmt: skip
        run("cmake", "--build", self.folder / "program")
        self.expect_answer(self.folder / "program" / "program")

    # Everything but libsluice_c hides from a C program.
    def expect_c_programs(self, libraries: Path) -> None:
        hidden = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON"
                  for name in ("TBB", "dnnl", "OpenMP", "PkgConfig", "CUDAToolkit")]  # fmt: skip
        build = self.folder / "c_program"
        run("cmake", "-S", ROOT / "tests" / "install" / "c_program", "-B", build,
            f"-DSOURCE={C_EXAMPLE}", f"-DCMAKE_PREFIX_PATH={self.prefix}", *hidden)  # fmt: skip
        run("cmake", "--build", build)
        self.expect_answer(build / "program")
        environment = {**os.environ, "PKG_CONFIG_PATH": str(libraries / "pkgconfig")}
        flags = run("pkg-config", "--cflags", "--libs", "sluice_c", env=environment).split()
        program = self.folder / "c_by_hand"
        run(os.environ.get("CC", "cc"), "-std=c11", C_EXAMPLE, "-o", program, *flags)
        self.expect_answer(program, LD_LIBRARY_PATH=str(libraries))
        done = subprocess.run([program, "nowhere", "x"], capture_output=True, text=True, check=False,
                              env={**os.environ, "LD_LIBRARY_PATH": str(libraries)})  # fmt: skip
        self.assertEqual((done.returncode, done.stderr.count("\n")), (3, 1), done.stderr)

    def expect_command_and_licence(self) -> None:
        self.assertIn("sluice ", run(self.prefix / "bin" / "sluice", "--version"))
        page = (self.prefix / "share" / "man" / "man1" / "sluice.1").read_text()
        self.assertIn(".SS sluice chat", page)
        completions = self.prefix / "share" / "bash-completion" / "completions"
        self.assertIn("_sluice()", (completions / "sluice").read_text())
        licence = (self.prefix / "share" / "doc" / "sluice" / "LICENSE").read_text()
        self.assertEqual(licence, (ROOT / "LICENSE").read_text())

    # What is in the help of `sluice bench`, from what is installed alone.
    def expect_scorer_and_plot(self) -> None:
        mine = self.folder / "mine"
        shutil.copytree(self.prefix / "share" / "doc" / "sluice" / "examples" / "scorer", mine)
        run(os.environ.get("CXX", "c++"), "-std=c++20", "-O3", "-fPIC", "-shared", "-I",
            self.prefix / "include", "signs.cc", "library.cc", "-o", "signs.so", cwd=mine)  # fmt: skip
        report = mine / "mine.json"
        run(self.prefix / "bin" / "sluice", "bench", "--shape", MODEL / "config.json", "--context", "256",
            "512", "--scorer", mine / "signs.so", "--policy", "select=signs prune=top_k(64)",
            "quest prune=top_k(64)", "--steps", "2", "--device-memory", "2MiB", "--check", "--json",
            report)  # fmt: skip
        cells = json.loads(report.read_text())["results"]
        own = [cell for cell in cells if cell["policy"].startswith("select=signs")]
        self.assertEqual([cell["context"] for cell in own if "step_ms" in cell], [256, 512])
        if importlib.util.find_spec("matplotlib") is None:
            return
        run(sys.executable, self.prefix / "share" / "sluice" / "plot_bench.py", report)
        self.assertIn("select=signs", report.with_suffix(".svg").read_text())

    def test_static_libraries(self) -> None:
        libraries = installed(self.build, self.prefix)
        self.assertTrue((libraries / "libsluice_engine.a").exists())
        self.expect_command_and_licence()
        self.expect_scorer_and_plot()
        self.expect_cmake_program()
        self.expect_c_programs(libraries)

    def test_shared_library(self) -> None:
        build = self.build.with_name(self.build.name + "-shared")
        environment = {**os.environ, "CCACHE_BASEDIR": str(ROOT)}  # as scripts/build.sh has it
        run("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            "-DBUILD_SHARED_LIBS=ON", "-DSLUICE_WERROR=ON", *self.quick_options())  # fmt: skip
        run("cmake", "--build", build, "--parallel", os.environ.get("JOBS", "2"), env=environment)
        libraries = installed(build, self.prefix)
        self.assertEqual([file.name for file in libraries.glob("*.a")], [])
        self.expect_command_and_licence()
        # Nothing that the library was built from has to be found.
        hidden = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON"
                  for name in ("TBB", "dnnl", "OpenMP", "PkgConfig", "CUDAToolkit")]  # fmt: skip
        self.expect_cmake_program(*hidden)
        self.expect_pkg_config_program(libraries)
        self.expect_c_programs(libraries)
        self.expect_cuda_by_itself(libraries)

    # The objects are those of the build there is, if ccache has them; CUDA's would take too long.
    def quick_options(self) -> list:
        if not shutil.which("ccache"):
            return ["-DSLUICE_CUDA=OFF"]
        cache = (self.build / "CMakeCache.txt").read_text()
        cuda = [f"-D{name}={re.search(f'^{name}:[A-Z]+=(.*)$', cache, re.M).group(1)}"
                for name in ("SLUICE_CUDA", "SLUICE_CUDA_ARCHITECTURES")]  # fmt: skip
        return [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("CXX", "CUDA")] + cuda

    # What is for CUDA is a library of its own, which nothing needs until the device is asked for.
    def expect_cuda_by_itself(self, libraries: Path) -> None:
        self.assertNotIn("cuda", run("readelf", "--dynamic", libraries / "libsluice.so"))
        modules = list(libraries.glob("libsluice_cuda.so*"))
        for module in modules:
            module.unlink()
        reason = "library of the CUDA backend cannot be loaded" if modules else "has no CUDA backend"
        self.expect_answer(self.folder / "by_hand", LD_LIBRARY_PATH=str(libraries))
        command = [self.prefix / "bin" / "sluice", "info", "--model", MODEL, "--device", "cuda"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (5, 1), done.stderr)
        self.assertIn(reason, done.stderr)

    def expect_pkg_config_program(self, libraries: Path) -> None:
        environment = {**os.environ, "PKG_CONFIG_PATH": str(libraries / "pkgconfig")}
        flags = run("pkg-config", "--cflags", "--libs", "sluice", env=environment).split()
        program = self.folder / "by_hand"
        run(os.environ.get("CXX", "c++"), "-std=c++20", EXAMPLE, "-o", program, *flags)
        self.expect_answer(program, LD_LIBRARY_PATH=str(libraries))


if __name__ == "__main__":
    Install.build = Path(sys.argv.pop(1)).resolve()
    unittest.main()
