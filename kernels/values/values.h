// Value tiles: building them from rows, and attention over them.
//
// Building takes one block per page and KV head. Attention is a chain of kernels, for as many
// tokens at a time as scratch allows:
//   weigh   computes the weight of every page without its selected tokens, from the digest if there
//           is one and no token of the page is selected, else from the logits; skipped if the
//           digest's weights are already known
//   read    chooses the pages that carry the share, in every block, and reads their values with
//           tensor cores, one page per warp. The last block of a head adds up the sums of all
//           blocks, gives the remaining weight to the mean value, and merges. Only that last step
//           needs the partial of the selected rows, so that without a weigh step `read` runs while
//           those rows still arrive from host memory
// A head is a KV head of a token of the batch. Launches depend on the batch's capacity alone.
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
// `is_beside`: the kernel before writes only `out` and `lse`, may run at the same time, has its own
// scratch and counters, and let this one begin after waiting itself.
void attend_tiles(const AttendTilesParams& params, const Launch& launch, bool is_beside = false);
void merge_partials(const MergePartialsParams& params, const Launch& launch);
// merge_partials() for a launch that also waits for work of another stream, not only for kernels.
void merge_joined_partials(const MergePartialsParams& params, const Launch& launch);

inline constexpr int kTileQueries = 8;  // query heads that read a page together
inline constexpr std::int64_t kMostTilePages = std::int64_t{1} << 16;  // per head

// Computes the digest's weights after select(), if select() does not leave them
// (leaves_page_weights()).
void weigh_pages(const SelectParams& params, const Launch& launch);

// Bytes of scratch for all tokens at once. With less, tokens are attended in several rounds; one
// token must fit.
std::size_t attend_tiles_scratch_bytes(const AttendTilesParams& params, const DeviceLimits& device);

}  // namespace sluice::cuda
