// A directory that spilled rows may lie in.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <optional>

#include "io/spill_file.h"
#include "sluice/errors.h"

namespace sluice::testing {

// SLUICE_TEST_DISK, the directory for temporary files or /var/tmp: the first on a real disk.
inline std::optional<std::filesystem::path> disk_directory() {
  const char* const named = std::getenv("SLUICE_TEST_DISK");
  for (const std::filesystem::path& directory :
       {std::filesystem::path(named != nullptr ? named : ""),
        std::filesystem::temp_directory_path(), std::filesystem::path("/var/tmp")}) {
    if (directory.empty()) continue;
    try {
      SpillFile::create(directory, 4096);
      return directory;
    } catch (const Error&) {
      continue;
    }
  }
  return std::nullopt;
}

// Tests that need such a directory; skipped where there is none.
class OnDisk : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto found = disk_directory();
    if (!found) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
    parent_ = *found;
  }

  std::filesystem::path parent_;
};

}  // namespace sluice::testing
