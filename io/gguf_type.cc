#include "io/gguf_type.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "lib/weight_code.h"
#include "sluice/half.h"

namespace sluice {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian");

constexpr std::int64_t kSmall = kWeightGroup;  // weights of a block of Q4_0 and its like
constexpr std::int64_t kLarge = 256;           // weights of a block of the K-quants and IQ4_XS

template <typename T>
T load(const std::uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

float load_f16(const std::uint8_t* from) { return f16_to_float(load<std::uint16_t>(from)); }

// The low half of each of 16 bytes is a weight of the first half of 32, the high half one of the
// second.
std::uint8_t nibble(const std::uint8_t* codes, int i) {
  return i < 16 ? codes[i] & 0x0F : codes[i - 16] >> 4;
}

std::array<std::uint8_t, kSmall> nibbles(const std::uint8_t* codes) {
  std::array<std::uint8_t, kSmall> all{};
  for (std::size_t i = 0; i < 16; ++i) {
    all[i] = codes[i] & 0x0F;
    all[16 + i] = codes[i] >> 4;
  }
  return all;
}

void put(int code, int i, CodedGroup& group) {
  group.codes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(code);
}

// A layout says how the weights of one block lie in its bytes; if these are codes, kCode is the
// code that has them, and groups() writes them.

struct F32Block {
  static constexpr std::int64_t kWeights = 1;
  static constexpr std::int64_t kBytes = 4;
  static void decode(const std::uint8_t* from, float* to) { *to = load<float>(from); }
};

struct F16Block {
  static constexpr std::int64_t kWeights = 1;
  static constexpr std::int64_t kBytes = 2;
  static void decode(const std::uint8_t* from, float* to) { *to = load_f16(from); }
};

struct Bf16Block {
  static constexpr std::int64_t kWeights = 1;
  static constexpr std::int64_t kBytes = 2;
  static void decode(const std::uint8_t* from, float* to) {
    *to = bf16_to_float(load<std::uint16_t>(from));
  }
};

// f16 scale, 32 int8.
struct Q80Block {
  static constexpr std::int64_t kWeights = kSmall;
  static constexpr std::int64_t kBytes = 34;
  static void decode(const std::uint8_t* from, float* to) {
    const float scale = load_f16(from);
    for (int i = 0; i < 32; ++i) {
      to[i] = static_cast<float>(static_cast<std::int8_t>(from[2 + i])) * scale;
    }
  }
  static constexpr WeightCode kCode = WeightCode::int8;
  static void groups(const std::uint8_t* from, CodedGroup* to) {
    *to = {kCode, {}, load_f16(from), 0.0f};
    std::memcpy(to->codes.data(), from + 2, to->codes.size());
  }
};

// f16 scale, 16 bytes of nibbles less 8.
struct Q40Block {
  static constexpr std::int64_t kWeights = kSmall;
  static constexpr std::int64_t kBytes = 18;
  static void decode(const std::uint8_t* from, float* to) {
    const float scale = load_f16(from);
    for (int i = 0; i < 32; ++i) to[i] = scale * static_cast<float>(nibble(from + 2, i) - 8);
  }
  static constexpr WeightCode kCode = WeightCode::uint4;
  static void groups(const std::uint8_t* from, CodedGroup* to) {
    const float scale = load_f16(from);
    *to = {kCode, nibbles(from + 2), scale, -8.0f * scale};
  }
};

// f16 scale, f16 minimum, 16 bytes of nibbles.
struct Q41Block {
  static constexpr std::int64_t kWeights = kSmall;
  static constexpr std::int64_t kBytes = 20;
  static void decode(const std::uint8_t* from, float* to) {
    const float scale = load_f16(from);
    const float least = load_f16(from + 2);
    for (int i = 0; i < 32; ++i) to[i] = scale * static_cast<float>(nibble(from + 4, i)) + least;
  }
  static constexpr WeightCode kCode = WeightCode::uint4;
  static void groups(const std::uint8_t* from, CodedGroup* to) {
    *to = {kCode, nibbles(from + 4), load_f16(from), load_f16(from + 2)};
  }
};

// Four low bits in 16 bytes of nibbles at `low`, the fifth of each weight in 32 bits at `high`.
int five_bits(std::uint32_t high, const std::uint8_t* low, int i) {
  return nibble(low, i) | static_cast<int>(((high >> i) & 1u) << 4);
}

// f16 scale, 32 high bits, 16 bytes of nibbles; less 16.
struct Q50Block {
  static constexpr std::int64_t kWeights = kSmall;
  static constexpr std::int64_t kBytes = 22;
  static void decode(const std::uint8_t* from, float* to) {
    const float scale = load_f16(from);
    const auto high = load<std::uint32_t>(from + 2);
    for (int i = 0; i < 32; ++i) {
      to[i] = scale * static_cast<float>(five_bits(high, from + 6, i) - 16);
    }
  }
  static constexpr WeightCode kCode = WeightCode::int8;
  static void groups(const std::uint8_t* from, CodedGroup* to) {
    *to = {kCode, {}, load_f16(from), 0.0f};
    const auto high = load<std::uint32_t>(from + 2);
    for (int i = 0; i < 32; ++i) put(five_bits(high, from + 6, i) - 16, i, *to);
  }
};

// f16 scale, f16 minimum, 32 high bits, 16 bytes of nibbles.
struct Q51Block {
  static constexpr std::int64_t kWeights = kSmall;
  static constexpr std::int64_t kBytes = 24;
  static void decode(const std::uint8_t* from, float* to) {
    const float scale = load_f16(from);
    const float least = load_f16(from + 2);
    const auto high = load<std::uint32_t>(from + 4);
    for (int i = 0; i < 32; ++i) {
      to[i] = scale * static_cast<float>(five_bits(high, from + 8, i)) + least;
    }
  }
  static constexpr WeightCode kCode = WeightCode::int8;
  static void groups(const std::uint8_t* from, CodedGroup* to) {
    *to = {kCode, {}, load_f16(from), load_f16(from + 2)};
    const auto high = load<std::uint32_t>(from + 4);
    for (int i = 0; i < 32; ++i) put(five_bits(high, from + 8, i), i, *to);
  }
};

// f16 scale, 16 bytes of nibbles that name one of 16 levels.
struct Iq4NlBlock {
  static constexpr std::int64_t kWeights = kSmall;
  static constexpr std::int64_t kBytes = 18;
  static void decode(const std::uint8_t* from, float* to) {
    const float scale = load_f16(from);
    for (int i = 0; i < 32; ++i) {
      to[i] = scale * static_cast<float>(kWeightLevels[nibble(from + 2, i)]);
    }
  }
  static constexpr WeightCode kCode = WeightCode::int4;
  static void groups(const std::uint8_t* from, CodedGroup* to) {
    *to = {kCode, nibbles(from + 2), load_f16(from), 0.0f};
  }
};

// Scale and minimum, of 6 bits each, of 32 weights: group `g` of 8 in 12 bytes. The first four
// groups have the low six bits of bytes 0 to 3 (scales) and 4 to 7 (minima), the others a nibble of
// bytes 8 to 11 and the two bits that the first four leave over.
struct GroupScale {
  float scale, least;

  GroupScale(const std::uint8_t* packed, int g) {
    const auto small = static_cast<std::size_t>(g % 4);
    unsigned of_scale = packed[small] & 0x3Fu;
    unsigned of_least = packed[small + 4] & 0x3Fu;
    if (g >= 4) {
      of_scale = (packed[small + 8] & 0x0Fu) | ((packed[small] >> 2) & 0x30u);
      of_least = static_cast<unsigned>(packed[small + 8] >> 4) | ((packed[small + 4] >> 2) & 0x30u);
    }
    scale = static_cast<float>(of_scale);
    least = static_cast<float>(of_least);
  }
};

// The line of group `g` of Q4_K and Q5_K, without codes.
CodedGroup line_of(const std::uint8_t* block, int g, WeightCode code) {
  const GroupScale group(block + 4, g);
  return {code, {}, load_f16(block) * group.scale, -load_f16(block + 2) * group.least};
}

// f16 scale and f16 minimum of 8 groups, their 6-bit factors, 128 bytes of nibbles: 32 bytes hold
// two groups.
struct Q4KBlock {
  static constexpr std::int64_t kWeights = kLarge;
  static constexpr std::int64_t kBytes = 144;
  static void decode(const std::uint8_t* from, float* to) {
    const float scale = load_f16(from);
    const float least = load_f16(from + 2);
    for (int g = 0; g < 8; ++g) {
      const GroupScale group(from + 4, g);
      const float step = scale * group.scale;
      const float offset = least * group.least;
      const std::uint8_t* const codes = from + 16 + 32 * (g / 2);
      const int shift = 4 * (g % 2);
      for (int i = 0; i < 32; ++i) {
        to[32 * g + i] = step * static_cast<float>((codes[i] >> shift) & 0x0F) - offset;
      }
    }
  }
  static constexpr WeightCode kCode = WeightCode::uint4;
  static void groups(const std::uint8_t* from, CodedGroup* to) {
    for (int g = 0; g < 8; ++g, ++to) {
      *to = line_of(from, g, kCode);
      const std::uint8_t* const codes = from + 16 + 32 * (g / 2);
      for (int i = 0; i < 32; ++i) put((codes[i] >> 4 * (g % 2)) & 0x0F, i, *to);
    }
  }
};

// As Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of byte i is of weight i of
// group g.
struct Q5KBlock {
  static constexpr std::int64_t kWeights = kLarge;
  static constexpr std::int64_t kBytes = 176;
  static void decode(const std::uint8_t* from, float* to) {
    const float scale = load_f16(from);
    const float least = load_f16(from + 2);
    const std::uint8_t* const high = from + 16;
    for (int g = 0; g < 8; ++g) {
      const GroupScale group(from + 4, g);
      const float step = scale * group.scale;
      const float offset = least * group.least;
      const std::uint8_t* const low = from + 48 + 32 * (g / 2);
      const int shift = 4 * (g % 2);
      for (int i = 0; i < 32; ++i) {
        const int code = ((low[i] >> shift) & 0x0F) | (((high[i] >> g) & 1) << 4);
        to[32 * g + i] = step * static_cast<float>(code) - offset;
      }
    }
  }
  static constexpr WeightCode kCode = WeightCode::int8;
  static void groups(const std::uint8_t* from, CodedGroup* to) {
    for (int g = 0; g < 8; ++g, ++to) {
      *to = line_of(from, g, kCode);
      const std::uint8_t* const low = from + 48 + 32 * (g / 2);
      for (int i = 0; i < 32; ++i) {
        const int code = (low[i] >> 4 * (g % 2)) & 0x0F;
        put(code | ((from[16 + i] >> g) & 1) << 4, i, *to);
      }
    }
  }
};

// 128 bytes of nibbles, 64 bytes of two high bits, 16 int8 scales, f16 scale of these; less 32.
// Each half of the block has 64 and 32 of the bytes: run r of its four runs of 32 weights has the
// low (r < 2) or high nibbles of 32 of them, and bits 2r and 2r + 1 of all.
struct Q6KBlock {
  static constexpr std::int64_t kWeights = kLarge;
  static constexpr std::int64_t kBytes = 210;
  static void decode(const std::uint8_t* from, float* to) {
    const float scale = load_f16(from + 208);
    for (int run = 0; run < 8; ++run) {
      for (int i = 0; i < 32; ++i) {
        const auto factor = static_cast<float>(factor_of(from, run, i));
        to[32 * run + i] = scale * factor * static_cast<float>(code_of(from, run, i));
      }
    }
  }
  // A run's scale is a quarter of the larger of its two, because codes of 6 bits times 4 fill 8.
  static constexpr WeightCode kCode = WeightCode::int8;
  static void groups(const std::uint8_t* from, CodedGroup* to) {
    const float scale = load_f16(from + 208);
    for (int run = 0; run < 8; ++run, ++to) {
      const std::array factors = {static_cast<float>(factor_of(from, run, 0)),
                                  static_cast<float>(factor_of(from, run, 16))};
      const bool second = std::abs(factors[1]) > std::abs(factors[0]);
      const float larger = factors[second ? 1 : 0];
      *to = {kCode, {}, 0.25f * scale * larger, 0.0f};
      if (larger == 0.0f) continue;
      for (int i = 0; i < 32; ++i) {
        const float ratio = 4.0f * factors[i < 16 ? 0 : 1] / larger;
        const float code = ratio * static_cast<float>(code_of(from, run, i));
        // Only a half with the other's scale and another sign has 128.
        put(std::min(static_cast<int>(std::nearbyint(code)), 127), i, *to);
      }
    }
  }

 private:
  static int code_of(const std::uint8_t* block, int run, int i) {
    const int half = run / 4;
    const int r = run % 4;
    const int low = block[64 * half + 32 * (r % 2) + i] >> 4 * (r / 2) & 0x0F;
    const int high = block[128 + 32 * half + i] >> 2 * r & 3;
    return (low | high << 4) - 32;
  }
  static int factor_of(const std::uint8_t* block, int run, int i) {
    return static_cast<std::int8_t>(block[192 + 2 * run + i / 16]);
  }
};

// f16 scale, two high bits of each of 8 groups' 6-bit factors, their low nibbles, 16 bytes of
// nibbles per group that name one of 16 levels.
struct Iq4XsBlock {
  static constexpr std::int64_t kWeights = kLarge;
  static constexpr std::int64_t kBytes = 136;
  static void decode(const std::uint8_t* from, float* to) {
    const float scale = load_f16(from);
    for (int g = 0; g < 8; ++g) {
      const float step = scale * static_cast<float>(factor_of(from, g));
      for (int i = 0; i < 32; ++i) {
        to[32 * g + i] = step * static_cast<float>(kWeightLevels[nibble(from + 8 + 16 * g, i)]);
      }
    }
  }
  static constexpr WeightCode kCode = WeightCode::int4;
  static void groups(const std::uint8_t* from, CodedGroup* to) {
    for (int g = 0; g < 8; ++g, ++to) {
      const float step = load_f16(from) * static_cast<float>(factor_of(from, g));
      *to = {kCode, nibbles(from + 8 + 16 * g), step, 0.0f};
    }
  }

 private:
  static int factor_of(const std::uint8_t* block, int g) {
    const int low = block[4 + g / 2] >> 4 * (g % 2) & 0x0F;
    const int high = load<std::uint16_t>(block + 2) >> 2 * g & 3;
    return (low | high << 4) - 32;
  }
};

template <typename Block>
void decode(const std::byte* from, std::int64_t blocks, float* to) {
  const auto* at = reinterpret_cast<const std::uint8_t*>(from);
  for (std::int64_t i = 0; i < blocks; ++i, at += Block::kBytes, to += Block::kWeights) {
    Block::decode(at, to);
  }
}

template <typename Block>
void groups(const std::byte* block, CodedGroup* to) {
  Block::groups(reinterpret_cast<const std::uint8_t*>(block), to);
}

template <typename Block>
constexpr GgufType elements(std::uint32_t id, std::string_view name, DType element) {
  return {id, name, Block::kWeights, Block::kBytes, element, decode<Block>};
}

template <typename Block>
constexpr GgufType codes(std::uint32_t id, std::string_view name) {
  return {id,           name,          Block::kWeights, Block::kBytes,
          std::nullopt, decode<Block>, Block::kCode,    groups<Block>};
}

// Types that are not decoded are here so that a file with them can be checked and named.
constexpr std::array kTypes = {
    elements<F32Block>(0, "F32", DType::f32),
    elements<F16Block>(1, "F16", DType::f16),
    codes<Q40Block>(2, "Q4_0"),
    codes<Q41Block>(3, "Q4_1"),
    codes<Q50Block>(6, "Q5_0"),
    codes<Q51Block>(7, "Q5_1"),
    codes<Q80Block>(8, "Q8_0"),
    GgufType{9, "Q8_1", 32, 40},
    GgufType{10, "Q2_K", 256, 84},
    GgufType{11, "Q3_K", 256, 110},
    codes<Q4KBlock>(12, "Q4_K"),
    codes<Q5KBlock>(13, "Q5_K"),
    codes<Q6KBlock>(14, "Q6_K"),
    GgufType{15, "Q8_K", 256, 292},
    GgufType{16, "IQ2_XXS", 256, 66},
    GgufType{17, "IQ2_XS", 256, 74},
    GgufType{18, "IQ3_XXS", 256, 98},
    GgufType{19, "IQ1_S", 256, 50},
    codes<Iq4NlBlock>(20, "IQ4_NL"),
    GgufType{21, "IQ3_S", 256, 110},
    GgufType{22, "IQ2_S", 256, 82},
    codes<Iq4XsBlock>(23, "IQ4_XS"),
    GgufType{24, "I8", 1, 1},
    GgufType{25, "I16", 1, 2},
    GgufType{26, "I32", 1, 4},
    GgufType{27, "I64", 1, 8},
    GgufType{28, "F64", 1, 8},
    GgufType{29, "IQ1_M", 256, 56},
    elements<Bf16Block>(30, "BF16", DType::bf16),
    GgufType{34, "TQ1_0", 256, 54},
    GgufType{35, "TQ2_0", 256, 66},
    GgufType{39, "MXFP4", 32, 17},
    GgufType{40, "NVFP4", 64, 36},
    GgufType{41, "Q1_0", 128, 18},
};

}  // namespace

const GgufType* find_gguf_type(std::uint32_t id) {
  const auto* const found = std::find_if(kTypes.begin(), kTypes.end(),
                                         [&](const GgufType& type) { return type.id == id; });
  return found == kTypes.end() ? nullptr : found;
}

}  // namespace sluice
