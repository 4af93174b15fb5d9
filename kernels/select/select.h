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
// There are three ways to select, by what works on a head: a block, a cluster of blocks, or a chain
// of kernels that divide its rows among blocks. select() tries them from the top and takes the
// first that fits. Sizes alone decide, the batch's capacity among them and never a position,
// because a step is recorded once and replayed.
//
//   way      kernel    source          which calls
//   block    fixed     fixed.cu        without logits: keeps what is always kept
//            few       few.cu          top_k up to 64, and up to 64 always kept; with a digest,
//                                      without candidates; up to 8 query heads, 262144 entries and
//                                      1048576 logits. Also writes page weights
//            top_k     top_k.cu        top_k of one query head, up to 16384 entries, in registers
//            small     small.cu        up to 65536 entries that fit a block's shared memory
//   cluster  digest    digest.cu       few are kept; with a digest, which the cluster's shared
//                                      memories hold, from 262144 entries on, without candidates.
//                                      Reads only the logits that may be kept
//            cluster   cluster.cu      few are kept or no cap may cut; few heads; logits that the
//                                      shared memories hold
//   chain              chain.cuh       everything else, for as many heads at a time as scratch
//                                      allows
//
// top_k and small take few logits (16384 per head, 65536 without clusters) or many heads (half the
// number of multiprocessors), because a few long rows run faster divided among blocks. Clusters
// need compute capability 9.0 and take up to 8 query heads. Few are kept if k or the cap, times the
// query heads, is at most 4096.
//
// All ways: floats are added in a fixed order, or as integers, so results do not depend on timing;
// logits stay as they are; only the chain uses scratch and counters; nothing checks the capacity of
// `selected`, which has to hold what the quota may keep (SelectionView).
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
