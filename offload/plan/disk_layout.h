// Where a plan's rows lie on disk, and the host memory through which they pass.
//
//   region (layer, KV head):  block 0 | block 1 | ...        each `page_bytes`
//   block:                    128 rows, then padding up to whole sectors
//
// A block's number is its place, so that no table of addresses is needed.
#pragma once

#include <cstdint>

#include "io/page_store.h"
#include "sluice/kv_cache.h"

namespace sluice {

struct DiskLayout {
  explicit DiskLayout(const KvPlan& plan);

  KvShape shape;
  std::uint64_t page_bytes = 0;    // from one block to the next; whole sectors
  std::uint64_t unit_bytes = 0;    // read for a row: whole sectors and whole rows
  std::uint64_t region_bytes = 0;  // of one (layer, KV head)
  std::uint64_t regions = 0;

  std::uint64_t bytes() const { return regions * region_bytes; }
  // Bytes from the store's start to a block.
  std::uint64_t address(int layer, int head, std::int64_t block) const {
    const auto region = static_cast<std::uint64_t>(layer * shape.kv_heads + head);
    return region * region_bytes + static_cast<std::uint64_t>(block) * page_bytes;
  }
  // The store's sizes; its directories are the caller's.
  PageStoreConfig store() const;
};

// Host memory of a plan whose rows lie on disk.
struct DiskHostBytes {
  // Halves of a buffer: one fills while the other is on its way.
  static constexpr std::uint64_t kHalves = 2;

  explicit DiskHostBytes(const KvPlan& plan);

  std::uint64_t streamed = 0;  // [halves, kv_heads, stream_pages, page_bytes]
  std::uint64_t written = 0;   // [halves, kv_heads, page_bytes]
  std::uint64_t units = 0;     // [fetches_at_once(), units_at_once(), unit_bytes]
  std::uint64_t rows = 0;      // [kv_heads, host_cache_rows + placed_rows, row_bytes]
  std::uint64_t tags = 0;      // of the cached rows, with their heat
  std::uint64_t places = 0;    // [fetches_at_once()]: of the selected rows, and their counts
  std::uint64_t store = 0;     // checksums and queues

  std::uint64_t sum() const { return streamed + written + units + rows + tags + places + store; }
};

// Layers whose selected rows are fetched at a time: two if one may begin before the other ends.
int fetches_at_once(const KvPlan& plan);

// Units that are read at a time for a layer's selected rows.
std::int64_t units_at_once(const KvPlan& plan);

// Pages per KV head in each half of the streaming buffer.
std::int64_t stream_pages(const KvPlan& plan);

}  // namespace sluice
