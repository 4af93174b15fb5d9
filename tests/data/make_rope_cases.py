#!/usr/bin/env python3
"""Golden answers of transformers for checkpoints of tests/data/golden with other rotary embeddings.

    pip install torch transformers && python3 tests/data/make_rope_cases.py [FOLDER]

Each case is a checkpoint whose weights are those of another: a link, a config.json with changes and
golden.json, which has what that of the other has, computed in fp32. Without FOLDER they are written
beside the checkpoints they are made of.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

GOLDEN = Path(__file__).resolve().parent / "golden"
# The texts have 600 tokens: the original contexts are shorter, so that everything is stretched.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral_linear": ("mistral", {"rope_type": "linear", "factor": 4.0}),
    "qwen3_yarn": (
        "qwen3",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    "llama_mqa128_yarn": (
        "llama_mqa128",
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
         "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5,
         "truncate": False},
    ),
}  # fmt: skip


@torch.inference_mode()
def answers(model: Any, of: dict[str, Any]) -> dict[str, Any]:
    """What golden.json has, for the tokens and positions of another."""
    ids = torch.tensor([of["ids"]])
    logits = model(ids).logits[0].double()
    nll = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
    top = logits[of["positions"]].topk(len(of["top_ids"][0]))
    after = model.generate(ids, max_new_tokens=len(of["greedy"]), do_sample=False, eos_token_id=None)
    return {
        "ids": of["ids"],
        "mean_nll": nll.item(),
        "positions": of["positions"],
        "top_ids": top.indices.tolist(),
        "top_logits": top.values.tolist(),
        "greedy": after[0, len(of["ids"]) :].tolist(),
    }


def main() -> None:
    """Runs the command."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    for name, (source, rope) in CASES.items():
        folder = target / name
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((GOLDEN / source / "config.json").read_text(encoding="utf-8"))
        config["rope_parameters"] |= rope
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights = folder / "model.safetensors"
        weights.unlink(missing_ok=True)
        weights.symlink_to((GOLDEN / source / "model.safetensors").resolve())
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager")  # fmt: skip
        of = json.loads((GOLDEN / source / "golden.json").read_text(encoding="utf-8"))
        golden = answers(model.eval(), of)
        golden["versions"] = {"transformers": transformers.__version__, "torch": torch.__version__}
        (folder / "golden.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
        weights.unlink()
        weights.symlink_to(f"../{source}/model.safetensors")


if __name__ == "__main__":
    main()
