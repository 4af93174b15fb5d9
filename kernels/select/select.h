// Selection: chooses positions by estimated weight.
//
//   logits f16 [heads, group, entries] (+ LogitDigest of whole pages)
//        |  1. row sums     maximum and sum of weights of every row
//        |  2. threshold    top_p: the lowest logit that each row keeps
//        |  3. cut          top_k, or a cap that may cut: the lightest grade that is kept
//        v  4. emit         positions in ascending order, kept weights, page weights
//   positions, alpha, HeadSelection
//
// A head is a KV head of one token of the batch; a row has the logits of one of its query heads. A
// grade orders the entries of a head, larger for heavier ones. Steps 2 and 3 look closely only at
// the entries that bounds from earlier steps leave open.
//
// The kernel depends only on sizes, including the batch's capacity, never on a position, because a
// step is recorded once and replayed. The first that fits runs:
//   fixed     no logits: keeps only the tokens that are always kept; one block per head
//   few       top_k up to 64 (and up to 64 always kept) with a digest, without a list or mask, up
//             to 8 query heads and 262144 entries, 1048576 over all query heads; one block per
//             head, which also writes page weights
//   one block per head if its shared memory holds the logits, and they are few (16384 per head) or
//   the heads many (half the number of multiprocessors):
//     top_k   top_k of one query head, up to 16384 entries, in the registers of up to four warps
//     small   everything else
//   one cluster of blocks per head (compute capability 9.0, up to 8 query heads) if its shared
//   memories hold
//     digest  the digest, and few are kept: reads only the logits that may be kept
//     cluster the logits, and few are kept or no cap may cut, and there are few heads
//   large     everything else: a chain of kernels that divide the rows among blocks, for as many
//             heads at a time as scratch allows. sums; shortlist for a small k or cap; thresholds
//             for top_p; shortlist again; grade_rounds and emit for heads that are still open
//
// choose_tokens() sorts the scores of a whole prompt.
#pragma once

#include <cstddef>

#include "kernels/runtime/launch.h"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {

inline constexpr int kMostGroup = 64;         // query heads per KV head
inline constexpr int kMostEntries = 1 << 25;  // logits per query head

// Leaves the logits unchanged and never waits for the host. top_p cuts each query head at a
// multiple of 1/128 nat: logits between two multiples are kept or dropped together. Weights are
// fp32; top_k with one query head per KV head compares the logits themselves.
void select(const SelectParams& params, const Launch& launch);

// Throws Error{unsupported} for a prompt whose scores do not fit the scratch memory, about 20 bytes
// per token.
void choose_tokens(const ChooseTokensParams& params, const Launch& launch);

// Scratch bytes for the fewest rounds of select(), by sizes alone. With less it takes more rounds;
// the scratch of one head must fit.
std::size_t select_scratch_bytes(const SelectParams& params, const DeviceLimits& device);

// Returns true if select() writes the page weights that are asked for; else values/ writes them
// later.
bool leaves_page_weights(const SelectParams& params, const DeviceLimits& device);

}  // namespace sluice::cuda
