"""sluice.transformers against transformers' own cache. Exits with 77 where torch or transformers
is not installed.

    transformers_test.py MODEL [unittest's arguments]
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import torch
    import transformers
except ImportError as error:
    print(f"SKIPPED: sluice.transformers is not tested: {error}")
    sys.exit(77)

import sluice
from sluice.transformers import SluiceCache
from transformers import DynamicCache

MODEL = ""
TEXT = "Well, Prince, so Genoa and Lucca are now just family estates of the Buonapartes. " * 20


def tiny(kind, **options):
    """A model with random weights."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2, **options,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


class Case(unittest.TestCase):
    def expect_same_answer(self, model, prompt, new_tokens=24, **options):
        """The same tokens as with transformers' cache, and logits within fp32's rounding."""
        how = {"max_new_tokens": new_tokens, "do_sample": False, "output_logits": True,
               "return_dict_in_generate": True, "eos_token_id": None}  # fmt: skip
        model.set_attn_implementation("sdpa")
        expected = model.generate(prompt, **how)
        model.set_attn_implementation("sluice")
        options = {"chunk": 1024, **options}
        cache = SluiceCache(model.config, context=4096, policies=["dense"], **options)
        # transformers 5.0 answers differently with any prefill_chunk_size and sliding windows.
        if prompt.shape[1] > cache.chunk:
            how["prefill_chunk_size"] = cache.chunk
        got = model.generate(prompt, past_key_values=cache, **how)
        self.assertEqual(got.sequences.tolist(), expected.sequences.tolist())
        for own, other in zip(got.logits, expected.logits, strict=True):
            torch.testing.assert_close(own, other, atol=2e-3, rtol=0)
        self.assertEqual(cache.ledger()["decode"]["tokens"], new_tokens - 1)
        self.assertEqual(cache.get_seq_length(), prompt.shape[1] + new_tokens - 1)
        return cache


