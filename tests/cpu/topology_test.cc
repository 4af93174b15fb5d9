#include "sluice/topology.h"

#include <gtest/gtest.h>

#include <utility>

#include "sluice/errors.h"

namespace sluice {
namespace {

TEST(Topology, MeasuresWithTheThreadsThatAreAsked) {
  const Bandwidth one = measure_bandwidth(1, 1u << 20);
  EXPECT_EQ(one.threads, 1);
  EXPECT_GT(one.read_bytes_per_second, 0.0);
  EXPECT_GT(one.copy_bytes_per_second, 0.0);
  EXPECT_EQ(measure_bandwidth(0, 1).threads, detect_topology().threads);
}

TEST(Topology, RefusesToMeasureWithFewerThreadsThanNoneOrMoreThanATebibyte) {
  for (const auto& [threads, bytes] : {std::pair{-1, 1ull << 20}, std::pair{1, (1ull << 40) + 1}}) {
    try {
      measure_bandwidth(threads, bytes);
      ADD_FAILURE() << threads << " threads, " << bytes << " bytes";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
    }
  }
}

}  // namespace
}  // namespace sluice
