// Keys times queries on tensor cores; keys go from global memory straight to registers.
//
// Rows of keys are the rows of A. The order of the inner dimension is free if A and B agree, so a
// lane reads 8 consecutive elements of each block of 32 and exchanges nothing with other lanes.
#include <algorithm>

#include "kernels/runtime/error.h"
#include "kernels/runtime/paged.cuh"
#include "kernels/runtime/rows.cuh"
#include "kernels/scan/channels.cuh"
#include "kernels/scan/rows.h"
#include "kernels/scan/tile_queries.cuh"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {
namespace {

inline constexpr int kRowWarps = kQueryThreads / kWarp;
inline constexpr int kRowBlocks = 4;       // per multiprocessor
inline constexpr int kTileRows = 32;       // per warp: two tiles of 16
inline constexpr int kBlockElements = 32;  // elements of a row per block of the inner dimension
inline constexpr int kLoadBlocks = 4;      // loaded before the first is used

// Work beyond one wave of blocks is split finer, so that all blocks end together, but not so fine
// that the time to prepare queries matters.
inline constexpr int kWaves = 3;
inline constexpr int kLeastTiles = 12;  // per warp

// Blocks to launch for `units` units of rows; one unit keeps a block busy.
template <typename Count>
__host__ __device__ __forceinline__ Count shared_blocks(Count units, Count wave) {
  const Count fine = units / kLeastTiles < kWaves * wave ? units / kLeastTiles : kWaves * wave;
  const Count most = fine > wave ? fine : wave;
  return units < 1 ? 1 : units < most ? units : most;
}

// Rows that a scan reads.
enum class RowKind {
  newest,      // the tokens of a token's own page
  all,         // all tokens from the first on
  candidates,  // tokens found by position
  bounds,      // sub-pages: smallest, then largest keys
};

// True if heads get blocks in proportion to their rows, false if every head gets equally many.
template <RowKind kKind>
inline constexpr bool kShared = kKind == RowKind::all || kKind == RowKind::bounds;

// "heads" are the KV heads of all tokens, [tokens, kv_heads].
struct RowScanArgs {
  const BatchToken* tokens;
  PagedRows rows;
  std::int64_t row_bytes;       // bytes from row to row
  const std::uint16_t* bounds;  // f16 [kv_heads, slots, kTilePages, kBoundsPerPage, 2, head_dim]
  const std::int32_t* table;    // [sequences, table_stride]: slots of tiles
  std::int64_t table_stride;
  std::int64_t slots;  // per KV head
  QueryArgs queries;
  const std::int32_t* positions;    // [heads, position_capacity]: candidates
  const HeadSelection* candidates;  // reported [heads], or null without candidates
  std::int64_t position_capacity;
  __half* logits;  // [heads, group, stride]
  std::int64_t stride;
  int token_count;
  int kv_heads;
  int elements;       // per row
  bool wide;          // rows can be read 16 bytes at a time
  bool skip_newest;   // leaves out the rows of a token's own page
  int wave;           // blocks that run at once, used if kShared
  int scan_blocks;    // blocks per head that scan, used if not kShared
  int prepare_block;  // block of every head that prepares a scan of tiles; -1: none
  PrepareArgs prepare;
};

// The rows of one head.
struct HeadScan {
  const std::byte* base;          // newest: the page's first row; bounds: the KV head's first row
  const PageSlots* pages;         // all, candidates: the sequence's pages
  const std::int32_t* table;      // bounds: slots of tiles
  const std::int32_t* positions;  // candidates
  std::int64_t count;
  std::int64_t first_logit;
};

// The part of a head's rows that does not depend on the kernel before.
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

// Adds the part that depends on the kernel before: the candidates.
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

// Slots of a tile's rows. all: the slots of its page on the device and in host memory. bounds: the
// slots of the two tiles of the index that its four pages lie in.
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

// The rows of a block: part `part` of the `parts` of a head.
struct BlockPart {
  int token;
  int kv_head;
  int part;
  int parts;
};

// Rows per head of a token, in units of the rows that a block scans at once.
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

// Finds this block's part if kShared; false if none is left for it. Every warp computes it for
// itself.
template <RowKind kKind>
__device__ __forceinline__ bool find_part(const RowScanArgs& a, BlockPart& found) {
  int total = 0;
#pragma unroll 1
  for (int t = lane_id(); t - lane_id() < a.token_count; t += kWarp) {
    total += __reduce_add_sync(kAllLanes, units_of<kKind>(a, t)) * a.kv_heads;
  }
  const int blocks = shared_blocks(total, a.wave);
  const int each = max((total + blocks - 1) / blocks, 1);  // units per block
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

// This block's part in a grid [token_count, kv_heads, blocks].
__device__ __forceinline__ BlockPart part_of_grid(const RowScanArgs& a) {
  return {static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x),
          a.scan_blocks};
}

// Two elements of B in the dtype of the rows, and their rounding errors.
struct SplitPair {
  std::uint32_t high;
  std::uint32_t low;
};

template <typename T>
__device__ __forceinline__ SplitPair split(float x, float y) {
  const T high_x = from_float<T>(x);
  const T high_y = from_float<T>(y);
  return {pack(T(), to_float(high_x), to_float(high_y)),
          pack(T(), x - to_float(high_x), y - to_float(high_y))};
}

// Element `e` of query `n` as it is multiplied with a row. For bounds, the smallest keys meet the
// negative elements and the largest keys the positive ones; the sum is the largest product that
// keys between the bounds can have.
template <RowKind kKind>
__device__ __forceinline__ float query_element(const Queries& queries, const QueryArgs& a, int n,
                                               int e) {
  const int d = a.head_dim;
  if (kKind != RowKind::bounds) return e < d ? queries.q[n][e] : 0.0f;
  if (e >= 2 * d) return 0.0f;
  const float q = queries.q[n][e < d ? e : e - d];  // NaN passes both of the following
  if (e < d) return q > 0.0f ? 0.0f : q;
  return q < 0.0f ? 0.0f : q;
}

// B for all rows: [blocks, 2, kColumns, lanes] of {high pairs, low pairs}. Runs once, so it is not
// unrolled, see write_fragments().
template <typename T, RowKind kKind, int kColumns>
__device__ void make_fragments(const Queries& queries, const RowScanArgs& a, int blocks,
                               uint4* fragments) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < blocks * 2 * kColumns * kWarp;
       i += kQueryThreads) {
    const int lane = i % kWarp;
    const int n = i / kWarp % kColumns * 8 + lane / 4;
    if (n >= a.queries.count) {
      fragments[i] = make_uint4(0, 0, 0, 0);
      continue;
    }
    const int step = i / kWarp / kColumns;
    const int e = step / 2 * kBlockElements + lane % 4 * 8 + step % 2 * 4;
    const auto q = [&](int offset) {
      return query_element<kKind>(queries, a.queries, n, e + offset);
    };
    const SplitPair first = split<T>(q(0), q(1));
    const SplitPair second = split<T>(q(2), q(3));
    fragments[i] = make_uint4(first.high, second.high, first.low, second.low);
  }
}

