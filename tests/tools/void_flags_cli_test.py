"""Flags that can do nothing: each says so in one line, or is refused. Nothing is left out silently."""

import json
import tempfile
import unittest
from pathlib import Path

from chat_model import write_model
from command import MODEL, ROOT, sluice

BOOK = ROOT / "data" / "war-and-peace.txt"
GREEDY = "--temperature 0 always takes the likeliest token"
NO_PLAN = "there is no plan to show without --context"
SHORT = ["--length", 300, "--rounds", 1, "--needles", 1, "--policy", "dense"]


class VoidFlags(unittest.TestCase):
    def notes(self, *arguments, **options):
        done = sluice(*arguments, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [line for line in done.stderr.splitlines() if "do nothing" in line or "does nothing" in line]

    def generated(self, *flags):
        return self.notes("generate", "-m", MODEL, "-p", "Once", "-n", 2, "-q", *flags)

    def test_sampling(self):
        note = "note: --top-k, --top-p, --min-p and --seed do nothing: " + GREEDY
        every = ["--top-k", 5, "--top-p", 0.5, "--min-p", 0.1, "--seed", 1]
        self.assertEqual(self.generated(*every), [note])
        self.assertEqual(self.generated("--seed", 9), [f"note: --seed does nothing: {GREEDY}"])
        self.assertEqual(self.generated("--temperature", 1, "--top-k", 1, "--seed", 9),
                         ["note: --temperature and --seed do nothing: --top-k 1 always takes the likeliest token"])
        for flags in (["--temperature", 1, *every], ["--repetition-penalty", 1.1], ["--top-p", 1]):
            self.assertEqual(self.generated(*flags), [])
        with tempfile.TemporaryDirectory() as folder:
            flags = ["chat", "-m", write_model(Path(folder)), "-n", 2, "-q", *every]
            self.assertEqual(self.notes(*flags, stdin="Hello\n"), [note])

    def test_memory_and_device(self):
        cached = ["--row-cache", "1MiB"]
        small = ["--context", 9000, "--device-memory", "4MiB"]
        for flags, note in (
            (cached, "--row-cache does nothing: it is a part of --device-memory, which is not given"),
            ([*cached, "--device-memory", "64MiB"], "--row-cache does nothing: every row is on the device already"),
            ([*cached, *small, "--policy", "dense"], "--row-cache does nothing: the policy is dense, so no row"),
            (["--host-attention", 0.5], "--host-attention does nothing: without a GPU"),
            (["--device", "reference", "--threads", 2, "--compute", "bf16"],
             "--threads and --compute do nothing: the reference device computes in f32"),
            (["--policy", "dense recent=4"], "recent does nothing: the policy select=dense keeps every token"),
            (["--policy", "quest bits=2"], "bits does nothing: the policy select=quest keeps no keys"),
        ):  # fmt: skip
            with self.subTest(flags):
                notes = self.generated(*flags)
                self.assertEqual(len(notes), 1, notes)
                self.assertTrue(notes[0].startswith("note: " + note), notes)
        for flags in (["--row-cache", 0], [*cached, *small, "--policy", "streaming"], ["--threads", 1],
                      ["--policy", "quest candidates=2000 bits=2"], ["--policy", "sparq bits=2"],
                      ["--host-attention", "auto"]):  # fmt: skip
            self.assertEqual(self.generated(*flags), [], flags)

    def test_what_the_model_or_the_policy_lacks(self):
        report = ["--json", "/dev/null", "--positions"]
        self.assertEqual(self.generated(*report, "--policy", "dense"),
                         ["note: --positions does nothing: no layer selected tokens, so it lists none"])
        self.assertEqual(self.generated(*report, "--policy", "streaming"), [])
        self.assertEqual(self.generated("--ignore-eos"), [])
        with tempfile.TemporaryDirectory() as folder:
            for file in MODEL.iterdir():
                (Path(folder) / file.name).write_bytes(file.read_bytes())
            config = json.loads((MODEL / "config.json").read_text())
            del config["eos_token_id"]
            (Path(folder) / "config.json").write_text(json.dumps(config))
            (Path(folder) / "generation_config.json").unlink(missing_ok=True)
            self.assertEqual(self.notes("generate", "-m", folder, "-p", "Once", "-n", 2, "--ignore-eos"),
                             ["note: --ignore-eos does nothing: this model names no token that ends a text"])

    def test_info(self):
        flags = ["--policy", "values", "--device-memory", "1GiB", "--threads", 1]
        self.assertEqual(self.notes("info", "-m", MODEL, *flags),
                         [f"note: --policy, --device-memory and --threads do nothing: {NO_PLAN}"])
        self.assertEqual(self.notes("info", "-m", MODEL, *flags, "--context", 1000), [])
        self.assertEqual(self.notes("info", "-m", MODEL, "--kv-dtype", "f16"), [])
        for context in (0, -5):
            done = sluice("info", "-m", MODEL, "--context", context)
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        for command in (["generate", "-p", "x"], ["chat"]):
            done = sluice(command[0], "-m", MODEL, *command[1:], "--context", 0)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("--context: 0 is too few", done.stderr)

    def test_eval(self):
        flags = ["eval", "-m", MODEL, "-t", BOOK, *SHORT, "--seed", 2, "--digits", 3, "--tokens", 4]
        self.assertEqual(self.notes(*flags, "--task", "perplexity"),
                         ["note: --needles, --digits and --seed do nothing: no --task that was given depends on that"])
        self.assertEqual(self.notes(*flags, "--task", "needle"),
                         ["note: --tokens does nothing: no --task that was given depends on that"])
        self.assertEqual(self.notes(*flags, "--task", "needle", "--task", "drift"), [])
        done = sluice(*flags, "--task", "drift", "--chunk", 8, "--step-tokens", 16)
        self.assertIn("note: a step takes the 8 tokens of --chunk, not 16\n", done.stderr)

    def test_calibrate(self):
        for preset, flags in (("values", (["--budget", 8], ["--needles", 1], ["--seed", 2])),
                              ("tidaldecode", (["--loss", 0.1], ["--save", "bus"], ["--rows", 4],
                                               ["--value-bits", 2], ["--key-bits", 2], ["--tokens", 4]))):  # fmt: skip
            for flag in flags:
                done = sluice("calibrate", "-m", MODEL, "-t", BOOK, "--preset", preset, *flag)
                self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
                self.assertIn(f"{flag[0]} is no flag of --preset {preset}", done.stderr)


if __name__ == "__main__":
    unittest.main()
