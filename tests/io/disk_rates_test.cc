#include "io/disk_rates.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "io/disk.h"
#include "tests/io/test_files.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::expect_error;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

TEST(DiskRates, AreThoseOfTheDirectoryAndLeaveNothingThere) {
  const auto disk = testing::disk_directory();
  if (!disk) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
  const std::filesystem::path directory = *disk / "rates";
  std::filesystem::create_directory(directory);
  const DiskRates rates = measure_disk(directory, 20 * kMiB);
  EXPECT_EQ(rates.bytes, 32 * kMiB);
  EXPECT_GT(rates.written, 0.0);
  EXPECT_GT(rates.pages, 0.0);
  EXPECT_GT(rates.sectors, 0.0);
  // `sectors` counts reads and `pages` bytes: a wrong unit would be off by thousands.
  EXPECT_LT(rates.sectors * kSectorBytes, 16 * rates.pages);
  ASSERT_EQ(rates.descriptions.size(), 1u);
  EXPECT_NE(rates.descriptions.front().find(directory.string()), std::string::npos);
  EXPECT_TRUE(std::filesystem::is_empty(directory));
  std::filesystem::remove_all(directory);
}

TEST(DiskRates, AreNotMeasuredWhereRowsCannotLie) {
  expect_error(ErrorCode::not_found, "/nowhere", [] { measure_disk("/nowhere", kMiB); });
}

}  // namespace
}  // namespace sluice
