"""Wrong input: one clear line that names the file or flag, its own exit code, no partial answer."""

import json
import os
import re
import resource
import shutil
import struct
import tempfile
import unittest
from pathlib import Path

from command import GOLDEN, MODEL, ROOT, sluice

USAGE, NOT_FOUND, CORRUPT, UNSUPPORTED, TOKENIZER, PROMPT, MEMORY, IO, NUMERIC = *range(2, 10), 11

REPORT = '{"written_by": "sluice 0"}'  # the beginning of a report is what it is known by


class BadInput(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.model = Path(self.folder.name) / "model"
        shutil.copytree(GOLDEN / "qwen2", self.model)
        shutil.copy(MODEL / "tokenizer.json", self.model)

    def refused(self, code: int, *mentions: str, flags=(), stdin="Hello", model=None, **options):
        done = sluice("generate", "-m", model or self.model, "-n", 2, *flags, stdin=stdin,
                      **options)
        self.assertEqual(done.returncode, code, done.stderr)
        lines = [line for line in done.stderr.splitlines() if line.startswith("sluice: ")]
        self.assertEqual(len(lines), 1, done.stderr)
        for mention in mentions:
            self.assertIn(mention, lines[0])
        self.assertEqual(done.stdout.strip(), "")

    def edit_config(self, **changes):
        path = self.model / "config.json"
        config = json.loads(path.read_text())
        config.update(changes)
        path.write_text(json.dumps(config))

    def edit_header(self, change):
        """Rewrites model.safetensors with change(header) applied to its header."""
        path = self.model / "model.safetensors"
        raw = path.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])

    # Flags

    def test_flags(self):
        self.refused(USAGE, "--device-memory", "lots", flags=["--device-memory", "lots"])
        self.refused(USAGE, "--weights", "int3", flags=["--weights", "int3"])
        self.refused(USAGE, "temperature", flags=["--temperature", "-1"])
        self.refused(USAGE, "top-p", flags=["--top-p", "1.5"])
        self.refused(USAGE, "--no-such-flag", flags=["--no-such-flag"])
        self.refused(USAGE, "--device", "abacus", flags=["--device", "abacus"],
                     model=MODEL)
        self.refused(USAGE, "--device", "cuda:x", flags=["--device", "cuda:x"], model=MODEL)
        # Where there is a GPU, not a hundred of them.
        self.refused(UNSUPPORTED, "--device cuda", flags=["--device", "cuda:99"], model=MODEL)
        self.refused(USAGE, "--kv-dtype", flags=["--kv-dtype", "int3"])
        self.refused(USAGE, "--chunk", flags=["--chunk", "-1"])
        self.refused(USAGE, "--threads", flags=["--threads", "-2"])
        for share in ("1.5", "-0.1", "nan", "inf", "half", ""):
            self.refused(USAGE, "--host-attention", flags=["--host-attention", share])
        self.refused(USAGE, "--context", flags=["--context", "-5"], model=MODEL)
        self.refused(USAGE, "--prompt-file", flags=["-p", "x", "--prompt-file", "y"])

    def test_numbers_are_decimal_and_fit(self):
        text = sluice("generate", "-m", MODEL, "-q", "-p", "x", "-n", 10).stdout
        self.assertEqual(sluice("generate", "-m", MODEL, "-q", "-p", "x", "-n", "010").stdout, text)
        for flag, value in (("-n", "0x10"), ("-n", "1e2"), ("-n", "2147483648"), ("--seed", "-1"),
                            ("--seed", str(1 << 64)), ("--threads", "two"), ("--top-k", "")):
            self.refused(USAGE, flag.lstrip("-n"), "is", flags=[flag, value])

    def test_empty_values_are_not_the_default(self):
        for flag in ("--device-memory", "--host-memory", "--json", "--policy", "--prompt-file"):
            self.refused(USAGE, flag, "empty", flags=[flag, ""])

    def test_stop_strings_are_taken_as_they_are(self):
        flags = ["generate", "-m", MODEL, "-q", "-p", "Once upon a time", "-n", 20]
        text = sluice(*flags).stdout
        word = text.split()[3]
        done = sluice(*flags, "--stop", f"[{word}]", "--stop", "[]")
        self.assertEqual((done.returncode, done.stdout), (0, text), done.stderr)
        self.assertNotEqual(sluice(*flags, "--stop", word).stdout, text)

    def test_long_and_strange_values_are_shown_short_and_plain(self):
        for flags in (["--device", "x" * 100000], ["--" + "x" * 100000], ["-n", "`" + "a" * 100000],
                      ["--policy", "\u202e\u2028" * 1000], ["--device", "\udcff\n\x1b[31m"]):
            done = sluice("generate", "-m", MODEL, "-p", "x", *flags)
            self.assertEqual(done.returncode, USAGE)
            self.assertLess(len(done.stderr), 3000)
            self.assertEqual(done.stderr.count("\n"), 1)
            self.assertTrue(done.stderr[:-1].isprintable(), done.stderr)

    def test_closed_streams_are_not_taken_for_files(self):
        flags = ["generate", "-m", MODEL, "-q", "-n", 1]
        done = sluice(*flags, stdin=None, preexec_fn=lambda: os.close(0))
        self.assertIn(done.returncode, (PROMPT, IO), done.stderr)
        done = sluice(*flags, "-p", "x", stdout=None, preexec_fn=lambda: os.close(1))
        self.assertEqual(done.returncode, IO, done.stderr)

    def test_help_that_cannot_be_shown(self):
        with open("/dev/full", "wb") as full:
            for flags in (["--help"], ["generate", "--help"], ["--version"]):
                done = sluice(*flags, stdout=full)
                self.assertEqual(done.returncode, IO)

    def test_no_command(self):
        done = sluice()
        self.assertEqual(done.returncode, USAGE)
        self.assertEqual(len(done.stderr.splitlines()), 1)

    def test_max_tokens(self):
        done = sluice("generate", "-m", MODEL, "-p", "x", "-n", 0)
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("--max-tokens 0: give 1 or more", done.stderr)

    # Files

    def test_missing_files(self):
        self.refused(NOT_FOUND, "nowhere", model=Path(self.folder.name) / "nowhere")
        self.refused(NOT_FOUND, "nothing.txt", flags=["-f", "nothing.txt"], model=MODEL)
        self.refused(NOT_FOUND, self.folder.name, flags=["-f", self.folder.name], model=MODEL)
        (self.model / "model.safetensors").unlink()
        self.refused(NOT_FOUND, "model.safetensors")

    def test_missing_tokenizer(self):
        (self.model / "tokenizer.json").unlink()
        self.refused(TOKENIZER, "tokenizer.json")

    def test_broken_json(self):
        for name, code in (("config.json", CORRUPT), ("tokenizer.json", TOKENIZER)):
            path = self.model / name
            text = path.read_text()
            path.write_text(text[: len(text) // 2])
            self.refused(code, name)
            path.write_text(text)

    def test_truncated_safetensors(self):
        path = self.model / "model.safetensors"
        raw = path.read_bytes()
        for size in (0, 5, 8, 1000, len(raw) - 1):
            path.write_bytes(raw[:size])
            self.refused(CORRUPT, "model.safetensors")

    def test_oversized_header(self):
        path = self.model / "model.safetensors"
        path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
        self.refused(CORRUPT, "model.safetensors", "header")

    def test_overlapping_tensors(self):
        def overlap(header):
            names = [name for name in header if name != "__metadata__"]
            header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
            header[names[1]]["shape"] = header[names[0]]["shape"]

        self.edit_header(overlap)
        self.refused(CORRUPT, "model.safetensors")

    def test_wrong_dtype(self):
        def integers(header):
            header["model.norm.weight"]["dtype"] = "I16"

        self.edit_header(integers)
        self.refused(UNSUPPORTED, "model.norm.weight", "I16")

    def test_missing_tensor(self):
        def rename(header):
            header["model.norm.weights"] = header.pop("model.norm.weight")

        self.edit_header(rename)
        self.refused(CORRUPT, "model.norm.weight")

    def test_shape_disagrees_with_config(self):
        self.edit_config(intermediate_size=161)
        self.refused(CORRUPT, "160", "161")

    def test_unsupported_by_name(self):
        self.edit_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0})
        self.refused(UNSUPPORTED, "dynamic")
        self.edit_config(rope_parameters={"rope_type": "default"}, hidden_act="gelu")
        self.refused(UNSUPPORTED, "gelu")
        self.edit_config(architectures=["GPT2LMHeadModel"], model_type="gpt2")
        self.refused(UNSUPPORTED, "gpt2")

    def test_tensors_that_would_not_be_read(self):
        tensors = "model.safetensors"
        self.edit_config(num_hidden_layers=2, layer_types=["full_attention"] * 2)
        self.refused(UNSUPPORTED, tensors, "'model.layers.2.", "num_hidden_layers")
        self.edit_config(num_hidden_layers=3, layer_types=["full_attention"] * 3)

        def add_scale(header):
            header["model.layers.0.mlp.up_proj.weight_scale"] = {
                "dtype": "F32", "shape": [0], "data_offsets": [0, 0]}  # fmt: skip

        self.edit_header(add_scale)
        self.refused(UNSUPPORTED, tensors, "'model.layers.0.mlp.up_proj.weight_scale' without any values")
        # Queries and keys that the model normalises.
        shutil.copytree(GOLDEN / "qwen3", self.model, dirs_exist_ok=True)
        self.edit_config(architectures=["LlamaForCausalLM"], model_type="llama")
        self.refused(UNSUPPORTED, tensors, "self_attn.k_norm.weight'", "model_type")

    def test_mixed_dtypes_are_refused_at_once(self):
        def half(header):
            header["model.layers.1.mlp.up_proj.weight"]["dtype"] = "F16"

        self.edit_header(half)
        done = sluice("info", "-m", self.model)
        self.assertEqual(done.returncode, UNSUPPORTED, done.stderr)
        for part in ("model.safetensors", "'model.layers.1.mlp.up_proj.weight' is F16"):
            self.assertIn(part, done.stderr)

    def test_weights_that_are_nan(self):
        """Every command ends with the code that README gives, and stores nothing."""
        model = Path(self.folder.name) / "nan"
        shutil.copytree(MODEL, model)
        path = model / "model.safetensors"
        raw = bytearray(path.read_bytes())
        size = struct.unpack("<Q", raw[:8])[0]
        begin = json.loads(raw[8 : 8 + size])["model.norm.weight"]["data_offsets"][0] + 8 + size
        raw[begin : begin + 2] = b"\xc0\x7f"
        path.write_bytes(raw)
        book = ["--text", ROOT / "data" / "war-and-peace.txt", "--rounds", 1]
        for command in (["generate", "-p", "x"], ["eval", *book, "--length", 1000],
                        ["eval", *book, "--length", 64, "--task", "perplexity", "--tokens", 4],
                        ["calibrate", *book, "--length", 1000]):  # fmt: skip
            done = sluice(command[0], "-m", model, *command[1:])
            self.assertEqual(done.returncode, NUMERIC, done.stderr)
            self.assertIn("NaN", done.stderr)
            self.assertEqual(done.stdout.strip(), "")
        self.assertFalse((model / "sluice.json").exists())

    def test_links_that_lead_nowhere(self):
        for name in ("tokenizer.json", "config.json", "model.safetensors"):
            path = self.model / name
            path.rename(self.model / "kept")
            path.symlink_to(name)
            self.refused(IO, name, "symbolic links")
            path.unlink()
            (self.model / "kept").rename(path)

    def test_a_stored_policy_that_does_not_fit_names_its_file(self):
        model = Path(self.folder.name) / "demo"
        shutil.copytree(MODEL, model)
        stored = {"tidaldecode": "select=int4 prune=top_k(512) dense=0,1 anchors=2,40"}
        (model / "sluice.json").write_text(json.dumps({"policies": stored}))
        self.refused(CORRUPT, "sluice.json", "anchors lists layer 40", model=model,
                     flags=["--policy", "tidaldecode"])

    def test_calibrations_that_cannot_be_stored(self):
        model = Path(self.folder.name) / "demo"
        shutil.copytree(MODEL, model)
        flags = ["calibrate", "-m", model, "--text", ROOT / "data" / "war-and-peace.txt"]
        for more, mention in ((["--save", "foo"], "{bus,device}"), (["--save", "1"], "--save"),
                              (["--loss", "inf"], "--loss"),
                              (["--json", model / "sluice.json"], "would overwrite")):  # fmt: skip
            done = sluice(*flags, *more)
            self.assertEqual(done.returncode, USAGE, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertIn(mention, done.stderr)
            self.assertFalse((model / "sluice.json").exists())
        (model / "sluice.json").write_text("garbage")
        done = sluice(*flags, "--length", 300)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (CORRUPT, 1), done.stderr)
        self.assertIn("delete the file and run", done.stderr)

    def test_lengths_that_the_tokenizers_prefix_fills(self):
        model = Path(self.folder.name) / "demo"
        shutil.copytree(MODEL, model)
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        for ids in (15, 16, 17, 100):
            tokenizer["post_processor"] = {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x"}}, {"Sequence": {"id": "A"}}],
                "special_tokens": {"x": {"id": "x", "ids": [5] * ids}},
            }
            (model / "tokenizer.json").write_text(json.dumps(tokenizer))
            for task in ("perplexity", "repetition", "needle"):
                done = sluice("eval", "-m", model, "--text", ROOT / "data" / "war-and-peace.txt",
                              "--task", task, "--length", 16)  # fmt: skip
                self.assertEqual(done.returncode, USAGE, done.stderr)
                self.assertIn("--length 16 is too short", done.stderr)

    def test_tokenizer_lacks_an_id(self):
        self.refused(TOKENIZER, "tokenizer.json")  # 4096 entries for a vocabulary of 384

    # Prompts

    def test_prompts(self):
        self.refused(PROMPT, "empty", stdin="", model=MODEL)
        self.refused(PROMPT, "UTF-8", stdin=b"caf\xe9 au lait", model=MODEL)
        self.refused(PROMPT, "--context", stdin="word " * 100, flags=["--context", "50"],
                     model=MODEL)

    # Memory and disks

    def test_caps_too_small(self):
        self.refused(MEMORY, "--device-memory", "at least", flags=["--device-memory", "1KiB"],
                     model=MODEL)
        self.refused(MEMORY, "--host-memory", "at least", flags=["--host-memory", "1MiB"],
                     model=MODEL)
        self.refused(MEMORY, "free", flags=["--context", "2000000000"], model=MODEL)

    def test_disks_that_cannot_hold_rows(self):
        def refused(code, disk, *mentions, policy="values", memory="110MiB", flags=(), **options):
            self.refused(code, *mentions, model=MODEL,
                         flags=["--context", 33000, "--host-memory", memory, "--policy", policy,
                                *flags, "--disk", disk], **options)  # fmt: skip

        refused(NOT_FOUND, "/no/such/folder", "/no/such/folder")
        refused(NOT_FOUND, MODEL / "config.json", "not a directory")
        refused(UNSUPPORTED, "/proc", "/proc")
        refused(USAGE, ":5GiB", "--disk")
        refused(USAGE, "/var/tmp:99999999TiB", "--disk")
        refused(USAGE, "/var/tmp:1GiB", "every directory a size", flags=["--disk", "/var/tmp"])
        refused(MEMORY, "/var/tmp:1MiB", "--disk", "too small")
        if Path("/dev/shm").is_dir():
            refused(UNSUPPORTED, "/dev/shm", "tmpfs")
        for policy in ("select=exact prune=top_k(16)", "values prefill=zipvl(0.9)"):
            refused(UNSUPPORTED, "/var/tmp", "cannot lie on disk", policy=policy)
        refused(MEMORY, "/var/tmp", "on disk", memory="60MiB")
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
        refused(IO, "/var/tmp", "RLIMIT_FSIZE", preexec_fn=limit)

    def test_full_disk(self):
        done = sluice("generate", "-m", MODEL, "-p", "Hi", "-n", 2, "-q", "--json", "/dev/full")
        self.assertEqual(done.returncode, IO)
        self.assertIn("/dev/full", done.stderr)
        with open("/dev/full", "wb") as full:
            done = sluice("generate", "-m", MODEL, "-p", "Hi", "-n", 2, "-q", stdout=full)
        self.assertEqual(done.returncode, IO)
        self.assertIn("standard output", done.stderr)

    def test_a_report_that_does_not_fit_leaves_the_one_before(self):
        folder = Path(self.folder.name) / "reports"
        folder.mkdir()
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        for flag in ("--json", "--trace"):
            report = folder / "report.json"
            report.write_text(REPORT)
            done = sluice("generate", "-m", MODEL, "-p", "Hi", "-n", 2, "-q", flag, report,
                          preexec_fn=limit)  # fmt: skip
            self.assertEqual(done.returncode, IO, done.stderr)
            self.assertIn("report.json: cannot be written", done.stderr)
            self.assertEqual(report.read_text(), REPORT)
            self.assertEqual(os.listdir(folder), ["report.json"])

    def test_reports_go_where_links_and_pipes_lead(self):
        folder = Path(self.folder.name)
        report, link, absent = (folder / name for name in ("report.json", "link", "absent"))
        report.write_text(REPORT)
        link.symlink_to(report)
        absent.symlink_to(folder / "new.json")
        for path in (link, absent, "/dev/stderr"):
            done = sluice("generate", "-m", MODEL, "-p", "Hi", "-n", 2, "-q", "--json", path)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(link.is_symlink() and absent.is_symlink())
        for text in (report.read_text(), (folder / "new.json").read_text(), done.stderr):
            self.assertIn("tokens", json.loads(text))

    def test_reports_go_where_no_file_can_take_another_ones_place(self):
        folder = Path(self.folder.name)
        long, linked, other, log = (folder / name for name in ("l" * 245, "a", "b", "log"))
        linked.write_text(REPORT)
        other.hardlink_to(linked)
        for path in (long, linked):
            done = sluice("generate", "-m", MODEL, "-p", "Hi", "-n", 2, "-q", "--json", path)
            self.assertEqual(done.returncode, 0, done.stderr)
        for path in (long, other):
            self.assertIn("tokens", json.loads(path.read_text()))
        # The file behind standard output stays that of whoever writes to it before and afterwards.
        log.write_text("before\n")
        for name in ("/dev/stdout", log):
            with open(log, "a") as file:
                done = sluice("generate", "-m", MODEL, "-p", "Hi", "-n", 2, "-q", "--json", name,
                              stdout=file)  # fmt: skip
                self.assertEqual(done.returncode, 0, done.stderr)
                file.write("after\n")
        before, first, second, rest = re.split("^(?:before|after)$", log.read_text(), flags=re.MULTILINE)
        self.assertEqual(before + rest, "\n")
        for text in (first, second):
            self.assertIn("tokens", json.loads(text[text.index("{") :]))

    def test_reports_replace_nothing_that_is_no_report(self):
        model, blob = self.model, Path(self.folder.name) / "blob"
        blob.write_text('{"chat_template": "x"}')
        (model / "chat_template.json").symlink_to(blob)
        for name in ("README.md", "vocab.json", "notes"):
            (model / name).write_text("what somebody wrote")
        files = {file: file.read_bytes() for file in model.iterdir()}
        commands = (["generate", "-p", "x", "--json"], ["generate", "-p", "x", "--trace"],
                    ["eval", "-t", "/no/text", "--json"], ["calibrate", "-t", "/no/text", "--json"])  # fmt: skip
        for file in files:
            for command, *flags in commands:
                done = sluice(command, "-m", "/no/model", *flags, file)
                self.assertEqual((done.returncode, done.stderr.count("\n")), (USAGE, 1), done.stderr)
                self.assertIn("writing would overwrite it", done.stderr)
                self.assertIn("--force", done.stderr)
                # What the command would read is not replaced by force either.
                if file.name in ("config.json", "model.safetensors", "chat_template.json", "vocab.json"):
                    done = sluice(command, "-m", model, *flags, file, "--force")
                    self.assertEqual((done.returncode, done.stderr.count("\n")), (USAGE, 1), done.stderr)
        # Names that are not there yet, but would be read from now on.
        for name in ("special_tokens_map.json", "tokenizer.model", "merges.txt"):
            done = sluice("generate", "-m", model, "-p", "x", "--json", model / name, "--force")
            self.assertEqual(done.returncode, USAGE, done.stderr)
            self.assertFalse((model / name).exists())
        for file, text in files.items():
            self.assertEqual(file.read_bytes(), text)

    def test_reports_replace_what_they_may(self):
        report = Path(self.folder.name) / "report"
        flags = ["generate", "-m", MODEL, "-p", "x", "-n", 1, "-q"]
        report.touch()
        for before in ("", None, "formatted anew", "somebody else's"):
            for flag in ("--json", "--trace"):
                if before == "formatted anew":
                    report.write_text(json.dumps(json.loads(report.read_text()), indent=1))
                elif before is not None:
                    report.write_text(before)
                more = ["--force"] if before == "somebody else's" else []
                done = sluice(*flags, flag, report, *more)
                self.assertEqual(done.returncode, 0, done.stderr)
                written = json.loads(report.read_text())
                self.assertTrue(written["written_by"].startswith("sluice "))
                self.assertIn("tokens" if flag == "--json" else "traceEvents", written)

    def test_force_is_of_reports(self):
        self.refused(USAGE, "--force requires --json or --trace", flags=["--force"])
        for command in ("eval", "calibrate"):
            done = sluice(command, "-m", MODEL, "-t", "/no/text", "--force")
            self.assertEqual(done.returncode, USAGE, done.stderr)
            self.assertIn("--force requires --json", done.stderr)

    def test_reports_that_cannot_be_written_are_refused_before_the_work(self):
        for path in ("/nowhere/report.json", self.folder.name):
            done = sluice("generate", "-m", "/no/model", "-p", "Hi", "--json", path)
            self.assertEqual(done.returncode, IO, done.stderr)
            self.assertIn(path, done.stderr)
            for command in ("eval", "calibrate"):
                done = sluice(command, "-m", "/no/model", "--text", "/no/text", "--json", path)
                self.assertEqual(done.returncode, IO, done.stderr)
                self.assertIn(path, done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_a_broken_calibration_is_refused_before_the_work(self):
        model = Path(self.folder.name) / "demo"
        shutil.copytree(MODEL, model)
        for text in ("garbage", '{"of": "another program"}'):
            (model / "sluice.json").write_text(text)
            done = sluice("calibrate", "-m", model, "--text", "/no/text")
            self.assertEqual(done.returncode, CORRUPT, done.stderr)
            self.assertIn("sluice.json", done.stderr)
            self.assertEqual((model / "sluice.json").read_text(), text)


if __name__ == "__main__":
    unittest.main()
