// Sessions that a test saves and loads, and the files they are saved in.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "sluice/engine.h"
#include "tests/support/random_checkpoint.h"
#include "tests/support/small_sessions.h"
#include "tests/support/temp_dir.h"

namespace sluice::testing {

inline constexpr int kSaved = 700;  // tokens: five pages and a part
inline constexpr int kMore = 40;    // tokens after them

inline std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void put(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
}

// Files of rows in a session's directory: one, unless a save was killed.
inline std::vector<std::filesystem::path> rows_files(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().filename().string().starts_with("rows-")) files.push_back(entry.path());
  }
  return files;
}

// Bytes of a directory's files, by name.
inline std::map<std::string, std::string> contents(const std::filesystem::path& directory) {
  std::map<std::string, std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    all[entry.path().filename().string()] = text_of(entry.path());
  }
  return all;
}

// `name` in the environment, or `otherwise`.
inline std::int64_t number_from(const char* name, std::int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::strtoll(text, nullptr, 10) : otherwise;
}

class SavedSessions : public ::testing::Test {
 protected:
  std::filesystem::path directory() const { return temp_.path() / "session"; }
  std::filesystem::path manifest() const { return directory() / "manifest.json"; }
  std::filesystem::path rows() const { return rows_files(directory()).at(0); }

  // Saves a session of kSaved tokens.
  void save(Engine& engine, const std::string& note = {}, std::uint64_t seed = 1) const {
    Session session = engine.new_session(options_for(engine, "dense"));
    session.prefill(random_tokens(kSaved, seed));
    session.save(directory(), note);
  }

  TempDir temp_;
  RandomCheckpoint model_{1};
};

}  // namespace sluice::testing
