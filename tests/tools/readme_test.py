"""README and docs say what is so: programs, commands, flags, settings, files, links and words."""

import re
import unittest

from command import ROOT, sluice

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {page: page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)


def anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


class Readme(unittest.TestCase):
    def test_shows_the_example_as_it_is_compiled(self):
        example = (ROOT / "examples" / "generate.cc").read_text(encoding="utf-8")
        self.assertTrue(f"```cpp\n{example}```" in README)

    def test_commands_have_their_flags(self):
        commands = re.findall(r"bin/sluice (\w+) (.*)", "\n".join(BLOCKS))
        self.assertGreater(len(commands), 4)
        for command, arguments in commands:
            done = sluice(command, "--help")
            self.assertEqual(done.returncode, 0, command)
            for flag in re.findall(r"--[a-z-]+", arguments):
                self.assertRegex(done.stdout, rf"(^|[ ,]){flag} ", f"{command} {flag}")

    def test_files_are_there(self):
        named = {ROOT / name for name in re.findall(r"`(\w+\.md)`", README)}
        for text in PAGES.values():
            folders = "bench|docs|examples|lib|model|scripts|tests"
            files = re.findall(rf"(?<![\w/])((?:{folders})/[\w./-]+\w)", text)
            named |= {ROOT / file for file in files}
            results = re.findall(r"[`(](\w+_(?:avx2|cpu|epyc|h100|h200|\d*cores)\.(?:json|txt))`", text)
            named |= {ROOT / "bench" / "results" / file for file in results}
        self.assertGreater(len(named), 80)
        for file in named:
            self.assertTrue(file.exists() or file.with_suffix(".h").exists(), file)

    def test_links_lead_somewhere(self):
        anchors = {
            page: {anchor(line) for line in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)}
            for page, text in PAGES.items()
        }
        links = [(page, *link) for page, text in PAGES.items()
                 for link in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text)]  # fmt: skip
        self.assertGreater(len(links), 15)
        for page, file, heading in links:
            target = (page.parent / file).resolve() if file else page
            self.assertTrue(target.exists(), f"{page.name}: {file}")
            if heading:
                self.assertIn(heading, anchors[target], page.name)

    def test_words_are_explained_before_they_are_used(self):
        for word in ("TTFT", "TPOT", "NLL", "alpha", "perplexity", "recall", "ledger", "KV head"):
            first = re.search(rf"\b{word}\b", README)
            self.assertEqual(README[first.start() - 2 : first.start()], "**", word)

    def test_settings_and_presets_are_all_there(self):
        text = sluice("generate", "--help").stdout
        listed = text[text.index("Policies:") : text.index("Exit codes:")]
        names = re.findall(r"^  (\w+) ", listed, flags=re.MULTILINE)
        self.assertGreater(len(names), 15)
        for name in names:
            self.assertTrue(f"`{name}`" in README, name)


if __name__ == "__main__":
    unittest.main()
