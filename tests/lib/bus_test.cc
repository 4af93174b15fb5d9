#include "sluice/bus.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "sluice/errors.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

TEST(Bus, IsReadFromText) {
  const Bus bus = parse_bus("12.5GB/s,10us", "--bus");
  EXPECT_DOUBLE_EQ(bus.bytes_per_second, 12.5e9);
  EXPECT_DOUBLE_EQ(bus.latency, 10e-6);
  EXPECT_DOUBLE_EQ(bus.item_latency, 0.0);
  const Bus batched = parse_bus("1GiB/s,0.5ms,430ns", "--bus");
  EXPECT_DOUBLE_EQ(batched.bytes_per_second, 1073741824.0);
  EXPECT_DOUBLE_EQ(batched.latency, 5e-4);
  EXPECT_DOUBLE_EQ(batched.item_latency, 430e-9);
}

TEST(Bus, RefusesOtherText) {
  for (const char* const text :
       {"", "12.5GB/s", "12.5GB,10us", "12.5GB/s,10", "0GB/s,10us", "-1GB/s,10us", "nanGB/s,1us",
        "infGB/s,1us", "1GB/s,-1us", "1GB/s,1us,", "1GB/s,1us,1us,1us", "1 GB/s,1us",
        "1e300TB/s,1s", "1GB/s,1000s", "999999999TB/s,1us"}) {
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
  const Bus bus = parse_bus("2GB/s,10us,1us", "--bus");
  EXPECT_DOUBLE_EQ(transfer_seconds(bus, {4'000'000, 3, 5}), 2e-3 + 30e-6 + 5e-6);
  EXPECT_DOUBLE_EQ(transfer_seconds(bus, {}), 0.0);
}

TEST(Bus, CountsPagesAndRuns) {
  constexpr std::uint64_t kRow = 256;
  constexpr std::uint64_t kSeed = 11;
  testing::Random random(kSeed);
  SCOPED_TRACE(kSeed);
  for (int round = 0; round < 50; ++round) {
    std::set<std::int32_t> chosen;
    while (chosen.size() < 40) chosen.insert(static_cast<std::int32_t>(random.integer(0, 1999)));
    const std::vector<std::int32_t> positions(chosen.begin(), chosen.end());
    for (const int page : {16, 128}) {
      std::set<std::int32_t> pages;
      for (const std::int32_t position : chosen) pages.insert(position / page);
      const Crossing copies = page_copies(positions, page, kRow);
      EXPECT_EQ(copies.requests, pages.size());
      EXPECT_EQ(copies.bytes, pages.size() * static_cast<std::size_t>(page) * kRow);
    }
    std::uint64_t starts = 0;
    for (const std::int32_t position : chosen) starts += chosen.count(position - 1) == 0 ? 1 : 0;
    EXPECT_EQ(batched_copies(positions, kRow), (Crossing{40 * kRow, 1, starts - 1}));
  }
  EXPECT_EQ(page_copies({}, 16, kRow), Crossing());
  EXPECT_EQ(batched_copies({}, kRow), Crossing());
}

}  // namespace
}  // namespace sluice
