// KV rows on the CPU: append, look-up, gather and attention. Operations and parameters are defined
// in lib/backend/kv_ops.h and page_ops.h; every pointer is host memory.
#pragma once

#include <cstdint>

#include "cpu/runtime/threads.h"
#include "lib/backend/kv_ops.h"

namespace sluice::cpu {

// The kernel that attends. `automatic` chooses by shape and processor; the others are for tests and
// benchmarks.
enum class AttendKernel : std::uint8_t {
  automatic,
  decode,       // SIMD along the channels; few queries, memory-bound
  prefill,      // SIMD with one query per lane; many queries, compute-bound
  amx,          // as prefill, on AMX tiles; rows of bf16 or int8
  avx512_bf16,  // as prefill, on AVX-512 dot products of bf16
};

// Returns true if this process can use `kernel` for rows of `shape`.
bool attend_supported(AttendKernel kernel, const KvShape& shape);

// `attend` on the calling thread and `threads`; every pointer is host memory.
//
// Any number of tokens, any group, any even head_dim, row counts that differ between KV heads.
// Sums are fp32; the kernels avx512_bf16 and amx round queries and weights to bf16, as GPU kernels
// do. A query that sees no row gets out = 0 and lse = -inf. A NaN in a row makes the queries that
// see it NaN, and may do so for queries of the same block that precede it.
void attend(const AttendParams& params, Threads& threads,
            AttendKernel kernel = AttendKernel::automatic);

// Scratch of attend() in bytes, summed over `threads`, for up to `tokens` tokens and `rows` rows.
// Threads keep it.
std::uint64_t attend_scratch_bytes(const KvShape& shape, std::int64_t tokens, std::int64_t rows,
                                   bool is_listed, int threads);

void attend_batch(const AttendBatchParams& params, Threads& threads);
// Scratch of attend_batch() and attend_selected() in bytes, summed over `threads`.
std::uint64_t decode_scratch_bytes(const KvShape& shape, int threads);

void attend_selected(const AttendSelectedParams& params, Threads& threads);

// Writes rows on the device only; copy_to_host() copies them to host memory.
void append(const AppendParams& params, Threads& threads);
void append_batch(const AppendBatchParams& params, Threads& threads);
void sum_values(const SumValuesParams& params);

void find_rows(const FindRowsParams& params, Threads& threads);
void forget_rows(const ForgetRowsParams& params);

void gather(const GatherParams& params, Threads& threads);
void pack_tokens(const PackTokensParams& params, Threads& threads);
void unpack_tokens(const UnpackTokensParams& params, Threads& threads);

void page_means(const PageMeansParams& params, Threads& threads);
void choose_pages(const ChoosePagesParams& params, Threads& threads);

}  // namespace sluice::cpu
