// Scans of the key index, or of the keys themselves, for logits.
//
//   key_index     builds pages of tiles and bounds from rows: a run of pages, or the pages that
//                 the tokens of a batch complete
//   estimate      logits of a batch's tokens, up to kMaxQueries query heads per pass:
//     int4, sparq   prepares the queries (channels, tile_queries), in the same launch as the scan
//                   of the newest rows if those are wanted; then warps copy tiles to shared memory
//                   (tile_copy), multiply them on tensor cores (tiles) and store the logits
//                   (tile_results): of all tiles, with a digest for select(), or of candidates.
//                   sparq looks its channels up in a list; scan_few() takes up to 32 listed
//                   channels of 4-bit tiles, up to 4 query heads per KV head, no candidates
//     quest         the newest rows, then bounds (rows)
//     exact         all rows, or the newest and the candidates (rows)
//     newest        the newest rows (rows)
//   column_sums   softmax weights of probes, summed per row: two passes over the keys of a prompt
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {

void build_index(const BuildIndexParams& params, const Launch& launch);
void build_batch(const BuildBatchParams& params, const Launch& launch);

// Logits of at least kDigestedFrom tokens get a digest. Below that, reading the logits once more
// takes no longer.
inline constexpr std::int64_t kDigestedFrom = std::int64_t{1} << 18;
// In contexts of [kWeighedFrom, kDigestedFrom) tokens a digest also pays if select() weighs pages
// for value tiles.
inline constexpr std::int64_t kWeighedFrom = 8192;

// Logits are f16; finite ones are clamped to its range. Queries are rounded to f16 when multiplied
// with the index.
void estimate(const EstimateParams& params, const Launch& launch);

void column_sums(const ColumnSumsParams& params, const Launch& launch);

}  // namespace sluice::cuda
