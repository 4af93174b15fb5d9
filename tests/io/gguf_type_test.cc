#include "io/gguf_type.h"

#include <gtest/gtest.h>

#include <bit>
#include <charconv>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/io/test_files.h"

namespace sluice {
namespace {

std::uint32_t hex_number(std::string_view digits) {
  std::uint32_t value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  return value;
}

std::vector<std::byte> bytes_of(const std::string& hex) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(hex_number(std::string_view(hex).substr(i, 2))));
  }
  return bytes;
}

// gguf_cases.json: what the gguf package makes of random blocks.
TEST(GgufType, DecodesAsTheGgufPackage) {
  const auto cases =
      nlohmann::json::parse(testing::read_bytes(SLUICE_TEST_DATA "/gguf_cases.json"));
  std::string names;
  for (const nlohmann::json& entry : cases["types"]) {
    const std::string name = entry["name"];
    SCOPED_TRACE(name);
    const GgufType* const type = find_gguf_type(entry["id"]);
    ASSERT_NE(type, nullptr);
    EXPECT_EQ(type->name, name);
    EXPECT_EQ(type->block, entry["block"]);
    EXPECT_EQ(type->bytes, entry["bytes"]);
    ASSERT_NE(type->decode, nullptr);
    const std::vector<std::byte> stored = bytes_of(entry["stored"]);
    const std::string expected = entry["weights"];
    const auto blocks = static_cast<std::int64_t>(stored.size()) / type->bytes;
    std::vector<float> weights(static_cast<std::size_t>(blocks * type->block));
    ASSERT_EQ(expected.size(), 8 * weights.size());
    type->decode(stored.data(), blocks, weights.data());
    for (std::size_t i = 0; i < weights.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(weights[i]),
                hex_number(std::string_view(expected).substr(8 * i, 8)))
          << "weight " << i;
    }
    EXPECT_NE(kDecodedGgufTypes.find(name), std::string_view::npos);
    names += name + " ";
  }
  EXPECT_EQ(names, "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K IQ4_NL IQ4_XS ");
}

TEST(GgufType, KnowsTypesThatItDoesNotDecode) {
  const GgufType* const q2 = find_gguf_type(10);
  ASSERT_NE(q2, nullptr);
  EXPECT_EQ(q2->name, "Q2_K");
  EXPECT_EQ(q2->decode, nullptr);
  for (const std::uint32_t none : {4u, 5u, 33u, 42u, 0xFFFFFFFFu}) {
    EXPECT_EQ(find_gguf_type(none), nullptr) << none;
  }
}

}  // namespace
}  // namespace sluice
