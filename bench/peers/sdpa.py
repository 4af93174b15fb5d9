#!/usr/bin/env python3
"""Times torch's scaled_dot_product_attention for one query token, by backend, as JSON.

The shapes are those of bench/decode_attention_cuda_bench.cu: batch, tokens, query heads, KV heads,
head_dim; bf16. Small problems rotate over copies that exceed the L2 cache; calls are captured into
a CUDA graph, as the benchmark's are. Needs a GPU and torch 2.5 or newer.
"""

import json
import statistics
import sys

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
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LEAST_BYTES = 512 << 20


def graph_time(issue, runs):
    """Seconds of one of the `runs` that `issue` makes, as the median of replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            issue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        issue()
    times = []
    for _ in range(12):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / runs)
    return statistics.median(times[2:])


def measure(shape):
    """Seconds by backend for one shape; a backend that refuses is dropped."""
    batch, tokens, query_heads, kv_heads, dim = shape
    size = 2 * batch * kv_heads * tokens * dim * 2
    copies = max(1, LEAST_BYTES // size)
    make = lambda heads, length: torch.randn(
        batch, heads, length, dim, device="cuda", dtype=torch.bfloat16
    )
    keys = [make(kv_heads, tokens) for _ in range(copies)]
    values = [make(kv_heads, tokens) for _ in range(copies)]
    query = make(query_heads, 1)
    result = {}
    for name, backend in BACKENDS.items():

        def issue():
            with sdpa_kernel(backend):
                for k, v in zip(keys, values):
                    sdpa(query, k, v, enable_gqa=query_heads != kv_heads)

        try:
            result[name] = graph_time(issue, copies)
        except RuntimeError as error:
            print(f"{shape} {name}: {str(error).splitlines()[0]}", file=sys.stderr)
    del keys, values
    torch.cuda.empty_cache()
    return {"shape": shape, "bytes": size, "seconds": result}


def main():
    torch.manual_seed(1)
    rows = [measure(shape) for shape in SHAPES]
    json.dump(
        {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "decode": rows},
        sys.stdout,
        indent=1,
    )
    print()


if __name__ == "__main__":
    main()
