"""`--speculate`: the same text in fewer steps, and what is refused."""

import json
import shutil
import tempfile
import unittest
from pathlib import Path

from command import MODEL, ROOT, sluice

BOOK = ROOT / "data" / "war-and-peace.txt"
USAGE = 2


def generate(prompt, *flags):
    done = sluice("generate", "-m", MODEL, "-q", "-n", 100, "--ignore-eos", "--compute", "f32",
                  "--kv-dtype", "f32", "--json", "-", *flags, stdin=prompt)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Speculate(unittest.TestCase):
    def test_the_same_text_in_fewer_steps(self):
        text = BOOK.read_text(encoding="utf-8")
        prompt = text[20000:23000] + "\n\n" + text[20000:20500]
        for flags in (["--policy", "values"], ["--policy", "dense", "--temperature", 0.6]):
            plain = generate(prompt, *flags)
            self.assertEqual(plain["drafts"], {"steps": 0, "drafted": 0, "accepted": 0})
            drafted = generate(prompt, *flags, "--speculate", "lookup", "--drafts", 5)
            self.assertEqual(drafted["text"], plain["text"])
            steps = plain["ledger"]["decode"]["steps"] - drafted["drafts"]["accepted"]
            self.assertEqual(drafted["ledger"]["decode"]["steps"], steps)
            if "dense" not in flags:  # a greedy text repeats itself
                self.assertGreater(drafted["drafts"]["accepted"], 5)
            self.assertEqual(drafted["ledger"]["decode"]["tokens"],
                             plain["ledger"]["decode"]["tokens"])
        plain = generate(text[:600], "--policy", "dense")
        by_model = generate(text[:600], "--policy", "dense", "--speculate", MODEL,
                            "--host-memory", "1GiB")
        self.assertEqual(by_model["text"], plain["text"])

    def test_the_summary_says_what_was_accepted(self):
        done = sluice("generate", "-m", MODEL, "-n", 30, "-p", "one two three four one two three "
                      "four one two three four one two", "--ignore-eos", "--speculate", "lookup")
        self.assertRegex(done.stderr, r"drafts   \d+ drafts accepted of \d+, \d\.\d\d tokens per ")

    def test_chat_takes_it(self):
        done = sluice("chat", "--help")
        self.assertIn("--speculate", done.stdout)

    def test_bad_values(self):
        def refused(code, part, *flags):
            done = sluice("generate", "-m", MODEL, "-p", "x", *flags)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(part, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

        refused(USAGE, "--drafts 0", "--speculate", "lookup", "--drafts", 0)
        refused(USAGE, "--drafts 64", "--speculate", "lookup", "--drafts", 64)
        refused(USAGE, "--drafts", "--speculate", "lookup", "--drafts", "many")
        refused(USAGE, "--speculate", "--drafts", 4)
        refused(USAGE, "--speculate", "--speculate", "")
        refused(USAGE, "--speculate", "--speculate", "lookup", "--positions", "--json", "x.json")
        self.assertNotEqual(sluice("generate", "-m", MODEL, "-p", "x", "--speculate",
                                   "/nowhere").returncode, 0)
        with tempfile.TemporaryDirectory() as folder:
            other = Path(folder) / "other"
            shutil.copytree(MODEL, other)
            tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
            vocabulary = tokenizer["model"]["vocab"]
            a, b = [token for token in vocabulary if token.isalpha() and len(token) == 1][:2]
            vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
            (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
            refused(USAGE, "another vocabulary: token", "--speculate", str(other))


if __name__ == "__main__":
    unittest.main()
