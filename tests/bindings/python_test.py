"""The Python package, used and misused. PYTHONPATH has it; the first argument is a checkpoint.

    python_test.py MODEL CHAT_MODEL [unittest's arguments]
"""

import ast
import asyncio
import gc
import json
import math
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

import numpy as np
import sluice

ROOT = Path(__file__).resolve().parents[2]
MODEL = ""
CHAT_MODEL = ""  # the same with a chat template
TEXT = "Well, Prince, so Genoa and Lucca are now just family estates"
CODES = {"usage", "not_found", "corrupt", "unsupported", "tokenizer", "prompt", "memory", "io",
         "internal", "numeric"}  # fmt: skip


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.engine = sluice.Engine(MODEL, device_memory=64 << 20)
        cls.prompt = cls.engine.encode(TEXT)

    def session(self, **options):
        return self.engine.new_session(512, **options)

    def greedy(self, count):
        """A greedy answer by the session's own calls."""
        session = self.session()
        logits = session.prefill(self.prompt)
        answer = []
        for _ in range(count):
            answer.append(int(logits.argmax()))
            logits = session.decode(answer[-1])
        return answer


class Errors(Case):
    def test_have_a_class_for_every_code(self):
        classes = [c for c in vars(sluice).values()
                   if isinstance(c, type) and issubclass(c, sluice.Error)]  # fmt: skip
        self.assertEqual({c.code for c in classes if c is not sluice.Error}, CODES)

    def test_name_what_is_wrong(self):
        cases = [
            (sluice.NotFoundError, lambda: sluice.Engine("nowhere")),
            (sluice.UsageError, lambda: sluice.Engine(MODEL, device="toaster")),
            (sluice.UsageError, lambda: sluice.Engine(MODEL, compute="f64")),
            (sluice.UsageError, lambda: sluice.Engine(MODEL, kv_dtype="int4")),
            (sluice.UsageError, lambda: sluice.Engine(MODEL, threads=-1)),
            (sluice.UsageError, lambda: sluice.parse_policy("select=magic")),
            (sluice.UsageError, lambda: self.session(policies=["select=magic"])),
            (sluice.UsageError, lambda: self.engine.new_session(-4)),
            (sluice.CapError, lambda: self.session(host_memory=1)),
            (sluice.PromptError, lambda: self.session().prefill([])),
            (sluice.PromptError, lambda: self.session().prefill([10**6])),
            (sluice.PromptError, lambda: self.session().prefill([1] * 513)),
            (sluice.TokenizerError, lambda: self.engine.decode([-1])),
            (sluice.UsageError, lambda: self.session().truncate(1)),
            (sluice.UsageError, lambda: self.session().generate(TEXT, max_tokens=-1)),
            (sluice.UsageError, lambda: self.session().generate(TEXT, temperature=math.nan)),
            (sluice.UnsupportedError, lambda: self.engine.render_chat([("Who?", "")])),
        ]
        for kind, call in cases:
            with self.subTest(kind=kind.__name__), self.assertRaises(sluice.Error) as caught:
                call()
            self.assertIs(type(caught.exception), kind, caught.exception)
            self.assertNotIn("\n", str(caught.exception))

    def test_of_python_for_what_is_no_argument(self):
        for call in (lambda: self.session().prefill("text"), lambda: self.session().decode("a"),
                     lambda: self.session().decode(2**40), lambda: sluice.Engine(),
                     lambda: sluice.Engine(3), lambda: self.engine.step([None], ["x"]),
                     lambda: self.engine.new_session(context=None)):  # fmt: skip
            with self.assertRaises(TypeError):
                call()


