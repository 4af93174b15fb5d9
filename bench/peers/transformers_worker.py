"""Hugging Face transformers' turn. See worker.py."""

import argparse
from pathlib import Path
from typing import Sequence

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from worker import check_golden, read_job, report


class Transformers:
    """A model and its cache."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self.cache = DynamicCache()

    def reset(self) -> None:
        self.cache = DynamicCache()

    @torch.inference_mode()
    def feed(self, ids: Sequence[int]) -> int:
        output = self.model(
            torch.tensor([list(ids)]), past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        return int(output.logits[0, -1].argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    job = read_job(args.job)
    # The golden continuation is float32's; in bfloat16 near ties may fall the other way.
    check_golden(Transformers(args.model, torch.float32), job)
    report(Transformers(args.model, getattr(torch, args.dtype)), job)


if __name__ == "__main__":
    main()
