#include "io/file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "io/json.h"
#include "tests/io/test_files.h"

namespace sluice {
namespace {

using testing::expect_error;
using testing::TempDir;

TEST(File, ReadsExactlyTheBytesAskedFor) {
  const TempDir dir;
  const File file = File::open(dir.write("a", "0123456789"));
  EXPECT_EQ(file.size(), 10u);
  std::array<std::byte, 4> bytes{};
  file.read(3, bytes);
  EXPECT_EQ(bytes, (std::array{std::byte{'3'}, std::byte{'4'}, std::byte{'5'}, std::byte{'6'}}));
  file.read(10, {});
  expect_error(ErrorCode::io, "ends at byte 10", [&] { file.read(8, bytes); });
}

TEST(File, MovesAndStaysOpen) {
  const TempDir dir;
  File file = File::open(dir.write("a", "ab"));
  File other = File::open(dir.write("b", "cd"));
  other = std::move(file);
  std::array<std::byte, 1> byte{};
  other.read(1, byte);
  EXPECT_EQ(byte[0], std::byte{'b'});
}

TEST(File, ThatIsMissingOrNoFileIsNotFound) {
  const TempDir dir;
  expect_error(ErrorCode::not_found, "nothing: there is no such file",
               [&] { File::open(dir.path() / "nothing"); });
  dir.write("file", "");
  expect_error(ErrorCode::not_found, "no such file",
               [&] { File::open(dir.path() / "file" / "inside"); });
  expect_error(ErrorCode::not_found, "not a regular file", [&] { File::open(dir.path()); });
}

TEST(File, AFifoDoesNotBlock) {
  const TempDir dir;
  const std::filesystem::path fifo = dir.path() / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  expect_error(ErrorCode::not_found, "not a regular file", [&] { File::open(fifo); });
}

TEST(File, WhatExistsButCannotBeReachedCountsAsExisting) {
  const TempDir dir;
  std::filesystem::create_symlink("loop", dir.path() / "loop");
  EXPECT_TRUE(file_exists(dir.path() / "loop"));
  EXPECT_FALSE(file_exists(dir.path() / "nothing"));
  std::filesystem::create_symlink("nothing", dir.path() / "dangling");
  EXPECT_TRUE(file_exists(dir.path() / "dangling"));
  expect_error(ErrorCode::io, "cannot be opened", [&] { File::open(dir.path() / "loop"); });
}

TEST(File, TextIsBounded) {
  const TempDir dir;
  const std::filesystem::path path = dir.write("a", "12345678");
  EXPECT_EQ(read_text_file(path, 8), "12345678");
  expect_error(ErrorCode::corrupt, "8 B, more than the 7 B", [&] { read_text_file(path, 7); });
}

TEST(Json, GivesTheDocument) {
  const TempDir dir;
  const auto json = read_json_file(dir.write("a", R"({"a": [1, {"a": null}], "b": {"a": 2}})"), 99);
  EXPECT_EQ(json["a"][0], 1);
  EXPECT_EQ(json["b"]["a"], 2);
}

TEST(Json, RefusesWhatIsNotStrictlyJson) {
  const TempDir dir;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "is not JSON"},
      {"version https://git-lfs.x/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"},
      {R"({"a": 1)", "breaks off at byte 8"},
      {R"({"a": 1} x)", "goes wrong at byte 10"},
      {R"({"a": 1,})", "goes wrong at byte 9"},
      {R"({"a": nan})", "goes wrong at byte 8"},
      {R"({"a": NaNs})", "goes wrong at byte 10"},
      {R"({"a": +Infinity})", "goes wrong at byte 7"},
      {R"({NaN: 1})", "goes wrong at byte 2"},
      {R"({"a": NaN, "b": Infinity, "a": 3})", "the key 'a' twice"},
      {R"([NaN, -Infinity, "\"NaN", x])", "goes wrong at byte 27"},
      {std::string("{\"a\": 1}\0 garbage", 17), "NUL byte"},
      {R"({"a": 1e999})", "no type can hold"},
      {"{\"a\": \"\xff\"}", "goes wrong at byte 8"},
      {R"({"a": 1, "b": 2, "a": 3})", "the key 'a' twice"},
      {R"({"x": [{"line\nbreak": 1, "line\nbreak": 1}]})", R"(the key 'line\x0abreak' twice)"},
      {std::string(kMaxJsonDepth, '[') + "[" + std::string(kMaxJsonDepth, ']') + "]", "deeper"},
      {std::string(100'000, '['), "nested deeper than 32"},
  };
  for (const auto& [text, part] : cases) {
    const std::filesystem::path path = dir.write("a", text);
    expect_error(ErrorCode::corrupt, part, [&] { read_json_file(path, 1 << 20); });
  }
  const std::string deepest = std::string(kMaxJsonDepth, '[') + std::string(kMaxJsonDepth, ']');
  EXPECT_NO_THROW(read_json_file(dir.write("a", deepest), 1 << 20));
}

// A document, and the same with numbers instead of NaN, Infinity and -Infinity.
struct Twins {
  std::string with_constants;
  std::string plain;

  void add(const std::string& text) {
    with_constants += text;
    plain += text;
  }
};

constexpr std::array<std::pair<const char*, double>, 3> kTwins = {
    {{"NaN", 12345.5}, {"Infinity", 12346.5}, {"-Infinity", 12347.5}}};

void add_value(Twins& twins, std::mt19937_64& random, int depth) {
  constexpr std::array kPlain = {"1",    "-2.5", "null",        "\"\"",         "\"NaN\"",
                                 "true", "-0",   "\"\\\"NaN\"", "\"\\\\\"",     "\"a, -Infinity]\"",
                                 "{}",   "[]",   "\"\\u0022\"", "\"x\\\\\\\"\""};
  const std::uint64_t kind = random() % (depth > 0 ? 4 : 2);
  if (kind == 0) return twins.add(kPlain.at(random() % kPlain.size()));
  if (kind == 1) {
    const auto& [name, number] = kTwins.at(random() % kTwins.size());
    twins.with_constants += name;
    twins.plain += std::to_string(number);
    return;
  }
  twins.add(kind == 2 ? "[" : "{");
  for (std::uint64_t i = 0; i < random() % 4; ++i) {
    twins.add(i > 0 ? " , " : "");
    if (kind == 3) twins.add("\"NaN\\\"" + std::to_string(i) + "\" :");
    add_value(twins, random, depth - 1);
  }
  twins.add(kind == 2 ? "]" : "}");
}

void put_constants(nlohmann::json& value) {
  for (nlohmann::json& part : value) {
    if (part.is_structured()) put_constants(part);
    if (part == 12345.5) part = std::numeric_limits<double>::quiet_NaN();
    if (part == 12346.5) part = std::numeric_limits<double>::infinity();
    if (part == 12347.5) part = -std::numeric_limits<double>::infinity();
  }
}

// NaN equals nothing, and dump() writes null for all that is not finite.
std::string spelled(const nlohmann::json& value) {
  if (value.is_number_float()) return std::to_string(value.get<double>());
  if (!value.is_structured()) return value.dump();
  std::string text = value.is_array() ? "[" : "{";
  for (const auto& [key, part] : value.items()) text += key + ":" + spelled(part) + ",";
  return text;
}

TEST(Json, ReadsNumbersThatAreNotFiniteAsPythonWritesThem) {
  const TempDir dir;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    Twins twins;
    twins.add("[");
    add_value(twins, random, 5);
    twins.add("]");
    nlohmann::json expected = nlohmann::json::parse(twins.plain);
    put_constants(expected);
    const nlohmann::json json = read_json_file(dir.write("a", twins.with_constants), 1 << 20);
    ASSERT_EQ(spelled(json), spelled(expected)) << twins.with_constants;
  }
}

TEST(Json, TakesTimeLinearInTheNumberOfValues) {
  const TempDir dir;
  std::string text = "[{}";
  for (int i = 1; i < 300'000; ++i) text += ",{}";
  const std::filesystem::path path = dir.write("a", text + "]");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(read_json_file(path, 1 << 20).size(), 300'000u);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(Json, ValuesAreBounded) {
  const TempDir dir;
  std::string text = "[0";
  for (int i = 2; i < kMaxJsonValues; ++i) text += ",0";
  EXPECT_NO_THROW(read_json_file(dir.write("a", text + "]"), 1 << 24));
  expect_error(ErrorCode::corrupt, "more than 4194304 values",
               [&] { read_json_file(dir.write("a", text + ",0]"), 1 << 24); });
}

}  // namespace
}  // namespace sluice