// Elements [e, e + 8) of a row, zeros from `elements` on because the bytes after it may be NaN.
template <bool kWide>
__device__ __forceinline__ uint4 load_elements(const std::byte* row, int e, int elements) {
  uint4 words = make_uint4(0, 0, 0, 0);
  if (kWide) {
    if (e < elements) words = __ldcs(reinterpret_cast<const uint4*>(row) + e / 8);
    return words;
  }
  const auto* const pairs = reinterpret_cast<const std::uint32_t*>(row) + e / 2;
  if (e < elements) words.x = pairs[0];
  if (e + 2 < elements) words.y = pairs[1];
  if (e + 4 < elements) words.z = pairs[2];
  if (e + 6 < elements) words.w = pairs[3];
  return words;
}

// Keys of kLoadBlocks blocks of a lane's four rows, 8 elements each.
template <typename T>
struct RowKeys {
  std::conditional_t<kIsCoded<T>, uint2, uint4> of[kLoadBlocks][4];
};

// Loads the keys of the blocks from `first` on.
template <bool kWide, typename T>
__device__ __forceinline__ void load_blocks(const std::byte* const (&rows)[4], int first,
                                            int elements, RowKeys<T>& keys) {
#pragma unroll
  for (int b = 0; b < kLoadBlocks; ++b) {
    const int e = (first + b) * kBlockElements + lane_id() % 4 * 8;
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      if constexpr (kIsCoded<T>) {
        const auto* const codes = reinterpret_cast<const uint2*>(rows[half]) + e / 8;
        keys.of[b][half] = e < elements ? __ldcs(codes) : make_uint2(0, 0);
      } else {
        keys.of[b][half] = load_elements<kWide>(rows[half], e, elements);
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void load_keys(const std::byte* const (&rows)[4], int first,
                                          const RowScanArgs& a, RowKeys<T>& keys) {
  if (a.wide) {
    load_blocks<true>(rows, first, a.elements, keys);
  } else {
    load_blocks<false>(rows, first, a.elements, keys);
  }
}

// Row, of a warp's 32, in row `lane / 4` of half `half` (0..3) of its tiles. A lane has four
// consecutive tokens, so that it stores their logits together.
template <RowKind kKind>
__device__ __forceinline__ int row_of(int half, int lane) {
  return kKind == RowKind::bounds ? half * 8 + lane / 4 : lane / 4 * 4 + half;
}

// Sums of one warp. of(half, column tile, side) is column 2 (lane % 4) + side of row lane / 4 of
// the half.
template <int kColumns>
struct RowSums {
  float tiles[2][kColumns][4];

  __device__ __forceinline__ float of(int half, int c, int side) const {
    return tiles[half / 2][c][half % 2 * 2 + side];
  }
  __device__ __forceinline__ void multiply(const float (&scales)[4]) {
#pragma unroll
    for (int i = 0; i < 8 * kColumns; ++i) {
      tiles[i / 4 / kColumns][i / 4 % kColumns][i % 4] *= scales[i / 4 / kColumns * 2 + i % 4 / 2];
    }
  }
};

// Finds the scales of a lane's four rows, whose first codes two lanes of every four hold.
__device__ __forceinline__ void find_scales(const RowKeys<Int8Code>& keys, float (&scales)[4]) {
#pragma unroll
  for (int half = 0; half < 4; ++half) {
    const uint2 codes = keys.of[0][half];
    const std::uint32_t bits = lowest_bits(codes.x) | lowest_bits(codes.y) << 4;
    const std::uint32_t low = __shfl_sync(kAllLanes, bits, 0, 4);
    scales[half] = __uint_as_float((low | __shfl_sync(kAllLanes, bits, 1, 4) << 8) << 16);
  }
}

// Adds the products of the loaded blocks, [first, first + kLoadBlocks) of `blocks`.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply_blocks(const RowKeys<T>& keys, const uint4* fragments,
                                                int first, int blocks, RowSums<kColumns>& sums) {
#pragma unroll
  for (int b = 0; b < kLoadBlocks; ++b) {
    if (first + b >= blocks) break;
    uint4 elements[4];
#pragma unroll
    for (int half = 0; half < 4; ++half) elements[half] = math_elements(keys.of[b][half]);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const uint4 q = fragments[(((first + b) * 2 + step) * kColumns + c) * kWarp + lane_id()];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const uint4& upper = elements[2 * tile];
          const uint4& lower = elements[2 * tile + 1];
          const std::uint32_t pairs[4] = {
              step == 0 ? upper.x : upper.z, step == 0 ? lower.x : lower.z,
              step == 0 ? upper.y : upper.w, step == 0 ? lower.y : lower.w};
          mma(MathOf<T>(), sums.tiles[tile][c], pairs, q.x, q.y);
          mma(MathOf<T>(), sums.tiles[tile][c], pairs, q.z, q.w);
        }
      }
    }
  }
}