class Bundled(Case):
    @classmethod
    def setUpClass(cls):
        cls.model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        cls.prompt = torch.tensor([sluice.Engine(MODEL).encode(TEXT)])

    def setUp(self):
        self.model.set_attn_implementation("sluice")

    def cache(self, **options):
        return SluiceCache(self.model.config, **{"context": 4096, "chunk": 1024, **options})

    def generate(self, cache, prompt=None, **options):
        options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, **options}
        prompt = self.prompt if prompt is None else prompt
        return self.model.generate(prompt, past_key_values=cache, **options)

    def test_dense_is_the_same(self):
        self.assertGreater(self.prompt.shape[1], 256)
        self.expect_same_answer(self.model, self.prompt, chunk=256)

    def test_dense_under_a_cap_is_the_same(self):
        cache = self.expect_same_answer(self.model, self.prompt, device_memory=3 << 20)
        self.assertIn("miss", {t["cause"] for t in cache.ledger()["decode"]["totals"]})
        self.assertLess(cache.kv.memory()["device_peak"], (3 << 20) + 1)

    def test_a_whole_prompt_in_one_forward(self):
        cache = self.cache(chunk=2048)
        with torch.no_grad():
            logits = self.model(self.prompt, past_key_values=cache).logits
            self.model.set_attn_implementation("sdpa")
            torch.testing.assert_close(logits, self.model(self.prompt).logits, atol=2e-3, rtol=0)

    def test_policies_select(self):
        cache = self.cache(policies=["values"])
        self.generate(cache)
        totals = {t["cause"]: t["rows"] for t in cache.ledger()["decode"]["totals"]}
        self.assertGreater(totals.get("value_read", 0), 0, totals)
        dense = self.cache()
        self.generate(dense)
        all_rows = {t["cause"]: t["rows"] for t in dense.ledger()["decode"]["totals"]}
        self.assertLess(totals["hit"], all_rows["hit"] / 2)

    def test_compact_takes_its_basis_from_the_model(self):
        with self.assertRaisesRegex(sluice.UsageError, "give it `model`"):
            self.cache(policies=["compact"])
        with self.assertRaisesRegex(sluice.UsageError, "v_proj"):
            self.cache(policies=["compact"], model=tiny("phi3"))
        how = {"policies": ["compact prune=top_k(64)"], "model": self.model}
        cache = self.cache(**how)
        logits = [self.generate(c, output_logits=True, return_dict_in_generate=True).logits[1]
                  for c in (cache, self.cache())]  # fmt: skip
        sluice_kl = torch.nn.functional.kl_div(
            logits[0].log_softmax(-1), logits[1].log_softmax(-1), log_target=True, reduction="sum"
        )
        self.assertLess(float(sluice_kl), 0.02)
        totals = {t["cause"]: t["rows"] for t in cache.ledger()["decode"]["totals"]}
        self.assertGreater(totals["value_read"], 0)

    def test_goes_on_crops_and_resets(self):
        cache = self.cache()
        answer = self.generate(cache)
        longer = self.generate(cache, answer, max_new_tokens=8)
        self.assertEqual(longer.tolist(), self.generate(self.cache(), max_new_tokens=24).tolist())
        cache.crop(-(cache.get_seq_length() - self.prompt.shape[1]) - 5)
        self.assertEqual(cache.get_seq_length(), self.prompt.shape[1] - 5)
        self.assertEqual(self.generate(cache).tolist(), answer.tolist())
        cache.reset()
        self.assertEqual(cache.get_seq_length(), 0)
        self.assertEqual(self.generate(cache).tolist(), answer.tolist())

    def test_refuses_what_it_cannot(self):
        two = self.prompt[:, :20].repeat(2, 1)
        mask = torch.ones_like(self.prompt)
        mask[0, :4] = 0
        cases = [
            ("batch", lambda: self.generate(self.cache(), two)),
            ("batch|one sequence", lambda: self.generate(self.cache(), num_beams=2)),
            ("padding", lambda: self.generate(self.cache(), attention_mask=mask)),
            ("prefill_chunk_size", lambda: self.model(self.prompt, past_key_values=self.cache(chunk=64))),
            ("correct", lambda: self.cache(policies=["tidaldecode correct=8"])),
            ("select", lambda: self.generate(self.cache(policies=["select=magic"]))),
        ]  # fmt: skip
        for message, call in cases:
            with self.subTest(message), torch.no_grad():
                with self.assertRaisesRegex(sluice.UsageError, message):
                    call()
        with self.assertRaisesRegex(sluice.UsageError, "gradients"):
            self.model(self.prompt[:, :8], past_key_values=self.cache())
        with self.assertRaises(sluice.PromptError):
            self.generate(self.cache(context=512))

    def test_without_a_sluice_cache_it_is_sdpa(self):
        rows = self.prompt[:, :40].repeat(2, 1)
        mask = torch.ones_like(rows)
        mask[0, :7] = 0
        answers = []
        for name in ("sdpa", "sluice"):
            self.model.set_attn_implementation(name)
            how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            answers.append([
                self.model.generate(rows, attention_mask=mask, **how).tolist(),
                self.model.generate(self.prompt, past_key_values=DynamicCache(),
                                    prefill_chunk_size=64, **how).tolist(),
                self.model.generate(self.prompt[:, :9], num_beams=3, **how).tolist(),
            ])  # fmt: skip
        self.assertEqual(answers[0], answers[1])


