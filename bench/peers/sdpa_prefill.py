"""Times torch's scaled_dot_product_attention under a causal mask and prints JSON, a line a case.

FLOP/s count 4 * head_dim for each visible pair of query and row, as prefill_attention_cuda_bench
does. Times are medians of CUDA events.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from typing import Callable, Optional

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass
class Case:
    tokens: int
    before: int  # rows before the first query
    heads: int
    kv_heads: int
    head_dim: int

    def operations(self) -> float:
        pairs = self.tokens * self.before + self.tokens * self.tokens / 2
        return 4.0 * self.head_dim * self.heads * pairs


CASES = (
    Case(32768, 0, 32, 8, 128),
    Case(32768, 0, 32, 32, 128),
    Case(2048, 30720, 32, 8, 128),
    Case(8192, 0, 32, 8, 128),
    Case(2048, 0, 32, 8, 128),
    Case(32768, 0, 32, 8, 64),
    Case(2048, 30720, 32, 8, 64),
)


def median_ms(call: Callable[[], object], warm_up: int, repeats: int) -> float:
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def attention(case: Case) -> Callable[[], torch.Tensor]:
    def random(heads: int, tokens: int) -> torch.Tensor:
        # The memory order is [batch, tokens, heads, head_dim], as in models.
        x = torch.randn(1, tokens, heads, case.head_dim, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2)

    rows = case.before + case.tokens
    q = random(case.heads, case.tokens)
    k, v = random(case.kv_heads, rows), random(case.kv_heads, rows)
    options: dict = {"enable_gqa": case.heads != case.kv_heads}
    if case.before == 0:
        options["is_causal"] = True
    else:
        # The bias object has no grouped heads, and always takes the flash backend.
        group = case.heads // case.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        options = {"attn_mask": causal_lower_right(case.tokens, rows)}
    return lambda: scaled_dot_product_attention(q, k, v, **options)


def measure(case: Case, backend: str, repeats: int) -> dict:
    result: dict = {"backend": backend, **asdict(case)}
    error: Optional[str] = None
    try:
        with sdpa_kernel(BACKENDS[backend]):
            milliseconds = median_ms(attention(case), 3, repeats)
        result["median_ms"] = milliseconds
        result["tflops"] = case.operations() / milliseconds * 1e-9
    except RuntimeError as failure:
        error = str(failure).splitlines()[0]
        result["error"] = error
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name()}))
    for case in CASES:
        for backend in BACKENDS if case.before == 0 else ("flash",):
            print(json.dumps(measure(case, backend, args.repeats)), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
