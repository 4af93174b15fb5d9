// Value tiles: building them from rows, and attention over them.
//
// Building takes a block for each page of a KV head. Attention is a chain of kernels, of as many
// tokens at a time as there is scratch for:
//   weigh   what every page weighs without what is selected of it, by blocks side by side: from the
//           digest if there is one and nothing is selected of the page, else from the logits;
//           unless the digest's weights tell
//   read    finds which pages carry the share, in every block, and reads their values, a page to a
//           warp, by tensor cores; the last block of a head adds up what all have, gives the mean
//           value what is left, and merges: only there it needs what selected rows gave, so that,
//           where nothing was left to weigh, it runs while these come from the host
// A head is a KV head of a token of the batch. Launches depend on the batch's capacity alone.
#pragma once

#include <cstddef>

#include "kernels/runtime/launch.h"
#include "lib/value_tiles.h"

namespace sluice::cuda {

// Of rows in bf16 or f16; Error{unsupported} for others.
void build_values(const BuildValuesParams& params, const Launch& launch);
void build_values_batch(const BuildValuesBatchParams& params, const Launch& launch);

// Logits are f16 and survive; rows of them start at multiples of 16 bytes. No part of it waits for
// the host; results do not depend on the order in which blocks run. Query heads are taken
// kTileQueries at a time. Error{unsupported} if the scratch does not suffice for one token.
// `is_beside`: the kernel before has to do with `out` and `lse` alone, may run at the same time,
// and has scratch and counters of its own; it let this one begin after waiting itself.
void attend_tiles(const AttendTilesParams& params, const Launch& launch, bool is_beside = false);
void merge_partials(const MergePartialsParams& params, const Launch& launch);
// merge_partials() for a launch that also waits for work of another stream, not only for kernels.
void merge_joined_partials(const MergePartialsParams& params, const Launch& launch);

inline constexpr int kTileQueries = 8;                                 // that read a page together
inline constexpr std::int64_t kMostTilePages = std::int64_t{1} << 16;  // of a head

// Computes the digest's weights after select(), if select() does not leave them
// (leaves_page_weights()).
void weigh_pages(const SelectParams& params, const Launch& launch);

// Scratch, bytes, for all tokens at once. With less, tokens are attended in turns; one token must
// fit.
std::size_t attend_tiles_scratch_bytes(const AttendTilesParams& params, const DeviceLimits& device);

}  // namespace sluice::cuda
