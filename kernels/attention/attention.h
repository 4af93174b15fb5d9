// Rows of keys and values: writing them, and attention over them.
//
//   append        writes new tokens' keys and values as rows, on the device and in host memory
//   attend        prefill: many queries of one sequence to one run of rows per KV head, causally or
//                 each to a given number of rows
//                   hopper    wgmma, fed by bulk tensor copies: compute capability 9.0, head_dim
//                             64 or 128
//                   generic   mma.sync: any other
//                 Many rows for few queries are split, and a kernel after it merges the parts.
//                 decode: one query of every token of a batch, to all rows of its sequence or to
//                 selected ones and its own page's. One kernel (decode.cu), whose words are in
//                 decode_work.cuh
//   find_rows     finds selected rows: on the device, in the row cache or in host memory. Decode
//                 then looks these places up instead of pages, and writes rows that it fetched into
//                 the cache
//   sum_values    corrects running sums of values when rows are replaced
//   page_means, choose_pages   for prefill=pages: mean keys of pages, and the pages that each block
//                 of 128 queries attends to
//
// Prefill attends run by run, to rows whose addresses the host knows; decode looks pages up on the
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

// Neither uses scratch. page_means() launches by counts alone, choose_pages() also by positions.
void page_means(const PageMeansParams& params, const Launch& launch);
void choose_pages(const ChoosePagesParams& params, const Launch& launch);

// AttendParams as lib/backend/kv_ops.h describes them; q and the softmax weights are rounded to the
// dtype of the rows, sums are fp32. Coded rows become bf16 rows in scratch first, rounded. Rows
// must be on the device. Throws Error{unsupported} for a head_dim or a row dtype that has no
// kernel.
void attend_prefill(const AttendParams& params, const Launch& launch);

// Query heads that one block of decode serves: with their rounding errors they fill the 16 rows of
// an mma. Rows are read once for every kBunch query heads of a KV head.
inline constexpr int kBunch = 8;

// Queries and softmax weights enter as sums of two numbers of the rows' dtype, in bf16 exact to
// 2^-17 of their size; codes of rows are exact in bf16, their scales multiply logits and weights.
// Rows are read in place, from mapped host memory too; arenas are not used. Launches depend on
// counts and capacities alone; batch.tokens, gaps and the table of pages are read before the
// preceding kernel is over. Tokens in the gaps are skipped: other calls attend to them.
void attend_decode(const AttendBatchParams& params, const Launch& launch);
void attend_decode_selected(const AttendSelectedParams& params, const Launch& launch);

}  // namespace sluice::cuda
