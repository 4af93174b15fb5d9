// Code shared by the scorers that leave the work to an operation of the backend.
#pragma once

#include "lib/backend/queue.h"
#include "sluice/scorer.h"

namespace sluice::scorers {

inline void estimate(const RunScorer& call, Selector method, int channels = 0) {
  EstimateParams params = *call.estimate;
  params.method = method;
  params.channels = channels;
  call.queue->run(params);
}

// Bytes that a scan reads of `channels` channels of all tiles.
inline std::uint64_t tile_bytes(const ScorerUse& use, const ScanExtent& extent, int channels) {
  KeyTiles tiles;
  tiles.bits = use.bits;
  const std::int64_t whole =
      (extent.pages + extent.tile_pages - 1) / extent.tile_pages * extent.tile_pages;
  return static_cast<std::uint64_t>(whole * extent.passes) * tiles.page_bytes(channels);
}

}  // namespace sluice::scorers
