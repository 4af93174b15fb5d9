// Shared by the kernels of attend_prefill(): arguments, the division into tiles, the online softmax
// and the epilogue.
//
// The query heads of a group are packed: packed row r of a KV head is query token r / group and
// query head kv_head * group + r % group. A tile is a run of packed rows of one KV head, a block a
// run of its KV rows. Accumulators are laid out as mma.m16n8k16 and wgmma do it: element i of a
// thread is column i / 4 * 8 + 2 (lane % 4) + i % 2 of its row lane / 4 + 8 (i / 2 % 2).
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao 2023,
// "FlashAttention-2".
#pragma once

#include <cstdint>

#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/heads.h"
#include "kernels/runtime/launch.h"
#include "lib/backend/page_ops.h"
#include "sluice/types.h"

namespace sluice::cuda {

struct PrefillArgs {
  const float* q = nullptr;    // [tokens, kv_heads, group, head_dim], q_stride between tokens
  float* out = nullptr;        // [tokens, kv_heads, group, head_dim]
  float* lse = nullptr;        // [tokens, kv_heads, group]
  float* split_out = nullptr;  // [splits, tokens, kv_heads, group, head_dim]
  float* split_lse = nullptr;  // [splits, tokens, kv_heads, group]
  HeadRows rows;               // [kv_heads][count, row_bytes]
  std::int64_t q_stride = 0;
  // Rows that token t sees, before they are clamped to [0, count]: this number, plus t or seen[t].
  std::int64_t first_visible = 0;
  int row_bytes = 0;
  int head_dim = 0;
  int tokens = 0;
  int kv_heads = 0;
  int group = 0;
  float scale = 0;        // of the logits in powers of two, positive
  bool q_aligned = true;  // every head of q starts at a multiple of 16 bytes
  bool merge = false;
  // The division of the work, see divide_prefill().
  int tiles = 0;          // per KV head
  int splits = 1;         // of the blocks of a tile
  int section_heads = 1;  // KV heads that are worked on together, so that the L2 cache holds them
  const std::int32_t* seen = nullptr;  // [tokens] or null, see AttendParams
  PageLists listed;                    // or none
  int first_page = 0;                  // of the rows, if pages are listed
};

// The tile sizes of a kernel.
struct PrefillTile {
  int rows = 0;           // packed rows of a tile
  int keys = 0;           // KV rows of a block
  int blocks_per_sm = 1;  // thread blocks that run on a multiprocessor together
};

// Sets the division of the work and where partials of splits go.
void divide_prefill(PrefillArgs& args, const PrefillTile& shape, const Launch& launch);

// Merges the partials of splits, and the old one if asked for, into out and lse.
void merge_prefill_splits(const PrefillArgs& args, const Launch& launch);

// Any device from sm_80 on.
void attend_prefill_generic(PrefillArgs args, DType dtype, const Launch& launch);

// Returns false, having done nothing, if the kernel does not support this device, program or call.
bool attend_prefill_hopper(PrefillArgs args, DType dtype, const Launch& launch);

inline constexpr float kNoLogit = -__builtin_huge_valf();

// KV rows are numbered within the KV head or, if pages are listed, as if only the listed pages
// existed.
struct Tile {
  int kv_head = 0;
  int split = 0;
  int first_row = 0;                     // packed
  int end_row = 0;                       // packed; rows from here on belong to other tiles
  int count = 0;                         // KV rows
  std::int64_t first_visible = 0;        // see PrefillArgs
  const std::int32_t* listed = nullptr;  // pages, or null
  int first_block = 0;                   // blocks of KV rows that this split of the tile sees
  int end_block = 0;
  int masked_block = 0;  // blocks from here on hold rows that some query does not see
};

__device__ __forceinline__ int packed_rows(const PrefillArgs& args) {
  return args.tokens * args.group;
}

// KV rows that a query token sees; of a token past the last, any number.
__device__ __forceinline__ int visible_rows(const PrefillArgs& args, const Tile& tile, int token) {
  const int more = args.seen == nullptr ? token : args.seen[min(token, args.tokens - 1)];
  const std::int64_t rows = tile.first_visible + more;
  return static_cast<int>(rows < 0 ? 0 : rows > tile.count ? tile.count : rows);
}

// The index of a tile's KV row `row` among the KV head's rows.
__device__ __forceinline__ std::int64_t place_of(const PrefillArgs& args, const Tile& tile,
                                                 int row) {
  if (tile.listed == nullptr) return row;
  const std::int64_t page = tile.listed[row / kPageTokens] - args.first_page;
  return page * kPageTokens + row % kPageTokens;
}

// Packed rows of a block of queries.
__device__ __forceinline__ int block_rows(const PrefillArgs& args) {
  return static_cast<int>(PageLists::kBlock) * args.group;
}

// Narrows a tile to the listed pages among its KV rows. A block of queries lists all pages from its
// own on, so rows there follow each other as positions do, and masking by row number still works.
__device__ inline void list_pages(const PrefillArgs& args, Tile& tile) {
  const int block = tile.first_row / block_rows(args);
  const std::int64_t entry = tile.kv_head * args.listed.blocks + block;
  const std::int32_t* const all = args.listed.pages + entry * args.listed.capacity;
  const std::int32_t listed = args.listed.counts[entry];
  const int pages = (tile.count + kPageTokens - 1) / kPageTokens;
  const std::int32_t first = count_below(all, listed, args.first_page);
  const std::int32_t end = count_below(all, listed, args.first_page + pages);
  tile.listed = all + first;
  if (first == end || tile.first_row >= tile.end_row) {
    tile.count = 0;
    return;
  }
  const int last_rows = tile.count - (all[end - 1] - args.first_page) * kPageTokens;
  tile.count = (end - first - 1) * kPageTokens + min(kPageTokens, last_rows);
  const std::int64_t first_row =
      args.first_visible - 1 + block * static_cast<int>(PageLists::kBlock);  // its own
  const std::int64_t own = first_row < 0 ? 0 : first_row / kPageTokens;
  const std::int32_t before = count_below(all, listed, args.first_page + own) - first;
  tile.first_visible = (before - own) * kPageTokens + args.first_visible;
}

// Tiles with many blocks come first, so that no multiprocessor starts one when others run dry.
template <int kRows, int kKeys>
__device__ __forceinline__ Tile tile_of(const PrefillArgs& args, int item) {
  Tile tile;
  const int section_items = args.section_heads * args.tiles * args.splits;
  const int first_head = item / section_items * args.section_heads;
  const int heads = min(args.section_heads, args.kv_heads - first_head);
  int rest = item % section_items;
  tile.split = rest % args.splits;
  rest /= args.splits;
  tile.kv_head = first_head + rest % heads;
  const int number = args.tiles - 1 - rest / heads;
  tile.count = static_cast<int>(args.rows.count);
  tile.first_visible = args.first_visible;
  if (args.listed.pages == nullptr) {
    tile.first_row = number * kRows;
    tile.end_row = min(tile.first_row + kRows, packed_rows(args));
  } else {
    const int of_block = (block_rows(args) + kRows - 1) / kRows;
    const int block_row = number / of_block * block_rows(args);
    tile.first_row = block_row + number % of_block * kRows;
    tile.end_row =
        min(min(tile.first_row + kRows, block_row + block_rows(args)), packed_rows(args));
    list_pages(args, tile);
  }
  const int most = visible_rows(args, tile, (tile.end_row - 1) / args.group);
  const int blocks = (most + kKeys - 1) / kKeys;
  tile.first_block = blocks * tile.split / args.splits;
  tile.end_block = blocks * (tile.split + 1) / args.splits;
  tile.masked_block = visible_rows(args, tile, tile.first_row / args.group) / kKeys;
  return tile;
}

// Rows that a packed row sees; of a packed row past the last, any number.
__device__ __forceinline__ int visible_of_row(const PrefillArgs& args, const Tile& tile, int row) {
  return visible_rows(args, tile, row / args.group);
}

// Eight consecutive channels of a packed row of q, rounded; zeros past the last row.
template <typename T>
__device__ __forceinline__ uint4 load_query(const PrefillArgs& args, const Tile& tile, int row,
                                            int channel) {
  if (row >= packed_rows(args)) return {};
  const int token = row / args.group;
  const int head = tile.kv_head * args.group + row % args.group;
  const float* const q =
      args.q + token * args.q_stride + static_cast<std::int64_t>(head) * args.head_dim + channel;
  float x[8];
  if (args.q_aligned) {
    *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(q);
    *reinterpret_cast<float4*>(x + 4) = *reinterpret_cast<const float4*>(q + 4);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = q[i];
  }
  return {pack(T(), x[0], x[1]), pack(T(), x[2], x[3]), pack(T(), x[4], x[5]),
          pack(T(), x[6], x[7])};
}

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Maximum over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// The softmax so far of this thread's two rows.
struct RowPair {
  float highest[2] = {kNoLogit, kNoLogit};  // unscaled logit
  float sum[2] = {0, 0};                    // of the weights in this lane's columns
};

// Hides columns from `limit[half]` on; both relative to this lane's first column.
template <int kCount>
__device__ __forceinline__ void mask_columns(float (&s)[kCount], const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = kNoLogit;
  }
}

