#include "lib/bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/errors.h"

namespace sluice {
namespace {

TEST(Bytes, ParsesUnits) {
  EXPECT_EQ(parse_bytes("0", "--x"), 0u);
  EXPECT_EQ(parse_bytes("4096", "--x"), 4096u);
  EXPECT_EQ(parse_bytes("2MiB", "--x"), 2u << 20);
  EXPECT_EQ(parse_bytes("2 mib", "--x"), 2u << 20);
  EXPECT_EQ(parse_bytes("1.5G", "--x"), 3ull << 29);
  EXPECT_EQ(parse_bytes("3GB", "--x"), 3000000000ull);
  EXPECT_EQ(parse_bytes("1TiB", "--x"), 1ull << 40);
  EXPECT_EQ(parse_bytes("17B", "--x"), 17u);
}

TEST(Bytes, RefusesWhatIsNotAByteCount) {
  for (const char* text : {"", "MiB", "-1", "1.2.3", "10 apples", "1MiBs", "nan", "inf", "1e30",
                           "99999999999TiB", "0x10", " 1"}) {
    try {
      parse_bytes(text, "--device-memory");
      ADD_FAILURE() << "accepted '" << text << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("--device-memory"));
    }
  }
}

TEST(Bytes, FormatsForPeople) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(4096), "4096 B");
  EXPECT_EQ(format_bytes(2u << 20), "2.00 MiB");
  EXPECT_EQ(format_bytes(6ull << 30), "6.00 GiB");
  EXPECT_EQ(format_bytes(100ull << 40), "100.0 TiB");
}

}  // namespace
}  // namespace sluice
