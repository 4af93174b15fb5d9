// Files that tests write, and what they expect of errors about them.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "sluice/errors.h"
#include "tests/support/temp_dir.h"

namespace sluice::testing {

inline std::string read_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The 8 bytes of a safetensors file in front of its header.
inline std::string header_length(std::uint64_t length) {
  std::string bytes;
  for (int shift = 0; shift < 64; shift += 8) bytes += static_cast<char>((length >> shift) & 0xff);
  return bytes;
}

inline std::string safetensors(std::string_view header, std::string_view data) {
  return header_length(header.size()) + std::string(header) + std::string(data);
}

// The entry of one tensor in a safetensors header.
inline std::string entry(const std::string& name, const std::string& dtype,
                         const std::string& shape, std::uint64_t begin, std::uint64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

// `function` must throw an Error with this code whose message is one line with `part` in it.
template <typename Function>
void expect_error(ErrorCode code, const std::string& part, Function&& function) {
  try {
    function();
    ADD_FAILURE() << "nothing thrown; expected an error with '" << part << "'";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), ::testing::HasSubstr(part));
    EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << error.what();
  }
}

}  // namespace sluice::testing
