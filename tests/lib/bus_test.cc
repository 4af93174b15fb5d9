#include "sluice/bus.h"

#include <gtest/gtest.h>

#include <string>

#include "sluice/errors.h"

namespace sluice {
namespace {

TEST(Bus, IsReadFromText) {
  const Bus bus = parse_bus("12.5GB/s,10us", "--bus");
  EXPECT_DOUBLE_EQ(bus.bytes_per_second, 12.5e9);
  EXPECT_DOUBLE_EQ(bus.latency, 10e-6);
  const Bus binary = parse_bus("1GiB/s,0.5ms", "--bus");
  EXPECT_DOUBLE_EQ(binary.bytes_per_second, 1073741824.0);
  EXPECT_DOUBLE_EQ(binary.latency, 5e-4);
}

TEST(Bus, RefusesOtherText) {
  for (const char* const text :
       {"", "12.5GB/s", "12.5GB,10us", "12.5GB/s,10", "0GB/s,10us", "-1GB/s,10us", "nanGB/s,1us",
        "infGB/s,1us", "1GB/s,-1us", "1GB/s,1us,", "1GB/s,1us,1us", "1 GB/s,1us", "1e300TB/s,1s",
        "1GB/s,1000s", "999999999TB/s,1us"}) {
    try {
      parse_bus(text, "--bus");
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      EXPECT_TRUE(std::string(error.what()).starts_with("--bus: ")) << error.what();
    }
  }
}

TEST(Bus, TakesTheTimeOfBytesAndRequests) {
  const Bus bus = parse_bus("2GB/s,10us", "--bus");
  EXPECT_DOUBLE_EQ(transfer_seconds(bus, {4'000'000, 3}), 2e-3 + 30e-6);
  EXPECT_DOUBLE_EQ(transfer_seconds(bus, {}), 0.0);
  Crossing sum{1'000'000, 1};
  sum += {3'000'000, 2};
  EXPECT_EQ(sum, (Crossing{4'000'000, 3}));
}

}  // namespace
}  // namespace sluice
