// The key index of a layer: keys in a few bits, and the bounds of sub-pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/batch.h"
#include "sluice/types.h"

namespace sluice {

// Tokens per page bound (Quest): a sub-page.
inline constexpr int kBoundTokens = 16;
inline constexpr int kBoundsPerPage = kPageTokens / kBoundTokens;

// Keys of whole pages, quantised per channel over the 128 tokens of a page and channel-major, so
// that one copy serves slices of channels (SparQ) as well as all of them (Twilight).
// key = zero + scale * code, code in [0, 2^bits). With one bit, zero and scale are fitted to the
// codes (lib/code_fit.h).
// At 4 bits, byte b of a channel's 64 holds token b in its low and token 64 + b in its high half;
// at 2 bits, byte b of 32 holds tokens b, 32 + b, 64 + b and 96 + b from its lowest bits up; at 1
// bit, byte b of 16 holds tokens b, 16 + b and so on to 112 + b. At 3 bits, a channel has 48 bytes:
// 32 with the lower two bits of all codes, laid out as 2 bits are, then 16 with the highest, laid
// out as 1 bit is. A channel of a tile has the codes of two adjacent pages of a sequence. In odd
// channels the second page's come first, because adjacent channels of a page then lie in different
// memory banks; at 3 bits they do so anyway, and the first page's are always first. The last tile
// of a sequence may have only one page; the bytes of the other are undefined.
//
// Rotated tiles hold keys after a rotation (lib/hadamard.h), so queries must be rotated, too; codes
// span kept_range() of the range. Unrotated ones hold the channels themselves, which SparQ reads
// one by one, and span the whole range. Tiles of one bit are always rotated.
struct KeyTiles {
  int bits = 4;
  bool rotated = false;
  std::byte* codes = nullptr;       // [kv_heads, slots, head_dim, kTilePages, code_bytes()]
  std::uint16_t* scales = nullptr;  // f16 [kv_heads, slots, kTilePages, 2, head_dim]: scales, zeros
  std::int64_t slots = 0;           // tiles per KV head

  // Bytes of the codes of one channel of one page.
  std::size_t code_bytes() const { return static_cast<std::size_t>(kPageTokens * bits / 8); }
  // Bytes of the codes of a tile of one KV head.
  std::size_t tile_bytes(int head_dim) const {
    return static_cast<std::size_t>(head_dim * kTilePages) * code_bytes();
  }
  // Bytes of all codes.
  std::size_t codes_bytes(int kv_heads, int head_dim) const {
    return static_cast<std::size_t>(kv_heads * slots) * tile_bytes(head_dim);
  }
  // Bytes of all scales and zeros.
  std::size_t scales_bytes(int kv_heads, int head_dim) const {
    return static_cast<std::size_t>(kv_heads * slots) * kTilePages * page_scales_bytes(head_dim);
  }
  // The codes of a slot's tile.
  std::byte* codes_of(int head_dim, std::int64_t head, std::int64_t slot) const {
    return codes + static_cast<std::size_t>(head * slots + slot) * tile_bytes(head_dim);
  }
  // The scales of a page in a slot, [2, head_dim].
  std::uint16_t* scales_of(int head_dim, std::int64_t head, std::int64_t slot,
                           std::int64_t page) const {
    return scales + ((head * slots + slot) * kTilePages + page % kTilePages) * 2 * head_dim;
  }
  // The part of a channel's range, around its middle, that codes of rotated keys span; keys outside
  // get the outermost codes. With few codes, finer steps gain more than clipped keys lose. Tried
  // for sluice-22m behind 8K tokens of two books: parts from 1 to 0.65. Neighbours of these lose as
  // much; whole ranges lose up to four (2 bits), three (3) and one (4) times as much.
  static constexpr float kept_range(int bits) {
    return bits == 1 ? 0.5f : bits == 2 ? 0.75f : bits == 3 ? 0.9f : 0.95f;
  }
  // Returns true if zero and scale are fitted to the codes.
  static constexpr bool fitted(int bits) { return bits == 1; }
  float kept_range() const { return rotated ? kept_range(bits) : 1.0f; }
  // The part clipped at either end.
  float margin() const { return (1.0f - kept_range()) / 2.0f; }
  // Bits of a code that lie together: all, except the highest of three.
  static constexpr int low_bits(int bits) { return bits == 3 ? 2 : bits; }
  // Bytes of these bits of one channel of one page.
  static constexpr std::size_t low_bytes(int bits) {
    return static_cast<std::size_t>(kPageTokens / 8 * low_bits(bits));
  }
  // The offset of one channel of a page in its tile, in units of code_bytes().
  static constexpr std::size_t place_of(int bits, std::int64_t page, std::size_t channel) {
    const std::size_t swapped = bits == 3 ? 0 : channel;
    return channel * kTilePages + (static_cast<std::size_t>(page) ^ swapped) % kTilePages;
  }
  // Bytes of `channels` channels of one page of one KV head, codes and scales.
  std::size_t page_bytes(int channels) const {
    return static_cast<std::size_t>(channels) * code_bytes() + page_scales_bytes(channels);
  }

 private:
  static std::size_t page_scales_bytes(int channels) {
    return static_cast<std::size_t>(channels) * 2 * sizeof(std::uint16_t);
  }
};

// The smallest and largest key of every sub-page, per channel, rounded outwards.
struct PageBounds {
  // f16 [kv_heads, slots, kTilePages, kBoundsPerPage, 2, head_dim]
  std::uint16_t* bounds = nullptr;
  std::int64_t slots = 0;  // tiles per KV head

  std::size_t page_bytes(int channels) const {
    return static_cast<std::size_t>(kBoundsPerPage * 2 * channels) * sizeof(std::uint16_t);
  }
  // Bytes of all bounds.
  std::size_t bytes(int kv_heads, int head_dim) const {
    return static_cast<std::size_t>(kv_heads * slots) * kTilePages * page_bytes(head_dim);
  }
  // The bounds of a page in a slot, [kBoundsPerPage, 2, head_dim].
  std::uint16_t* of(int head_dim, std::int64_t head, std::int64_t slot, std::int64_t page) const {
    return bounds +
           ((head * slots + slot) * kTilePages + page % kTilePages) * kBoundsPerPage * 2 * head_dim;
  }
};

// The key index of one layer, for all sequences of a pool; a part that it lacks is null.
// Tiles and bounds of two neighbouring pages have the same slot in their pools.
struct KeyIndexView {
  KeyTiles tiles;
  PageBounds bounds;
  const std::int32_t* slots = nullptr;  // the backend's memory, [sequences, table_stride]
  std::int64_t table_stride = 0;        // tiles that a sequence may have

  // The slot of a page. Callable only where `slots` can be dereferenced.
  std::int64_t slot(std::int64_t sequence, std::int64_t page) const {
    return slots[sequence * table_stride + page / kTilePages];
  }
};

}  // namespace sluice