template <int kCount>
__device__ __forceinline__ float highest_of(const float (&s)[kCount], int half, float start) {
  float even = start;
  float odd = kNoLogit;
#pragma unroll
  for (int i = 2 * half; i < kCount; i += 4) {
    even = fmaxf(even, s[i]);
    odd = fmaxf(odd, s[i + 1]);
  }
  return quad_max(fmaxf(even, odd));
}

// Turns logits into weights relative to the highest logit so far. Everything summed before must be
// multiplied by `correction`. A NaN becomes a NaN weight; fmaxf passes it over.
template <int kCount>
__device__ __forceinline__ void softmax_step(float (&s)[kCount], RowPair& rows, float scale,
                                             float (&correction)[2]) {
  // From here on rounding logit * scale to f32 may change an exponent by 1/16.
  constexpr float kLargeExponent = 0x1p20f;
  float reference[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float highest = highest_of(s, half, rows.highest[half]);
    // Logits that are all -inf have no weight, also relative to each other.
    // Both products are rounded, so that equal logits have no difference.
    reference[half] = highest == kNoLogit ? 0.0f : __fmul_rn(highest, scale);
    correction[half] = exp2_approximate(__fmul_rn(rows.highest[half], scale) - reference[half]);
    rows.highest[half] = highest;
  }
  const float largest = fmaxf(fabsf(reference[0]), fabsf(reference[1]));
  if (__any_sync(kAllLanes, largest > kLargeExponent)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float highest = reference[half] == 0 ? 0.0f : rows.highest[half];
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) {
        s[i] -= highest;
        s[i + 1] -= highest;
      }
      reference[half] = 0;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float even = 0;
    float odd = 0;
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
      s[i] = exp2_approximate(fmaf(s[i], scale, -reference[half]));
      s[i + 1] = exp2_approximate(fmaf(s[i + 1], scale, -reference[half]));
      even += s[i];
      odd += s[i + 1];
    }
    rows.sum[half] = rows.sum[half] * correction[half] + (even + odd);
  }
}

