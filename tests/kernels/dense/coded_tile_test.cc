// The order of codes in a tile: what a lane finds in its words are the weights of its fragments of
// mma.m16n8k16, written down here from the PTX ISA ("Matrix Fragments for mma.m16n8k16"), and the
// product of all lanes' fragments is the product of the weights.
#include "kernels/dense/coded_tile.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/random.h"

namespace sluice::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kGroup = 32;

// Numbers [rows, columns], all zero at first.
class Table {
 public:
  Table(int rows, int columns)
      : columns_(static_cast<std::size_t>(columns)),
        numbers_(static_cast<std::size_t>(rows) * columns_) {}
  std::uint32_t& at(int row, int column) { return numbers_.at(index(row, column)); }
  std::uint32_t at(int row, int column) const { return numbers_.at(index(row, column)); }
  // Random ones below `end`.
  void draw(testing::Random& random, std::uint32_t end) {
    for (std::uint32_t& number : numbers_) {
      number = static_cast<std::uint32_t>(random.integer(0, std::int64_t{end} - 1));
    }
  }

 private:
  std::size_t index(int row, int column) const {
    return static_cast<std::size_t>(row) * columns_ + static_cast<std::size_t>(column);
  }

  std::size_t columns_;
  std::vector<std::uint32_t> numbers_;
};

// Made-up rows of a tile.
struct Rows {
  Table codes{kTileOutputs, kTileInputs};
  Table scales{kTileOutputs, kTileGroups};
  Table offsets{kTileOutputs, kTileGroups};

  Rows(std::uint64_t seed, int bits) {
    testing::Random random(seed);
    codes.draw(random, 1u << bits);
    scales.draw(random, 1u << 16);
    offsets.draw(random, 1u << 16);
  }
  std::uint32_t scale(int row, int group) const { return scales.at(row, group); }
  std::uint32_t offset(int row, int group) const { return offsets.at(row, group); }
  std::uint32_t code(int row, int input) const { return codes.at(row, input); }
};

template <WeightCode kCode>
std::vector<std::uint32_t> packed(const Rows& rows) {
  std::vector<std::uint32_t> words;
  for (int word = 0; word < CodedTile<kCode>::kWords; ++word) {
    words.push_back(CodedTile<kCode>::word_of(word, rows));
  }
  return words;
}

// The row and the inner dimension of element `e` of register `i` of lane `lane`, in A and in B.
int a_row(int lane, int i) { return lane / 4 + 8 * (i % 2); }
int a_inner(int lane, int i, int e) { return lane % 4 * 2 + e + 8 * (i / 2); }
int b_inner(int lane, int i, int e) { return lane % 4 * 2 + e + 8 * i; }

// Codes of a lane's A fragment, as the kernels take them from its words.
template <WeightCode kCode>
std::uint32_t fragment_code(const std::vector<std::uint32_t>& words, int group, int lane,
                            int product, int i, int e) {
  using Tile = CodedTile<kCode>;
  const std::size_t of_lane =
      static_cast<std::size_t>(Tile::kFirstCode + (group * kLanes + lane) * Tile::kLaneWords);
  if (kCode == WeightCode::int4) {
    const int shift = 16 * (i % 2) + 8 * (i / 2) + 4 * e;
    return words.at(of_lane + static_cast<std::size_t>(product)) >> shift & 15u;
  }
  const std::uint32_t word = words.at(of_lane + static_cast<std::size_t>(2 * product + i % 2));
  return word >> (16 * e + 8 * (i / 2)) & 255u;
}

