// The layout of value tiles for kernels, which cannot call the members of ValueTiles (see
// paged.cuh). A page of value tiles is one page of one KV head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/runtime/device_math.cuh"
#include "lib/value_tiles.h"

namespace sluice::cuda {

// A thread has 32 neighbouring tokens of a channel: 16 pairs, as kLowWords words of their lower
// bits and, at 3 bits, one word of their highest bits.
inline constexpr int kThreadTokens = 32;
inline constexpr int kThreadPairs = kThreadTokens / 2;
template <int kBits>
inline constexpr int kLowCodeBits = ValueTiles::low_bits(kBits);
template <int kBits>
inline constexpr int kLowWords = kLowCodeBits<kBits>;
template <int kBits>
inline constexpr int kWordPairs = kThreadPairs / kLowWords<kBits>;

// Offset of the bits of a pair's first token; the second's are 16 bits higher.
template <int kBits>
__host__ __device__ constexpr int low_shift(int pair) {
  return pair % kWordPairs<kBits> * kLowCodeBits<kBits>;
}
__host__ __device__ constexpr int high_shift(int pair) {
  return pair % 4 * 2 + pair / 4 % 2 + pair / 8 * 8;
}

template <int kBits>
constexpr bool is_layout_of_tiles() {
  for (int token = 0; token < kPageTokens; ++token) {
    const int thread = token / kThreadTokens;
    const int pair = token % kThreadTokens / 2;
    const int half = token % 2 * 16;
    const ValueTiles::Place low = ValueTiles::low_place(kBits, token);
    const ValueTiles::Place high = ValueTiles::high_place(token);
    if (low.word != thread * kLowWords<kBits> + pair / kWordPairs<kBits>) return false;
    if (low.shift != low_shift<kBits>(pair) + half) return false;
    if (high.word != 4 * kLowWords<3> + thread || high.shift != high_shift(pair) + half)
      return false;
  }
  return true;
}
static_assert(is_layout_of_tiles<1>() && is_layout_of_tiles<2>() && is_layout_of_tiles<3>() &&
              is_layout_of_tiles<4>());

// Bytes of a page of one KV head.
__host__ __device__ constexpr std::int64_t tile_page_bytes(int bits, int channels) {
  return std::int64_t{channels} * (4 + kPageTokens / 8 * bits);
}

// Pages as they lie in a pool, and the table that finds them.
struct TilePool {
  std::byte* pages = nullptr;
  std::int64_t slots = 0;               // per KV head
  const std::int32_t* table = nullptr;  // [sequences, table_stride]
  std::int64_t table_stride = 0;
  std::int64_t page_bytes = 0;

  TilePool() = default;
  TilePool(const ValueTilesView& view, int head_dim)
      : pages(view.tiles.pages),
        slots(view.tiles.slots),
        table(view.slots),
        table_stride(view.table_stride),
        page_bytes(tile_page_bytes(view.tiles.bits, view.tiles.channels(head_dim))) {}

  // The slot of a page, which it shares with its neighbour.
  __device__ __forceinline__ std::int32_t slot_of(std::int64_t sequence, int page) const {
    return table[sequence * table_stride + page / kTilePages];
  }
  // The place of a page among all pages of a KV head.
  __device__ __forceinline__ static std::int64_t place_of(std::int32_t slot, int page) {
    return std::int64_t{slot} * kTilePages + page % kTilePages;
  }
  __device__ __forceinline__ std::byte* at(int head, std::int64_t place) const {
    return pages + (head * slots * kTilePages + place) * page_bytes;
  }
};

}  // namespace sluice::cuda
