// Pages of the key index, and the queries that their tiles are scored with.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "lib/backend/index_ops.h"

namespace sluice::cpu {

inline constexpr int kMaxHeadDim = 256;

// Pointers to the parts of a page of one KV head.
struct TilePage {
  std::byte* codes = nullptr;       // of the tile, [head_dim, kTilePages, code_bytes]
  std::uint16_t* scales = nullptr;  // f16 [head_dim]
  std::uint16_t* zeros = nullptr;   // f16 [head_dim]
  std::int64_t page = 0;            // its parity selects the page of the tile

  // Codes of one channel.
  std::byte* codes_of(std::size_t channel, int bits) const {
    return codes + KeyTiles::place_of(bits, page, channel) * code_bytes(bits);
  }
  static constexpr std::size_t code_bytes(int bits) {
    return static_cast<std::size_t>(kPageTokens / 8 * bits);
  }
};
// Page `page` of a sequence; `slot` holds its tile.
TilePage tile_page(const KeyTiles& tiles, int head_dim, std::int64_t head, std::int64_t slot,
                   std::int64_t page);

// The channels that a scan reads, ascending; one list for all query heads of a KV head.
struct ChannelList {
  std::array<std::uint8_t, kMaxHeadDim> index{};
  int count = 0;
};
ChannelList all_channels(int head_dim);
// The `count` channels with the largest sum of |q| over the `group` queries [group, head_dim];
// among equals the first.
ChannelList largest_channels(const float* q, int group, int head_dim, int count);

// 1 / SparQ's temperature sqrt(head_dim * |q over `channels`|_1 / |q|_1); 1 / sqrt(head_dim) with
// all channels. 0 for a query of zeros.
float inverse_temperature(const float* q, int head_dim, const ChannelList& channels);

// A query folded into the scales of one page, so that a logit is an integer dot product: factor *
// sum over channels of weights * codes + offset. The weights are rounded to 8 bits, which adds to
// each channel at most 1/508 of the largest |q * scale| per step of its code; the offset
// compensates that error for codes in the middle of their range.
struct PageQuery {
  std::array<std::int8_t, kMaxHeadDim> weights;  // [channels], zeros up to a multiple of four
  float factor;
  float offset;
};

}  // namespace sluice::cpu
