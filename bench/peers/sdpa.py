#!/usr/bin/env python3
"""Times torch's scaled_dot_product_attention for one query token, by backend, as JSON.

    bench/peers/sdpa.py > OUT.json
    bench/peers/sdpa.py --device cpu --shape 1 8192 32 8 128 > OUT.json

The shapes are those of bench/decode_attention_cuda_bench.cu: batch, tokens, query heads, KV heads,
head_dim; bf16. Small problems rotate over copies that exceed the L2 cache; on a GPU calls are
captured into a CUDA graph, as the benchmark's are. `results` are cells of `sluice bench`, whose step
is the attention of one layer, and bench/plot_bench.py draws both. Needs torch 2.5 or newer.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any, Callable

import bench_cells
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

SHAPES = [
    (1, 8192, 32, 8, 128),
    (1, 32768, 32, 8, 128),
    (1, 131072, 32, 8, 128),
    (1, 1048576, 32, 8, 128),
    (16, 8192, 32, 8, 128),
    (16, 32768, 32, 8, 128),
    (16, 131072, 32, 8, 128),
    (16, 1048576, 32, 8, 128),
    (64, 4096, 32, 32, 128),
    (64, 16384, 32, 32, 128),
    (1, 131072, 32, 32, 128),
    (16, 30000, 32, 32, 128),
]
BACKENDS = {
    "cuda": {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    },
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH},
}
LEAST_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
WARM_UP, RUNS = 2, 10


def graph_times(issue: Callable[[], None], calls: int) -> list[float]:
    """Seconds of one of the `calls` that `issue` makes, of each replay of a CUDA graph of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            issue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        issue()
    times = []
    for _ in range(WARM_UP + RUNS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / calls)
    return times[WARM_UP:]


def call_times(issue: Callable[[], None], calls: int) -> list[float]:
    """The same on a CPU, of each time that the calls are made."""
    times = []
    for _ in range(WARM_UP + RUNS):
        begin = time.perf_counter()
        issue()
        times.append((time.perf_counter() - begin) / calls)
    return times[WARM_UP:]


@torch.inference_mode()
def measure(shape: tuple[int, ...], device: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Median seconds by backend for one shape, and their cells; a backend that refuses is dropped."""
    batch, tokens, query_heads, kv_heads, dim = shape
    size = 2 * batch * kv_heads * tokens * dim * 2
    copies = max(1, LEAST_BYTES[device] // size)

    def make(heads: int, length: int) -> torch.Tensor:
        return torch.randn(batch, heads, length, dim, device=device, dtype=torch.bfloat16)

    keys = [make(kv_heads, tokens) for _ in range(copies)]
    values = [make(kv_heads, tokens) for _ in range(copies)]
    query = make(query_heads, 1)
    result, cells = {}, []
    for name, backend in BACKENDS[device].items():

        def issue() -> None:
            with sdpa_kernel(backend):
                for k, v in zip(keys, values):
                    sdpa(query, k, v, enable_gqa=query_heads != kv_heads)

        try:
            seconds = (graph_times if device == "cuda" else call_times)(issue, copies)
        except RuntimeError as error:
            print(f"{shape} {name}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        result[name] = statistics.median(seconds)
        policy = f"torch {name}, {query_heads} query and {kv_heads} KV heads"
        cells.append(bench_cells.cell(policy, tokens, seconds, sequences=batch))
    del keys, values
    if device == "cuda":
        torch.cuda.empty_cache()
    return {"shape": shape, "bytes": size, "seconds": result}, cells


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=sorted(BACKENDS))
    parser.add_argument("--shape", type=int, nargs=5, action="append", help="instead of all",
                        metavar=("BATCH", "TOKENS", "QUERY_HEADS", "KV_HEADS", "HEAD_DIM"))  # fmt: skip
    flags = parser.parse_args()
    torch.manual_seed(1)
    start = bench_cells.utc_now()
    gpu = torch.cuda.get_device_name() if flags.device == "cuda" else None
    measured = [measure(tuple(shape), flags.device) for shape in flags.shape or SHAPES]
    report = {
        "schema": bench_cells.SCHEMA,
        "run": bench_cells.run(f"torch {torch.__version__}", flags.device, gpu, start),
        "device": gpu or "cpu",
        "torch": torch.__version__,
        "decode": [row for row, _ in measured],
        "results": [cell for _, cells in measured for cell in cells],
    }
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
