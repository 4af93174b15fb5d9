// What Hugging Face's tokenizers cuts by the same expressions; see tests/data/make_split_cases.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/split.h"
#include "engine/utf8.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

const Json& cases() {
  static const Json read =
      Json::parse(std::ifstream(std::string(SLUICE_TEST_DATA) + "/split_cases.json"));
  return read;
}

// CRC-32 of 32-bit numbers in little-endian order, with the polynomial of zlib.
class Checksum {
 public:
  Checksum() {
    for (std::uint32_t i = 0; i < table_.size(); ++i) {
      table_[i] = i;
      for (int bit = 0; bit < 8; ++bit) {
        table_[i] = (table_[i] >> 1) ^ ((table_[i] & 1) != 0 ? 0xEDB88320u : 0u);
      }
    }
  }

  void add(std::uint32_t number) {
    for (int shift = 0; shift < 32; shift += 8) {
      crc_ = (crc_ >> 8) ^ table_[(crc_ ^ (number >> shift)) & 0xFF];
    }
  }
  std::uint32_t value() const { return ~crc_; }

 private:
  std::array<std::uint32_t, 256> table_{};
  std::uint32_t crc_ = ~0u;
};

std::uint32_t characters(std::string_view text) {
  std::uint32_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80 ? 1 : 0;
  return count;
}

void add_ends(const Splitter& splitter, const std::string& text, Checksum& checksum) {
  std::uint32_t end = 0;
  Splitter::Run run(splitter, text.size());
  run.split(text, [&](std::string_view piece) {
    end += characters(piece);
    checksum.add(end);
  });
  ASSERT_EQ(end, characters(text));
}

bool assigned(char32_t code_point) {
  for (const Json& run : cases()["unassigned"]) {
    if (code_point >> 8 >= run[0] && code_point >> 8 <= run[1]) return false;
  }
  return true;
}

// All code points of a plane, those in blocks with assigned ones in `frame`.
std::string plane_text(char32_t plane, std::string_view frame) {
  std::string text;
  for (char32_t block = plane << 16; block < (plane + 1) << 16; block += 256) {
    if (block >= 0xD800 && block <= 0xDFFF) continue;
    const std::string_view form = assigned(block) ? frame : "%";
    for (char32_t c = block; c < block + 256; ++c) {
      for (const char part : form) {
        if (part == '%') {
          append_utf8(text, c);
        } else {
          text += part;
        }
      }
    }
  }
  return text;
}

std::vector<std::string> plane_texts(std::string_view frame) {
  std::vector<std::string> texts;
  for (char32_t plane = 0; plane < 17; ++plane) texts.push_back(plane_text(plane, frame));
  return texts;
}

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t below(std::uint64_t bound) {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) % bound;
  }

 private:
  std::uint64_t state_;
};

std::string random_text(std::uint64_t seed, const std::vector<std::string>& fragments) {
  Random random(seed);
  std::string text;
  for (std::uint64_t left = random.below(60); left > 0; --left) {
    if (random.below(8) > 0) {
      text += fragments[random.below(fragments.size())];
    } else {
      const auto point = static_cast<char32_t>(random.below(0x20000));
      append_utf8(text, point >= 0xD800 && point <= 0xDFFF ? U' ' : point);
    }
  }
  return text;
}

// The planes whose pieces differ from the library's.
std::vector<std::size_t> wrong_planes(const Splitter& splitter,
                                      const std::vector<std::string>& texts, const Json& wanted) {
  std::vector<std::size_t> wrong;
  for (std::size_t plane = 0; plane < texts.size(); ++plane) {
    Checksum checksum;
    add_ends(splitter, texts[plane], checksum);
    if (checksum.value() != wanted.at(plane)) wrong.push_back(plane);
  }
  return wrong;
}

TEST(SplitCases, PropertiesAndEscapesMeanTheSameForEveryCodePoint) {
  const std::vector<std::string> texts = plane_texts("%%");
  ASSERT_GE(cases()["properties"].size(), 400u);
  for (const Json& entry : cases()["properties"]) {
    const auto expression = entry["expression"].get<std::string>();
    EXPECT_THAT(wrong_planes(Splitter({expression}), texts, entry["planes"]), ::testing::IsEmpty())
        << expression;
  }
}

TEST(SplitCases, ExpressionsCutEveryCodePointAlike) {
  const std::vector<std::string> texts = plane_texts(cases()["frame"].get<std::string>());
  ASSERT_GE(cases()["expressions"].size(), 40u);
  for (const Json& entry : cases()["expressions"]) {
    const Splitter splitter(entry["steps"].get<std::vector<std::string>>());
    EXPECT_THAT(wrong_planes(splitter, texts, entry["planes"]), ::testing::IsEmpty())
        << entry["name"];
  }
}

TEST(SplitCases, ExpressionsCutTextsAlike) {
  const auto fragments = cases()["fragments"].get<std::vector<std::string>>();
  const auto count = cases()["texts"].get<std::uint64_t>();
  const auto group = cases()["group"].get<std::uint64_t>();
  ASSERT_EQ(count, 1500u);
  for (const Json& entry : cases()["expressions"]) {
    const Splitter splitter(entry["steps"].get<std::vector<std::string>>());
    for (std::uint64_t first = 0; first < count; first += group) {
      Checksum checksum;
      for (std::uint64_t seed = first; seed < first + group; ++seed) {
        add_ends(splitter, random_text(seed, fragments), checksum);
      }
      EXPECT_EQ(checksum.value(), entry["texts"].at(first / group))
          << entry["name"] << ", seeds " << first << " to " << first + group - 1;
    }
  }
}

// The code of the error that an expression gives, and its message.
std::pair<std::optional<ErrorCode>, std::string> refusal(const std::string& expression) {
  try {
    Splitter({expression});
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {std::nullopt, "accepted"};
}

TEST(SplitCases, WhatIsValidThereAndMissingHereIsNotSupported) {
  for (const std::string expression : cases()["refused"]) {
    const auto [code, message] = refusal(expression);
    EXPECT_EQ(code, ErrorCode::unsupported) << expression << ": " << message;
  }
  for (const char* name : {R"(\p{Letter})", R"(\p{Punct})", R"(\P{Alpha})"}) {
    EXPECT_THAT(refusal(name).second, ::testing::HasSubstr(name));
  }
}

TEST(SplitCases, WhatIsInvalidThereIsRefused) {
  for (const std::string expression : cases()["broken"]) {
    EXPECT_TRUE(refusal(expression).first.has_value()) << expression;
  }
}

}  // namespace
}  // namespace sluice
