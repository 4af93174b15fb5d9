// A directory that spilled rows may lie in.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

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

// The files of rows that this process has in a directory. They have no names.
inline std::vector<std::filesystem::path> row_files(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    const bool is_ours = target.starts_with(std::filesystem::canonical(directory).string() + "/");
    if (is_ours && target.ends_with(" (deleted)")) found.push_back(entry.path());
  }
  return found;
}

// Writes other bytes into all of them.
inline void spoil_row_files(const std::filesystem::path& directory) {
  for (const std::filesystem::path& file : row_files(directory)) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    const std::string noise(std::filesystem::file_size(file), 'x');
    stream << noise << std::flush;
    ASSERT_TRUE(stream.good()) << file;
  }
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
