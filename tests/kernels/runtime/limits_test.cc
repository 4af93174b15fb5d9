// What is left of a device that passes for another; needs no device.
#include "kernels/runtime/limits.h"

#include <gtest/gtest.h>

#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

constexpr DeviceLimits kHopper = {132, 227 << 10, 90, 141ULL << 30};

TEST(PretendedLimitsTest, AreThoseOfTheCardThatIsNamed) {
  const DeviceLimits limits = pretended_limits(kHopper, "8.9");
  EXPECT_EQ(limits.capability, 89);
  EXPECT_EQ(limits.multiprocessors, 128);
  EXPECT_EQ(limits.shared_bytes, 99 << 10);
  EXPECT_EQ(limits.memory_bytes, 24ULL << 30);
  EXPECT_EQ(limits.digested_entries, kHopper.digested_entries);
}

TEST(PretendedLimitsTest, NeverExceedTheDevice) {
  EXPECT_EQ(pretended_limits(kHopper, "12.0").multiprocessors, kHopper.multiprocessors);
  const DeviceLimits small = {40, 64 << 10, 75, 8ULL << 30};
  const DeviceLimits limits = pretended_limits(small, "8.6");
  EXPECT_EQ(limits.multiprocessors, small.multiprocessors);
  EXPECT_EQ(limits.shared_bytes, small.shared_bytes);
  EXPECT_EQ(limits.memory_bytes, small.memory_bytes);
}

TEST(PretendedLimitsTest, ClustersCannotBePretended) {
  const DeviceLimits ada = pretended_limits(kHopper, "8.9");
  EXPECT_THROW(pretended_limits(ada, "12.0"), Error);
}

TEST(PretendedBusTest, IsWhatIsAskedFor) {
  EXPECT_EQ(pretended_bus("12.5"), 12'500'000'000u);
  EXPECT_EQ(pretended_bus("25"), 25'000'000'000u);
}

TEST(PretendedBusTest, OtherNumbersAreRefused) {
  for (const char* rate : {"", "0", "-1", "nan", "inf", "12,5", "12.5 GB/s", "1e4", "0x10"}) {
    EXPECT_THROW(pretended_bus(rate), Error) << rate;
  }
}

TEST(PretendedLimitsTest, OtherNamesAreRefusedWithWhatIsAccepted) {
  for (const char* name : {"", "9.0", "8.90", "89", "nan"}) {
    try {
      pretended_limits(kHopper, name);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      EXPECT_NE(std::string(error.what()).find("8.0, 8.6, 8.9 or 12.0"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace sluice::cuda
