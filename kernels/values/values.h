// Value tiles: building them from rows, and attention over them.
//
// Building takes one block per page and KV head. Attention is a chain of kernels, for as many
// tokens at a time as scratch allows:
//   weigh   sums the weights of every page's unselected tokens, by the digest if there is one and
//           no token of the page is selected, else from the logits. Skipped if select() or the
//           weigh_pages() after it have done so
//   read    chooses the pages that carry the share, in every block, and reads their values with
//           tensor cores, one page per warp. The last block of a head adds up the sums of all
//           blocks, gives the remaining weight to the mean value, and merges
// Only merging needs the partial of the selected rows. So the first kernel of the chain runs beside
// attend_decode_selected(), while rows still arrive from host memory (`is_beside`).
//
// A head is a KV head of a token of the batch. A weight is e^(logit - log-sum-exp of select()); a
// mass is a sum of them for one query head. Launches depend on the batch's capacity alone.
#pragma once

#include <cstddef>

#include "kernels/runtime/launch.h"
#include "lib/value_tiles.h"

namespace sluice::cuda {

// Rows must be bf16 or f16; Error{unsupported} for others.
void build_values(const BuildValuesParams& params, const Launch& launch);
void build_values_batch(const BuildValuesBatchParams& params, const Launch& launch);

// Logits are f16 and are not changed; rows of them start at multiples of 16 bytes. Nothing waits
// for the host, and results do not depend on the order in which blocks run. kTileQueries query
// heads are processed together. Error{unsupported} if scratch does not suffice for one token.
// `is_beside`: the kernel before is attend_decode_selected() and may run at the same time. It
// writes only `out` and `lse`, has scratch and counters of its own (Launch::half()), and waits
// before it lets this one begin (rule 4 of early_launch.cuh).
void attend_tiles(const AttendTilesParams& params, const Launch& launch, bool is_beside = false);
void merge_partials(const MergePartialsParams& params, const Launch& launch);

inline constexpr int kTileQueries = 8;  // query heads that read a page together
inline constexpr std::int64_t kMostTilePages = std::int64_t{1} << 16;  // per head

// Computes the digest's weights after a select() that does not (leaves_page_weights()).
void weigh_pages(const SelectParams& params, const Launch& launch);

// Bytes of scratch with which attend_tiles() takes the fewest rounds of tokens. With less it takes
// more rounds; one token must fit.
std::size_t attend_tiles_scratch_bytes(const AttendTilesParams& params, const DeviceLimits& device);

}  // namespace sluice::cuda
