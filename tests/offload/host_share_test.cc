// How much the host attends to: what was given, or what both sides need as long for.
#include "offload/attention/host_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "sluice/errors.h"
#include "tests/support/expect.h"

namespace sluice {
namespace {

constexpr std::int64_t kPages = 1000;

// A machine of so many rows per second, and a latency of either side.
struct Machine {
  double host = 0.0;
  double device = 0.0;
  double latency = 20e-6;

  void step(HostShare& share) const {
    const std::int64_t host_rows = share.pages_of(kPages) * 128;
    const std::int64_t device_rows = kPages * 128 - host_rows;
    share.learn({host_rows, latency + static_cast<double>(host_rows) / host},
                {device_rows, latency + static_cast<double>(device_rows) / device});
  }
  double seconds(const HostShare& share) const {
    const auto host_rows = static_cast<double>(share.pages_of(kPages) * 128);
    const auto device_rows = static_cast<double>(kPages * 128) - host_rows;
    return latency + std::max(host_rows / host, device_rows / device);
  }
};

TEST(HostShare, BothSidesComeToNeedAsLong) {
  for (const double ratio : {0.1, 0.5, 1.0, 1.9, 8.0}) {
    const Machine machine = {ratio * 12e6, 12e6};
    HostShare share;
    for (int step = 0; step < 30; ++step) machine.step(share);
    EXPECT_NEAR(share.share(), ratio / (1.0 + ratio), 0.02) << ratio;
    EXPECT_LT(machine.seconds(share), 1.05 * kPages * 128 / (12e6 * (1.0 + ratio)) + 20e-6);
  }
}

TEST(HostShare, FollowsAMachineThatChanges) {
  HostShare share;
  for (int step = 0; step < 30; ++step) Machine{24e6, 12e6}.step(share);
  for (int step = 0; step < 30; ++step) Machine{6e6, 12e6}.step(share);
  EXPECT_NEAR(share.share(), 1.0 / 3.0, 0.02);
}

TEST(HostShare, AMomentOfHindranceCountsLittle) {
  HostShare share;
  const Machine machine = {24e6, 12e6};
  for (int step = 0; step < 30; ++step) machine.step(share);
  Machine{24e3, 12e6}.step(share);
  EXPECT_GT(share.share(), 0.55);
}

TEST(HostShare, ASlowHostIsLeftAlone) {
  HostShare share;
  for (int step = 0; step < 30 && share.share() > 0.0; ++step) Machine{12e4, 12e6}.step(share);
  EXPECT_EQ(share.share(), 0.0);
  EXPECT_EQ(share.pages_of(kPages), 0);
}

TEST(HostShare, AFixedOneStays) {
  HostShare share(0.25);
  for (int step = 0; step < 10; ++step) Machine{24e6, 12e6}.step(share);
  EXPECT_EQ(share.share(), 0.25);
  EXPECT_EQ(share.pages_of(10), 3);
  EXPECT_EQ(HostShare(0.0).pages_of(10), 0);
  EXPECT_EQ(HostShare(1.0).pages_of(10), 10);
}

TEST(HostShare, StepsThatTellNothingChangeNothing) {
  HostShare share;
  for (int step = 0; step < 10; ++step) share.learn({}, {100, 1.0});
  for (int step = 0; step < 10; ++step) share.learn({100, 1.0}, {100, 0.0});
  EXPECT_EQ(share.share(), HostShare().share());
}

TEST(HostShare, RefusesWhatIsNoShare) {
  for (const double share : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity()}) {
    testing::expect_error(ErrorCode::usage, "from 0 to 1", [&] { HostShare{share}; });
  }
}

}  // namespace
}  // namespace sluice
