#include "io/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/io/test_files.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::expect_error;
using testing::TempDir;

// A file in this version of the format, as numpy pads it.
std::string npy(int major, std::string header, const std::string& data) {
  const std::size_t start = 8 + (major == 1 ? 2 : 4);
  while ((start + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  std::string file = "\x93NUMPY";
  file += static_cast<char>(major);
  file += '\0';
  for (std::size_t i = 0; i < start - 8; ++i) {
    file += static_cast<char>((header.size() >> (8 * i)) & 0xff);
  }
  return file + header + data;
}

std::string dict(const std::string& descr, const std::string& order, const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }";
}

NpyFile open(const std::string& bytes) {
  const TempDir dir;
  return NpyFile::open(dir.write("k.npy", bytes));
}

void expect_refused(ErrorCode code, const std::string& bytes, const std::string& part) {
  SCOPED_TRACE(bytes.substr(0, 120));
  expect_error(code, part, [&] { open(bytes); });
  expect_error(code, "k.npy: ", [&] { open(bytes); });
}

void expect_corrupt_header(const std::string& header, const std::string& part) {
  expect_refused(ErrorCode::corrupt, npy(1, header, "abcd"), part);
}

TEST(Npy, ReadsEveryVersion) {
  for (const int major : {1, 2, 3}) {
    const NpyFile file = open(npy(major, dict("<f4", "False", "(2, 1)"), "aaaabbbb"));
    EXPECT_EQ(file.dtype(), DType::f32);
    EXPECT_THAT(file.shape(), ::testing::ElementsAre(2, 1));
    EXPECT_EQ(file.bytes(), 8u);
    std::string part(3, '\0');
    file.read(3, std::as_writable_bytes(std::span(part)));
    EXPECT_EQ(part, "abb");
  }
}

TEST(Npy, ReadsHalvesScalarsAndArraysOfOneDimensionOrNone) {
  EXPECT_EQ(open(npy(1, dict("<f2", "False", "(1, 2)"), "abcd")).dtype(), DType::f16);
  EXPECT_THAT(open(npy(1, dict("<f4", "False", "()"), "abcd")).shape(), ::testing::IsEmpty());
  EXPECT_THAT(open(npy(1, dict("<f4", "False", "(1,)"), "abcd")).shape(),
              ::testing::ElementsAre(1));
  EXPECT_EQ(open(npy(1, dict("<f4", "False", "(7, 0)"), "")).bytes(), 0u);
}

TEST(Npy, TakesKeysInAnyOrderAndQuotesOfBothKinds) {
  const NpyFile file =
      open(npy(1, R"({"shape":(1,2),'descr':"<f2" , "fortran_order" :False})", "abcd"));
  EXPECT_THAT(file.shape(), ::testing::ElementsAre(1, 2));
}

TEST(Npy, RefusesOtherOrdersAndDtypes) {
  const auto refused = [](const std::string& header, const std::string& part) {
    expect_refused(ErrorCode::unsupported, npy(1, header, "abcd"), part);
  };
  refused(dict("<f4", "True", "(1, 1)"), "Fortran order");
  refused(dict(">f4", "False", "(1, 1)"), "big-endian");
  refused(dict("<f8", "False", "(1, 1)"), "'<f8'");
  refused(dict("|u1", "False", "(4,)"), "'|u1'");
  refused("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", "records");
}

TEST(Npy, RefusesFilesThatAreNone) {
  expect_refused(ErrorCode::corrupt, "", "is no npy file");
  expect_refused(ErrorCode::corrupt, "\x93NUMP", "is no npy file");
  expect_refused(ErrorCode::corrupt, std::string(100, 'x'), "is no npy file");
  const std::string good = npy(1, dict("<f4", "False", "(1, 1)"), "abcd");
  std::string version = good;
  version[6] = 4;
  expect_refused(ErrorCode::unsupported, version, "format 4.0");
  version = good;
  version[7] = 1;
  expect_refused(ErrorCode::unsupported, version, "format 1.1");
}

TEST(Npy, RefusesEveryTruncation) {
  const std::string good = npy(2, dict("<f4", "False", "(1, 1)"), "abcd");
  open(good);
  for (std::size_t bytes = 8; bytes < good.size(); ++bytes) {
    expect_refused(ErrorCode::corrupt, good.substr(0, bytes),
                   bytes + 4 < good.size() ? "ends inside" : "incomplete");
  }
  expect_refused(ErrorCode::corrupt, good + "x", "its array has 5 bytes");
}

TEST(Npy, RefusesHeadersThatAreNoDict) {
  expect_corrupt_header("", "does not begin with {");
  expect_corrupt_header("[]", "does not begin with {");
  expect_corrupt_header("{}", "has no 'descr'");
  expect_corrupt_header("{'descr': '<f4', 'shape': (1,)}", "has no 'fortran_order'");
  expect_corrupt_header("{'descr': '<f4', 'fortran_order': False}", "has no 'shape'");
  expect_corrupt_header("{'descr': 4}", "that is no string");
  expect_corrupt_header("{'descr: <f4", "ends inside");
  expect_corrupt_header("{'descr' '<f4'}", "has no :");
  expect_corrupt_header("{'descr': '<f4', 'descr': '<f4'}", "twice");
  expect_corrupt_header("{'axis': 1}", "unknown key 'axis'");
  expect_corrupt_header("{'fortran_order': 0}", "no bool");
  expect_corrupt_header("{'shape': 1}", "no tuple");
  expect_corrupt_header("{'shape': (1", "no )");
  expect_corrupt_header("{'shape': (1 2)}", "no )");
  expect_corrupt_header("{'shape': (-1,)}", "no 63-bit number");
  expect_corrupt_header("{'shape': (1.5,)}", "no )");
  expect_corrupt_header("{'shape': (99999999999999999999,)}", "no 63-bit number");
  expect_corrupt_header(dict("<f4", "False", "(1, 1)") + "x", "goes on after");
  std::string dimensions;
  for (int i = 0; i < 33; ++i) dimensions += "1,";
  expect_corrupt_header(dict("<f4", "False", "(" + dimensions + ")"), "more than 32 dimensions");
}

TEST(Npy, RefusesHugeShapesBeforeAnythingIsAllocated) {
  expect_corrupt_header(dict("<f4", "False", "(4611686018427387904, 4611686018427387904)"),
                        "overflows");
  expect_corrupt_header(dict("<f4", "False", "(2305843009213693952,)"), "overflows");
  expect_corrupt_header(dict("<f4", "False", "(1152921504606846976,)"), "incomplete");
  // A header of 4 GiB in a file of some bytes.
  expect_refused(ErrorCode::corrupt, std::string("\x93NUMPY\x02\0\xff\xff\xff\xff{}", 14),
                 "ends inside");
}

TEST(Npy, RefusesAHeaderLongerThanAny) {
  const std::string header = dict("<f4", "False", "(1,)") + std::string(70000, ' ');
  expect_refused(ErrorCode::corrupt, npy(2, header, "abcd"), "more than 65536");
}

// Any one byte of the header changed: read, or refused by an error of one line.
TEST(Npy, SurvivesChangedBytes) {
  const std::string good = npy(1, dict("<f4", "False", "(1, 1)"), "abcd");
  testing::Random random(20270131);
  int accepted = 0;
  for (std::size_t at = 0; at < 72; ++at) {
    std::string changed = good;
    changed[at] = static_cast<char>(random.integer(0, 255));
    try {
      open(changed);
      ++accepted;
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::corrupt || error.code() == ErrorCode::unsupported);
    }
  }
  EXPECT_LT(accepted, 72);
}

}  // namespace
}  // namespace sluice
