#include "io/gguf_type.h"

#include <gtest/gtest.h>

#include <bit>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
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

// The codes of a block stand for its weights, but for the rounding of scales and offsets to f16 and
// of the smaller of two scales' codes to quarters of the larger's steps.
TEST(GgufType, CodesAreThoseOfTheWeights) {
  const auto cases =
      nlohmann::json::parse(testing::read_bytes(SLUICE_TEST_DATA "/gguf_cases.json"));
  std::size_t types = 0;
  for (const nlohmann::json& entry : cases["types"]) {
    SCOPED_TRACE(std::string(entry["name"]));
    const GgufType& type = *find_gguf_type(entry["id"]);
    if (type.groups == nullptr) continue;
    ++types;
    const std::vector<std::byte> stored = bytes_of(entry["stored"]);
    const auto block_bytes = static_cast<std::size_t>(type.bytes);
    const auto count = static_cast<std::size_t>(type.block);
    for (std::size_t first = 0; first < stored.size(); first += block_bytes) {
      std::vector<float> weights(count);
      type.decode(stored.data() + first, 1, weights.data());
      const auto sum = std::accumulate(weights.begin(), weights.end(), 0.0f);
      if (!std::isfinite(sum)) continue;  // of random bits for a scale
      std::vector<CodedGroup> groups(count / kWeightGroup);
      type.groups(stored.data() + first, groups.data());
      for (const WeightFormat& format : {WeightFormat(type.code), WeightFormat(WeightCode::int8)}) {
        std::vector<std::byte> row(format.row_bytes(type.block));
        const CodedRow at(format, type.block);
        for (std::size_t g = 0; g < groups.size(); ++g) {
          ASSERT_EQ(groups[g].code, type.code);
          put_group(groups[g], g, format, at, row.data());
        }
        std::vector<float> actual(count);
        decode_row(row.data(), format, type.block, actual.data());
        for (std::size_t i = 0; i < count; ++i) {
          const CodedGroup& group = groups[i / kWeightGroup];
          if (std::abs(group.scale) > 60000.0f || std::abs(group.offset) > 60000.0f) continue;
          // Half a step of f16, which has no finer ones than 2^-24, at the largest code. Of scales
          // that are alike but for their sign one loses a step.
          const float rounding =
              (128.0f * std::abs(group.scale) + std::abs(group.offset)) * 0x1p-11f +
              129.0f * 0x1p-25f;
          const float steps = entry["name"] == "Q6_K" ? 1.01f * std::abs(group.scale) : 0.0f;
          ASSERT_NEAR(actual[i], weights[i], rounding + steps) << "weight " << i;
        }
      }
    }
  }
  EXPECT_EQ(types, 10u);
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
