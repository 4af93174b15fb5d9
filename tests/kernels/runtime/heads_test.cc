// What launchers make of a call's host arrays; needs no device.
#include "kernels/runtime/heads.h"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/runtime/memory.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

// Addresses that nothing reads from.
const std::byte* at(std::size_t offset) {
  static const std::vector<std::byte> memory(2 << 20);
  return memory.data() + offset;
}

TEST(HeadRowsTest, FollowsEqualDistancesForAnyNumberOfHeads) {
  std::vector<const std::byte*> heads;
  for (std::size_t i = 0; i < 2048; ++i) heads.push_back(at(4096 + 512 * i));
  const HeadRows rows = head_rows(heads);
  EXPECT_FALSE(rows.is_listed);
  for (int i = 0; i < 2048; ++i) ASSERT_EQ(rows[i], heads[static_cast<std::size_t>(i)]);
}

TEST(HeadRowsTest, ListsAFewHeadsAnywhere) {
  const std::vector<const std::byte*> heads = {at(4096), at(64), at(9000), nullptr};
  const HeadRows rows = head_rows(heads);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(rows[i], heads[static_cast<std::size_t>(i)]);
  EXPECT_EQ(head_rows(std::vector<const std::byte*>{at(64)})[0], at(64));
  EXPECT_EQ(head_rows(std::vector<const std::byte*>{}).base, nullptr);
}

TEST(HeadRowsTest, RefusesManyHeadsAnywhere) {
  std::vector<const std::byte*> heads(HeadRows::kListed + 1, at(64));
  heads[3] = at(128);
  try {
    static_cast<void>(head_rows(heads));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
  }
}

TEST(HeadCountsTest, AreOneNumberOrAList) {
  const std::vector<RowSpan> equal(2048, RowSpan{nullptr, 77});
  EXPECT_FALSE(head_counts(equal).is_listed);
  EXPECT_EQ(head_counts(equal).uniform, 77);
  const std::vector<RowSpan> differing = {{nullptr, 5}, {nullptr, 0}, {nullptr, 9}};
  const HeadCounts counts = head_counts(differing);
  EXPECT_EQ(counts[0], 5);
  EXPECT_EQ(counts[1], 0);
  EXPECT_EQ(counts[2], 9);
}

TEST(AddressMapTest, KnowsRunsAndWhatCrossesThem) {
  AddressMap map;
  map.add(at(1000), 100);
  map.add(at(1100), 50);  // registered later, right behind
  map.add(at(5000), 10);
  EXPECT_EQ(map.reach(at(999), 1), 0u);
  EXPECT_EQ(map.reach(at(1000), 500), 100u);
  EXPECT_EQ(map.reach(at(1099), 500), 1u);
  EXPECT_EQ(map.reach(at(1120), 5), 5u);
  EXPECT_EQ(map.reach(at(1150), 1), 0u);
  EXPECT_TRUE(map.covers(at(1000), 150));
  EXPECT_TRUE(map.covers(at(1090), 20));
  EXPECT_FALSE(map.covers(at(1000), 151));
  EXPECT_FALSE(map.covers(at(4999), 2));
  EXPECT_EQ(map.remove(at(1000)), 100u);
  EXPECT_FALSE(map.covers(at(1090), 20));
  EXPECT_TRUE(map.covers(at(1100), 50));
}

}  // namespace
}  // namespace sluice::cuda
