"""sluice plan and --plan: plans against those of real runs, predictions, and wrong input."""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from command import MODEL, ROOT, sluice

sys.path.insert(0, str(ROOT / "bench"))
import million  # noqa: E402

MIB = 1 << 20


def planned(*arguments) -> dict:
    done = sluice("plan", *arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Plans(unittest.TestCase):
    def test_bytes_are_those_that_a_gpu_planned(self):
        """A GPU ran by these plans; none is here."""
        for run, measured in zip(million.disk_runs(), million.of_disk(), strict=True):
            with self.subTest(run["name"]):
                plan = planned("--shape", "llama3-8b", *measured.plan)["bytes"]
                # Buffers have other sizes since, which may cost a page of rows or leave room for one.
                pages = (plan["resident_tokens"] - run["plan"]["resident_tokens"]) // 128
                self.assertIn(pages, (-1, 0, 1))
                grown = {"resident_tokens": plan["resident_tokens"],
                         "device_bytes": run["plan"]["device_bytes"] + pages * 128 * 131072}  # fmt: skip
                self.assertEqual(plan | run["plan"] | grown, plan)

    def test_predictions_are_within_a_fifth_of_what_was_measured(self):
        rows = million.compared(million.Sluice(os.environ["SLUICE_BINARY"]))
        errors = [int(e) for row in rows[2:] for e in re.findall(r"([+-]\d+) %", row)]
        self.assertGreater(len(errors), 30)
        for error in errors:
            self.assertLessEqual(abs(error), 20)
        text = (ROOT / "docs" / "million.md").read_text()
        self.assertIn("\n".join(rows), text, "bench/million.py SLUICE --write docs/million.md")

    def test_the_document_has_what_plan_says(self):
        text = (ROOT / "docs" / "million.md").read_text()
        plan = planned("--shape", "llama3-8b", "--machine", "rtx4090", "--context", "1M", "--kv-dtype", "int8")
        self.assertIn(million.cell(plan), text)
        for cap in (16, 24):
            plan = planned("--shape", "llama3-8b", "--machine", "rtx5090", "--context", "1K", "--weights",
                           "int4", "--policy", "values", "--device-memory", f"{cap}GiB")  # fmt: skip
            self.assertIn(f"{plan['longest_context']:,}", text)

    def test_runs_by_the_plan(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            done = sluice("plan", "-m", MODEL, "--context", "16K", "--device-memory", "40MiB", "--json", file)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"--plan {file}", done.stdout)
            report = Path(folder) / "report.json"
            run = sluice("generate", "-m", MODEL, "--plan", file, "-p", "Well, Prince,", "-n", 2, "--json", report)
            self.assertEqual(run.returncode, 0, run.stderr)
            plan, ran = json.loads(file.read_text()), json.loads(report.read_text())
            self.assertEqual(ran["policy"], plan["policy"])
            for name, value in plan["bytes"].items():
                if name not in ("program_bytes", "process_bytes"):
                    self.assertEqual(ran["plan"][name], value, name)
            self.assertLessEqual(ran["memory"]["device_peak_bytes"], 40 * MIB)
            both = sluice("generate", "-m", MODEL, "--plan", file, "--policy", "dense", "-p", "x")
            self.assertEqual(both.returncode, 2)
            self.assertIn("--plan decides --policy", both.stderr)

    def test_edited_plans_are_refused(self):
        good = planned("-m", MODEL, "--context", "16K", "--device-memory", "40MiB")
        for code, mention, spoilt in (
            (4, "context is 0", {"context": 0}),
            (4, "colour is no field", {"colour": 1}),
            (4, "policy cannot be read", {"policy": "bogus"}),
            (4, "weights is 'int3'", {"weights": "int3"}),
            (2, "another model", {"model": good["model"] | {"layers": 13}}),
            (2, "made for a GPU", {"device": "gpu"}),
            (8, "--device-memory", {"device_memory": 5}),
        ):
            with self.subTest(mention), tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "plan.json"
                file.write_text(json.dumps(good | spoilt))
                done = sluice("generate", "-m", MODEL, "--plan", file, "-p", "x")
                self.refused(done, code, mention)
                self.assertEqual(list(Path(folder).iterdir()), [file])

    def test_wishes_that_make_no_sense_are_refused(self):
        shape = ("--shape", "llama3-8b", "--machine", "rtx4090")
        for code, mention, arguments in (
            (2, "--context '1Q'", (*shape, "--context", "1Q")),
            (2, "--context must be 1", (*shape, "--context", "0")),
            (2, "--context must be 1", (*shape, "--context", "9999999999")),
            (2, "'nope' is not known", ("--shape", "nope", "--machine", "h200", "--context", "1K")),
            (2, "'nope' is not known", ("--shape", "nope", "--context", "1K")),
            (2, "'h300' is not known", ("--shape", "llama3-8b", "--machine", "h300", "--context", "1K")),
            (3, "gone.json", ("--shape", "llama3-8b", "--machine", "gone.json", "--context", "1K")),
            (2, "'24XB' is not a byte count", (*shape, "--context", "1K", "--device-memory", "24XB")),
            (2, "more than rtx4090 has", (*shape, "--context", "1K", "--device-memory", "40GiB")),
            (2, "names no directory", (*shape, "--context", "1K", "--disk", ":4GiB")),
            (2, "--loss must be", (*shape, "--context", "1K", "--loss", "-1")),
            (2, "give the --machine", ("-m", MODEL, "--context", "1K", "--fastest")),
            (2, "--model or for a --shape", ("--context", "1K")),
            (2, "excludes", (*shape, "-m", MODEL, "--context", "1K")),
            (8, "what fits: a --context of", (*shape, "--context", "1M", "--host-memory", "60GiB")),
            (8, "or --host-memory 64.1 GiB", (*shape, "--context", "1M", "--host-memory", "60GiB")),
            (8, "--disk 1.00 GiB is too small",
             (*shape, "--context", "1M", "--host-memory", "60GiB", "--disk", "/d:1GiB")),
            (3, "/not/there",
             ("-m", MODEL, "--device", "cpu", "--context", "24K", "--device-memory", "96MiB",
              "--host-memory", "120MiB", "--disk", "/not/there:1GiB")),
        ):  # fmt: skip
            with self.subTest(mention):
                self.refused(sluice("plan", *arguments), code, mention)

    def test_a_head_dim_without_an_index_or_without_kernels(self):
        config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
                  "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000,
                  "max_position_embeddings": 8192}  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            shape = Path(folder) / "config.json"
            shape.write_text(json.dumps(config | {"head_dim": 18}))
            done = sluice("plan", "--shape", shape, "--device", "cpu", "--context", "8K")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, r"(?m)^ +policy +select=dense$")
            shape.write_text(json.dumps(config | {"head_dim": 40}))
            done = sluice("plan", "--shape", shape, "--machine", "rtx4090", "--context", "8K")
            self.refused(done, 5, "no attention for head_dim 40")

    def test_limits_of_the_process_count_here_but_not_elsewhere(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))

        here = sluice("plan", "-m", MODEL, "--device", "cpu", "--context", "1M", preexec_fn=limit)
        self.refused(here, 8, "what fits: a --context of")
        elsewhere = sluice("plan", "-m", MODEL, "--machine", "h200", "--context", "1M", preexec_fn=limit)
        self.assertEqual(elsewhere.returncode, 0, elsewhere.stderr)

    def refused(self, done: subprocess.CompletedProcess, code: int, mention: str):
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertIn(mention, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertEqual(done.stdout, "")


if __name__ == "__main__":
    unittest.main()
