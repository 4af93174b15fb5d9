// Selection: chooses positions by estimated weight.
//
//   logits f16 [heads, group, entries] (+ LogitDigest of whole pages)
//        |  1. row sums     maximum and sum of weights of every row
//        |  2. threshold    top_p: the lowest logit that each row keeps
//        |  3. cut          top_k, or a cap that may cut: the lightest grade that is kept
//        v  4. emit         positions in ascending order, kept weights, page weights
//   positions, alpha, HeadSelection
//
// Words of this folder:
//   head      a KV head of one token of the batch
//   entry     a position that a head may keep; with candidates, an index in their list
//   row       the logits of one query head of a head, one per entry; not a row of keys and values
//   forced    entries that are always kept: the first (`sinks`) and the last (`recent`)
//   tail      the token's own page, which is attended anyway: it may have logits, whose weight
//             counts as kept, but is not emitted
//   grade     an integer that orders the entries of a head, larger for heavier ones: weight summed
//             over query heads, or the logit of a single one
//   sector    16 neighbouring logits of a row, one 32-byte read
// Steps 2 and 3 read only the sectors that bounds from earlier steps leave open.
//
// The kernel depends only on sizes, including the batch's capacity, never on a position, because a
// step is recorded once and replayed. The first that fits runs:
//   fixed     no logits: keeps only the tokens that are always kept; one block per head
//   few       top_k up to 64 (and up to 64 always kept) with a digest, without candidates, up to 8
//             query heads and 262144 entries, 1048576 over all query heads; one block per head,
//             which also writes page weights
//   one block per head if its shared memory holds two bytes per entry (up to 65536), and the logits
//   are few (16384 per head) or the heads many (half the number of multiprocessors):
//     top_k   top_k of one query head, up to 16384 entries, in the registers of up to four warps
//     small   everything else
//   one cluster of blocks per head (compute capability 9.0, up to 8 query heads) if its shared
//   memories hold
//     digest  the digest, from 262144 entries on without candidates, and few are kept: reads only
//             the logits that may be kept
//     cluster the logits, and few are kept or no cap may cut, and there are few heads
//   large     everything else: the chain of kernels of large.cuh, which divide the rows among
//             blocks, for as many heads at a time as scratch allows
// Few are kept if k or the cap, times the query heads, is at most 4096.
//
// choose_tokens() sorts the scores of a whole prompt.
#pragma once

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

// Returns true if select() writes the page weights that are asked for, which only `few` does; else
// weigh_pages() of values/ has to follow.
bool leaves_page_weights(const SelectParams& params, const DeviceLimits& device);

}  // namespace sluice::cuda