// Rounds a logit to f16: finite ones stay finite, Inf and NaN become NaN.
__device__ __forceinline__ __half half_logit(float x) {
  const float clamped = fminf(fmaxf(x, -65504.0f), 65504.0f);
  return __float2half_rn(clamped + (x - x));
}

// Stores logits [first, first + 32) of `count`, four consecutive ones per lane.
__device__ __forceinline__ void store_tokens(const __half (&logits)[4], std::int64_t first,
                                             std::int64_t count, __half* to) {
  const int lane = lane_id();
  const std::int64_t at = first + lane / 4 * 4;
  if (at + 4 <= count && reinterpret_cast<std::uintptr_t>(to + at) % 8 == 0) {
    *reinterpret_cast<uint2*>(to + at) = *reinterpret_cast<const uint2*>(logits);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (at + i < count) to[at + i] = logits[i];
  }
}

// Stores bounds [first, first + 32) of `count`, each to its 16 tokens. A lane stores half a
// sub-page, whose bound it may get from another lane, so that the 8 lanes of a query write 128
// bytes at once.
__device__ __forceinline__ void store_bounds(const __half (&bounds)[4], std::int64_t first,
                                             std::int64_t count, bool active, __half* to) {
  const int lane = lane_id();
  const int row = lane / 4;
  const bool aligned = reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
#pragma unroll
  for (int part = 0; part < 8; ++part) {
    const int source = (part % 2 * 4 + row / 2) * 4 + lane % 4;
    const unsigned mine = __half_as_ushort(bounds[part / 2]);
    const std::uint32_t bound = __shfl_sync(kAllLanes, mine, source) * 0x10001u;
    const std::int64_t sub_page = first + part * 4 + row / 2;
    if (!active || sub_page >= count) continue;
    __half* const tokens = to + sub_page * kBoundTokens + row % 2 * 8;
    if (aligned) {
      *reinterpret_cast<uint4*>(tokens) = make_uint4(bound, bound, bound, bound);
    } else {
      for (int i = 0; i < 8; ++i) tokens[i] = __ushort_as_half(static_cast<unsigned short>(bound));
    }
  }
}

