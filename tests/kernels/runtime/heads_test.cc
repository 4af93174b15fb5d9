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

TEST(HeadRowsTest, FollowEqualDistancesForAnyNumberOfHeads) {
  std::vector<std::byte> memory(2048 * 512);
  std::vector<std::byte*> heads;
  for (std::size_t i = 0; i < 2048; ++i) heads.push_back(memory.data() + 512 * i);
  const HeadRows rows = head_rows(heads);
  for (int i = 0; i < 2048; ++i) ASSERT_EQ(rows[i], heads[static_cast<std::size_t>(i)]);
}

TEST(HeadRowsTest, HaveOneCount) {
  const HeadRows rows = head_rows(std::vector<RowSpan>{{at(64), 77}, {at(128), 77}, {at(192), 77}});
  EXPECT_EQ(rows.count, 77);
  EXPECT_EQ(rows[2], at(192));
  EXPECT_EQ(head_rows(std::vector<RowSpan>{{at(64), 5}})[0], at(64));
  EXPECT_EQ(head_rows(std::vector<RowSpan>{}).base, nullptr);
}

TEST(HeadRowsTest, HeadsThatDifferEndTheProgram) {
  EXPECT_DEATH(head_rows(std::vector<RowSpan>{{at(0), 1}, {at(64), 1}, {at(192), 1}}), "distance");
  EXPECT_DEATH(head_rows(std::vector<RowSpan>{{at(0), 1}, {at(64), 2}}), "number");
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
