// Rows of keys and values: written, and attended to.
//
//   append        new tokens' keys and values become rows, on the device and at home
//   attend        prefill: many queries of one sequence to one run of rows per KV head, causally or
//                 each to as many as it is said to see
//                   hopper    wgmma, fed by bulk tensor copies: compute capability 9.0, head_dim
//                             64 or 128
//                   generic   mma.sync: any other
//                 Many rows for few queries are split, and a kernel after it merges the parts.
//                 decode: one query of every token of a batch, to all rows of its sequence or to
//                 selected ones and its own page's. One kernel: warps fetch rows by page (rows),
//                 attend to them (warp), and combine what they found, in the block and between
//                 blocks (results); what each block does follows from work
//   find_rows     where selected rows are, on the device, in the row cache or at home: decode then
//                 looks that up in place of their pages, and puts what it fetched into the cache
//   sum_values    corrects running sums of values when rows are replaced
//
// Prefill attends run by run, wherever the host knows the rows to be; decode looks pages up on the
// device, so that a recorded step serves any tokens.
//
// Source: Dao 2023, "FlashAttention-2"; Shah et al. 2024, "FlashAttention-3"; Dao et al. 2023,
// "Flash-Decoding"; the split of decode's work follows Osama et al. 2023, "Stream-K".
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/backend/kv_ops.h"

namespace sluice::cuda {

void append(const AppendParams& params, const Launch& launch);
void append_batch(const AppendBatchParams& params, const Launch& launch);
void sum_values(const SumValuesParams& params, const Launch& launch);
void find_rows(const FindRowsParams& params, const Launch& launch);
void forget_rows(const ForgetRowsParams& params, const Launch& launch);

// Scratch of neither is used. The first launches by counts alone, the second also by positions.
void page_means(const PageMeansParams& params, const Launch& launch);
void choose_pages(const ChoosePagesParams& params, const Launch& launch);

// AttendParams as lib/backend.h describes them; q and the softmax weights are rounded to the dtype
// of the rows, sums are fp32. Rows must be on the device. Throws Error{unsupported} for a head_dim
// or a row dtype that has no kernel.
void attend_prefill(const AttendParams& params, const Launch& launch);

// Queries that one block of decode serves: with their rounding errors they fill the 16 rows of a
// matrix instruction. Rows are read once for every so many of a KV head.
inline constexpr int kBunch = 8;

// Whether the device has shared memory enough for rows of this head_dim.
bool attend_decode_fits(int head_dim, const DeviceLimits& device);

// Queries and softmax weights take part as sums of two numbers of the rows' dtype, which leaves
// fp32's rounding. Rows are read where they lie, from mapped host memory too; arenas are not used.
// Launches depend on counts and capacities alone; batch.tokens, gaps and the table of pages are
// read before the kernel before is over. Others attend to what is in the gaps.
void attend_decode(const AttendBatchParams& params, const Launch& launch);
void attend_decode_selected(const AttendSelectedParams& params, const Launch& launch);

}  // namespace sluice::cuda