template <RowKind kKind, int kColumns>
__device__ __forceinline__ void store_rows(const RowSums<kColumns>& sums, const Queries& queries,
                                           const RowScanArgs& a, std::int64_t head,
                                           std::int64_t first, std::int64_t count,
                                           std::int64_t first_logit) {
  const int lane = lane_id();
  const std::int64_t query_head = head * a.queries.group + a.queries.first;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int n = c * 8 + lane % 4 * 2 + side;
      const bool active = n < a.queries.count;
      const float factor = active ? queries.factor[n] : 0.0f;
      __align__(8) __half logits[4];
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        logits[half] = half_logit(sums.of(half, c, side) * factor);
      }
      __half* const to = a.logits + (query_head + n) * a.stride + first_logit;
      if (kKind == RowKind::bounds) {
        store_bounds(logits, first, count, active, to);
      } else if (active) {
        store_tokens(logits, first, count, to);
      }
    }
  }
}

// Finds a lane's rows in the tile from row `first` on, which must exist; `slots` are the result of
// look_up().
template <RowKind kKind>
__device__ __forceinline__ void find_rows(const HeadScan& scan, const RowScanArgs& a, int kv_head,
                                          std::int64_t first, int2 slots,
                                          const std::byte* (&rows)[4]) {
  const std::byte* const page = kKind == RowKind::all
                                    ? page_rows(a.rows, kv_head, {slots.x, slots.y}, a.row_bytes)
                                    : scan.base;
#pragma unroll
  for (int half = 0; half < 4; ++half) {
    // Rows beyond the last one read any existing row.
    const std::int64_t at = min(first + row_of<kKind>(half, lane_id()), scan.count - 1);
    if (kKind == RowKind::bounds) {
      constexpr int kBounds = kTilePages * kBoundsPerPage;
      const bool is_later = at / kBounds != first / kBounds;
      const std::int64_t slot = is_later ? slots.y : slots.x;
      rows[half] = page + (slot * kBounds + at % kBounds) * a.row_bytes;
    } else if (kKind == RowKind::candidates) {
      const std::int32_t position = scan.positions[at];
      rows[half] = page_rows(a.rows, kv_head, scan.pages[position / kPageTokens], a.row_bytes) +
                   position % kPageTokens * a.row_bytes;
    } else {
      rows[half] = page + at % kPageTokens * a.row_bytes;
    }
  }
}

