// Keys times queries on tensor cores, keys straight from global memory to registers.
//
// Rows of keys are the rows of A. The order of the inner dimension is free as long as A and B
// agree, so a lane takes 8 consecutive elements of each block of 32 and needs no exchange with
// others.
#pragma once

#include "kernels/scan/row_parts.cuh"

namespace sluice::cuda {

// Two elements of B in the dtype of the rows, and what rounding left of them.
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

// Element `e` of query `n` as a row meets it. Of bounds the smallest keys meet what is negative and
// the largest what is positive; their sum is the largest product that keys between them can have.
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

// B for all rows: [blocks, 2, kColumns, lanes] of {high pairs, low pairs}. Runs once, see
// write_fragments().
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

// Elements [e, e + 8) of a row, zeros from `elements` on: what follows may be no number.
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

// Keys of some blocks of the four rows of a lane.
struct RowKeys {
  uint4 of[kLoadBlocks][4];
};

// Keys of the blocks from `first` on.
template <bool kWide>
__device__ __forceinline__ void load_blocks(const std::byte* const (&rows)[4], int first,
                                            int elements, RowKeys& keys) {
#pragma unroll
  for (int b = 0; b < kLoadBlocks; ++b) {
    const int e = (first + b) * kBlockElements + lane_id() % 4 * 8;
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      keys.of[b][half] = load_elements<kWide>(rows[half], e, elements);
    }
  }
}

__device__ __forceinline__ void load_keys(const std::byte* const (&rows)[4], int first,
                                          const RowScanArgs& a, RowKeys& keys) {
  if (a.wide) {
    load_blocks<true>(rows, first, a.elements, keys);
  } else {
    load_blocks<false>(rows, first, a.elements, keys);
  }
}

// Which row of a warp's 32 is in row `lane / 4` of half `half` (of 0..3) of its tiles: of tokens
// four consecutive ones share a lane, so that their logits are stored together.
template <RowKind kKind>
__device__ __forceinline__ int row_of(int half, int lane) {
  return kKind == RowKind::bounds ? half * 8 + lane / 4 : lane / 4 * 4 + half;
}

// Sums of one warp: [half][column tile][column 2 (lane % 4), the next] of row lane / 4 of the half.
template <int kColumns>
struct RowSums {
  float tiles[2][kColumns][4];

  __device__ __forceinline__ float of(int half, int c, int side) const {
    return tiles[half / 2][c][half % 2 * 2 + side];
  }
};

// Adds the products of the blocks from `first` on, of `blocks`.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply_blocks(const RowKeys& keys, const uint4* fragments,
                                                int first, int blocks, RowSums<kColumns>& sums) {
#pragma unroll
  for (int b = 0; b < kLoadBlocks; ++b) {
    if (first + b >= blocks) break;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const uint4 q = fragments[(((first + b) * 2 + step) * kColumns + c) * kWarp + lane_id()];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const uint4& upper = keys.of[b][2 * tile];
          const uint4& lower = keys.of[b][2 * tile + 1];
          const std::uint32_t pairs[4] = {
              step == 0 ? upper.x : upper.z, step == 0 ? lower.x : lower.z,
              step == 0 ? upper.y : upper.w, step == 0 ? lower.y : lower.w};
          mma(T(), sums.tiles[tile][c], pairs, q.x, q.y);
          mma(T(), sums.tiles[tile][c], pairs, q.z, q.w);
        }
      }
    }
  }
}

// A logit as f16: what is finite stays so, what is not becomes NaN.
__device__ __forceinline__ __half half_logit(float x) {
  const float clamped = fminf(fmaxf(x, -65504.0f), 65504.0f);
  return __float2half_rn(clamped + (x - x));
}

// Logits [first, first + 32) of `count`, four consecutive ones a lane.
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

// Bounds [first, first + 32) of `count`, each to its 16 tokens. A lane stores half a sub-page,
// which it may have to ask another for, so that the 8 lanes of a query write 128 bytes at once.
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

// The rows of a lane in the tile from row `first` on, of which there is one; `slots` are what
// look_up() found.
template <RowKind kKind>
__device__ __forceinline__ void find_rows(const HeadScan& scan, const RowScanArgs& a, int kv_head,
                                          std::int64_t first, int2 slots,
                                          const std::byte* (&rows)[4]) {
  const std::byte* const page = kKind == RowKind::all
                                    ? page_rows(a.rows, kv_head, {slots.x, slots.y}, a.row_bytes)
                                    : scan.base;
#pragma unroll
  for (int half = 0; half < 4; ++half) {
    // Beyond the last: anything that exists.
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

// A block scans rows of one head, a warp 32 of them at a time. Keys are on their way while the
// queries are made ready, and while logits are stored.
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
  // In this order: a scan of tiles that begins early may copy tiles at once.
  wait_for_kernel_before();
  allow_next_kernel();
  if (!has_part) return;
  if (scans) add_candidates<kKind>(a, head, scan);
  const std::byte* rows[4];
  RowKeys keys;
  // To the rows from `next` on, with a look at where those after them are.
  const auto enter = [&] {
    find_rows<kKind>(scan, a, at.kv_head, next, slots, rows);
    slots = look_up<kKind>(scan, next + step);
  };
  if (next < scan.count) {
    enter();
    load_keys(rows, 0, a, keys);
  }

  load_queries(a.queries, a.queries.of(at.token, at.kv_head), queries);
  if (at.part == a.prepare_block) {
    prepare_tiles(queries, a.prepare, static_cast<int>(head), at.token);
  }
  if (!scans) return;
  make_fragments<T, kKind, kColumns>(queries, a, blocks, fragments);
  __syncthreads();
  while (next < scan.count) {
    const std::int64_t first = next;
    RowSums<kColumns> sums{};
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
    store_rows<kKind, kColumns>(sums, queries, a, head, first, scan.count, scan.first_logit);
  }
}

}  // namespace sluice::cuda
