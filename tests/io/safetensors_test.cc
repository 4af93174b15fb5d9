#include "io/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/io/test_files.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::entry;
using testing::expect_error;
using testing::header_length;
using testing::safetensors;
using testing::TempDir;

std::string read_tensor(const SafetensorsFile& file, std::string_view name) {
  const TensorInfo* info = file.find(name);
  if (info == nullptr) return "no such tensor";
  std::string bytes(static_cast<std::size_t>(info->bytes()), '\0');
  file.read(*info, 0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

// Writes a file with this header and data and opens it.
void open(const std::string& header, const std::string& data) {
  const TempDir dir;
  SafetensorsFile::open(dir.write("x.safetensors", safetensors(header, data)));
}

void expect_corrupt(const std::string& header, const std::string& data, const std::string& part) {
  SCOPED_TRACE(header.substr(0, 200));
  expect_error(ErrorCode::corrupt, part, [&] { open(header, data); });
  expect_error(ErrorCode::corrupt, "x.safetensors: ", [&] { open(header, data); });
}

// Three tensors out of order, a scalar, an empty one, metadata and padding.
std::string valid_file() {
  return safetensors("{\"__metadata__\":{\"format\":\"pt\"}," + entry("b", "F32", "[1,2]", 4, 12) +
                         "," + entry("a", "BF16", "[2]", 0, 4) + "," +
                         entry("scalar", "F16", "[]", 12, 14) + "," +
                         entry("empty", "F16", "[0,7]", 14, 14) + "}   ",
                     "aaaabbbbbbbbss");
}

TEST(Safetensors, ReadsEveryTensor) {
  const TempDir dir;
  SafetensorsFile opened = SafetensorsFile::open(dir.write("x", valid_file()));
  const TensorInfo* before = opened.find("b");
  const SafetensorsFile file = std::move(opened);
  EXPECT_EQ(file.find("b"), before) << "infos survive a move of their file";
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(read_tensor(file, "a"), "aaaa");
  EXPECT_EQ(read_tensor(file, "b"), "bbbbbbbb");
  EXPECT_EQ(read_tensor(file, "scalar"), "ss");
  EXPECT_EQ(read_tensor(file, "empty"), "");
  EXPECT_EQ(file.find("__metadata__"), nullptr);

  const TensorInfo& b = *file.find("b");
  EXPECT_EQ(b.name, "b");
  EXPECT_EQ(b.dtype, DType::f32);
  EXPECT_THAT(b.shape, ::testing::ElementsAre(1, 2));
  EXPECT_EQ(b.elements(), 2);
  EXPECT_EQ(file.find("scalar")->elements(), 1);
  EXPECT_EQ(file.find("empty")->elements(), 0);
}

TEST(Safetensors, ReadsAnyPartOfATensor) {
  const TempDir dir;
  const std::string data = "0123456789abcdefghij";
  const SafetensorsFile file =
      SafetensorsFile::open(dir.write("x", safetensors("{" + entry("a", "F16", "[2]", 0, 4) + "," +
                                                           entry("b", "F16", "[8]", 4, 20) + "}",
                                                       data)));
  for (std::size_t first = 0; first <= 16; ++first) {
    for (std::size_t bytes = 0; first + bytes <= 16; ++bytes) {
      std::string part(bytes, '\0');
      file.read(*file.find("b"), first, std::as_writable_bytes(std::span(part)));
      EXPECT_EQ(part, data.substr(4 + first, bytes));
    }
  }
}

TEST(Safetensors, ReadsTheDemoModel) {
  const std::filesystem::path path =
      std::filesystem::path(SLUICE_SOURCE_DIR) / "models/sluice-22m/model.safetensors";
  const std::string bytes = testing::read_bytes(path);
  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EQ(file.tensors().size(), 110u);

  // A tree of the whole header is the other way to find a tensor.
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  const auto header = nlohmann::json::parse(bytes.substr(8, length));
  for (const std::string name : {"model.norm.weight", "model.layers.11.mlp.up_proj.weight"}) {
    const auto& offsets = header[name]["data_offsets"];
    const std::uint64_t begin = offsets[0];
    const std::uint64_t end = offsets[1];
    EXPECT_TRUE(read_tensor(file, name) == bytes.substr(8 + length + begin, end - begin)) << name;
    EXPECT_EQ(file.find(name)->shape, header[name]["shape"].get<std::vector<std::int64_t>>());
  }
}

TEST(Safetensors, AMissingFileIsNotFound) {
  const TempDir dir;
  expect_error(ErrorCode::not_found, "no.safetensors: there is no such file",
               [&] { SafetensorsFile::open(dir.path() / "no.safetensors"); });
}

TEST(Safetensors, OtherDtypesMayBeThereButAreNotLoaded) {
  const TempDir dir;
  const std::string header = "{" + entry("ids", "I64", "[1]", 0, 8) + "," +
                             entry("small", "F8_E4M3", "[4]", 8, 12) + "," +
                             entry("packed", "F4", "[2,3]", 12, 15) + "}";
  const SafetensorsFile file =
      SafetensorsFile::open(dir.write("x", safetensors(header, std::string(15, 'x'))));
  EXPECT_EQ(file.find("ids")->dtype, std::nullopt);
  expect_error(ErrorCode::unsupported, "tensor 'ids' is I64", [&] { read_tensor(file, "ids"); });
  expect_error(ErrorCode::unsupported, "'packed' is F4", [&] { read_tensor(file, "packed"); });
}

TEST(Safetensors, TheHeadersLengthIsBounded) {
  const TempDir dir;
  const auto refused = [&](const std::string& bytes, const std::string& part) {
    const std::filesystem::path path = dir.write("x", bytes);
    expect_error(ErrorCode::corrupt, part, [&] { SafetensorsFile::open(path); });
  };
  refused("", "has 0 bytes");
  refused("1234567", "has 7 bytes");
  refused(header_length(0), "is not a safetensors file");
  refused(header_length(3) + "{}", "ends inside its header of 3 bytes");
  refused(header_length(UINT64_MAX) + "{}", "more than the format allows");
  refused(header_length(100'000'001) + "{}", "more than the format allows");
  refused("version https://git-lfs.x/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull");

  // Refused by the limit alone: the file is as long as it says, but sparse.
  std::filesystem::resize_file(dir.write("x", header_length(200'000'000)), 200'000'008);
  expect_error(ErrorCode::corrupt, "more than the format allows",
               [&] { SafetensorsFile::open(dir.path() / "x"); });
}

TEST(Safetensors, ATruncatedFileIsCorruptWhereverItEnds) {
  const TempDir dir;
  const std::string bytes = valid_file();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    SCOPED_TRACE(size);
    const std::filesystem::path path = dir.write("x", bytes.substr(0, size));
    expect_error(ErrorCode::corrupt, "download it again", [&] { SafetensorsFile::open(path); });
  }
}

TEST(Safetensors, RangesMustCoverTheDataExactly) {
  const std::string data(8, 'x');
  EXPECT_NO_THROW(open(
      "{" + entry("a", "F32", "[1]", 0, 4) + "," + entry("b", "F32", "[1]", 4, 8) + "}", data));
  EXPECT_NO_THROW(open("{}", ""));
  expect_corrupt("{" + entry("a", "F32", "[1]", 0, 4) + "," + entry("b", "F32", "[1]", 2, 6) + "}",
                 data, "tensor 'b' overlaps");
  expect_corrupt("{" + entry("a", "F32", "[1]", 0, 4) + "," + entry("b", "F32", "[1]", 0, 4) + "}",
                 data, "tensor 'b' overlaps");
  expect_corrupt("{" + entry("a", "F32", "[1]", 4, 8) + "}", data, "'a' follows a hole of 4 bytes");
  expect_corrupt("{" + entry("a", "F16", "[1]", 0, 2) + "," + entry("b", "F32", "[1]", 4, 8) + "}",
                 data, "'b' follows a hole of 2 bytes");
  expect_corrupt("{" + entry("a", "F32", "[1]", 0, 4) + "}", data, "4 bytes that belong to no");
  expect_corrupt("{}", data, "8 bytes that belong to no tensor");
}

TEST(Safetensors, OffsetsShapeAndDtypeMustAgree) {
  const std::string data(8, 'x');
  const auto one = [](const std::string& dtype, const std::string& shape, std::uint64_t begin,
                      std::uint64_t end) {
    return "{" + entry("a", dtype, shape, begin, end) + "}";
  };
  EXPECT_NO_THROW(open(one("F32", "[2]", 0, 8), data));
  expect_corrupt(one("F32", "[3]", 0, 8), data, "tensor 'a' takes 8 bytes");
  expect_corrupt(one("F32", "[]", 0, 8), data, "tensor 'a' takes 8 bytes");
  expect_corrupt(one("F16", "[2]", 0, 8), data, "but dtype and shape give 32 bits");
  expect_corrupt(one("F4", "[3]", 0, 1), data.substr(0, 1), "give 12 bits");
  expect_corrupt(one("F32", "[2]", 8, 0), data, "ends before it begins");
  expect_corrupt(one("F32", "[2]", 4, 12), data, "the file is incomplete");
  expect_corrupt(one("F32", "[4611686018427387904]", 0, 8), data, "product overflows");
  expect_corrupt(one("F32", "[4294967296,4294967296,2]", 0, 8), data, "product overflows");
  expect_corrupt(one("F32", "[4294967296,4294967298]", 0, 8), data, "product overflows");
  expect_corrupt(one("F32", "[99999999999999999999999]", 0, 8), data, "no 64-bit integer");
  expect_corrupt(one("F33", "[2]", 0, 8), data, "unknown dtype 'F33'");
}

TEST(Safetensors, TheHeaderHasNothingElse) {
  const std::string data(4, 'x');
  const std::string good = entry("a", "F32", "[1]", 0, 4);
  const auto field = [](const std::string& fields) { return "{\"a\":{" + fields + "}}"; };
  const std::string dtype = "\"dtype\":\"F32\"";
  const std::string shape = "\"shape\":[1]";
  const std::string offsets = "\"data_offsets\":[0,4]";
  EXPECT_NO_THROW(open(field(offsets + "," + shape + "," + dtype), data));

  expect_corrupt("[]", data, "is not a JSON object");
  expect_corrupt("\xef\xbb\xbf{" + good + "}", data, "is not a JSON object");
  expect_corrupt("{" + good, data, "breaks off");
  expect_corrupt("{" + good + "} x", data, "not JSON");
  expect_corrupt("{" + good + "}" + std::string(1, '\0') + "x", data, "is not a JSON object");
  expect_corrupt("{\"a\":5}", data, "tensor 'a' is a number, not an object");
  expect_corrupt("{\"a\":[]}", data, "tensor 'a' is an array");
  expect_corrupt("{" + good + "," + good + "}", data, "the key 'a' twice");
  expect_corrupt(field(dtype + "," + dtype + "," + shape + "," + offsets), data, "'dtype' twice");
  expect_corrupt(field(dtype + "," + shape), data, "tensor 'a' has no data_offsets");
  expect_corrupt(field(dtype + "," + offsets), data, "tensor 'a' has no shape");
  expect_corrupt(field(shape + "," + offsets), data, "tensor 'a' has no dtype");
  expect_corrupt(field("\"strides\":[1]," + dtype), data, "unknown key 'strides'");
  expect_corrupt(field("\"dtype\":32"), data, "a number in 'dtype'");
  expect_corrupt(field("\"dtype\":[]"), data, "an array in 'dtype'");
  expect_corrupt(field("\"shape\":\"[1]\""), data, "a string in 'shape'");
  expect_corrupt(field("\"shape\":1"), data, "a number in 'shape'");
  expect_corrupt(field("\"shape\":[1.0]"), data, "'shape'");
  expect_corrupt(field("\"shape\":[-1]"), data, "a negative number in 'shape'");
  expect_corrupt(field("\"shape\":[[1]]"), data, "an array in 'shape'");
  expect_corrupt(field("\"shape\":[null]"), data, "null in 'shape'");
  expect_corrupt(field("\"shape\":{}"), data, "an object in 'shape'");
  expect_corrupt(field("\"data_offsets\":[0,4,8]"), data, "3 data_offsets, not 2");
  expect_corrupt(field("\"data_offsets\":[true]"), data, "a boolean in 'data_offsets'");
}

TEST(Safetensors, MetadataIsAMapOfStrings) {
  expect_corrupt(R"({"__metadata__":{"a":1}})", "", "'__metadata__' has a number in 'a'");
  expect_corrupt(R"({"__metadata__":{"a":{}}})", "", "'__metadata__' has an object in 'a'");
  expect_corrupt(R"({"__metadata__":{"a":"1","a":"2"}})", "", "has the key 'a' twice");
  expect_corrupt(R"({"__metadata__":{},"__metadata__":{}})", "", "'__metadata__' twice");
  expect_corrupt(R"({"__metadata__":"pt"})", "", "is a string, not an object");
}

TEST(Safetensors, DeepNestingAndHugeCountsEndEarly) {
  std::string deep = "{\"a\":";
  for (int i = 0; i < 200'000; ++i) deep += "{\"a\":";
  expect_corrupt(deep, "", "unknown key 'a'");
  std::string shape = "[1";
  for (int i = 1; i < 16; ++i) shape += ",1";
  EXPECT_NO_THROW(open("{" + entry("a", "F32", shape + "]", 0, 4) + "}", "xxxx"));
  for (int i = 0; i < 200'000; ++i) shape += ",1";
  expect_corrupt("{" + entry("a", "F32", shape + "]", 0, 4) + "}", "xxxx",
                 "tensor 'a' has more than 16 numbers in 'shape'");
}

TEST(Safetensors, TensorsAreBounded) {
  std::string header;
  for (int i = 0; i < 1 << 17; ++i) {
    header += (i == 0 ? "{" : ",") + entry(std::to_string(i), "F32", "[0]", 0, 0);
  }
  EXPECT_NO_THROW(open(header + "}", ""));
  expect_corrupt(header + "," + entry("x", "F32", "[0]", 0, 0) + "}", "",
                 "more than 131072 tensors");
}

TEST(Safetensors, NamesInMessagesStayOnOneLine) {
  expect_corrupt("{" + entry(R"(line\nbreak)", "F33", "[1]", 0, 4) + "}", "xxxx",
                 R"(tensor 'line\x0abreak' has the unknown dtype)");
}

TEST(Safetensors, AFileThatShrinksIsAnIoError) {
  const TempDir dir;
  const std::filesystem::path path = dir.write("x", valid_file());
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::filesystem::resize_file(path, valid_file().size() - 1);
  EXPECT_EQ(read_tensor(file, "a"), "aaaa");
  expect_error(ErrorCode::io, "became shorter", [&] { read_tensor(file, "scalar"); });
}

// What open() promises, for a file of `size` bytes.
void expect_consistent(const SafetensorsFile& file, std::size_t size) {
  std::uint64_t sum = 0;
  for (const auto& [name, tensor] : file.tensors()) {
    EXPECT_EQ(name, tensor.name);
    EXPECT_LE(tensor.begin, tensor.end);
    EXPECT_LE(tensor.end, size);
    sum += tensor.bytes();
    if (!tensor.dtype) continue;
    EXPECT_EQ(tensor.bytes(),
              static_cast<std::uint64_t>(tensor.elements()) * size_of(*tensor.dtype));
    EXPECT_EQ(read_tensor(file, name).size(), tensor.bytes());
  }
  EXPECT_LE(sum, size);
}

TEST(Safetensors, DamagedFilesGiveAnErrorOrAConsistentFile) {
  const std::uint64_t seed = testing::seed(20240607);
  SCOPED_TRACE(testing::seed_message(seed));
  testing::Random random(seed);
  const TempDir dir;
  int refused = 0;
  int accepted = 0;
  for (int round = 0; round < 1500; ++round) {
    std::string bytes = valid_file();
    const auto any = [&] {
      return static_cast<std::size_t>(random.integer(0, std::ssize(bytes) - 1));
    };
    for (std::int64_t flips = random.integer(1, 2); flips > 0; --flips) {
      bytes[any()] = static_cast<char>(random.integer(0, 255));
    }
    if (random.integer(0, 3) == 0) bytes.resize(any());
    try {
      expect_consistent(SafetensorsFile::open(dir.write("x", bytes)), bytes.size());
      ++accepted;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(accepted, 5) << "damage that a format cannot show: in data or in names";
}

}  // namespace
}  // namespace sluice