// A block scans rows of one head, each warp 32 of them at a time. Loads of keys overlap with
// preparing the queries and with storing logits.
template <typename T, RowKind kKind, int kColumns>
__global__ void __launch_bounds__(kQueryThreads, kRowBlocks)
    row_scan_kernel(const __grid_constant__ RowScanArgs a) {
  extern __shared__ uint4 fragments[];
  __shared__ Queries queries;
  BlockPart at = part_of_grid(a);
  const bool has_part = !kShared<kKind> || find_part<kKind>(a, at);
  const std::int64_t head = static_cast<std::int64_t>(at.token) * a.kv_heads + at.kv_head;
  const bool scans = has_part && at.part < at.parts;
  const int blocks = (a.elements + kBlockElements - 1) / kBlockElements;
  const std::int64_t step = std::int64_t{at.parts} * kRowWarps * kTileRows;
  std::int64_t next = (std::int64_t{at.part} * kRowWarps + threadIdx.x / kWarp) * kTileRows;
  HeadScan scan{};
  if (scans) scan = head_scan<kKind>(a, at.kv_head, a.tokens[at.token]);
  int2 slots = look_up<kKind>(scan, next);
  // Waits before it lets the next kernel begin, because a scan of tiles copies tiles before it
  // waits: rule 4 of early_launch.cuh.
  wait_for_kernel_before();
  allow_next_kernel();
  if (!has_part) return;
  if (scans) add_candidates<kKind>(a, head, scan);
  const std::byte* rows[4];
  RowKeys<T> keys;
  // Moves to the rows from `next` on and looks up the slots of those after them.
  const auto enter = [&] {
    find_rows<kKind>(scan, a, at.kv_head, next, slots, rows);
    slots = look_up<kKind>(scan, next + step);
  };
  if (next < scan.count) {
    enter();
    load_keys(rows, 0, a, keys);
  }

  const bool prepares = at.part == a.prepare_block;
  load_queries(prepares ? a.prepare.queries : a.queries, a.queries.of(at.token, at.kv_head),
               queries);
  if (prepares) prepare_tiles(queries, a.prepare, static_cast<int>(head), at.token);
  if (!scans) return;
  make_fragments<MathOf<T>, kKind, kColumns>(queries, a, blocks, fragments);
  __syncthreads();
  while (next < scan.count) {
    const std::int64_t first = next;
    RowSums<kColumns> sums{};
    float scales[4];
    if constexpr (kIsCoded<T>) find_scales(keys, scales);
    int block = 0;
    do {
      multiply_blocks<T>(keys, fragments, block, blocks, sums);
      block += kLoadBlocks;
      if (block >= blocks) {
        block = 0;
        next += step;
        if (next >= scan.count) break;
        enter();
      }
      load_keys(rows, block, a, keys);
    } while (block > 0);
    if constexpr (kIsCoded<T>) sums.multiply(scales);
    store_rows<kKind, kColumns>(sums, queries, a, head, first, scan.count, scan.first_logit);
  }
}

constexpr std::int64_t kUnitRows = kRowWarps * kTileRows;  // rows that a block scans at once

RowScanArgs common_args(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  RowScanArgs a{};
  a.tokens = p.batch.tokens;
  a.rows = p.rows;
  a.row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
  a.table = p.index.slots;
  a.table_stride = p.index.table_stride;
  a.queries = query_args(pass);
  if (p.candidates != nullptr) {
    a.positions = p.candidates->positions;
    a.position_capacity = p.candidates->capacity;
    a.candidates = p.candidates->heads;
  }
  a.logits = reinterpret_cast<__half*>(p.logits.data);
  a.stride = p.logits.stride;
  a.token_count = static_cast<int>(p.batch.count);
  a.kv_heads = p.shape.kv_heads;
  a.elements = p.shape.head_dim;
  a.wide = p.shape.head_dim % 8 == 0;
  a.skip_newest = p.skip_newest;
  a.wave = launch.device->multiprocessors * kRowBlocks;
  a.prepare_block = -1;
  return a;
}

template <typename T, RowKind kKind, int kColumns>
void launch_columns(const RowScanArgs& a, const dim3& grid, const Launch& launch) {
  const int blocks = (a.elements + kBlockElements - 1) / kBlockElements;
  const std::size_t shared =
      static_cast<std::size_t>(blocks) * 2 * kColumns * kWarp * sizeof(uint4);
  const auto kernel = row_scan_kernel<T, kKind, kColumns>;
  launch_early("row scan", kernel, grid, kQueryThreads, shared, launch, a);
}

template <typename T, RowKind kKind>
void launch_kind(const RowScanArgs& a, const dim3& grid, const Launch& launch) {
  if (a.queries.count <= 8) {
    launch_columns<T, kKind, 1>(a, grid, launch);
  } else {
    launch_columns<T, kKind, 2>(a, grid, launch);
  }
}