class Sessions(Case):
    def test_scores_are_the_log_softmax_of_logits(self):
        session = self.session()
        scores = session.score(self.prompt)
        session.truncate(0)
        logits = session.prefill(self.prompt[:1])
        for score, token in zip(scores, self.prompt[1:], strict=True):
            exact = logits.astype(np.float64)
            logprob = exact[token] - np.log(np.exp(exact).sum())
            self.assertAlmostEqual(float(score), logprob, delta=0.05)  # chunks round differently
            logits = session.decode(token)
        self.assertEqual(logits.shape, (self.engine.info["vocabulary"],))
        self.assertEqual(len(session), len(self.prompt))

    def test_logits_are_the_callers(self):
        session = self.session()
        first = session.prefill(self.prompt)
        kept = first.copy()
        session.decode(self.prompt[0])
        np.testing.assert_array_equal(first, kept)
        first[:] = 0  # writable

    def test_forks_and_steps(self):
        session = self.session(sequences=2)
        session.prefill(self.prompt)
        fork = session.fork()
        rows = self.engine.step([session, fork], [self.prompt[1]] * 2)
        np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)
        with self.assertRaises(sluice.CapError):
            session.fork()
        with self.assertRaises(sluice.UsageError):
            self.engine.step([session, session], [1, 1])
        with self.assertRaises(sluice.UsageError):
            self.engine.step([session, fork], [1])
        del session
        self.assertEqual(len(fork), len(self.prompt) + 1)

    def test_policies_are_texts(self):
        session = self.session(policies=["dense", "values"])
        session.policy = "values"
        self.assertEqual(session.policy, self.engine.policy("values"))
        with self.assertRaises(sluice.UsageError):
            session.policy = "quest"  # not planned
        self.assertEqual(session.policy, sluice.parse_policy(session.policy))

    def test_an_interpreter_ends_under_a_call_of_another_thread(self):
        script = (
            "import sys, threading, time, sluice\n"
            "engine = sluice.Engine(sys.argv[1])\n"
            "session = engine.new_session(20000)\n"
            "prompt = engine.encode('Well, Prince, ' * 4000)[:19000]\n"
            "threading.Thread(target=lambda: session.prefill(prompt), daemon=True).start()\n"
            "time.sleep(0.5)\n"
        )
        done = subprocess.run([sys.executable, "-c", script, MODEL], capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_saved_sessions_go_on(self):
        session = self.session(sequences=3, loads=True)
        session.prefill(self.prompt)
        with tempfile.TemporaryDirectory() as parent:
            path = Path(parent) / "one"
            session.save(path, note="mine")
            expected = session.decode(7)
            self.assertEqual(self.engine.saved_session(path), (list(self.prompt), "mine"))
            other = session.sibling()
            other.load(str(path))
            self.assertEqual(other.tokens, list(self.prompt))
            self.assertTrue((other.decode(7) == expected).all())
            with self.assertRaises(sluice.UsageError):
                other.load(path)  # has tokens
            with self.assertRaises(sluice.NotFoundError):
                session.sibling().load(path / "none")
            batcher = sluice.Batcher(self.engine, context=512, running=1, loads_prefixes=True)
            found = batcher.load_prefixes(parent)
            self.assertEqual(found, {"sessions": 1, "tokens": len(self.prompt), "skipped": []})
            stream = batcher.submit(list(self.prompt) + [7], max_tokens=2)
            for _ in stream:
                pass
            self.assertEqual(batcher.save_prefixes(parent)["skipped"], [])
            self.assertEqual(batcher.stats()["reused_tokens"], len(self.prompt))

    def test_ledger_and_plan_are_dicts(self):
        session = self.session()
        session.prefill(self.prompt)
        ledger = session.ledger()
        causes = {total["cause"] for total in ledger["prefill"]["totals"]}
        self.assertIn("append", causes)
        self.assertEqual(ledger["prefill"]["tokens"], len(self.prompt))
        self.assertGreater(self.engine.plan(512)["device_bytes"], 0)
        parked = self.engine.plan(512, ["values"], sequences=8, device_memory=1 << 30, indexed_tokens=512)
        self.assertGreater(parked["parked_bytes"], 0)
        self.assertGreater(self.engine.memory()["host_bytes"], 0)

    def test_progress_stops_and_raises(self):
        session = self.session()
        for stop in (False, 0, np.False_, ""):
            self.assertIsNone(session.prefill(self.prompt, progress=lambda done, total: stop))
        logits = session.prefill(self.prompt)
        self.assertTrue((session.recompute() == logits).all())
        self.assertEqual(len(session), len(self.prompt))
        self.assertIsNone(session.recompute(progress=lambda done, total: False))
        self.assertEqual(len(session), 0)
        session.truncate(0)

        def fail(done, total):
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            session.prefill(self.prompt, progress=fail)
        self.assertEqual(len(session), 0)
        with self.assertRaises(sluice.UsageError):  # a callback may not compute
            session.prefill(self.prompt, progress=lambda *_: session.decode(1) is None)
        self.assertIsNotNone(session.prefill(self.prompt))

    def test_other_threads_run_meanwhile_and_are_kept_out(self):
        session = self.session()
        outcome = []

        def use(done, total):
            def other():
                try:
                    session.decode(1)
                except sluice.UsageError as error:
                    outcome.append(str(error))

            thread = threading.Thread(target=other)
            thread.start()
            thread.join(20)

        session.prefill(self.prompt, progress=use)
        self.assertGreaterEqual(len(outcome), 1)
        self.assertIn("another thread", outcome[0])

    def test_outlive_their_engine(self):
        engine = sluice.Engine(MODEL)
        session = engine.new_session(64)
        del engine
        gc.collect()
        session.prefill(self.prompt[:4])
        self.assertEqual(session.engine.info["layers"], self.engine.info["layers"])

    def test_rows_may_lie_on_disk(self):
        caps = {"host_memory": 200 << 20, "device_memory": 64 << 20}
        with self.assertRaises(sluice.NotFoundError):
            sluice.Engine(MODEL, disk=["nowhere"], **caps).new_session(131072)
        try:
            session = sluice.Engine(MODEL, disk=[Path.cwd()], **caps).new_session(131072)
        except sluice.UnsupportedError as error:
            self.skipTest(str(error))  # the tests run on a file system in memory
        expected = self.session().prefill(self.prompt)
        np.testing.assert_allclose(session.prefill(self.prompt), expected, atol=0.1)

    def test_chat(self):
        engine = sluice.Engine(Path(CHAT_MODEL))
        tokens = engine.render_chat([("Who?", "Vasili."), ("And Genoa?", "")], system="Be brief.")
        self.assertEqual(engine.decode(tokens, keep_special=True),
                         "system: Be brief.\nuser: Who?\nassistant: Vasili.\nuser: And Genoa?\n"
                         "assistant: ")  # fmt: skip
        self.assertEqual(self.engine.decode(self.engine.encode(TEXT, plain=True)), TEXT)


class Generating(Case):
    def test_streams_the_greedy_answer(self):
        generation = self.session().generate(TEXT, max_tokens=12, ignore_eos=True)
        pieces = list(generation)
        self.assertGreater(len(pieces), 3)
        self.assertEqual(generation.tokens, self.greedy(12))
        self.assertEqual("".join(pieces), generation.text)
        self.assertEqual(generation.finish_reason, "max_tokens")
        self.assertEqual(generation.pending, generation.tokens[-1])
        self.assertEqual(generation.timings["prefill_tokens"], len(self.prompt))

    def test_takes_arrays_of_tokens_and_stop_strings(self):
        generation = self.session().generate(list(np.array(self.prompt)), stop=[" "])
        text = "".join(generation)
        self.assertEqual(generation.finish_reason, "stop_string")
        self.assertNotIn(" ", text)

    def test_keeps_the_session_until_it_is_closed(self):
        session = self.session()
        generation = session.generate(TEXT, max_tokens=400, ignore_eos=True)
        next(generation)
        with self.assertRaisesRegex(sluice.UsageError, "another thread"):
            session.decode(1)
        generation.close()
        self.assertEqual(generation.finish_reason, "interrupted")
        self.assertLess(len(session), 400)
        session.decode(1)

    def test_ends_when_it_is_dropped(self):
        session = self.session()
        generation = session.generate(TEXT, max_tokens=400, ignore_eos=True)
        next(generation)
        del generation
        gc.collect()
        session.decode(1)

    def test_ends_with_an_error(self):
        session = self.session()
        generation = session.generate([], max_tokens=4)
        with self.assertRaises(sluice.PromptError):
            next(generation)
        self.assertIsNone(generation.text)
        with self.assertRaises(sluice.PromptError):
            list(session.generate(TEXT, max_tokens=4096))

    def test_constraints(self):
        session = self.session()
        digits = self.engine.constraint(regex="[0-9]{3}")
        generation = session.generate(TEXT, constraint=digits)
        self.assertRegex("".join(generation), "^[0-9]{3}$")
        self.assertEqual(generation.finish_reason, "end_of_text")
        colour = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}},
                  "required": ["colour"], "additionalProperties": False}  # fmt: skip
        for schema in (colour, json.dumps(colour)):
            session.truncate(0)
            constraint = self.engine.constraint(json_schema=schema)
            text = "".join(session.generate(TEXT, constraint=constraint))
            self.assertIn(json.loads(text)["colour"], ("red", "blue"))
        batcher = sluice.Batcher(self.engine, context=512)
        grammar = self.engine.constraint(grammar='root ::= "yes" | "no"')
        streams = [batcher.submit(self.prompt, constraint=grammar) for _ in range(2)]
        for stream in streams:
            self.assertIn("".join(piece.text for piece in stream), ("yes", "no"))
        other = sluice.Engine(MODEL)
        for kind, call in [
            (sluice.UsageError, lambda: self.engine.constraint()),
            (sluice.UsageError, lambda: self.engine.constraint(regex="a", json_object=True)),
            (sluice.UsageError, lambda: self.engine.constraint(regex="(")),
            (sluice.UnsupportedError, lambda: self.engine.constraint(json_schema={"not": {}})),
            (TypeError, lambda: self.engine.constraint(json_schema=3j)),
            (sluice.UsageError,
             lambda: session.generate(TEXT, constraint=other.constraint(regex="a"))),
            (sluice.UsageError, lambda: session.generate(TEXT, constraint=digits, ignore_eos=True)),
            (sluice.UsageError, lambda: batcher.submit([1], constraint=digits, ignore_eos=True)),
        ]:
            with self.assertRaises(kind):
                made = call()
                list(made)

    def test_control_c_ends_it(self):
        # A process of its own interrupts itself while it reads.
        program = f"""
import os, signal, sluice, threading
session = sluice.Engine({MODEL!r}).new_session(32768)
generation = session.generate({TEXT!r}, max_tokens=32000, ignore_eos=True)
next(generation)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    for _ in generation: pass
except KeyboardInterrupt:
    generation.close()
    print("interrupted", generation.finish_reason, len(session) > 0)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                              timeout=60, check=False)  # fmt: skip
        self.assertEqual(done.stdout, "interrupted interrupted True\n", done.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_control_c_ends_a_prompt(self):
        for chunk in (128, 32768):  # between its steps, and within one
            with self.subTest(chunk=chunk):
                self.end_a_prompt(chunk)

    def end_a_prompt(self, chunk):
        program = f"""