// Sums over a group by way of fragments, with inputs read as the kernels read them: 8 from
// 8 (lane % 4) on, four for each product.
template <WeightCode kCode>
void expect_products(std::uint64_t seed) {
  const Rows rows(seed, CodedTile<kCode>::kBits);
  const std::vector<std::uint32_t> words = packed<kCode>(rows);
  testing::Random random(seed + 1);
  Table x(1, kTileInputs);
  x.draw(random, 1000);
  for (int group = 0; group < kTileGroups; ++group) {
    Table sums(kTileOutputs, 1);
    for (int product = 0; product < 2; ++product) {
      Table a(kTileOutputs, 16);
      Table b(16, 1);
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int e = 0; e < 2; ++e) {
          for (int i = 0; i < 4; ++i) {
            a.at(a_row(lane, i), a_inner(lane, i, e)) =
                fragment_code<kCode>(words, group, lane, product, i, e);
          }
          for (int i = 0; i < 2; ++i) {
            b.at(b_inner(lane, i, e), 0) =
                x.at(0, group * kGroup + lane % 4 * 8 + product * 4 + i * 2 + e);
          }
        }
      }
      for (int row = 0; row < kTileOutputs; ++row) {
        for (int k = 0; k < 16; ++k) sums.at(row, 0) += a.at(row, k) * b.at(k, 0);
      }
    }
    for (int row = 0; row < kTileOutputs; ++row) {
      std::uint32_t wanted = 0;
      for (int i = group * kGroup; i < (group + 1) * kGroup; ++i) {
        wanted += rows.code(row, i) * x.at(0, i);
      }
      EXPECT_EQ(sums.at(row, 0), wanted) << "group " << group << ", row " << row;
    }
  }
}

template <WeightCode kCode>
void expect_places(std::uint64_t seed) {
  using Tile = CodedTile<kCode>;
  const Rows rows(seed, Tile::kBits);
  const std::vector<std::uint32_t> words = packed<kCode>(rows);
  std::vector<std::uint32_t> taken(words.size());
  for (int row = 0; row < kTileOutputs; ++row) {
    for (int input = 0; input < kTileInputs; ++input) {
      const auto place = Tile::place_of(row, input);
      const auto word = static_cast<std::size_t>(place.word);
      const std::uint32_t mask = (1u << Tile::kBits) - 1;
      EXPECT_EQ(words.at(word) >> place.shift & mask, rows.code(row, input));
      EXPECT_EQ(taken.at(word) & mask << place.shift, 0u) << "two codes in one place";
      taken.at(word) |= mask << place.shift;
    }
    for (int group = 0; group < kTileGroups; ++group) {
      const auto word = static_cast<std::size_t>(row % 8 * kTileGroups + group);
      EXPECT_EQ(words.at(word) >> row / 8 * 16 & 0xffffu, rows.scale(row, group));
      if (!Tile::kHasOffsets) continue;
      EXPECT_EQ(words.at(word + Tile::kScaleWords) >> row / 8 * 16 & 0xffffu,
                rows.offset(row, group));
    }
  }
  for (std::size_t i = Tile::kFirstCode; i < taken.size(); ++i) EXPECT_EQ(taken[i], ~0u) << i;
}

TEST(CodedTile, FragmentsMultiplyAsTheRowsDo) {
  const std::uint64_t seed = testing::seed(71);
  SCOPED_TRACE(testing::seed_message(seed));
  expect_products<WeightCode::int8>(seed);
  expect_products<WeightCode::int4>(seed);
}

TEST(CodedTile, EveryCodeHasAPlaceOfItsOwn) {
  const std::uint64_t seed = testing::seed(72);
  SCOPED_TRACE(testing::seed_message(seed));
  expect_places<WeightCode::int8>(seed);
  expect_places<WeightCode::int4>(seed);
}

TEST(CodedTile, TakesTheBytesOfTheFormatAndPaddingOnly) {
  for (const WeightCode code : {WeightCode::int8, WeightCode::int4}) {
    const WeightFormat format(code);
    const auto bytes = [&](std::int64_t outputs, std::int64_t inputs) {
      return CodedMatrix{nullptr, code, outputs, inputs}.bytes();
    };
    EXPECT_EQ(bytes(4096, 14336), 4096 * format.row_bytes(14336));
    EXPECT_EQ(bytes(70, 96), 80 * format.row_bytes(128));
    EXPECT_EQ(bytes(1, 32), 16 * format.row_bytes(128));
  }
}

}  // namespace
}  // namespace sluice::cuda
