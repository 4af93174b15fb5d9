// Names of formats: each is read back, and any other is refused with the names that there are.
#include "sluice/format_names.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace sluice {
namespace {

using testing::expect_error;

TEST(FormatNames, AreReadBack) {
  for (const std::string& name : dtype_names()) EXPECT_EQ(to_string(parse_dtype(name, "x")), name);
  for (const std::string& name : row_format_names()) {
    EXPECT_EQ(to_string(parse_row_format(name, "x")), name);
  }
  for (const std::string& name : weight_code_names()) {
    EXPECT_EQ(to_string(parse_weight_code(name, "x").code), name);
    EXPECT_EQ(parse_weight_code(name, "x").is_coded(), name != "elements");
  }
}

TEST(FormatNames, OthersAreRefused) {
  constexpr ErrorCode kUsage = ErrorCode::usage;
  expect_error(kUsage, "`compute` is bf16, f16 or f32", [] { parse_dtype("bf8", "compute"); });
  expect_error(kUsage, "`kv_dtype` is bf16, f16, f32, int8 or k8v4",
               [] { parse_row_format("", "kv_dtype"); });
  expect_error(kUsage, "`weights` is elements, int8 or int4",
               [] { parse_weight_code("bf16", "weights"); });
}

}  // namespace
}  // namespace sluice