import os, signal, sluice, threading
session = sluice.Engine({MODEL!r}, chunk={chunk}).new_session(60000)
tokens = session.engine.encode("war and peace " * 14000)[:50000]
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    session.prefill(tokens)
except KeyboardInterrupt:
    print("interrupted", len(session))
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                              timeout=120, check=False)  # fmt: skip
        self.assertEqual(done.stdout, "interrupted 0\n", done.stderr)


class Batching(Case):
    def test_answers_are_those_of_sessions(self):
        expected = self.greedy(12)
        batcher = sluice.Batcher(self.engine, context=512, running=4)
        streams = [batcher.submit(self.prompt, max_tokens=12, ignore_eos=True, logprobs=2)
                   for _ in range(3)]  # fmt: skip
        for stream in streams:
            pieces = list(stream)
            self.assertEqual([t for p in pieces for t in p.tokens], expected)
            self.assertEqual(pieces[-1].finish_reason, "max_tokens")
            for token, logprob, top in (s for p in pieces for s in p.scores):
                self.assertEqual(top[0][0], token)  # greedy takes the likeliest
                self.assertAlmostEqual(top[0][1], logprob, places=5)
                self.assertEqual(len(top), 2)
            self.assertTrue(stream.ended)
            self.assertEqual(stream.usage()["answer_tokens"], 12)
        self.assertEqual(batcher.stats()["submitted"], 3)

    def test_cancel_deadline_and_refusals(self):
        batcher = sluice.Batcher(self.engine, context=512, running=2)
        stream = batcher.submit(self.prompt, max_tokens=400, ignore_eos=True)
        stream.cancel()
        self.assertEqual([p.finish_reason for p in stream][-1], "interrupted")
        stream = batcher.submit(self.prompt, max_tokens=400, ignore_eos=True, timeout=0.001)
        self.assertEqual([p.finish_reason for p in stream][-1], "deadline")
        for kind, options in [(sluice.PromptError, {"max_tokens": 10**6}),
                              (sluice.UsageError, {"choices": 0}),
                              (sluice.UsageError, {"policy": "values"}),
                              (sluice.UsageError, {"timeout": -1.0}),
                              (sluice.UsageError, {"timeout": math.nan}),
                              (sluice.UsageError, {"bias": [(-5, 1.0)]})]:  # fmt: skip
            with self.subTest(options=options), self.assertRaises(kind):
                batcher.submit(self.prompt, **options)
        with self.assertRaises(sluice.PromptError):
            batcher.submit([])
        with self.assertRaises(sluice.UsageError):
            sluice.Batcher(self.engine, context=0)
        batcher.drain(1.0)
        with self.assertRaises(sluice.CapError):
            batcher.submit(self.prompt)

    def test_asyncio(self):
        expected = self.greedy(8)
        batcher = sluice.Batcher(self.engine, context=512, running=4)

        async def read():
            stream = batcher.submit(self.prompt, max_tokens=8, ignore_eos=True)
            return [token async for piece in sluice.pieces(stream) for token in piece.tokens]

        async def read_all():
            return await asyncio.gather(*(read() for _ in range(3)))

        self.assertEqual(asyncio.run(read_all()), [expected] * 3)

    def test_streams_keep_their_batcher(self):
        stream = sluice.Batcher(self.engine, context=512).submit(self.prompt, max_tokens=5)
        gc.collect()
        self.assertIsNotNone(list(stream)[-1].finish_reason)


