// Reading the key index, or keys themselves, for logits.
//
//   key_index     builds pages of tiles and bounds from rows, a run of them or what a token
//   completes estimate      logits of the tokens of a batch, for up to kMaxQueries query heads at a
//   time:
//     int4, sparq   prepares the queries (channels, tile_queries), beside the scan of the newest
//                   rows if they are asked for; then tiles, copied by bulk (tile_copy) and shared
//                   out among warps (tile_runs): all of them with a digest for select()
//                   (tile_results), or those that have candidates (tile_candidates). tile_few
//                   takes up to 32 listed channels of up to 4 query heads per KV head
//     quest         rows: the newest, then bounds
//     exact         rows: all, or the newest and the candidates
//     newest        rows: the newest
//   column_sums   softmax weights of probes, summed per row: two passes over the keys of a prompt
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {

void build_index(const BuildIndexParams& params, const Launch& launch);
void build_batch(const BuildBatchParams& params, const Launch& launch);

// In contexts of fewer tokens reading the logits once more takes no longer than digesting them.
inline constexpr std::int64_t kDigestedFrom = std::int64_t{1} << 18;
// From here to there select() weighs pages for value tiles, and then a digest pays as well.
inline constexpr std::int64_t kWeighedFrom = 8192;

// Logits are f16, finite ones clamped to its range. Queries are rounded to f16 where they meet the
// index.
void estimate(const EstimateParams& params, const Launch& launch);

void column_sums(const ColumnSumsParams& params, const Launch& launch);

}  // namespace sluice::cuda
