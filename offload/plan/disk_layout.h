// Where a plan's rows lie below the device: some blocks in host memory, the others on disk; and the
// host memory through which those pass.
//
//   region (layer, KV head):  block 0 | block 1 | ...        each `page_bytes`
//   block:                    128 rows, then padding up to whole sectors
//
// A block's number is its place, so that no table of addresses is needed. Blocks in host memory
// follow those that one sequence has on the device, and never change their place: a step of a
// prompt reads all blocks in turn, so a cache would evict each one just before it is wanted again.
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
  std::uint64_t region_bytes = 0;  // of all blocks of one (layer, KV head)
  std::uint64_t regions = 0;
  // Blocks [first_in_host, first_in_host + blocks_in_host) lie in host memory.
  std::int64_t first_in_host = 0;
  std::int64_t blocks_in_host = 0;

  // On disk.
  std::uint64_t bytes() const { return regions * stored_region_bytes(); }
  // A block's name: bytes from the start of a store that had all blocks.
  std::uint64_t address(int layer, int head, std::int64_t block) const {
    const auto region = static_cast<std::uint64_t>(layer * shape.kv_heads + head);
    return region * region_bytes + static_cast<std::uint64_t>(block) * page_bytes;
  }
  // Bytes from the store's start to an address whose block is on disk.
  std::uint64_t stored(std::uint64_t address) const;
  bool is_in_host(std::int64_t block) const {
    return block >= first_in_host && block < first_in_host + blocks_in_host;
  }
  // The store's sizes; its directories are the caller's.
  PageStoreConfig store() const;

 private:
  std::uint64_t stored_region_bytes() const {
    return region_bytes - static_cast<std::uint64_t>(blocks_in_host) * page_bytes;
  }
};

// Host memory of a plan whose rows lie on disk.
struct DiskHostBytes {
  // Halves of a buffer: one fills while the other is on its way.
  static constexpr std::uint64_t kHalves = 2;

  explicit DiskHostBytes(const KvPlan& plan);

  std::uint64_t streamed = 0;  // [halves, kv_heads, stream_pages, page_bytes]
  std::uint64_t written = 0;   // [halves, kv_heads, written_pages, page_bytes]
  std::uint64_t pages = 0;     // [layers, kv_heads, blocks_in_host], committed with use
  std::uint64_t units = 0;     // [fetches_at_once(), units_at_once(), unit_bytes]
  std::uint64_t rows = 0;      // [kv_heads, host_cache_rows + placed_rows, row_bytes]
  std::uint64_t tags = 0;      // of the cached rows, with their heat
  std::uint64_t places = 0;    // [fetches_at_once()]: of the selected rows, and their counts
  std::uint64_t store = 0;     // checksums and queues

  std::uint64_t sum() const {
    return streamed + written + pages + units + rows + tags + places + store;
  }
};

// Tokens whose rows lie on disk, of a sequence of the whole context: its last ones.
std::int64_t tokens_on_disk(const KvPlan& plan);

// Layers whose selected rows are fetched at a time: two if one may begin before the other ends.
int fetches_at_once(const KvPlan& plan);

// Units that are read at a time for a layer's selected rows.
std::int64_t units_at_once(const KvPlan& plan);

// Pages per KV head in each half of the streaming buffer.
std::int64_t stream_pages(const KvPlan& plan);

// Pages per KV head that are written at a time.
std::int64_t written_pages(const KvPlan& plan);

}  // namespace sluice
