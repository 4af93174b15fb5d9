// What a scan of rows is given, and which part of whose rows a block scans.
#pragma once

#include "kernels/runtime/paged.cuh"
#include "kernels/scan/channels.cuh"
#include "kernels/scan/tile_queries.cuh"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {

inline constexpr int kRowWarps = kQueryThreads / kWarp;
inline constexpr int kRowBlocks = 4;       // of a multiprocessor
inline constexpr int kTileRows = 32;       // of one warp: two tiles of 16
inline constexpr int kBlockElements = 32;  // of a row
inline constexpr int kLoadBlocks = 4;      // loaded before the first is used

// Work beyond one wave of blocks is split finer, so that all end together, but not so fine that
// making queries ready counts.
inline constexpr int kWaves = 3;
inline constexpr int kLeastTiles = 12;  // of a warp

// Blocks for `units` units of rows, one of which keeps a block busy.
template <typename Count>
__host__ __device__ __forceinline__ Count shared_blocks(Count units, Count wave) {
  const Count fine = units / kLeastTiles < kWaves * wave ? units / kLeastTiles : kWaves * wave;
  const Count most = fine > wave ? fine : wave;
  return units < 1 ? 1 : units < most ? units : most;
}

// What the rows of a scan are.
enum class RowKind {
  newest,      // tokens of a token's own page
  all,         // tokens from the first on
  candidates,  // tokens found by position
  bounds,      // sub-pages: smallest, then largest keys
};

// Whether blocks are shared out among heads by how many rows they have, rather than evenly.
template <RowKind kKind>
inline constexpr bool kShared = kKind == RowKind::all || kKind == RowKind::bounds;

// Heads are the KV heads of all tokens, [tokens, kv_heads].
struct RowScanArgs {
  const BatchToken* tokens;
  PagedRows rows;
  std::int64_t row_bytes;       // from row to row
  const std::uint16_t* bounds;  // f16 [kv_heads, slots, kTilePages, kBoundsPerPage, 2, head_dim]
  const std::int32_t* table;    // [sequences, table_stride]: slots of tiles
  std::int64_t table_stride;
  std::int64_t slots;  // of a KV head
  QueryArgs queries;
  const std::int32_t* positions;    // [heads, position_capacity], of candidates
  const HeadSelection* candidates;  // reported [heads], or null if there are none
  std::int64_t position_capacity;
  __half* logits;  // [heads, group, stride]
  std::int64_t stride;
  int token_count;
  int kv_heads;
  int elements;       // of a row
  bool wide;          // rows can be read in 16 bytes at a time
  bool skip_newest;   // rows of a token's own page are left out
  int wave;           // blocks that run at once, for those that are shared out
  int scan_blocks;    // of every head, for others
  int prepare_block;  // of every head makes ready a scan of tiles; -1: there will be none
  PrepareArgs prepare;
};

// The rows of one head.
struct HeadScan {
  const std::byte* base;          // of the newest: the page's first row; of bounds: the KV head's
  const PageSlots* pages;         // of other tokens
  const std::int32_t* table;      // of bounds
  const std::int32_t* positions;  // of candidates
  std::int64_t count;
  std::int64_t first_logit;
};

// What is known of a head's rows before the kernel before is over.
template <RowKind kKind>
__device__ __forceinline__ HeadScan head_scan(const RowScanArgs& a, int kv_head,
                                              const BatchToken& token) {
  HeadScan scan{};
  const int page = token.position / kPageTokens;
  const int first = page * kPageTokens;
  if (kKind == RowKind::bounds) {
    scan.base = reinterpret_cast<const std::byte*>(a.bounds) +
                kv_head * a.slots * (kTilePages * kBoundsPerPage * a.row_bytes);
    scan.table = a.table + token.sequence * a.table_stride;
    scan.count = std::int64_t{page} * kBoundsPerPage;
    return scan;
  }
  scan.pages = page_table_of(a.rows, token.sequence);
  if (kKind == RowKind::newest) {
    scan.base = page_rows(a.rows, kv_head, scan.pages[page], a.row_bytes);
    scan.count = token.position - first + 1;
    scan.first_logit = first;
  } else if (kKind == RowKind::all) {
    scan.count = a.skip_newest ? first : std::int64_t{token.position} + 1;
  }
  return scan;
}

