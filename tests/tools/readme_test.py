"""README and docs say what is so: programs, commands, flags, settings, files, links, words and numbers."""

import json
import re
import unittest

from command import MODEL, ROOT, sluice

DOCS = ROOT / "docs"
RESULTS = ROOT / "bench" / "results"
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = {
    page: page.read_text(encoding="utf-8") for page in [*ROOT_PAGES, *sorted(DOCS.glob("*.md"))]
}
README = PAGES[ROOT / "README.md"]
POLICIES = PAGES[DOCS / "policies.md"]
COMMANDS = ("generate", "chat", "serve", "eval", "bench", "calibrate", "info", "plan", "topology")
# Of a checkpoint; other names with an underscore are of bench/results.
CHECKPOINT = {"chat_template.json", "generation_config.json", "tokenizer_config.json",
              "special_tokens_map.json", "added_tokens.json"}  # fmt: skip
MADE_UP = {"NAME", "DIR", "FILE", "SUBJECT"}


def anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


def help_of(command: str) -> str:
    done = sluice(command, "--help")
    assert done.returncode == 0, command
    return done.stdout


def sources(*patterns: str) -> str:
    files = (path for pattern in patterns for path in ROOT.glob(pattern))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def section(text: str, heading: str) -> str:
    """From a heading to the next one of its level or above."""
    start = re.search(rf"^(#+) {re.escape(heading)}$", text, flags=re.MULTILINE)
    assert start, heading
    rest = text[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", rest, flags=re.MULTILINE)
    return rest[: end.start()] if end else rest


def table(text: str) -> dict[str, list[str]]:
    """Rows of the first table, by what stands in their first cell's first backquotes."""
    rows = {}
    for line in re.findall(r"^\| .*\|$", text, flags=re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if name := re.match(r"`([^`]+)`", cells[0]):
            rows[name[1]] = cells[1:]
    return rows


def steps(file: str) -> dict[str, dict]:
    """Benchmarks of decode steps by their names up to the iterations."""
    data = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return {b["name"].split("/iterations")[0]: b for b in data["benchmarks"]}


def evaluated(file: str, task: str) -> dict[str, dict]:
    """Results of one task by the policy's line."""
    data = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return {p["policy"]: p for r in data["results"] if r["task"] == task for p in r["policies"]}


class Readme(unittest.TestCase):
    def test_is_short(self):
        self.assertLessEqual(README.count("\n"), 150)

    def test_shows_the_example_as_it_is_compiled(self):
        example = (ROOT / "examples" / "generate.cc").read_text(encoding="utf-8")
        self.assertTrue(f"```cpp\n{example}```" in README)

    def test_links_to_every_page(self):
        for page in DOCS.glob("*.md"):
            self.assertIn(f"](docs/{page.name})", README)

    def test_table_of_steps_is_that_of_the_files(self):
        rows = table(section(README, "What it gains"))
        self.assertEqual(len(rows), 7)
        for name, cells in rows.items():
            capped, resident, fetched = self.step(name)
            self.assert_shown(cells[0], capped, " ms", name)
            self.assert_shown(cells[1], resident, " ms", name)
            self.assert_shown(cells[2], fetched / 1e6, " MB", name)
            kept = self.kept("128k", self.line_of(name))
            self.assert_shown(cells[3], 100 * kept["top1_agreement"], " %", name)
            self.assert_shown(cells[4], kept["kl"], "", name)

    def test_table_of_servers_is_that_of_the_file(self):
        data = json.loads((RESULTS / "serve_peers_cpu.json").read_text(encoding="utf-8"))
        text = section(PAGES[DOCS / "serving.md"], "Beside llama-server")
        lines = re.findall(r"^\| (alone: )?`(\w+)`(.*?) \| (.*) \| (.*) \|$", text, flags=re.MULTILINE)
        self.assertEqual(len(lines), 10)
        for alone, name, rest, *cells in lines:
            share = "0.5" if "median" in rest else "0.99"
            for server, cell in zip(("sluice", "llama-server"), cells):
                runs = [r for r in data["runs"] if r["server"] == server and (r["clients"] == 1) == bool(alone)]
                values = [r[name][share] if isinstance(r[name], dict) else r[name] for r in runs]
                self.assertEqual(len(values), 2)
                for shown, value in zip(cell.split(", "), values):
                    self.assert_shown(shown, value / (1e6 if "MB" in rest else 1), "", name + rest)
        self.assertIn("83 and 89 % of the answers to 64", text)
        self.assertEqual([round(100 * share) for share in data["same_answers"]], [83, 100, 89, 100])

    def step(self, policy: str) -> tuple[float, float, float]:
        """ms under 24 GiB, ms with all rows on the device, bytes fetched under 24 GiB."""
        today = json.loads((RESULTS / "values_resident_h200.json").read_text(encoding="utf-8"))["steps"]
        latest = {(step["policy"], step["device_memory"]): step for step in today}
        if policy == "dense":
            capped = steps("slow_bus_h200.json")["bus:real/decode/dense/tokens:131072"]
            return capped["real_time"], latest["dense", "70GiB"]["ms"], capped["fetched_bytes"]
        if policy == "values":
            capped = latest["values", "24GiB"]
            return capped["ms"], latest["values", "70GiB"]["ms"], capped["fetched_bytes"]
        if policy == "sluice":
            text = (RESULTS / "decode_text_alone_h200.txt").read_text(encoding="utf-8")
            lines = re.findall(r"^sluice +([\d.]+) ms .*?fetched_bytes=([\d.]+)", text, flags=re.MULTILINE)
            return float(lines[0][0]), float(lines[1][0]), float(lines[0][1]) * 1e6
        alone = steps("decode_text_alone_h200.json")
        capped = alone[f"device_memory:24GiB/decode/{policy}/tokens:131072"]
        resident = alone[f"device_memory:120GiB/decode/{policy}/tokens:131072"]
        return capped["real_time"], resident["real_time"], capped["fetched_bytes"]

    def test_table_of_what_policies_keep_is_that_of_the_files(self):
        needles = evaluated("eval_32k_h200.json", "needle")
        needles = evaluated("values_32k_h200.json", "needle") | needles
        rows = table(section(POLICIES, "What each policy keeps"))
        self.assertEqual(len(rows), 10)
        for name, cells in rows.items():
            line = self.line_of(name)
            for cell, length in zip(cells, ("32k", "128k")):
                agreement, kl = cell.split(", ")
                kept = self.kept(length, line)
                self.assert_shown(agreement, 100 * kept["top1_agreement"], " %", name)
                self.assert_shown(kl, kept["kl"], "", name)
            self.assert_shown(cells[2], 100 * needles[line]["recall"]["mean"], " %", name)
            rows_kept = self.kept("32k", line)["selected_rows"]
            self.assert_shown(cells[3].replace(",", ""), rows_kept, "", name)

    def kept(self, length: str, line: str) -> dict:
        curves = evaluated(f"curves_{length}_h200.json", "agreement")
        curves |= evaluated(f"values_{length}_h200.json", "agreement")
        if length == "128k":
            curves |= evaluated("eval_codecs_128k_h200.json", "agreement")
        return curves[line]

    def line_of(self, policy: str) -> str:
        """As reports have it."""
        done = sluice("info", "-m", MODEL, "--context", 4096, "--policy", policy)
        self.assertEqual(done.returncode, 0, done.stderr)
        line = re.search(r"^  policy(.*(?:\n {3,}.*)*)", done.stdout, flags=re.MULTILINE)
        return " ".join(line[1].split())

    def assert_shown(self, cell: str, value: float, unit: str, name: str):
        """The cell is the value, rounded to the digits that it has."""
        shown = cell.removesuffix(unit)
        decimals = len(shown.partition(".")[2])
        self.assertEqual(cell, f"{value:.{decimals}f}{unit}", name)


class Pages(unittest.TestCase):
    def test_commands_have_their_flags(self):
        text = "\n".join(PAGES.values())
        blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL))
        commands = re.findall(r"^build/release/bin/sluice (\w+)(.*)", blocks, flags=re.MULTILINE)
        self.assertGreater(len(commands), 9)
        for command, arguments in commands:
            text = help_of(command)
            for flag in re.findall(r"--[a-z-]+", arguments):
                self.assertTrue(re.search(rf"(^|[ ,]){flag} ", text), f"{command} {flag}")

    def test_flags_and_variables_exist(self):
        programs = sources("scripts/*", "bench/*.py", "bench/peers/*.py", "tests/fuzz/*.cc", "cmake/*.cmake")
        known_flags = "\n".join(map(help_of, COMMANDS)) + programs
        known_variables = programs + sources("CMakeLists.txt", "bindings/c/*.h", "kernels/*/*.cc", "tests/*/*_test.cc")
        # Of CMake and pkg-config.
        others = {"--preset", "--build", "--install", "--prefix", "--cflags", "--libs"}
        pattern = r"(?<![\w-])--[a-z][a-z-]+\b"
        flags = {f for text in PAGES.values() for f in re.findall(pattern, text)} - others
        variables = {v for text in PAGES.values() for v in re.findall(r"\bSLUICE_[A-Z_]+\b", text)}
        self.assertGreater(len(flags), 40)
        self.assertGreater(len(variables), 2)
        for names, known in ((flags, known_flags), (variables, known_variables)):
            for name in names:
                self.assertTrue(re.search(rf"(?<![\w-]){name}(?![\w-])", known), name)

    def test_files_are_there(self):
        named = set()
        for page, text in PAGES.items():
            folders = "bench|bindings|cmake|cpu|docs|examples|io|kernels|lib|model|offload|scripts|tests|tools"
            files = re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]+\w)", text)
            headers = re.findall(r"(?<![\w/])(sluice/\w+\.h)", text)
            benches = re.findall(r"`([a-z_]+_bench)`", text)
            named |= {ROOT / name for name in re.findall(r"`(\w+\.md)`", text) if page in ROOT_PAGES}
            named |= {ROOT / name for name in files}
            named |= {ROOT / "lib" / "include" / name for name in headers}
            named |= {ROOT / "bench" / f"{name}.cc" for name in benches}
            results = set(re.findall(r"[`(](\w+_\w+\.(?:json|jsonl|txt))`", text))
            named |= {RESULTS / name for name in results - CHECKPOINT}
        named = {file for file in named if not any(word in file.name for word in MADE_UP)}
        self.assertGreater(len(named), 150)
        for file in named:
            self.assertTrue(file.exists() or file.with_suffix(".h").exists(), file)

    def test_links_lead_somewhere(self):
        anchors = {
            page: {anchor(line) for line in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)}
            for page, text in PAGES.items()
        }
        links = [(page, *link) for page, text in PAGES.items()
                 for link in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text)]  # fmt: skip
        self.assertGreater(len(links), 50)
        for page, file, heading in links:
            target = (page.parent / file).resolve() if file else page
            self.assertTrue(target.exists(), f"{page.name}: {file}")
            if heading:
                self.assertIn(heading, anchors[target], page.name)

    def test_words_are_explained_before_they_are_used(self):
        measured = ["TTFT", "TPOT", "NLL", "alpha", "perplexity", "recall", "ledger", "KL"]
        wanted = ["policy", "row", "KV head", "dense", *measured]
        words = table_of_words()
        for word in [*wanted, "key index", "tier", "anchor", "resident", "row cache"]:
            self.assertIn(word, words)
        used = 0
        for word in wanted:
            if first := re.search(rf"\b{word}\b", without_code(README), flags=re.IGNORECASE):
                self.assertEqual(first.string[first.start() - 2 : first.start()], "**", word)
                used += 1
        self.assertGreater(used, 4)
        # Other pages send their readers to the table first.
        for page in DOCS.glob("*.md"):
            if page.name not in {"policies.md", "gpu.md"}:
                self.assertIn("policies.md#words", PAGES[page][:1500], page.name)

    def test_settings_and_presets_are_all_there(self):
        text = help_of("generate")
        listed = text[text.index("Policies:") : text.index("Exit codes:")]
        parts = listed.split("Settings of")
        presets, settings = (re.findall(r"^  (\w+) ", part, flags=re.MULTILINE) for part in parts)
        self.assertEqual(sorted(presets), sorted(table(section(POLICIES, "Presets"))))
        setting_rows = re.findall(r"^\| (`.*?) \|", section(POLICIES, "Settings"), flags=re.MULTILINE)
        self.assertEqual(sorted(settings), sorted(re.findall(r"`(\w+)`", " ".join(setting_rows))))

    def test_presets_stand_for_their_lines(self):
        for name, cells in table(section(POLICIES, "Presets")).items():
            self.assertEqual(cells[0], f"`{Readme.line_of(self, name)}`", name)

    def test_exit_codes_and_tasks_are_all_there(self):
        listed = re.search(r"Exit codes:(.*)", help_of("generate"), flags=re.DOTALL)[1]
        codes = re.findall(r"\d+", listed)
        self.assertGreater(len(codes), 10)
        shown = re.findall(r"\| (\d+) ", section(PAGES[DOCS / "long-contexts.md"], "Errors"))
        self.assertEqual(sorted(codes), sorted(shown))
        tasks = re.search(r"--task TEXT=\S+ \.\.\.\s+(.*?);", help_of("eval"), flags=re.DOTALL)[1]
        for task in re.findall(r"[a-z_]+(?=,|\s+or|$)", tasks):
            self.assertIn(f"`{task}`", section(PAGES[DOCS / "comparing.md"], "eval"), task)


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`]*`|\(#[\w-]+\)", "", text, flags=re.DOTALL)


def table_of_words() -> set[str]:
    rows = re.findall(r"^\| (\*\*.*?) \|", section(POLICIES, "Words"), flags=re.MULTILINE)
    return set(re.findall(r"\*\*(.*?)\*\*", " ".join(rows)))


if __name__ == "__main__":
    unittest.main()