@unittest.skipUnless(torch.cuda.is_available(), "no GPU that torch can use")
class OnAGpu(Case):
    @classmethod
    def setUpClass(cls):
        cls.model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
        cls.model.to("cuda")
        cls.prompt = torch.tensor([sluice.Engine(MODEL).encode(4 * TEXT)], device="cuda")

    def logits(self, stream=None, **options):
        """Of the last tokens, each fed by itself."""
        self.model.set_attn_implementation("sluice")
        cache = SluiceCache(self.model.config, context=4096, chunk=1024, **options)
        known = self.prompt.shape[1] - 16
        with torch.no_grad(), torch.cuda.stream(stream):
            for piece in self.prompt[:, :known].split(1024, dim=1):
                self.model(piece, past_key_values=cache)
            steps = [self.model(token, past_key_values=cache).logits[0, -1]
                     for token in self.prompt[:, known:].split(1, dim=1)]  # fmt: skip
            return torch.stack(steps).float(), cache

    def expected(self):
        self.model.set_attn_implementation("sdpa")
        with torch.no_grad():
            return self.model(self.prompt).logits[0, -16:].float()

    def test_dense_is_near_sdpa(self):
        whole, cache = self.logits(policies=["dense"])
        torch.testing.assert_close(whole, self.expected(), atol=0.3, rtol=0)
        self.assertNotIn("miss", {t["cause"] for t in cache.ledger()["decode"]["totals"]})
        # A quarter of the context stays on the device, and the prompt is more.
        plan = cache.kv.plan
        self.assertGreater(self.prompt.shape[1], plan["context"] // 4)
        cap = cache.kv.memory()["device_peak"] - 3 * plan["dense_bytes"] // 4
        capped, cache = self.logits(policies=["dense"], device_memory=cap)
        torch.testing.assert_close(capped, self.expected(), atol=0.3, rtol=0)
        self.assertIn("miss", {t["cause"] for t in cache.ledger()["decode"]["totals"]})

    def test_another_stream_waits_for_the_cache(self):
        alone, _ = self.logits(policies=["values"])
        beside, cache = self.logits(torch.cuda.Stream(), policies=["values"])
        torch.testing.assert_close(beside, alone, atol=0, rtol=0)
        # The cache stays in the order of the stream that it began with.
        with torch.no_grad():
            cache.crop(-1)
            again = self.model(self.prompt[:, -1:], past_key_values=cache).logits[0, -1]
        torch.testing.assert_close(again.float(), alone[-1], atol=0, rtol=0)


@unittest.skipUnless(importlib.util.find_spec("accelerate"), "transformers' tp_plan needs accelerate")
class TensorParallel(unittest.TestCase):
    """Every process has its KV heads, of the model and of the cache."""

    def report(self, *command):
        root = Path(__file__).resolve().parents[2]
        script = [root / "bench" / "peers" / "transformers_cache.py", MODEL]
        with tempfile.NamedTemporaryFile() as file:
            flags = ["--text", root / "data" / "war-and-peace.txt", "--tokens", 500, "--steps", 4,
                     "--device", "cpu", "--cache", "resident", "values", "--json", file.name]  # fmt: skip
            done = subprocess.run([sys.executable, *map(str, [*command, *script, *flags])],
                                  capture_output=True, text=True, timeout=300)  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(Path(file.name).read_text())

    def test_two_processes_say_what_one_says(self):
        one = self.report()
        two = self.report("-m", "torch.distributed.run", "--nproc-per-node", 2)
        self.assertEqual((one["devices"], two["devices"]), (1, 2))
        for alone, part in zip(one["results"], two["results"], strict=True):
            self.assertEqual(part["likeliest"], alone["likeliest"])
        halves = [2 * part["bytes_per_token"]["host -> host"] for part in two["results"][1:]]
        self.assertEqual(len(halves), 1)
        whole = one["results"][1]["bytes_per_token"]["host -> host"]
        self.assertLess(abs(halves[0] - whole), 0.05 * whole)


class Architectures(Case):
    prompt = torch.randint(3, 128, (1, 300), generator=torch.Generator().manual_seed(5))

    def test_qwen3(self):
        self.expect_same_answer(tiny("qwen3"), self.prompt, chunk=128)

    def test_mixture_of_experts(self):
        model = tiny("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        self.expect_same_answer(model, self.prompt)

    def test_layers_with_a_window_stay_with_transformers(self):
        kinds = ["sliding_attention", "full_attention"] * 2
        model = tiny("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=64)
        cache = self.expect_same_answer(model, self.prompt)
        self.assertEqual([type(layer).__name__ for layer in cache.layers],
                         ["DynamicSlidingWindowLayer", "SluiceLayer"] * 2)  # fmt: skip
        with self.assertRaisesRegex(sluice.UsageError, "no layer"):
            only = tiny("qwen3", layer_types=["sliding_attention"] * 4, use_sliding_window=True,
                        sliding_window=64)  # fmt: skip
            SluiceCache(only.config, context=512)


if __name__ == "__main__":
    MODEL = sys.argv.pop(1)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    unittest.main()
