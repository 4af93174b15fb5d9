#include "io/spool.h"

#include <gtest/gtest.h>

#include "tests/io/test_files.h"

namespace sluice {
namespace {

using testing::expect_error;
using testing::TempDir;

std::string all_of(Spool& spool) {
  std::string text;
  spool.read([&](std::string_view piece) { text += piece; });
  return text;
}

TEST(Spool, GivesBackWhatWasWrittenAsOftenAsItIsAskedFor) {
  const TempDir dir;
  Spool spool(dir.path());
  EXPECT_TRUE(std::filesystem::is_empty(dir.path())) << "it has no name";
  EXPECT_EQ(all_of(spool), "");
  const std::string much(300'000, 'x');
  spool.write(much);
  spool.write("end");
  EXPECT_EQ(all_of(spool), much + "end");
  EXPECT_EQ(all_of(spool), much + "end");
  spool.write(" of it");
  EXPECT_EQ(all_of(spool), much + "end of it");
}

TEST(Spool, SaysWhereItCannotBe) {
  const TempDir dir;
  expect_error(ErrorCode::io, "none: a temporary file", [&] { Spool(dir.path() / "none"); });
}

}  // namespace
}  // namespace sluice
