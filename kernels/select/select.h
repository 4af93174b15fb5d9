// Choosing positions by estimated weight.
//
// In come logits, f16, with what a scan has noted of whole pages (LogitDigest), or none; out go
// positions, ascending per KV head, the weight that they carry (alpha) and what became of each
// head. A row has the logits of one query head, a grade is a number that orders the entries of a KV
// head, larger for heavier ones. Whatever holds the logits, it finds
//   1. of every row, its maximum and its sum of weights,
//   2. of top_p, the lowest logit of every row that it keeps (threshold),
//   3. of top_k, or where a cap may cut, the lightest grade that is kept (cut),
//   4. positions in order, kept weights and pages.
// Each of 2 and 3 looks closely only at entries that bounds from the steps before leave open.
//
// Which way it goes follows from sizes alone, the batch's capacity among them, never from a
// position; the first that fits is taken:
//   fixed     there are no logits: what is always kept, by one block per head
//   few       top_k of up to 64, of which as many may be always kept, with a digest, without a list
//             or a mask, of up to 8 query heads and 262144 entries, 1048576 of all query heads
//             together, by one block per head, which leaves page weights, too
//   one block per head, where its shared memory can hold the logits, and those are few (16384 per
//   head) or heads are many (half as many as multiprocessors):
//     top_k   top_k of one query head, up to 16384 entries, in the registers of up to four warps
//     small   any other
//   one cluster of blocks per head (compute capability 9.0, up to 8 query heads), where shared
//   memories can hold
//     digest  the digest, and few are kept: reads only logits that may be kept
//     cluster the logits, and few are kept or no cap may cut, and heads are few
//   large     whatever is left, by a chain of kernels that share the rows out, of as many heads at
//             a time as there is scratch for: sums; shortlist, for a small k or cap; thresholds, of
//             top_p; shortlist again; then, for heads that it has left open, grade_rounds and emit
//
// choose_tokens, of a whole prompt, sorts its scores.
#pragma once

#include <cstddef>

#include "kernels/runtime/launch.h"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {

inline constexpr int kMostGroup = 64;         // query heads of a KV head
inline constexpr int kMostEntries = 1 << 25;  // of a query head

// Logits are f16 and survive. No part of it waits for the host. top_p cuts each query head at a
// multiple of 1/128 nat: what weighs between two of them is kept or dropped together. Weights are
// fp32; of top_k with one query head per KV head, logits are compared themselves.
void select(const SelectParams& params, const Launch& launch);

// Throws Error{unsupported} for a prompt whose scores do not fit the scratch memory, 20 bytes per
// token and some.
void choose_tokens(const ChooseTokensParams& params, const Launch& launch);

// Scratch with which select() takes the fewest rounds, from sizes alone. With less it takes more;
// that of one KV head of a token must fit.
std::size_t select_scratch_bytes(const SelectParams& params, const DeviceLimits& device);

// Whether select() leaves the digest's weights, if they are asked for; else values/ does, after it.
bool leaves_page_weights(const SelectParams& params, const DeviceLimits& device);

}  // namespace sluice::cuda