// Launches `blocks` blocks per head.
template <RowKind kKind>
void launch_even(const ScanPass& pass, const RowScanArgs& a, int blocks, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(a.kv_heads),
                  static_cast<unsigned>(a.token_count));
  dispatch_key(pass.estimate->shape.rows.key(),
               [&](auto row) { launch_kind<decltype(row), kKind>(a, grid, launch); });
}

// Counts the candidates of a head whose rows are on the device. Launched [kv_heads, tokens].
__global__ void __launch_bounds__(kQueryThreads)
    resident_kernel(const __grid_constant__ RowScanArgs a, std::int32_t* resident) {
  const std::int64_t head = std::int64_t{blockIdx.y} * a.kv_heads + blockIdx.x;
  const std::int32_t* const positions = a.positions + head * a.position_capacity;
  const PageSlots* const pages = page_table_of(a.rows, a.tokens[blockIdx.y].sequence);
  const std::int32_t count = a.candidates[head].count;
  std::int32_t found = 0;
  for (std::int32_t first = 0; first < count; first += kQueryThreads) {
    const std::int32_t i = first + static_cast<std::int32_t>(threadIdx.x);
    found += __syncthreads_count(i < count && is_on_device(pages[page_of(positions[i])]));
  }
  if (threadIdx.x == 0) resident[head] = found;
}

void count_resident(const RowScanArgs& a, std::int32_t* resident, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(a.token_count));
  resident_kernel<<<grid, kQueryThreads, 0, launch.stream>>>(a, resident);
  require_launch("counting resident candidates");
}

// Grid for heads of up to `units` units each. It has one extra block per head because parts are
// rounded up.
dim3 shared_grid(const RowScanArgs& a, std::int64_t units) {
  const std::int64_t heads = std::int64_t{a.token_count} * a.kv_heads;
  return dim3(static_cast<unsigned>(shared_blocks(units * heads, std::int64_t{a.wave}) + heads));
}

}  // namespace

void scan_rows(const ScanPass& pass, const PrepareArgs* prepare, const Launch& launch) {
  RowScanArgs a = common_args(pass, launch);
  // A page keeps one block busy. With few heads, a second block per head prepares the scan of tiles
  // sooner. Rotated tiles always take a second block, because its queries are rotated, too.
  int blocks = a.scan_blocks = 1;
  if (prepare != nullptr) {
    a.prepare = *prepare;
    a.prepare_block = 0;
    const int twice = (blocks + 1) * a.kv_heads * a.token_count;
    const bool is_rotated = prepare->queries.rotation.block > 1;
    if (is_rotated || twice <= launch.device->multiprocessors) a.prepare_block = blocks++;
  }
  launch_even<RowKind::newest>(pass, a, blocks, launch);
}

void scan_all_rows(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  const RowScanArgs a = common_args(pass, launch);
  const dim3 grid = shared_grid(a, most_pages(p.batch) + 1);
  dispatch_key(p.shape.rows.key(),
               [&](auto row) { launch_kind<decltype(row), RowKind::all>(a, grid, launch); });
}

void scan_candidate_rows(const ScanPass& pass, const Launch& launch) {
  RowScanArgs a = common_args(pass, launch);
  const std::int64_t heads = std::int64_t{a.token_count} * a.kv_heads;
  const std::int64_t units = (a.position_capacity + kUnitRows - 1) / kUnitRows;
  if (units == 0) return;
  // Once per head, not for every part of its queries.
  if (pass.estimate->resident != nullptr && pass.first_query == 0) {
    count_resident(a, pass.estimate->resident, launch);
  }
  const std::int64_t wave = (a.wave + heads - 1) / heads;
  a.scan_blocks = static_cast<int>(shared_blocks(units, wave));
  launch_even<RowKind::candidates>(pass, a, a.scan_blocks, launch);
}

void scan_bounds(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  RowScanArgs a = common_args(pass, launch);
  const int d = p.shape.head_dim;
  a.bounds = p.index.bounds.bounds;
  a.slots = p.index.bounds.slots;
  a.row_bytes = 2 * d * static_cast<std::int64_t>(sizeof(std::uint16_t));
  a.elements = 2 * d;
  a.wide = d % 4 == 0;
  const std::int64_t rows = most_pages(p.batch) * kBoundsPerPage;
  const dim3 grid = shared_grid(a, (rows + kUnitRows - 1) / kUnitRows);
  launch_kind<__half, RowKind::bounds>(a, grid, launch);
}

}  // namespace sluice::cuda
