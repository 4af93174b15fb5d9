#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "lib/selection.h"

namespace sluice {
namespace {

// Every channel of every page of either KV head has a place of its own, and together they fill what
// is allocated, but for the half of a tile that an odd page count leaves.
TEST(KeyTiles, GivesEveryChannelOfEveryPageItsOwnPlace) {
  constexpr int kHeads = 2;
  constexpr int kHeadDim = 6;
  for (const int bits : {2, 4}) {
    for (const std::int64_t pages : {1, 4, 5}) {
      KeyTiles tiles;
      tiles.bits = bits;
      tiles.capacity = pages;
      std::vector<std::byte> memory(tiles.codes_bytes(kHeads, kHeadDim));
      tiles.codes = memory.data();
      std::set<std::size_t> places;
      for (std::int64_t head = 0; head < kHeads; ++head) {
        for (std::int64_t page = 0; page < pages; ++page) {
          for (std::size_t channel = 0; channel < kHeadDim; ++channel) {
            const std::byte* const at = tiles.tile_of(kHeadDim, head, page) +
                                        KeyTiles::place_of(page, channel) * tiles.code_bytes();
            const auto offset = static_cast<std::size_t>(at - tiles.codes);
            EXPECT_EQ(offset % tiles.code_bytes(), 0u);
            EXPECT_LE(offset + tiles.code_bytes(), memory.size());
            EXPECT_TRUE(places.insert(offset).second);
          }
        }
      }
      EXPECT_EQ(memory.size(), static_cast<std::size_t>((pages + 1) / 2 * 2 * kHeads * kHeadDim) *
                                   tiles.code_bytes());
    }
  }
}

// Both pages of a channel are neighbours, so that one copy takes them.
TEST(KeyTiles, KeepsBothPagesOfAChannelTogether) {
  for (std::size_t channel = 0; channel < 8; ++channel) {
    EXPECT_EQ(KeyTiles::place_of(0, channel) / kTilePages, channel);
    EXPECT_EQ(KeyTiles::place_of(0, channel), KeyTiles::place_of(1, channel) ^ 1u);
  }
}

}  // namespace
}  // namespace sluice
