"""`sluice eval` and `sluice calibrate` as a user runs them: real model, short contexts."""

import copy
import json
import os
import re
import shutil
import string
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path

from command import MODEL, ROOT, sluice

TASKS = ("needle", "multikey", "multivalue", "multiquery", "multiturn", "variable_tracking",
         "common_words", "perplexity", "agreement", "drift", "repetition")  # fmt: skip
BOOK = ROOT / "data" / "war-and-peace.txt"
TASKS_OF_FILES = ROOT / "data" / "tasks"


def evaluate(*arguments):
    return sluice("eval", "--model", MODEL, "--text", BOOK, *arguments)


class Eval(unittest.TestCase):
    def test_policies_are_told_apart(self):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            done = evaluate(
                "--length", 2000, "--rounds", 2, "--needles", 6, "--tokens", 64,
                "--task", "needle", "--task", "agreement",
                "--policy", "select=int4 prune=top_k(1/1)", "--policy", "streaming recent=128",
                "--json", report,
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            needle, agreement = json.loads(report.read_text())["results"]
        dense, complete, streaming = needle["policies"]
        self.assertGreaterEqual(dense["recall"]["mean"], 0.7)
        self.assertEqual(complete["recall"]["mean"], dense["recall"]["mean"])
        self.assertLess(streaming["recall"]["mean"], dense["recall"]["mean"] - 0.3)
        self.assertLess(streaming["selected_rows"], 160)
        dense, complete, streaming = agreement["policies"]
        self.assertEqual(dense["kl"], 0)
        self.assertLess(complete["kl"], 1e-3)
        self.assertGreater(streaming["kl"], complete["kl"])
        self.assertEqual(dense["index_bytes_per_token"], 0)
        self.assertGreater(complete["index_bytes_per_token"], 0)
        self.assertEqual([dense["kept_index_bytes"], streaming["kept_index_bytes"]], [0, 0])
        # 4 bits of 64 channels in 12 layers of 2 KV heads, with scales, of whole tiles.
        kept = complete["kept_index_bytes"] / (12 * 2 * 2000)
        self.assertTrue(32 < kept < 40, kept)
        self.assertIn("needle at 2000 tokens, 12 probes per policy", done.stdout)
        self.assertIn("agreement at 2000 tokens, 2 probes per policy", done.stdout)
        self.assertNotIn("perplexity", done.stdout)

    def test_steps_are_no_larger_than_chunks(self):
        done = evaluate(
            "--length", 300, "--rounds", 1, "--tokens", 16, "--task", "agreement",
            "--policy", "values", "--step-tokens", 64, "--chunk", 8, "--json", "-",
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["step_tokens"], 8)

    def test_dense_agrees_with_itself_in_every_task(self):
        # The settings of a policy, and every layer dense after all.
        same = "sluice dense=" + ",".join(map(str, range(12)))
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            done = evaluate(
                "--length", 900, "--rounds", 1, "--needles", 2, "--tokens", 24, "--seed", 3,
                *(word for task in TASKS for word in ("--task", task)),
                "--policy", same, "--policy", "streaming recent=64", "--json", report,
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            results = json.loads(report.read_text())["results"]
        self.assertEqual(tuple(result["task"] for result in results), TASKS)
        for result in results:
            with self.subTest(result["task"]):
                dense, again, streaming = result["policies"]
                for policy in (dense, again):
                    self.assertEqual(policy["top1_agreement"], 1)
                    self.assertEqual(policy["kl"], 0)
                self.assertGreater(streaming["kl"], 0)
                self.assertGreater(streaming["read_bytes_per_token"], 0)
                if "recall" not in dense:
                    continue
                self.assertEqual(again["recall"], dense["recall"])
                self.assertEqual(dense["facts"], 2)
                self.assertEqual(result["dense_can_do"], dense["recall"]["mean"] >= 0.2)
        # One line for each task that the model cannot do, and names that are whole.
        hopeless = [result for result in results if not result["dense_can_do"]]
        self.assertIn("common_words", [result["task"] for result in hopeless])
        self.assertEqual(done.stdout.count("recall says nothing about policies"), len(hopeless))
        self.assertEqual(done.stdout.count(f"\n{same}\n"), len(TASKS) + 1)  # drift has two tables
        drift = results[TASKS.index("drift")]["policies"]
        for policy in drift:
            windows = policy["windows"]
            self.assertEqual([w["begin"] for w in windows], list(range(0, 24, 3)))
            self.assertEqual([w["end"] for w in windows], list(range(3, 25, 3)))
            self.assertAlmostEqual(sum(w["kl"]["mean"] for w in windows) / 8, policy["kl"])
        self.assertIn("to token ", done.stdout)

    def test_drift_is_the_seeds(self):
        flags = ["--length", 300, "--rounds", 1, "--tokens", 12, "--task", "drift",
                 "--policy", "streaming recent=16", "--json", "-"]
        kl = []
        for seed in (1, 1, 2):
            done = evaluate(*flags, "--seed", seed)
            self.assertEqual(done.returncode, 0, done.stderr)
            kl.append(json.loads(done.stdout)["results"][0]["policies"][1]["kl"])
        self.assertEqual(kl[0], kl[1])
        self.assertNotEqual(kl[0], kl[2])

    def test_answers_in_turn_are_those_of_many_steps(self):
        # Turns are read along what dense attention says: pieces of one token or of many agree.
        flags = ["--length", 1500, "--rounds", 1, "--needles", 6, "--task", "multiturn",
                 "--policy", "streaming recent=128", "--json", "-"]
        alone, shared = (
            json.loads(evaluate(*flags, "--step-tokens", tokens).stdout)["results"][0]["policies"][1]
            for tokens in (1, 16)
        )
        self.assertLess(alone["top1_agreement"], 1)
        self.assertAlmostEqual(alone["kl"], shared["kl"], delta=0.02 * alone["kl"])
        self.assertEqual(alone["recall"], shared["recall"])

    def test_bytes_are_those_that_crossed_between_tiers(self):
        context, token_bytes, stretch = 2000, 6144, 8
        flags = ["--length", context, "--rounds", 1, "--tokens", stretch, "--task", "perplexity",
                 "--policy", "dense", "--policy", "sluice", "--json", "-"]
        moved = {}
        for cap in (None, "4MiB", "8MiB", "1GiB"):
            done = evaluate(*flags, *(["--device-memory", cap] if cap else []))
            self.assertEqual(done.returncode, 0, done.stderr)
            policies = json.loads(done.stdout)["results"][0]["policies"]
            # Dense once, although it was asked for again.
            self.assertEqual([policy["name"] for policy in policies], ["dense", "sluice"])
            for policy in policies:
                crossed = [e for e in policy["traffic"] if e["from"] != e["to"]]
                self.assertAlmostEqual(sum(e["bytes_per_token"] for e in crossed),
                                       policy["transferred_bytes_per_token"], places=6)
                self.assertEqual(policy["index_bytes_per_token"] > 0, policy["name"] == "sluice")
            moved[cap] = [policy["transferred_bytes_per_token"] for policy in policies]
        # In host memory nothing moves; where every row fits, new rows are written home.
        self.assertEqual(moved[None], [0, 0])
        self.assertEqual(moved["1GiB"], [token_bytes, token_bytes])
        # Dense attention fetches whatever is not resident, for every token anew. A larger cap holds
        # more rows, of whole pages.
        saved = moved["4MiB"][0] - moved["8MiB"][0]
        self.assertGreater(saved, 0)
        self.assertAlmostEqual(saved % (128 * token_bytes), 0, places=3)
        self.assertLess(moved["4MiB"][0], (context + 2) * token_bytes)
        self.assertGreater(moved["4MiB"][0], (context - 128 - stretch) * token_bytes - (4 << 20))
        self.assertLess(moved["4MiB"][1], moved["4MiB"][0] / 2)

    def test_bytes_from_a_disk_are_counted(self):
        done = evaluate("--length", 3000, "--rounds", 1, "--tokens", 4, "--task", "perplexity",
                        "--policy", "values", "--compute", "f32", "--kv-dtype", "f32",
                        "--host-memory", "78MiB", "--disk", "/var/tmp", "--json", "-")  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        policies = self.policies_of(done)
        read = {
            name: sum(e["bytes_per_token"] for e in policy["traffic"] if e["from"] == "disk")
            for name, policy in policies.items()
        }
        self.assertTrue(all(policy["plan"]["on_disk"] for policy in policies.values()))
        self.assertGreater(read["dense"], 5 * read["values"])
        self.assertGreater(read["values"], 0)

    def test_a_policy_moves_what_it_moves_alone(self):
        # A cap that holds a third of the rows: what a plan gives a policy decides what it moves.
        flags = ["--length", 1200, "--rounds", 1, "--tokens", 100, "--task", "agreement",
                 "--device-memory", "3MiB", "--json", "-"]
        five = ["streaming", "quest", "twilight", "values", "tidaldecode"]
        together = self.policies_of(evaluate(*flags, *(f"--policy={name}" for name in five)))
        self.assertEqual(list(together), ["dense", *five])
        rows = {name: policy["plan"]["cache_rows"] for name, policy in together.items()}
        self.assertGreater(rows["values"], 0, rows)
        self.assertGreater(len(set(rows.values())), 3, rows)
        for name in five:
            with self.subTest(name):
                alone = self.policies_of(evaluate(*flags, "--policy", name))
                self.assertEqual(list(alone), ["dense", name])
                for policy in ("dense", name):
                    self.check_same_cost(alone[policy], copy.deepcopy(together[policy]))

    def policies_of(self, done):
        self.assertEqual(done.returncode, 0, done.stderr)
        (result,) = json.loads(done.stdout)["results"]
        return {policy["name"]: policy for policy in result["policies"]}

    def check_same_cost(self, alone, together):
        # But for the process, which grows as it goes on.
        for policy in (alone, together):
            del policy["plan"]["program_bytes"], policy["plan"]["process_bytes"]
        self.assertEqual(alone["plan"], together["plan"])
        for policy in (alone, together):
            # 100 tokens, of which nothing is asked after the last.
            tokens = {part: policy[part]["tokens"] for part in ("cold", "warm")}
            self.assertEqual(tokens, {"cold": 64, "warm": 36})
            moved = sum(tokens[part] * policy[part]["transferred_bytes_per_token"] for part in tokens)
            self.assertAlmostEqual(moved / 100, policy["transferred_bytes_per_token"], places=6)
        for part in ("cold", "warm"):
            self.assertAlmostEqual(*(policy[part]["transferred_bytes_per_token"]
                                     for policy in (alone, together)),
                                   delta=0.05 * alone[part]["transferred_bytes_per_token"])
        for cost in ("transferred", "read", "index", "value"):
            key = f"{cost}_bytes_per_token"
            self.assertAlmostEqual(alone[key], together[key], delta=0.05 * alone[key])
        self.assertAlmostEqual(alone["kl"], together["kl"], delta=0.05 * alone["kl"])
        self.assertEqual(alone["top1_agreement"], together["top1_agreement"])

    def test_tokens_of_a_step_share_what_dense_layers_fetch(self):
        flags = ["--length", 1500, "--rounds", 1, "--tokens", 32, "--task", "agreement",
                 "--policy", "streaming", "--device-memory", "4MiB", "--json", "-"]
        alone, shared = (
            json.loads(evaluate(*flags, "--step-tokens", tokens).stdout)["results"][0]["policies"][0]
            for tokens in (1, 32)
        )
        self.assertLess(8 * shared["transferred_bytes_per_token"],
                        alone["transferred_bytes_per_token"])
        self.assertAlmostEqual(alone["nll"]["mean"], shared["nll"]["mean"], delta=0.01)

    def test_rows_are_compared_where_there_are_some(self):
        for length, expected in ((100, {"dense": "1.0", "quantized": "1.0"}),
                                 (400, {"dense": "1.0", "quantized": "-"})):  # fmt: skip
            done = evaluate("--length", length, "--rounds", 1, "--tokens", 20,
                            "--task", "perplexity", "--policy", "quantized")  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
            for policy, ratio in expected.items():
                # Nothing is decoded after the 64 tokens that a cache is filled by.
                self.assertEqual(rows[policy][-6], "-", done.stdout)
                self.assertEqual(rows[policy][-9], ratio, done.stdout)

    def test_repetition_counts_characters(self):
        done = evaluate(
            "--length", 1500, "--rounds", 1, "--needles", 4, "--tokens", 32,
            "--task", "repetition", "--policy", "streaming recent=64",
            "--policy", "select=dense prefill=zipvl(1)", "--json", "-",
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        # The report is all there is on standard output, the tables are beside it.
        result = json.loads(done.stdout)["results"][0]
        self.assertIn("repetition at 1500 tokens, 4 probes per policy", done.stderr)
        dense, streaming, same = result["policies"]
        self.assertGreater(dense["characters"]["mean"], streaming["characters"]["mean"])
        # Costs are those of the steps up to the first wrong answer, also where others follow.
        self.assertEqual(dense["characters"]["mean"], same["characters"]["mean"])
        for cost in ("read_bytes_per_token", "transferred_bytes_per_token"):
            self.assertEqual(dense[cost], same[cost])

    def test_bad_input(self):
        for arguments, code, words in [
            (("--policy", "sparq prune=top_p(2)"), 2, "above 0 and up to 1"),
            (("--policy", "sparq(r=99)"), 2, "sparq(r=99)"),
            (("--policy", "select=sparq(r=99) prune=top_k(4)"), 2, "head_dim"),
            (("--policy", "tidaldecode anchors=2,40"), 2, "anchors"),
            (("--policy", "select=int4 prune=top_k(0)"), 2, "top_k"),
            (("--task", "poetry"), 2, "poetry"),
            (("--length", 4), 2, "--length"),
            (("--task", "multikey", "--length", 200), 2, "too short for --task multikey"),
            (("--task", "common_words", "--length", 500), 2, "give fewer --needles"),
            (("--task", "drift", "--length", 500, "--tokens", 500), 2, "--tokens 500"),
            (("--length", 4000000), 7, "give a longer text"),
            (("--rounds", 0), 2, "--rounds"),
            (("--step-tokens", 65), 2, "--step-tokens"),
            (("--needles", 99), 2, "--needles"),
            (("--json", "/nowhere/report.json", "--length", 300, "--rounds", 1, "--needles", 1,
              "--policy", "streaming"), 9, "/nowhere/report.json"),
        ]:  # fmt: skip
            with self.subTest(arguments):
                done = evaluate(*arguments)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(words, done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        done = sluice("eval", "--model", MODEL, "--text", "/nowhere.txt")
        self.assertEqual(done.returncode, 3, done.stderr)


def words(text):
    """normalize_answer of LongBench's metrics.py."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def best_f1(said, answers):
    def f1(right):
        own, other = words(said), words(right)
        common = sum((Counter(own) & Counter(other)).values())
        return 2 * common / (len(own) + len(other))

    return max(map(f1, answers))


def string_match_all(said, outputs):
    """RULER's, of one line."""
    return sum(output.lower() in said.lower() for output in outputs) / len(outputs)


class Data(unittest.TestCase):
    def evaluate(self, *arguments):
        return sluice("eval", "--model", MODEL, "--tokens", 6, *arguments)

    def files(self, *names):
        return [word for name in names for word in ("--data", TASKS_OF_FILES / f"{name}.jsonl")]

    def test_scores_are_those_of_the_benchmarks(self):
        done = self.evaluate(*self.files("ruler", "longbench"), "--policy", "streaming recent=64",
                             "--json", "-")  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        ruler, longbench = json.loads(done.stdout)["results"]
        for result, name, field, score in ((ruler, "ruler", "outputs", string_match_all),
                                           (longbench, "longbench", "answers", best_f1)):  # fmt: skip
            path = TASKS_OF_FILES / f"{name}.jsonl"
            self.assertEqual((result["task"], result["data"]), (name, str(path)))
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            dense, streaming = result["policies"]
            for policy in (dense, streaming):
                self.assertEqual(len(policy["answers"]), len(lines))
                for answer, line in zip(policy["answers"], lines):
                    self.assertAlmostEqual(answer["score"], score(answer["answer"], line[field]))
                mean = sum(answer["score"] for answer in policy["answers"]) / len(lines)
                self.assertAlmostEqual(policy["score"]["mean"], mean)
                change = mean - dense["score"]["mean"]
                self.assertAlmostEqual(policy["score_change"]["mean"], change)
            self.assertGreater(dense["score"]["mean"], 0.4)
            self.assertLess(streaming["score"]["mean"], 0.2)
            self.assertEqual(dense["kl"], 0)
            self.assertGreater(streaming["kl"], 0)
            self.assertIn(f"{name}, {path}, at up to {result['context']} tokens, 3 probes",
                          done.stderr)  # fmt: skip

    def test_dense_answers_as_generate_does(self):
        done = self.evaluate(*self.files("ruler"), "--policy", "dense", "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        (dense,) = json.loads(done.stdout)["results"][0]["policies"]
        lines = (TASKS_OF_FILES / "ruler.jsonl").read_text().splitlines()
        for line, answer in zip(lines, dense["answers"]):
            done = sluice("generate", "-m", MODEL, "-q", "-n", 6, "--policy", "dense",
                          stdin=json.loads(line)["input"])  # fmt: skip
            self.assertEqual(done.stdout.removesuffix("\n"), answer["answer"])

    def test_texts_are_measured_as_the_book_is(self):
        part = "".join(BOOK.read_text().splitlines(keepends=True)[9:13])
        with tempfile.TemporaryDirectory() as folder:
            text, data = Path(folder) / "text", Path(folder) / "text.jsonl"
            # Two rounds read the first and the last tokens of a text.
            text.write_text(part + "Well, Prince, so Genoa and Lucca are now.\n" + part)
            data.write_text(json.dumps({"text": part}) + "\n")
            flags = ["--policy", "streaming recent=16", "--json", "-"]
            done = self.evaluate("--data", data, *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            (own,) = json.loads(done.stdout)["results"]
            done = self.evaluate("--text", text, "--task", "agreement", "--rounds", 2,
                                 "--length", own["context"] - 1, *flags)  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            (same,) = json.loads(done.stdout)["results"]
        self.assertEqual(own["task"], "agreement")
        for one, other in zip(own["policies"], same["policies"]):
            for name in ("kl", "top1_agreement", "perplexity"):
                self.assertAlmostEqual(one[name], other[name], places=6)
        self.assertGreater(own["policies"][1]["kl"], 0)

    def test_bad_lines_are_refused_before_any_work(self):
        good = (TASKS_OF_FILES / "ruler.jsonl").read_text().splitlines()[0] + "\n"
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "tasks.jsonl"
            for line, flags, mentions in [
                (b'{"input": "x"}', (), ["line 2", "outputs"]),
                (b'{"input": 1, "outputs": ["1"]}', (), ["line 2", "'input'", "number"]),
                (b'{"input": "x", "outputs": []}', (), ["line 2", "'outputs'", "empty"]),
                (b'{"input": "x"', (), ["line 2", "JSON"]),
                (b'{"input": "\xff", "outputs": ["1"]}', (), ["line 2", "UTF-8"]),
                (b'{"text": "x"}', (), ["line 2", "plain text"]),
                (b"", ("--length", 300), ["line 1", "'input'", "--length is 300"]),
                (json.dumps({"input": 132000 * "Prince ", "outputs": ["1"]}).encode(), (),
                 ["line 2", "'input'", "the model was trained for 131072"]),
            ]:
                with self.subTest(line[:40]):
                    data.write_bytes(good.encode() + line + b"\n")
                    done = self.evaluate("--data", data, *flags)
                    self.assertEqual(done.returncode, 7, done.stderr)
                    self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                    self.assertEqual(done.stdout, "")
                    for words in [str(data), *mentions]:
                        self.assertIn(words, done.stderr)

    def test_flags(self):
        data = self.files("ruler")
        for arguments, code, mentions in [
            ((), 2, "--data"),
            ((*data, "--text", BOOK), 2, "--text"),
            ((*data, "--task", "needle"), 2, "--task"),
            ((*data, "--length", 900, "--length", 1000), 2, "--length"),
            ((*data, "--json", data[1]), 2, "ruler.jsonl"),
            ((*data, "--json", data[1], "--force"), 2, "ruler.jsonl"),
            (("--data", "/nowhere.jsonl"), 3, "/nowhere.jsonl"),
        ]:
            with self.subTest(arguments):
                done = self.evaluate(*arguments)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(mentions, done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        done = self.evaluate(*self.files("text"), "--policy", "dense", "--rounds", 9)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("--rounds does nothing: the tasks are those of --data", done.stderr)

    def test_the_samples_are_those_of_their_script(self):
        with tempfile.TemporaryDirectory() as folder:
            copy_of = Path(folder) / "data" / "tasks"
            shutil.copytree(TASKS_OF_FILES, copy_of)
            shutil.copy(BOOK, copy_of.parent)
            before = {path.name: path.read_bytes() for path in copy_of.glob("*.jsonl")}
            for path in copy_of.glob("*.jsonl"):
                path.unlink()
            subprocess.run([sys.executable, copy_of / "make_tasks.py"], check=True)
            self.assertEqual({p.name: p.read_bytes() for p in copy_of.glob("*.jsonl")}, before)


class Resume(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.report = Path(folder.name) / "eval.json"
        self.data = Path(folder.name) / "tasks.jsonl"
        shutil.copy(TASKS_OF_FILES / "ruler.jsonl", self.data)
        self.flags = ["eval", "--model", MODEL, "--data", self.data, "--data",
                      TASKS_OF_FILES / "longbench.jsonl", "--tokens", 4,
                      "--policy", "streaming recent=64", "--json", self.report]  # fmt: skip

    def interrupted(self, holds):
        """The report with which a run is killed: the first that `holds`."""
        command = [os.environ["SLUICE_BINARY"], *map(str, self.flags)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                try:
                    report = json.loads(self.report.read_text())
                except FileNotFoundError:
                    report = {}
                if report and holds(report):
                    process.kill()
                    return report
                time.sleep(0.005)
        self.fail("it ended before")

    def results(self, report):
        """Without what differs from run to run."""
        results = copy.deepcopy(report["results"])
        for policy in (policy for result in results for policy in result["policies"]):
            for name in ("prompt_seconds", "answer_seconds"):
                self.assertGreater(policy.pop(name), 0)
            del policy["plan"]["program_bytes"], policy["plan"]["process_bytes"]
        return results

    def test_goes_on_where_it_ended(self):
        begun = self.interrupted(lambda report: "unfinished" in report)
        self.assertIn(len(begun["unfinished"]["parts"]), (1, 2))
        further = self.interrupted(lambda report: report["results"])  # begins anew
        first = further["results"][0]
        done = sluice(*self.flags, "--resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        whole = json.loads(self.report.read_text())
        self.assertEqual(whole["results"][0], first)  # its seconds, too
        self.assertEqual([result["task"] for result in whole["results"]], ["ruler", "longbench"])
        self.assertNotIn("unfinished", whole)
        # The tables of both, though one was finished before.
        self.assertEqual(done.stdout.count("3 probes per policy"), 2)
        self.assertEqual(whole["schema"], "sluice-eval-1")
        self.assertEqual(whole["run"]["start"], further["run"]["start"])
        self.assertLessEqual(whole["run"]["start"], whole["run"]["end"])
        self.assertGreater(whole["run"]["machine"]["cores"], 0)
        self.assertIn("streaming recent=64", whole["run"]["command"])
        # From the first passages on, and with the same numbers.
        self.report.write_text(json.dumps(begun))
        self.assertEqual(sluice(*self.flags, "--resume").returncode, 0)
        resumed = json.loads(self.report.read_text())
        self.assertEqual(self.results(resumed), self.results(whole))
        self.assertEqual(resumed["run"]["start"], begun["run"]["start"])
        # A second time there is nothing to do.
        before = self.report.read_bytes()
        again = sluice(*self.flags, "--resume")
        self.assertEqual((again.returncode, again.stdout), (0, done.stdout))
        self.assertEqual(self.report.read_bytes(), before)
        self.check_refusals(resumed)

    def check_refusals(self, whole):
        def refused(code, words, text, *more):
            self.report.write_text(text)
            done = sluice(*self.flags, *more, "--resume")
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertIn(words, done.stderr)
            self.assertEqual(self.report.read_text(), text)

        text = json.dumps(whole)
        refused(2, "of another command", text, "--step-tokens", 2)
        for name, words in (("commit", "another commit"), ("version", "another version"),
                            ("checkpoint", "another checkpoint"), ("machine", "another machine"),
                            ("policies", "other policies")):  # fmt: skip
            changed = json.loads(text)
            changed["run"][name] = "x"
            refused(2, words, json.dumps(changed))
        changed = json.loads(text)
        changed["results"][0]["policies"][0]["kl"] = 1
        refused(4, "were changed", json.dumps(changed))
        refused(4, "eval.json", text[: len(text) // 2])
        refused(4, "can complete", '{"written_by": "sluice 0.1.0"}')
        self.data.write_text(self.data.read_text() + "\n")
        refused(2, "other data", text)

    def test_resume_needs_a_report(self):
        for flags in (("--resume",), ("--resume", "--json", "-")):
            done = sluice("eval", "--model", MODEL, "--text", BOOK, *flags)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("--json FILE", done.stderr)

    def test_of_a_text(self):
        self.flags = ["eval", "--model", MODEL, "--text", BOOK, "--length", 300, "--rounds", 2,
                      "--needles", 2, "--task", "needle", "--tokens", 8, "--task", "drift",
                      "--policy", "streaming", "--json", self.report]  # fmt: skip
        begun = self.interrupted(lambda report: "unfinished" in report)
        self.assertEqual(sluice(*self.flags, "--resume").returncode, 0)
        resumed = json.loads(self.report.read_text())
        self.assertEqual(sluice(*self.flags).returncode, 0)
        whole = json.loads(self.report.read_text())
        self.assertEqual(self.results(resumed), self.results(whole))


class Calibrate(unittest.TestCase):
    def copy_model(self, folder):
        model = Path(folder) / "model"
        model.mkdir()
        for file in ("config.json", "tokenizer.json", "model.safetensors"):
            shutil.copy(Path(MODEL) / file, model / file)
        return model

    def test_finds_what_every_layer_keeps(self):
        with tempfile.TemporaryDirectory() as folder:
            model = self.copy_model(folder)
            done = sluice(
                "calibrate", "--model", model, "--text", BOOK, "--length", 600, "--rounds", 1,
                "--preset", "values", "--tokens", 24, "--rows", 4, "--rows", 64,
                "--value-bits", 2, "--loss", 0.01, "--json", Path(folder) / "report.json",
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            report = json.loads((Path(folder) / "report.json").read_text())
            stored = json.loads((model / "sluice.json").read_text())["policies"]["values"]
            self.assertIn("compensate=values", stored)
            self.assertIn(f"best: {stored}", done.stdout)
            self.assertIn(", within 0.01", done.stdout)
            # A line for each layer, in which what it keeps stands between brackets.
            lines = [line.split() for line in done.stdout.splitlines()]
            layers = [line for line in lines if len(line) == 3 and line[0].isdigit()]
            self.assertEqual([int(line[0]) for line in layers], list(range(12)))
            self.assertEqual([sum("[" in word for word in line) for line in layers], [1] * 12)
            self.check_layers_of_report(report, stored, layers)
            # The looser the cheaper: most layers keep few.
            few = sum("[" in line[1] for line in layers)
            self.assertGreater(few, 6)
            info = sluice(
                "generate", "--model", model, "--prompt", "Well", "-n", 2, "--policy", "values"
            )
            self.assertIn(stored, " ".join(info.stderr.split()))

    def check_layers_of_report(self, report, stored, printed):
        """The numbers of the table that was printed, a line for each layer, and the plan's."""
        self.assertEqual(
            (report["preset"], report["context"], report["rounds"], report["tokens"]),
            ("values", 600, 1, 24),
        )
        self.assertEqual((report["policy"], report["stored"]), (stored, True))
        self.assertEqual([layer["layer"] for layer in report["layers"]], list(range(12)))
        for line, layer in zip(printed, report["layers"]):
            *sparse, dense = layer["choices"]
            self.assertEqual([choice["rows"] for choice in sparse], [4, 64])
            self.assertEqual([choice["dense"] for choice in layer["choices"]], [False, False, True])
            self.assertEqual([f"{1000 * choice['kl']:.3f}" for choice in sparse],
                             [word.strip("[]") for word in line[1:]])
            self.assertEqual([choice["chosen"] for choice in sparse], ["[" in w for w in line[1:]])
            # 256 bytes a row and KV head, of which there are 2; dense layers have no index.
            self.assertEqual([choice["row_bytes"] for choice in layer["choices"]],
                             [4 * 2 * 256, 64 * 2 * 256, 600 * 2 * 256])
            self.assertGreater(sparse[0]["index_bytes"], 0)
            self.assertEqual((dense["index_bytes"], dense["kl"]), (0, 0))
        chosen = [choice["kl"] for layer in report["layers"] for choice in layer["choices"]
                  if choice["chosen"]]
        self.assertAlmostEqual(sum(chosen), report["sum_of_layers"])
        whole = {policy["name"]: policy for policy in report["whole"]["policies"]}
        self.assertEqual(list(whole), ["dense", "calibrated", "values"])
        self.assertEqual(whole["calibrated"]["kl"], report["loss"])
        # Every token reads what dense attention reads: no step is shared.
        self.assertAlmostEqual(whole["dense"]["read_bytes_per_token"],
                               whole["dense"]["attended_rows"] * 12 * 2 * 256, delta=1)
        self.assertTrue(report["holds"] and report["loss"] <= report["most_loss"] == 0.01)

    def test_a_whole_plan_moves_what_eval_says(self):
        flags = ["--model", MODEL, "--text", BOOK, "--length", 900, "--rounds", 1, "--tokens", 80,
                 "--device-memory", "4MiB", "--json", "-"]
        found = sluice("calibrate", *flags, "--preset", "values", "--rows", 16, "--value-bits", 2,
                       "--loss", 0.01, "--dry-run")  # fmt: skip
        self.assertEqual(found.returncode, 0, found.stderr)
        asked = sluice("eval", *flags, "--task", "agreement", "--policy", "values")
        self.assertEqual(asked.returncode, 0, asked.stderr)
        whole = json.loads(found.stdout)["whole"]["policies"]
        policies = json.loads(asked.stdout)["results"][0]["policies"]
        self.assertEqual([policy["name"] for policy in whole], ["dense", "calibrated", "values"])
        self.assertGreater(policies[1]["warm"]["transferred_bytes_per_token"], 6144)
        for measured, policy in ((whole[0], policies[0]), (whole[2], policies[1])):
            for part in ("cold", "warm", "traffic"):
                self.assertEqual(measured[part], policy[part])

    def test_wrong_choices(self):
        for flag, value, words in (("--rows", -1, "--rows is -1"), ("--value-bits", 5, "from 1 to 4"),
                                   ("--key-bits", 5, "from 1 to 4"), ("--loss", 0, "above 0"),
                                   ("--loss", "nan", "above 0"), ("--save", "x", "--save"),
                                   ("--preset", "sluice", "--preset")):  # fmt: skip
            done = sluice("calibrate", "--model", MODEL, "--text", BOOK, "--dry-run", flag, value)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(words, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_finds_and_stores_the_layers(self):
        with tempfile.TemporaryDirectory() as folder:
            model = self.copy_model(folder)
            done = sluice(
                "calibrate", "--model", model, "--text", BOOK, "--length", 1200,
                "--rounds", 1, "--needles", 4, "--budget", 32, "--json", "-",
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            stored = json.loads((model / "sluice.json").read_text())["policies"]["tidaldecode"]
            self.assertIn("anchors=2,", stored)
            self.assertIn(f"best: {stored}", done.stderr)
            # The report is all there is on standard output, the table is beside it.
            report = json.loads(done.stdout)
            self.assertEqual((report["policy"], report["seed"]), (stored, 1))
            # Layer 2 alone, with one of nine others, with two of them.
            self.assertEqual(len(report["candidates"]), 1 + 9 + 36)
            (chosen,) = [c for c in report["candidates"] if c["chosen"]]
            self.assertIn("anchors=" + ",".join(map(str, chosen["anchors"])), stored)
            self.assertEqual([score["budget"] for score in chosen["scores"]], [32])
            self.assertEqual((report["probes"], report["dense"]["kl"]), (4, 0))
            self.assertIn(f"{100 * chosen['scores'][0]['recall']['mean']:5.1f}%", done.stderr)
            info = sluice(
                "generate", "--model", model, "--prompt", "Well", "-n", 2, "--policy", "tidaldecode"
            )
            self.assertIn(stored, " ".join(info.stderr.split()))  # it may be wrapped


if __name__ == "__main__":
    unittest.main()
