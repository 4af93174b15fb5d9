#include "lib/backend/key_tiles.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace sluice {
namespace {

// Every channel of every page of either KV head has a place of its own, and together they fill what
// is allocated; likewise the scales of every page.
TEST(KeyTiles, GivesEveryChannelOfEveryPageItsOwnPlace) {
  constexpr int kHeads = 2;
  constexpr int kHeadDim = 6;
  for (const int bits : {2, 3, 4}) {
    for (const std::int64_t slots : {1, 4, 5}) {
      KeyTiles tiles;
      tiles.bits = bits;
      tiles.slots = slots;
      std::vector<std::byte> memory(tiles.codes_bytes(kHeads, kHeadDim));
      std::vector<std::uint16_t> scales(tiles.scales_bytes(kHeads, kHeadDim) / 2);
      tiles.codes = memory.data();
      tiles.scales = scales.data();
      std::set<std::size_t> places;
      std::set<std::int64_t> scale_places;
      for (std::int64_t head = 0; head < kHeads; ++head) {
        for (std::int64_t page = 0; page < slots * kTilePages; ++page) {
          const std::int64_t slot = page / kTilePages;
          const auto place = tiles.scales_of(kHeadDim, head, slot, page) - tiles.scales;
          EXPECT_EQ(place % (2 * kHeadDim), 0);
          EXPECT_TRUE(scale_places.insert(place).second);
          for (std::size_t channel = 0; channel < kHeadDim; ++channel) {
            const std::byte* const at =
                tiles.codes_of(kHeadDim, head, slot) +
                KeyTiles::place_of(bits, page, channel) * tiles.code_bytes();
            const auto offset = static_cast<std::size_t>(at - tiles.codes);
            EXPECT_EQ(offset % tiles.code_bytes(), 0u);
            EXPECT_LE(offset + tiles.code_bytes(), memory.size());
            EXPECT_TRUE(places.insert(offset).second);
          }
        }
      }
      EXPECT_EQ(memory.size(), places.size() * tiles.code_bytes());
      EXPECT_EQ(scales.size(), scale_places.size() * 2 * kHeadDim);
    }
  }
}

// Both pages of a channel are neighbours, so that one copy takes them.
TEST(KeyTiles, KeepsBothPagesOfAChannelTogether) {
  for (const int bits : {2, 3, 4}) {
    for (std::size_t channel = 0; channel < 8; ++channel) {
      EXPECT_EQ(KeyTiles::place_of(bits, 0, channel) / kTilePages, channel);
      EXPECT_EQ(KeyTiles::place_of(bits, 0, channel), KeyTiles::place_of(bits, 1, channel) ^ 1u);
    }
  }
}

// Where the bytes per token in docs/policies.md come from: codes, and a scale and a zero per page.
TEST(KeyTiles, TakesBytesByBits) {
  for (const auto& [bits, bytes] : {std::pair{4, 68}, std::pair{3, 52}, std::pair{2, 36}}) {
    KeyTiles tiles;
    tiles.bits = bits;
    tiles.slots = 1;
    EXPECT_EQ(tiles.codes_bytes(1, 128) + tiles.scales_bytes(1, 128),
              static_cast<std::size_t>(bytes * kPageTokens * kTilePages));
    EXPECT_EQ(tiles.page_bytes(128), static_cast<std::size_t>(bytes * kPageTokens));
  }
}

}  // namespace
}  // namespace sluice
