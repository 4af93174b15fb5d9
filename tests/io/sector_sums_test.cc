#include "io/sector_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "io/disk.h"
#include "tests/io/test_files.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

std::vector<std::byte> random_sectors(testing::Random& random, std::size_t count) {
  std::vector<std::byte> bytes(count * kSectorBytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.integer(0, 255));
  return bytes;
}

TEST(SectorSums, AcceptsOnlyWhatWasSet) {
  testing::Random random(1);
  SectorSums sums(2, 8, 7);
  std::vector<std::byte> bytes = random_sectors(random, 4);
  EXPECT_EQ(sums.find_mismatch(2, bytes), 2u) << "never written";
  sums.set(2, bytes);
  EXPECT_EQ(sums.find_mismatch(2, bytes), std::nullopt);
  // Neighbours that were swapped, and the right bytes in another place.
  EXPECT_EQ(sums.find_mismatch(3, std::span(bytes).first(kSectorBytes)), 3u);
  std::swap_ranges(bytes.begin() + kSectorBytes, bytes.begin() + 2 * kSectorBytes,
                   bytes.begin() + 2 * kSectorBytes);
  EXPECT_EQ(sums.find_mismatch(2, bytes), 3u);
}

TEST(SectorSums, SeesEveryBit) {
  testing::Random random(2);
  SectorSums sums(1, 1, 7);
  std::vector<std::byte> bytes = random_sectors(random, 1);
  sums.set(0, bytes);
  for (std::size_t bit = 0; bit < 8 * kSectorBytes; ++bit) {
    const auto mask = std::byte{1} << static_cast<int>(bit % 8);
    bytes[bit / 8] ^= mask;
    ASSERT_EQ(sums.find_mismatch(0, bytes), 0u) << "bit " << bit;
    bytes[bit / 8] ^= mask;
  }
  EXPECT_EQ(sums.find_mismatch(0, bytes), std::nullopt);
}

TEST(SectorSums, RefusesEarlierVersions) {
  testing::Random random(3);
  SectorSums sums(1, 2, 7);
  const std::vector<std::byte> old = random_sectors(random, 1);
  const std::vector<std::byte> current = random_sectors(random, 1);
  sums.set(1, old);
  sums.set(1, current);
  EXPECT_EQ(sums.find_mismatch(1, old), 1u);
  EXPECT_EQ(sums.find_mismatch(1, current), std::nullopt);
}

TEST(SectorSums, ForgetsOneRegion) {
  testing::Random random(4);
  SectorSums sums(3, 2, 7);
  const std::vector<std::byte> bytes = random_sectors(random, 6);
  sums.set(0, bytes);
  sums.forget(1);
  const auto sector = [&](std::size_t i) {
    return std::span(bytes).subspan(i * kSectorBytes, kSectorBytes);
  };
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(sums.find_mismatch(i, sector(i)).has_value(), i == 2 || i == 3) << i;
  }
}

TEST(SectorSums, DependOnStorePlaceAndGeneration) {
  testing::Random random(5);
  const std::vector<std::byte> bytes = random_sectors(random, 1);
  const auto sector = std::span<const std::byte, kSectorBytes>(bytes);
  SectorSums one(2, 4, 1);
  const SectorSums other(2, 4, 2);
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < 8; ++i) {
    seen.insert(one.sum(i, sector));
    seen.insert(other.sum(i, sector));
  }
  EXPECT_EQ(seen.size(), 16u);
  const std::uint64_t before = one.sum(5, sector);
  one.forget(0);
  EXPECT_EQ(one.sum(5, sector), before);
  one.forget(1);
  EXPECT_EQ(seen.count(one.sum(5, sector)), 0u);
}

TEST(SectorSums, AreCounted) {
  // 128 GiB: 256 MiB of sums, as a plan expects.
  const std::uint64_t sectors = (std::uint64_t{128} << 30) / kSectorBytes;
  EXPECT_EQ(SectorSums::memory_bytes(256, sectors / 256), (256u << 20) + 256 * 4);
  testing::expect_error(ErrorCode::memory, "the checksums of spilled rows need",
                        [] { SectorSums(1 << 20, std::uint64_t{1} << 38, 1); });
}

}  // namespace
}  // namespace sluice
