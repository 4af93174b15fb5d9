// Attention on the CPU: chooses the kernel, splits the work over threads and merges the parts.
#pragma once

#include <cstdint>

#include "cpu/threads.h"
#include "lib/backend/kv_ops.h"

namespace sluice::cpu {

// Which kernel attends. `automatic` decides from the shape and the processor; the others are for
// tests and benchmarks.
enum class AttendKernel : std::uint8_t {
  automatic,
  decode,       // SIMD along the channels; few queries, bound by memory
  prefill,      // SIMD with one query per lane; many queries, bound by arithmetic
  amx,          // as prefill, on AMX tiles; bf16 rows only
  avx512_bf16,  // likewise, by AVX-512's dot products of bf16
};

// Whether this process may use `kernel` for rows of `shape`.
bool attend_supported(AttendKernel kernel, const KvShape& shape);

// KvOps::attend() on the calling thread and `threads`; every pointer is host memory.
//
// Any number of tokens, any group, any even head_dim, row counts that differ between KV heads.
// Sums are fp32; the kernels avx512_bf16 and amx round queries and weights to bf16, as GPU kernels
// do. A query that sees no row gets out = 0 and lse = -inf. A NaN in a row makes the queries that
// see it NaN, and may do so for queries of the same block that precede it.
void attend(const AttendParams& params, Threads& threads,
            AttendKernel kernel = AttendKernel::automatic);

// KvOps::attend_batch() likewise.
void attend_batch(const AttendBatchParams& params, Threads& threads);

}  // namespace sluice::cpu
