"""What `sluice` does with good input."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from command import GOLDEN, MODEL, ROOT, peak_memory, sluice

BOOK = ROOT / "data" / "war-and-peace.txt"
# The prompt of the golden answers: 6,052 tokens of the book with a number hidden in them.
NEEDLE = ROOT / "tests" / "data" / "needle_6k.txt"


class Generate(unittest.TestCase):
    def test_finds_the_needle_under_two_mebibytes(self):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            done = sluice("generate", "-m", MODEL, "--device-memory", "2MiB", "-n", 4,
                          "--json", report, "-f", NEEDLE)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(done.stdout.startswith("481926"), done.stdout)
            data = json.loads(report.read_text())
        self.assertLessEqual(data["memory"]["device_peak_bytes"], 2 << 20)
        self.assertGreater(data["plan"]["dense_bytes"], 30 << 20)
        misses = [e for e in data["ledger"]["decode"]["totals"] if e["cause"] == "miss"]
        self.assertEqual((misses[0]["from"], misses[0]["to"]), ("host", "device"))
        # 12 layers x 2 KV heads x rows of 256 B, for each of the 3 decoded tokens.
        context = data["timings"]["prefill_tokens"]
        self.assertGreater(misses[0]["bytes"], 3 * 24 * 256 * (context - 2000))
        self.assertLess(misses[0]["bytes"], 3 * 24 * 256 * (context + 4))
        self.assertIn("dense on the device", done.stderr)
        self.assertRegex(done.stderr, r"load     41\.\d MiB in \d+\.\d{3} s, ")

    def test_the_same_text_at_every_cap(self):
        prompt = BOOK.read_text(encoding="utf-8")[:6000]
        # In fp32, where the order of the partial sums cannot decide between near ties.
        texts = {
            sluice("generate", "-m", MODEL, "-q", "-n", 12, "--ignore-eos", "--kv-dtype", "f32",
                   "--policy", "dense",
                   "--compute", "f32", *cap, stdin=prompt).stdout
            for cap in ([], ["--device-memory", "512KiB"], ["--device-memory", "3MiB"],
                        ["--device-memory", "1GiB"])
        }
        self.assertEqual(len(texts), 1, texts)

    def test_the_same_text_from_disk(self):
        prompt = BOOK.read_text(encoding="utf-8")[:6000]
        common = ["generate", "-m", MODEL, "--context", 33000, "-n", 12, "--ignore-eos", "-q",
                  "--kv-dtype", "f32", "--compute", "f32", "--json", "-"]
        for policy in ("dense", "values"):
            reports = []
            for flags in ([], ["--host-memory", "170MiB", "--disk", "/var/tmp"]):
                done = sluice(*common, "--policy", policy, *flags, stdin=prompt)
                self.assertEqual(done.returncode, 0, done.stderr)
                reports.append(json.loads(done.stdout))
            in_memory, on_disk = reports
            self.assertEqual(in_memory["text"], on_disk["text"])
            self.assertFalse(in_memory["plan"]["on_disk"])
            self.assertTrue(on_disk["plan"]["on_disk"])
            self.assertGreater(on_disk["plan"]["disk_bytes"], 300 << 20)
            # One cap covers everything that the process allocates.
            peak = on_disk["memory"]["device_peak_bytes"] + on_disk["memory"]["host_peak_bytes"]
            self.assertLess(peak, 170 << 20)

    def test_policies_answer_and_report(self):
        # The number, 2,100 tokens around it, and the question.
        needle = NEEDLE.read_text(encoding="utf-8")
        prompt = needle[2500:8500] + needle[needle.index("\nQuestion:"):]
        for policy in ("sluice", "sparq", "quest prune=top_k(512)", "zipvl", "tidaldecode"):
            with self.subTest(policy):
                done = sluice("generate", "-m", MODEL, "-n", 4, "--policy", policy, stdin=prompt)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertTrue(done.stdout.startswith("481926"), done.stdout)
        # What cannot hold the answer does not find it: the policy is really in force.
        for policy in (
            "streaming",
            "select=dense prefill=zipvl(0.975,evict)",
            "values prefill=pages(0.8)",
        ):
            done = sluice("generate", "-m", MODEL, "-n", 4, "--policy", policy, stdin=prompt)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertFalse(done.stdout.startswith("48192"), done.stdout)

    def test_coded_weights_answer_in_less_memory(self):
        needle = NEEDLE.read_text(encoding="utf-8")
        prompt = needle[2500:8500] + needle[needle.index("\nQuestion:"):]
        bytes_of = []
        for weights in ("auto", "int8", "int4"):
            with self.subTest(weights):
                flags = ["-m", MODEL, "--weights", weights]
                done = sluice("generate", *flags, "-n", 4, stdin=prompt)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertTrue(done.stdout.startswith("481926"), done.stdout)
                info = sluice("info", *flags, "--context", 4096)
                bytes_of.append(float(re.search(r"weights +([\d.]+) MiB", info.stdout).group(1)))
        self.assertLess(bytes_of[1], 0.6 * bytes_of[0])
        self.assertLess(bytes_of[2], 0.6 * bytes_of[1])

    def test_notes_what_a_prompt_begins_with(self):
        def note(prompt, *flags, config=None):
            with tempfile.TemporaryDirectory() as folder:
                for file in MODEL.iterdir():
                    os.symlink(file, Path(folder) / file.name)
                if config is not None:
                    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
                done = sluice("generate", "-m", folder, "-n", 1, "-p", prompt, *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            text = " ".join(done.stderr.split())
            return text[text.index("note:"):] if "note:" in text else ""

        twice = "<|begin_of_text|>Well, Prince"
        self.assertIn("begins with '<|begin_of_text|>', which is put before every", note(twice))
        self.assertIn("begins with '<|begin_of_text|>'", note(twice, "--bos", "always"))
        for prompt, flags in ((twice, ["--bos", "never"]), (twice, ["-q"]), ("Well", [])):
            self.assertEqual(note(prompt, *flags), "")
        asking = {"add_bos_token": True, "tokenizer_class": "GPT2Tokenizer",
                  "bos_token": "<|begin_of_text|>"}
        self.assertIn("asks for a BOS token (add_bos_token), which", note("Well", config=asking))
        self.assertEqual(note("Well", "--bos", "always", config=asking), "")
        self.assertEqual(note("Well", config={**asking, "tokenizer_class": "LlamaTokenizer"}), "")
        self.assertEqual(note("Well", config={**asking, "add_bos_token": False}), "")

    def test_the_default_policy_gives_way_to_a_cap(self):
        flags = ["generate", "-m", MODEL, "-n", 2, "-f", NEEDLE, "--device-memory", "2MiB"]
        done = sluice(*flags)
        self.assertIn("select=dense", done.stderr)
        done = sluice(*flags, "--policy", "sluice")
        self.assertEqual(done.returncode, 8, done.stderr)
        self.assertIn("key index", done.stderr)
        done = sluice("generate", "-m", MODEL, "-n", 2, "-p", "Well, Prince")
        self.assertIn("select=dense, for all rows are where attention reads them", " ".join(done.stderr.split()))
        self.assertNotIn("note:", done.stderr)
        # 4 MiB of a layer's rows, which are 512 bytes a token.
        for context, line in ((8192, "select=dense, for"), (8193, "select=int4 prune=top_k(64)")):
            done = sluice("generate", "-m", MODEL, "-n", 2, "-p", "x", "--context", context)
            self.assertIn(line, done.stderr)

    def test_prompt_from_flag_file_and_pipe_are_one(self):
        text = "Well, Prince, so Genoa and Lucca"
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(text)
            file.flush()
            flags = ["generate", "-m", MODEL, "-q", "-n", 8]
            results = [
                sluice(*flags, "-p", text).stdout,
                sluice(*flags, "-f", file.name).stdout,
                sluice(*flags, stdin=text).stdout,
            ]
        self.assertEqual(len(set(results)), 1)
        self.assertGreater(len(results[0]), 8)

    def test_stop_string_and_seed(self):
        flags = ["generate", "-m", MODEL, "-q", "-p", "Once upon a time", "--temperature", 1,
                 "-n", 60, "--ignore-eos", "--seed", 7]
        text = sluice(*flags).stdout
        self.assertEqual(text, sluice(*flags).stdout)
        word = text.split()[5]
        stopped = sluice(*flags, "--stop", word).stdout
        # The output ends with a line break, whether or not the text does.
        self.assertEqual(stopped.rstrip("\n"), text[: text.index(word)].rstrip("\n"))

    def test_answers_under_a_constraint(self):
        with tempfile.TemporaryDirectory() as folder:
            schema, rules = Path(folder) / "schema.json", Path(folder) / "rules"
            schema.write_text('{"type":"array","items":{"enum":["b","a"]},"minItems":2,"maxItems":3}')
            rules.write_text('root ::= [a-z]{2,6} "."')
            common = ["generate", "-m", MODEL, "-q", "-n", 200, "-p", "Pierre"]
            done = sluice(*common, "--json-schema", schema)
            self.assertIn(len(json.loads(done.stdout)), (2, 3), done.stdout)
            self.assertRegex(sluice(*common, "--regex", "[A-C]{4}").stdout, r"^[A-C]{4}$")
            self.assertRegex(sluice(*common, "--grammar", rules).stdout, r"^[a-z]{2,6}\.$")
            schema.write_text('{"type":"array","uniqueItems":true}')
            for flags, code, text in [
                    (["--json-schema", schema], 5, "--json-schema: JSON schema: the keyword 'uniqueItems'"),
                    (["--json-schema", Path(folder) / "none"], 3, "none"), (["--regex", "("], 2, "--regex: pattern '('"),
                    (["--regex", "a", "--grammar", rules], 2, "excludes"), (["--regex", "a", "--ignore-eos"], 2, "excludes"),
                    (["--regex", "a", "--speculate", "lookup"], 2, "excludes")]:
                with self.subTest(flags=flags):
                    refused = sluice(*common, *flags)
                    self.assertEqual((refused.returncode, refused.stdout), (code, ""), refused.stderr)
                    self.assertIn(text, refused.stderr)

    def test_positions_of_every_step(self):
        done = sluice("generate", "-m", MODEL, "-q", "-n", 4, "--json", "-", "--positions",
                      "--policy", "select=sparq prune=top_k(40) dense=0", "--ignore-eos",
                      stdin=BOOK.read_text(encoding="utf-8")[:3000])  # fmt: skip
        report = json.loads(done.stdout)
        prompt = report["timings"]["prefill_tokens"]
        self.assertEqual([step["length"] for step in report["steps"]],
                         [prompt + i for i in (1, 2, 3)])  # fmt: skip
        for step in report["steps"]:
            self.assertEqual([layer["layer"] for layer in step["layers"]], list(range(1, 12)))
            for layer in step["layers"]:
                for positions in layer["positions"]:
                    self.assertEqual(len(set(positions)), 40)
                    self.assertLess(max(positions), prompt // 128 * 128)

    def test_reports_take_no_memory(self):
        with tempfile.TemporaryDirectory() as folder:
            arguments = ("generate", "-m", MODEL, "-p", "Once upon a time " * 120, "-n", 200,
                         "--ignore-eos", "--policy", "select=sparq prune=top_k(256)")  # fmt: skip
            report = Path(folder) / "report.json"
            alone = peak_memory(*arguments)
            self.assertLess(peak_memory(*arguments, "--json", report), alone + 4 * 2**20)
            self.assertLess(report.stat().st_size, 4 * 2**20)
            reported = peak_memory(*arguments, "--json", report, "--positions")
            self.assertLess(reported, alone + 4 * 2**20)
            self.assertGreater(report.stat().st_size, 4 * 2**20)
            self.assertEqual(len(json.loads(report.read_text())["steps"]), 199)
            homeless = sluice(*arguments[:5], "--json", report, "--positions",
                              env={**os.environ, "TMPDIR": f"{folder}/none"})  # fmt: skip
            self.assertEqual((homeless.returncode, homeless.stderr.count("\n")), (9, 1))
            self.assertIn("set TMPDIR", homeless.stderr)

    def test_a_trace_has_every_operation(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            arguments = ("generate", "-m", MODEL, "-p", "Once upon a time " * 60, "-n", 4,
                         "--ignore-eos", "--policy", "values", "--seed", 1)  # fmt: skip
            plain = sluice(*arguments)
            traced = sluice(*arguments, "--trace", file)
            events = json.loads(file.read_text())["traceEvents"]
            blocked = sluice(*arguments, "--trace", Path(folder) / "no" / "file", check=False)
        self.assertEqual(traced.stdout, plain.stdout)
        self.assertIn(f" events in {file}", traced.stderr)
        names = [event["name"] for event in events if event.get("cat") == "steps"]
        self.assertEqual(names, ["prefill", "decode", "decode", "decode"])
        kinds = {event["cat"] for event in events if event["ph"] == "X"}
        self.assertLessEqual({"dense", "append", "scan", "select", "attend", "copy"}, kinds)
        self.assertEqual(blocked.returncode, 9, blocked.stderr)
        self.assertEqual(blocked.stderr.count("\n"), 1, blocked.stderr)
        for more in (("--trace", "-"), ("--trace", "report", "--json", "report"),
                     ("--trace", "./report", "--json", Path.cwd() / "report")):  # fmt: skip
            refused = sluice(*arguments, *more, check=False)
            self.assertEqual(refused.returncode, 2, refused.stderr)
            self.assertIn("--trace wants a file of its own", refused.stderr)
        both = sluice(*arguments, "--trace", "/dev/null", "--json", "/dev/null")
        self.assertEqual(both.returncode, 0, both.stderr)

    def test_what_is_read_is_not_overwritten(self):
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            model.mkdir()
            for file in MODEL.iterdir():
                (model / file.name).write_bytes(file.read_bytes())
            prompt = Path(folder) / "prompt"
            prompt.write_text("Hello")
            link = Path(folder) / "link"
            link.symlink_to(model / "config.json")
            config = link.read_bytes()
            flags = ("generate", "-m", model, "-n", 2, "-q", "-f", prompt)
            # Files that would be the checkpoint's from now on are its own, too.
            for more in (("--json", link), ("--trace", model / "model.safetensors"), ("--json", prompt),
                         ("--json", model / "sluice.json"), ("--trace", model / "." / "chat_template.jinja"),
                         ("--json", model / "generation_config.json")):  # fmt: skip
                refused = sluice(*flags, *more)
                self.assertEqual(refused.returncode, 2, refused.stderr)
                self.assertEqual(refused.stderr.count("\n"), 1, refused.stderr)
                self.assertIn("would overwrite it", refused.stderr)
            # A report may lie beside them, and be written again.
            for _ in range(2):
                done = sluice(*flags, "--json", model / "report.json")
                self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(link.read_bytes(), config)

    def test_positions_go_into_a_report(self):
        done = sluice("generate", "-m", MODEL, "-p", "Hello", "--positions", check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--positions requires --json", done.stderr)

    def test_json_on_standard_output_is_all_there_is(self):
        done = sluice("generate", "-m", MODEL, "-q", "-p", "Hello", "-n", 3, "--json", "-")
        data = json.loads(done.stdout)
        self.assertEqual(len(data["tokens"]), 3)
        self.assertGreater(data["timings"]["load_seconds"], 0)
        # The weights with what reading them takes, or with the activations that come after it.
        loading = data["plan"]["loading_peak_bytes"]
        host_peak = data["memory"]["load_host_peak_bytes"]
        self.assertGreaterEqual(host_peak, loading)
        self.assertLessEqual(host_peak, loading + data["plan"]["activation_bytes"])
        self.assertGreater(data["memory"]["load_process_peak_bytes"], data["plan"]["weight_bytes"])
        self.assertEqual(data["finish_reason"], "max_tokens")

    def test_interrupt_keeps_what_was_generated(self):
        process = subprocess.Popen(
            [os.environ["SLUICE_BINARY"], "generate", "-m", MODEL, "-p", "Once", "-n", "100000",
             "--ignore-eos"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, errors)
        self.assertEqual(len(first), 20)
        self.assertTrue(rest.endswith(b"\n"))
        self.assertIn(b"decode", errors)
        self.assertIn(b"interrupted", errors)

    def test_interrupt_during_prefill(self):
        process = subprocess.Popen(
            [os.environ["SLUICE_BINARY"], "generate", "-m", MODEL, "-f", BOOK, "-n", "1"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 130, errors)
        self.assertEqual(out.strip(), b"")

    def test_info_and_topology(self):
        info = sluice("info", "-m", MODEL, "--context", 1000000)
        self.assertEqual(info.returncode, 0, info.stderr)
        self.assertIn("6144 B per token in bf16", info.stdout)
        chosen = sluice("info", "-m", MODEL, "--context", 100000, "--policy", "auto")
        self.assertEqual(chosen.returncode, 0, chosen.stderr)
        self.assertIn("compensate=values", chosen.stdout)
        with tempfile.TemporaryDirectory() as folder:
            config = json.loads((MODEL / "config.json").read_text())
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 9000}
            for file in MODEL.iterdir():
                (Path(folder) / file.name).symlink_to(file)
            (Path(folder) / "config.json").unlink()
            (Path(folder) / "config.json").write_text(json.dumps(config))
            windowed = sluice("info", "-m", folder)
            self.assertEqual(windowed.returncode, 0, windowed.stderr)
            self.assertIn("9000 tokens, all that some layers attend to", windowed.stdout)
            self.assertIn("at 1048576 tokens", windowed.stdout)
            config["architectures"], config["model_type"] = ["LlamaForCausalLM"], "llama"
            (Path(folder) / "config.json").write_text(json.dumps(config))
            limited = sluice("info", "-m", folder)
            self.assertEqual(limited.returncode, 0, limited.stderr)
            self.assertIn("9000 tokens, which no context may exceed", limited.stdout)
            self.assertRegex(limited.stdout, r"at 8192 tokens\n.*at 9000 tokens\n(?!.* tokens)")
        topology = sluice("topology", "--size", "16MiB")
        self.assertEqual(topology.returncode, 0, topology.stderr)
        self.assertRegex(topology.stdout, r"(?m)^bandwidth .* GB/s.*, over 16\.0 MiB$")
        self.assertRegex(topology.stdout, r"(?m)^GPU +\S")
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            measured = sluice("topology", "--size", "16MiB", "--disk", folder)
            self.assertEqual(measured.returncode, 0, measured.stderr)
            self.assertRegex(measured.stdout, r"(?m)^disk +" + re.escape(folder))
            self.assertRegex(measured.stdout, r"(?m)^disk +reads \d+ times 4 KiB a second, .* over 16\.0 MiB$")
            self.assertEqual(list(Path(folder).iterdir()), [])
            wrong = sluice("topology", "--size", 0, "--disk", Path(folder) / "missing")
            self.assertEqual((wrong.returncode, len(wrong.stderr.splitlines())), (3, 1), wrong.stderr)
        for device in ("cpu", "cuda:99", "gpu"):
            wrong = sluice("topology", "--size", 0, "--device", device)
            self.assertIn(wrong.returncode, (2, 5), wrong.stderr)
            self.assertEqual(wrong.stdout, "")
            self.assertEqual(len(wrong.stderr.splitlines()), 1)
            self.assertIn("--device " + device.split(":")[0], wrong.stderr)
        wrong = sluice("topology", "--size", "x")
        self.assertEqual((wrong.returncode, wrong.stdout), (2, ""))

    def test_help_and_version(self):
        for arguments in (["--help"], ["generate", "--help"], ["--version"]):
            done = sluice(*arguments)
            self.assertEqual(done.returncode, 0)
            self.assertTrue(done.stdout)

    def test_models_without_a_tokenizer_show_their_shape(self):
        done = sluice("info", "-m", GOLDEN / "qwen3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("qwen3", done.stdout)


if __name__ == "__main__":
    unittest.main()