def plain_attention(queries, keys, values):
    """Causal attention of the newest len(queries) tokens, in fp64: [tokens, heads, head_dim]."""
    group = queries.shape[1] // keys.shape[1]
    keys = np.repeat(keys.astype(np.float64), group, axis=1)
    values = np.repeat(values.astype(np.float64), group, axis=1)
    logits = np.einsum("qhd,khd->hqk", queries.astype(np.float64), keys)
    logits /= math.sqrt(queries.shape[2])
    first = len(keys) - len(queries)
    hidden = np.arange(len(keys))[None, :] > first + np.arange(len(queries))[:, None]
    logits[:, hidden] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values)


class Caches(Case):
    shape = {"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 64, "context": 512}

    def arrays(self, tokens, seed):
        noise = np.random.default_rng(seed)
        return [noise.standard_normal((tokens, heads, 64), dtype=np.float32) for heads in (2, 2, 4)]

    def test_attend_as_plain_attention(self):
        cache = sluice.KvCache(**self.shape, rows="f32")
        sequence = cache.new_sequence()
        del cache
        k, v, q = self.arrays(203, seed=3)
        for phase, first, last in [("prefill", 0, 200), ("decode", 200, 201), ("decode", 201, 202)]:
            step = sequence.begin_step(phase, last - first)
            for layer in range(2):
                out = np.empty((last - first, 4, 64), np.float32)
                step.append(layer, k[first:last], v[first:last])
                step.attend(layer, q[first:last], out)
                np.testing.assert_allclose(
                    out, plain_attention(q[first:last], k[:last], v[:last]), atol=1e-4
                )
            step.end()
        self.assertEqual(len(sequence), 202)
        # Strides of any kind: heads before tokens.
        step = sequence.begin_step("decode", 1)
        turned = [np.ascontiguousarray(a[202:].swapaxes(0, 1)).swapaxes(0, 1) for a in (k, v, q)]
        out = np.empty((1, 4, 64), np.float32)
        for layer in range(2):
            step.append(layer, turned[0], turned[1])
            step.attend(layer, turned[2], out)
        step.end()
        np.testing.assert_allclose(out, plain_attention(q[202:], k, v), atol=1e-4)
        self.assertEqual(sequence.ledger()["decode"]["steps"], 3)

    def test_arrays_that_repeat_their_elements_are_refused(self):
        step = sluice.KvCache(**self.shape, rows="f32").new_sequence().begin_step("prefill", 5)
        k, v, q = self.arrays(5, seed=5)
        out = np.empty((5, 4, 64), np.float32)
        for repeated in (k[:1], k[:, :1], k[:1, :1]):
            with self.assertRaisesRegex(sluice.UsageError, "broadcast"):
                step.append(0, np.broadcast_to(repeated, k.shape), v)
        with self.assertRaisesRegex(sluice.UsageError, "broadcast"):
            step.append(0, k, np.broadcast_to(v[:1], v.shape))
        step.append(0, k, v)
        with self.assertRaisesRegex(sluice.UsageError, "broadcast"):
            step.attend(0, np.broadcast_to(q[:1], q.shape), out)
        few = np.zeros((1, 4, 64), np.float32)
        for strides in ((0, 256, 4), (1024, 0, 4)):
            with self.assertRaisesRegex(sluice.UsageError, "broadcast"):
                step.attend(0, q, np.lib.stride_tricks.as_strided(few, out.shape, strides))

    def test_rows_in_int8_and_log_sum_exps(self):
        k, v, q = self.arrays(200, seed=7)
        hidden = np.triu(np.ones((200, 200), bool), 1)
        logits = np.einsum("qhd,khd->hqk", q.astype(np.float64), np.repeat(k, 2, 1)) / 8
        logits[:, hidden] = -np.inf
        most = logits.max(-1)
        wanted = (most + np.log(np.exp(logits - most[..., None]).sum(-1))).T
        for rows, close in (("f32", 1e-4), ("int8", 0.1)):
            step = sluice.KvCache(**self.shape, rows=rows).new_sequence().begin_step("prefill", 200)
            out, lse = np.empty((200, 4, 64), np.float32), np.empty((200, 4), np.float32)
            for layer in range(2):
                step.append(layer, k, v)
                step.attend(layer, q, out, lse=lse)
                np.testing.assert_allclose(out, plain_attention(q, k, v), atol=close)
                np.testing.assert_allclose(lse, wanted, atol=close)
            for bad in (lse[:199], lse.T, lse.astype(np.float64), np.empty((200, 8), np.float32)[:, ::2]):
                with self.subTest(rows, shape=bad.shape), self.assertRaises((sluice.UsageError, TypeError)):
                    step.attend(1, q, out, lse=bad)
            step.end()

    def test_refuse_what_is_wrong(self):
        cache = sluice.KvCache(**self.shape)
        sequence = cache.new_sequence()
        with self.assertRaises(sluice.UsageError):
            sequence.begin_step("prefil", 1)
        with self.assertRaises(sluice.UsageError):
            sequence.begin_step("prefill", 0)
        with self.assertRaises(sluice.CapError):
            cache.new_sequence()
        step = sequence.begin_step("prefill", 8)
        k, v, q = self.arrays(8, seed=4)
        bad = [k[:7], k.astype(np.float64), k.astype(np.int32), k[:, :1], k[:, :, ::2], k.ravel(),
               k[:, :, ::-1], np.empty((8, 2, 64), np.complex64)]  # fmt: skip
        for array in bad:
            with self.subTest(shape=array.shape, dtype=array.dtype), \
                    self.assertRaises((sluice.UsageError, TypeError)):  # fmt: skip
                step.append(0, array, v)
        for layer in (-1, 2):
            with self.assertRaises(sluice.UsageError):
                step.append(layer, k, v)
        with self.assertRaises(TypeError):
            step.append(0, "keys", v)
        with self.assertRaises(sluice.UsageError):
            step.end()  # layers without rows
        read_only = np.empty((8, 4, 64), np.float32)
        read_only.flags.writeable = False
        k.flags.writeable = False  # what is only read may be read-only
        step.append(0, k, v)
        k.flags.writeable = True
        with self.assertRaises(TypeError):
            step.attend(0, q, read_only)
        k[0, 0, 0] = np.nan
        with self.assertRaises(sluice.NumericError):
            step.append(1, k, v)
        del step
        with self.assertRaises(sluice.Error):
            sequence.begin_step("prefill", 8)  # it failed
        sequence.reset()
        self.assertEqual(len(sequence), 0)
        for options in ({"kv_heads": 3}, {"context": -1}, {"rows": "f8"}, {"policies": ["magic"]}):
            with self.subTest(**options), self.assertRaises(sluice.UsageError):
                sluice.KvCache(**{**self.shape, **options})


    def test_value_basis_lets_a_cache_keep_half(self):
        noise = np.random.default_rng(11)
        weights = noise.standard_normal((4, 64, 96), dtype=np.float32)
        basis = np.empty((2, 2, 32, 64), np.float32)
        for of_head, rows in zip(basis.reshape(4, 32, 64), weights, strict=True):
            sluice.value_basis(rows, of_head)
            np.testing.assert_allclose(of_head @ of_head.T, np.eye(32), atol=1e-5)
            # No vectors of this number explain more of the weights.
            values = np.linalg.eigvalsh(rows.astype(np.float64) @ rows.T)
            self.assertAlmostEqual(np.sum((of_head @ rows) ** 2) / values[32:].sum(), 1, places=4)
        with self.assertRaises(sluice.UnsupportedError):
            sluice.KvCache(**self.shape, policies=["compact"])
        cache = sluice.KvCache(**self.shape, rows="f32", policies=["compact"], value_basis=basis)
        sequence = cache.new_sequence()
        k, v, q = self.arrays(301, seed=5)
        # Rows of the newest page and 512 others are attended as they are.
        for phase, first, last in [("prefill", 0, 300), ("decode", 300, 301)]:
            step = sequence.begin_step(phase, last - first)
            for layer in range(2):
                out = np.empty((last - first, 4, 64), np.float32)
                step.append(layer, k[first:last], v[first:last])
                step.attend(layer, q[first:last], out)
            step.end()
        np.testing.assert_allclose(out, plain_attention(q[300:], k, v), atol=1e-3)
        bad = {
            "float64": basis.astype(np.float64),
            "too few": basis[:1],
            "gaps": np.zeros((2, 2, 32, 128), np.float32)[..., ::2],
            "not orthonormal": np.ones_like(basis),
        }
        for name, array in bad.items():
            with self.subTest(name), self.assertRaises((sluice.UsageError, TypeError)):
                sluice.KvCache(**self.shape, policies=["compact"], value_basis=array)
        for rows, out in [(weights[0, :63], basis[0, 0]), (weights[0], basis[0, 0, :31]),
                          (weights, basis[0, 0]), (weights[0], weights[0].astype(np.float64))]:  # fmt: skip
            with self.assertRaises((sluice.UsageError, TypeError)):
                sluice.value_basis(rows, out)
        weights[0, 3, 3] = np.inf
        with self.assertRaises(sluice.NumericError):
            sluice.value_basis(weights[0], basis[0, 0])


class Docs(unittest.TestCase):
    def test_example_of_the_page_runs(self):
        page = (ROOT / "docs" / "embedding.md").read_text()
        example = re.search(r"```python\n(import sluice\n.*?)```", page, re.DOTALL)[1]
        done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True,
                              cwd=ROOT, timeout=60, check=False)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("'cause': 'index_read'", done.stdout)


class Stubs(unittest.TestCase):
    def test_declare_what_there_is(self):
        stub = Path(sluice.__file__).parent / "_sluice.pyi"
        tree = ast.parse(stub.read_text())
        declared = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        for name in sluice.__all__:
            if name not in ("__version__", "pieces"):
                self.assertIn(name, declared)


if __name__ == "__main__":
    MODEL, CHAT_MODEL = sys.argv.pop(1), sys.argv.pop(1)
    unittest.main()