// What is known after.
template <RowKind kKind>
__device__ __forceinline__ void add_candidates(const RowScanArgs& a, std::int64_t head,
                                               HeadScan& scan) {
  if (a.candidates == nullptr) return;
  const std::int32_t count = a.candidates[head].count;
  if (kKind == RowKind::newest) scan.first_logit = count;
  if (kKind == RowKind::candidates) {
    scan.count = count;
    scan.positions = a.positions + head * a.position_capacity;
  }
}

// Where a tile's rows are: its page on the device and at home, or the slots of the two tiles of the
// index that its four pages lie in.
template <RowKind kKind>
__device__ __forceinline__ int2 look_up(const HeadScan& scan, std::int64_t first) {
  if (first >= scan.count) return {};
  if (kKind == RowKind::all) {
    const PageSlots at = scan.pages[first / kPageTokens];
    return {at.device, at.host};
  }
  if (kKind == RowKind::bounds) {
    constexpr int kBounds = kTilePages * kBoundsPerPage;
    static_assert(kTileRows == 2 * kBounds);
    const std::int64_t next = min(first + kBounds, scan.count - 1);
    return {scan.table[first / kBounds], scan.table[next / kBounds]};
  }
  return {};
}

// What a block scans: one of `parts` parts of a head.
struct BlockPart {
  int token;
  int kv_head;
  int part;
  int parts;
};

// Rows of each of a token's heads, in units of what a block takes at once.
template <RowKind kKind>
__device__ __forceinline__ int units_of(const RowScanArgs& a, int token) {
  if (token >= a.token_count) return 0;
  const int position = a.tokens[token].position;
  constexpr int kUnit = kRowWarps * kTileRows;
  static_assert(kUnit == kPageTokens && kUnit % kBoundsPerPage == 0);
  const int pages = position / kPageTokens;
  if (kKind == RowKind::all) return pages + (a.skip_newest ? 0 : 1);
  constexpr int kUnitPages = kUnit / kBoundsPerPage;
  return (pages + kUnitPages - 1) / kUnitPages;
}

// The part of a block that is shared out; false if there is none left. By every warp on its own.
template <RowKind kKind>
__device__ __forceinline__ bool find_part(const RowScanArgs& a, BlockPart& found) {
  int total = 0;
#pragma unroll 1
  for (int t = lane_id(); t - lane_id() < a.token_count; t += kWarp) {
    total += __reduce_add_sync(kAllLanes, units_of<kKind>(a, t)) * a.kv_heads;
  }
  const int blocks = shared_blocks(total, a.wave);
  const int each = max((total + blocks - 1) / blocks, 1);  // units of a block
  const auto block = static_cast<int>(blockIdx.x);
  int before = 0;
#pragma unroll 1
  for (int t = lane_id(); t - lane_id() < a.token_count; t += kWarp) {
    const int parts = (units_of<kKind>(a, t) + each - 1) / each;
    const int up_to = before + warp_inclusive(parts * a.kv_heads);
    const unsigned beyond = __ballot_sync(kAllLanes, up_to > block);
    if (beyond != 0) {
      const int lane = __ffs(static_cast<int>(beyond)) - 1;
      found.parts = __shfl_sync(kAllLanes, parts, lane);
      const int first = __shfl_sync(kAllLanes, up_to, lane) - found.parts * a.kv_heads;
      found.token = t - lane_id() + lane;
      found.kv_head = (block - first) / found.parts;
      found.part = (block - first) % found.parts;
      return true;
    }
    before = __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
  return false;
}

// The part of a block of a grid [token_count, kv_heads, blocks].
__device__ __forceinline__ BlockPart part_of_grid(const RowScanArgs& a) {
  return {static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x),
          a.scan_blocks};
}

}  // namespace sluice::cuda
