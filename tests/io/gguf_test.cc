#include "io/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "tests/io/test_files.h"
#include "tests/support/gguf_writer.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;
using testing::gguf_string;
using testing::GgufWriter;
using testing::le_bytes;
using testing::TempDir;
using Shape = std::vector<std::int64_t>;

constexpr std::uint32_t kF32 = 0;
constexpr std::uint32_t kQ80 = 8;
constexpr std::uint64_t kHuge = std::uint64_t{1} << 60;

std::string read_tensor(const GgufFile& file, const std::string& name) {
  const GgufTensor& tensor = file.tensors().at(name);
  std::string bytes(static_cast<std::size_t>(tensor.bytes), '\0');
  file.read(tensor, 0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

GgufFile open(const std::string& bytes) {
  const TempDir dir;
  return GgufFile::open(dir.write("x.gguf", bytes));
}
GgufFile open(const GgufWriter& writer) { return open(writer.bytes()); }

void expect_refused(ErrorCode code, const std::string& part, const std::string& bytes) {
  expect_error(code, part, [&] { open(bytes); });
  expect_error(code, "x.gguf: ", [&] { open(bytes); });
}
void expect_refused(ErrorCode code, const std::string& part, const GgufWriter& writer) {
  expect_refused(code, part, writer.bytes());
}

// Two tensors and a value of every kind.
GgufWriter valid() {
  GgufWriter writer;
  writer.add_u32("u32", 4'000'000'000u);
  writer.add_i32("i32", -5);
  writer.add_u64("u64", kHuge);
  writer.add_f32("f32", 0.25f);
  writer.add_bool("yes", true);
  writer.add_string("text", "mañana");
  writer.add_strings("texts", {"a", "", "bc"});
  writer.add_i32s("numbers", {3, -1});
  writer.add_tensor("one", kF32, {2, 3}, std::string(24, 'a'));
  writer.add_tensor("two", kQ80, {1, 64}, std::string(68, 'b'));
  return writer;
}

TEST(Gguf, ReadsKeysAndTensors) {
  GgufFile opened = open(valid());
  const GgufFile file = std::move(opened);
  const GgufMetadata& m = file.metadata();
  EXPECT_EQ(m.integer("u32", 0, std::int64_t{1} << 40), 4'000'000'000);
  EXPECT_EQ(m.integer("i32", -10, 10), -5);
  EXPECT_EQ(m.integer("u64", 0, std::numeric_limits<std::int64_t>::max()), std::int64_t{1} << 60);
  EXPECT_EQ(m.integer("missing", 0, 9, 7), 7);
  EXPECT_EQ(m.number("f32", 0.0, 1.0), 0.25);
  EXPECT_EQ(m.number("i32", -9.0, 1.0), -5.0);
  EXPECT_TRUE(m.boolean("yes"));
  EXPECT_EQ(m.string("text"), "mañana");
  EXPECT_THAT(m.strings("texts", 3), ElementsAre("a", "", "bc"));
  EXPECT_THAT(m.integers("numbers", 2), ElementsAre(3, -1));
  ASSERT_EQ(file.tensors().size(), 2u);
  EXPECT_EQ(file.tensors().at("one").shape, (Shape{2, 3}));
  EXPECT_EQ(file.tensors().at("two").type->name, "Q8_0");
  EXPECT_EQ(file.tensors().at("two").elements(), 64);
  EXPECT_EQ(read_tensor(file, "one"), std::string(24, 'a'));
  EXPECT_EQ(read_tensor(file, "two"), std::string(68, 'b'));
}

// The header is read piece by piece. Most of its bytes are lengths here, so pieces end in them.
TEST(Gguf, ReadsLengthsAtTheEndOfAPiece) {
  for (const std::size_t shift : {0, 3, 7}) {
    SCOPED_TRACE(shift);
    std::vector<std::string> texts(200'000);
    for (std::size_t i = 0; i < texts.size(); i += 1000) texts[i] = std::to_string(i);
    GgufWriter writer;
    writer.add_string("shift", std::string(shift, 'x'));
    writer.add_strings("texts", texts);
    writer.add_u32("last", 5);
    const GgufFile file = open(writer);
    const std::vector<std::string_view> read = file.metadata().strings("texts", texts.size());
    EXPECT_TRUE(std::equal(read.begin(), read.end(), texts.begin(), texts.end()));
    EXPECT_EQ(file.metadata().integer("last", 0, 9), 5);
  }
}

TEST(Gguf, ReadsAnyAlignment) {
  for (const std::uint32_t alignment : {1u, 64u, 4096u}) {
    GgufWriter writer;
    writer.alignment = alignment;
    writer.add_u32("general.alignment", alignment);
    writer.add_tensor("a", kF32, {1}, "aaaa");
    writer.add_tensor("b", kF32, {1}, "bbbb");
    const GgufFile file = open(writer);
    EXPECT_EQ(read_tensor(file, "a"), "aaaa");
    EXPECT_EQ(read_tensor(file, "b"), "bbbb");
  }
}

TEST(Gguf, WrongValuesAreNamed) {
  const GgufFile file = open(valid());
  const GgufMetadata& m = file.metadata();
  const auto corrupt = [](const std::string& part, const auto& call) {
    expect_error(ErrorCode::corrupt, part, call);
  };
  corrupt("missing is missing", [&] { m.integer("missing", 0, 9); });
  corrupt("text is no integer", [&] { m.integer("text", 0, 9); });
  corrupt("u32 is not between 0 and 9", [&] { m.integer("u32", 0, 9); });
  corrupt("texts is an array", [&] { m.string("texts"); });
  corrupt("text is no array", [&] { m.strings("text", 9); });
  corrupt("numbers is no array of strings", [&] { m.strings("numbers", 9); });
  corrupt("texts is no array of integers", [&] { m.integers("texts", 9); });
  corrupt("texts has 3 entries, more than the 2", [&] { m.strings("texts", 2); });
  corrupt("f32 is not between 1 and 2", [&] { m.number("f32", 1.0, 2.0); });
  corrupt("f32 is neither true nor false", [&] { m.boolean("f32"); });
  GgufWriter writer;
  writer.add_f32("nan", std::numeric_limits<float>::quiet_NaN());
  const GgufFile other = open(writer);
  corrupt("nan is not between", [&] { other.metadata().number("nan", -1e30, 1e30); });
}

TEST(Gguf, OtherVersionsAreNamed) {
  GgufWriter writer = valid();
  writer.version = 1;
  expect_refused(ErrorCode::unsupported, "is GGUF version 1,", writer);
  writer.version = 2;
  expect_refused(ErrorCode::unsupported, "is GGUF version 2,", writer);
  writer.version = 0x03000000;
  expect_refused(ErrorCode::unsupported, "big-endian", writer);
  writer = valid();
  writer.magic = "tjgg";
  expect_refused(ErrorCode::corrupt, "is no GGUF file: it begins with 'tjgg'", writer);
  expect_refused(ErrorCode::corrupt, "too few", std::string("GGUF"));
  expect_refused(ErrorCode::corrupt, "Git LFS",
                 "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
}

TEST(Gguf, NumbersLargerThanTheFileAreRefused) {
  GgufWriter writer = valid();
  writer.more_tensors = kHuge;
  expect_refused(ErrorCode::corrupt, "1152921504606846978 tensors", writer);
  writer = valid();
  writer.more_keys = kHuge;
  expect_refused(ErrorCode::corrupt, "keys, more than the 65536", writer);
  writer = valid();
  writer.more_keys = 9;  // fewer than allowed, but they are not there
  EXPECT_ANY_THROW(open(writer));

  writer = GgufWriter();
  writer.add_array("a", GgufWriter::kU32, kHuge, "");
  expect_refused(ErrorCode::corrupt, "the key 'a' has 1152921504606846976 entries", writer);
  writer = GgufWriter();
  writer.add_array("a", GgufWriter::kString, kHuge, "");
  expect_refused(ErrorCode::corrupt, "entries, more than the rest of the file", writer);
  writer = GgufWriter();
  writer.add_array("a", GgufWriter::kArray, 1, "");
  expect_refused(ErrorCode::corrupt, "is an array of arrays", writer);
  writer = GgufWriter();
  writer.add("a", GgufWriter::kString, le_bytes(std::uint64_t{1} << 31));
  expect_refused(ErrorCode::corrupt, "a string runs past the end of the file", writer);
  writer = GgufWriter();
  writer.add("a", 13, "");
  expect_refused(ErrorCode::corrupt, "the key 'a' has a value of type 13", writer);
  writer = GgufWriter();
  writer.add_u32(std::string(2000, 'k'), 1);
  expect_refused(ErrorCode::corrupt, "a key has 2000 bytes, more than 1024", writer);
  writer = GgufWriter();
  writer.add_u32("a", 1);
  writer.add_u32("a", 1);
  expect_refused(ErrorCode::corrupt, "has the key 'a' twice", writer);
}

// A file of 2 GiB that is nearly all holes: its string would fit.
TEST(Gguf, AHeaderOfMoreThan64MiBIsRefused) {
  GgufWriter writer;
  writer.add("a", GgufWriter::kString, le_bytes(std::uint64_t{1} << 31));
  const TempDir dir;
  const std::filesystem::path path = dir.write("x.gguf", writer.bytes());
  std::filesystem::resize_file(path, std::uint64_t{3} << 30);
  expect_error(ErrorCode::corrupt, "longer than the 64.0 MiB", [&] { GgufFile::open(path); });
}

TEST(Gguf, EveryCutOfAFileIsRefused) {
  const std::string bytes = valid().bytes();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    SCOPED_TRACE(size);
    expect_error(ErrorCode::corrupt, "x.gguf: ", [&] { open(bytes.substr(0, size)); });
  }
}

TEST(Gguf, TensorsMustFitTheFile) {
  const auto refused = [](const std::string& part, std::uint32_t type,
                          const std::vector<std::uint64_t>& shape, std::uint64_t offset = 0) {
    SCOPED_TRACE(part);
    GgufWriter writer;
    writer.add_tensor("first", kF32, {16}, std::string(64, 'x'));
    writer.add_tensor_at("t", type, shape, offset);
    expect_refused(ErrorCode::corrupt, "tensor 't' " + part, writer);
  };
  refused("overlaps 'first'", kF32, {16}, 0);
  refused("overlaps 'first'", kF32, {8}, 32);
  refused("runs past the end", kF32, {16}, 64);
  refused("runs past the end", kF32, {1}, kHuge);
  refused("begins at byte 65 of the data, no multiple of 32", kF32, {1}, 65);
  refused("has 0 dimensions", kF32, {});
  refused("has 5 dimensions", kF32, {1, 1, 1, 1, 1});
  refused("has no values", kF32, {0, 4});
  refused("has a dimension of 1152921504606846976", kF32, {kHuge});
  refused("is larger than the file", kF32, {1 << 30, 1 << 30, 1 << 30, 1 << 30});
  refused("has rows of 33, no multiple of the 32", kQ80, {1, 33});
  GgufWriter writer;
  writer.add_tensor("t", kF32, {1}, "xxxx");
  writer.add_tensor("t", kF32, {1}, "xxxx");
  expect_refused(ErrorCode::corrupt, "tensor 't' is there twice", writer);
  writer = GgufWriter();
  writer.add_tensor(std::string(300, 'n'), kF32, {1}, "xxxx");
  expect_refused(ErrorCode::corrupt, "the name of a tensor has 300 bytes", writer);
  writer = GgufWriter();
  writer.add_tensor("t", 99, {1}, "xxxx");
  expect_refused(ErrorCode::unsupported, "tensor 't' has the type 99", writer);
  writer = GgufWriter();
  writer.add_u32("general.alignment", 48);
  expect_refused(ErrorCode::corrupt, "general.alignment is 48, not a power of two", writer);
}

// Part `number` of 2 with one tensor.
GgufWriter part(std::uint16_t number, const std::string& tensor) {
  GgufWriter writer;
  writer.add_u16("split.no", number);
  writer.add_u16("split.count", 2);
  writer.add_i32("split.tensors.count", 2);
  writer.add_tensor(tensor, kF32, {1}, tensor.substr(0, 4));
  return writer;
}

TEST(Gguf, ReadsSplitFiles) {
  const TempDir dir;
  const auto first = dir.write("m-00001-of-00002.gguf", part(0, "aaaa").bytes());
  const auto second = dir.write("m-00002-of-00002.gguf", part(1, "bbbb").bytes());
  const std::vector<GgufFile> parts = open_gguf(first);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(read_tensor(parts[0], "aaaa"), "aaaa");
  EXPECT_EQ(read_tensor(parts[1], "bbbb"), "bbbb");
  expect_error(ErrorCode::usage, "is part 2 of 2; give the first, " + first.string(),
               [&] { open_gguf(second); });

  const auto expect = [&](ErrorCode code, const std::string& text, const GgufWriter& writer) {
    dir.write("m-00002-of-00002.gguf", writer.bytes());
    expect_error(code, text, [&] { open_gguf(first); });
  };
  expect(ErrorCode::corrupt, "tensor 'aaaa' is in an earlier part", part(1, "aaaa"));
  expect(ErrorCode::corrupt, "say that it is part 1 of 2, not part 2 of 2", part(0, "bbbb"));
  GgufWriter two = part(1, "bbbb");
  two.add_tensor("cccc", kF32, {1}, "cccc");
  expect(ErrorCode::corrupt, "split.tensors.count is 2, but the parts have 3", two);
  std::filesystem::remove(second);
  expect_error(ErrorCode::not_found, "m-00002-of-00002.gguf: there is no such file, but m-00001",
               [&] { open_gguf(first); });
  std::filesystem::rename(first, dir.path() / "renamed.gguf");
  expect_error(ErrorCode::not_found, "so its name must end in -00001-of-00002.gguf",
               [&] { open_gguf(dir.path() / "renamed.gguf"); });
}

TEST(Gguf, AChangedFileIsNoticed) {
  const TempDir dir;
  const auto path = dir.write("x.gguf", valid().bytes());
  const GgufFile file = GgufFile::open(path);
  file.require_unchanged();
  std::filesystem::resize_file(path, 64);
  expect_error(ErrorCode::io, "was changed", [&] { file.require_unchanged(); });
  expect_error(ErrorCode::io, "became shorter", [&] { read_tensor(file, "two"); });
}

}  // namespace
}  // namespace sluice
