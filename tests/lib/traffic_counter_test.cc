#include "sluice/traffic_counter.h"

#include <gtest/gtest.h>

#include <vector>

namespace sluice {
namespace {

constexpr Tier kDevice = Tier::device;
constexpr Tier kHost = Tier::host;

TEST(TrafficCounter, AddsUpUntilTaken) {
  TrafficCounter counter;
  counter.add(kHost, kDevice, Cause::miss, {2, 512});
  counter.add(kHost, kDevice, Cause::miss, {1, 256});
  counter.add(kDevice, kDevice, Cause::hit, {0, 0});
  counter.add_beside(24);
  const CountedTraffic counted = counter.take();
  ASSERT_EQ(counted.moved.size(), 1u);
  EXPECT_EQ(counted.moved.at({kHost, kDevice, Cause::miss}), (Traffic{3, 768}));
  EXPECT_EQ(counted.beside, 24u);
  EXPECT_TRUE(counter.take().moved.empty());
}

// Two layers' entries against one count of both.
struct Step {
  CountedTraffic counted;
  std::vector<LedgerEntry> recorded;

  Step() {
    counted.moved[{kHost, kDevice, Cause::miss}] = {3, 768};
    counted.moved[{kDevice, kDevice, Cause::hit}] = {10, 2560};
    recorded = {{0, kHost, kDevice, Cause::miss, {1, 256}},
                {1, kHost, kDevice, Cause::miss, {2, 512}},
                {0, kDevice, kDevice, Cause::hit, {10, 2560}}};
  }
};

TEST(Difference, IsNothingBetweenEqualSums) {
  const Step step;
  EXPECT_EQ(difference(step.counted, step.recorded), "");
}

TEST(Difference, NamesWhatDiffers) {
  Step step;
  step.recorded[1].traffic = {1, 256};
  EXPECT_EQ(difference(step.counted, step.recorded),
            "miss from host to device: the ledger has 2 rows, 512 B, counted were 3 rows, 768 B");
  step = Step();
  step.recorded[1].traffic.bytes = 500;
  EXPECT_NE(difference(step.counted, step.recorded), "");
  step = Step();
  step.recorded.pop_back();
  EXPECT_NE(difference(step.counted, step.recorded), "");
  step = Step();
  step.counted.moved.erase({kDevice, kDevice, Cause::hit});
  EXPECT_NE(difference(step.counted, step.recorded), "");
  // The right rows in the wrong tier.
  step = Step();
  step.recorded[2].from = step.recorded[2].to = kHost;
  EXPECT_NE(difference(step.counted, step.recorded), "");
}

TEST(Difference, LeavesOutWhatIsNotCounted) {
  Step step;
  step.recorded.push_back({0, Tier::disk, kHost, Cause::miss, {1, 256}});
  step.recorded.push_back({0, kDevice, kDevice, Cause::index_read, {100, 6400}});
  step.recorded.push_back({0, kDevice, kDevice, Cause::value_read, {128, 4096}});
  step.recorded.push_back({0, kDevice, kDevice, Cause::evict, {2, 0}});
  // Attended by the CPU beside the device.
  step.recorded.push_back({0, kHost, kHost, Cause::hit, {5, 1280}});
  EXPECT_EQ(difference(step.counted, step.recorded), "");
  step.recorded.push_back({0, kHost, kDevice, Cause::index_read, {4, 512}});
  EXPECT_EQ(difference(step.counted, step.recorded, false), "");
  EXPECT_NE(difference(step.counted, step.recorded), "");
}

TEST(Difference, CountsHitsInHostMemoryWithoutADevice) {
  CountedTraffic counted;
  counted.moved[{kHost, kHost, Cause::hit}] = {10, 2560};
  const std::vector<LedgerEntry> recorded = {{0, kHost, kHost, Cause::hit, {9, 2304}}};
  EXPECT_NE(difference(counted, recorded), "");
}

}  // namespace
}  // namespace sluice