template <int kCount>
__device__ __forceinline__ void rescale(float (&o)[kCount], const float (&correction)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= correction[i / 2 % 2];
}

// Weights that merge two partials.
struct MergeWeights {
  float before;
  float here;
  float lse;
};

__device__ __forceinline__ MergeWeights merge_weights(float before, float here) {
  if (before == kNoLogit) return {0, 1, here};
  const float highest = fmaxf(before, here);
  const float lse = highest + logf(expf(before - highest) + expf(here - highest));
  return {expf(before - lse), expf(here - lse), lse};
}

// Stores a thread's part of one of its two rows, and the row's log-sum-exp. Whole warps call it.
template <int kCount>
__device__ __forceinline__ void store_row(const PrefillArgs& args, const Tile& tile, int row,
                                          const float (&o)[kCount], int half, const RowPair& rows) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const float sum = quad_sum(rows.sum[half]);
  const bool empty = sum == 0;
  const float here = empty ? kNoLogit : kLn2 * (rows.highest[half] * args.scale + log2f(sum));
  const bool exists = row < tile.end_row;
  const bool merge = args.merge && args.splits == 1;
  const int heads = args.kv_heads * args.group;
  const int token = row / args.group;
  const int head = tile.kv_head * args.group + row % args.group;
  const std::int64_t index =
      (static_cast<std::int64_t>(args.splits == 1 ? 0 : tile.split) * args.tokens + token) * heads +
      head;
  float* const lse = (args.splits == 1 ? args.lse : args.split_lse) + index;
  const MergeWeights weights = merge_weights(merge && exists ? *lse : kNoLogit, here);
  __syncwarp();  // the four lanes of a row have read its lse
  if (!exists || (merge && empty)) return;
  if (lane % 4 == 0) *lse = weights.lse;
  float* const out =
      (args.splits == 1 ? args.out : args.split_out) + index * args.head_dim + 2 * (lane % 4);
  const float factor = empty ? 0.0f : weights.here / sum;
#pragma unroll
  for (int i = 2 * half; i < kCount; i += 4) {
    auto* const to = reinterpret_cast<float2*>(out + i / 4 * 8);
    float2 value = {empty ? 0.0f : o[i] * factor, empty ? 0.0f : o[i + 1] * factor};
    if (weights.before != 0) {
      const float2 before = *to;
      value.x = fmaf(weights.before, before.x, value.x);
      value.y = fmaf(weights.before, before.y, value.y);
    }
    *to = value;
  }
}

}  // namespace sluice::cuda
