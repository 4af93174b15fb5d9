#include "cpu/dense/coded_weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "lib/check.h"
#include "lib/weight_code.h"

// Old instruction sets get the portable code; everything else is worth a variant.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dense/coded_weights.cc"
#include <hwy/foreach_target.h>
// Highway compiles what follows once per instruction set.
#include "cpu/runtime/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu::HWY_NAMESPACE {

constexpr auto kBlock = static_cast<std::size_t>(kCodedBlock);
constexpr auto kGroup = static_cast<std::size_t>(kWeightGroup);
// Vectors of 16 outputs.
constexpr std::size_t kWidth = HWY_MIN(kLanes, kBlock);
constexpr std::size_t kVectors = kBlock / kWidth;
using DW = hn::CappedTag<float, kBlock>;
using VW = hn::Vec<DW>;
using DI = hn::RebindToSigned<DW>;
static_assert(kLanes <= kBlock, "vectors of at most one block");

HWY_INLINE VW half_floats(const std::byte* from) {
  return load_floats(reinterpret_cast<const hwy::float16_t*>(from));
}

// Sums that inputs take turns in, so that an addition need not wait for the one before.
constexpr std::size_t kSums = 4;
template <std::size_t kNumber>
constexpr std::integral_constant<std::size_t, kNumber> kSum = {};

// The weights of 16 outputs, without their scale, for each of kGroup inputs. `body` gets the input,
// the sum whose turn it is, and the weights.
struct Int8Codes {
  static constexpr std::size_t kBits = 8;
  static constexpr bool kHasOffsets = true;

  template <typename Body>
  static HWY_INLINE void for_inputs(const std::byte* group, std::size_t vector, const Body& body) {
    const hn::Rebind<std::int8_t, DI> bytes;
    const auto* const codes = reinterpret_cast<const std::int8_t*>(group) + vector * kWidth;
    const auto at = [&](std::size_t i) HWY_ATTR {
      return hn::ConvertTo(DW(), hn::PromoteTo(DI(), hn::LoadU(bytes, codes + i * kBlock)));
    };
    for (std::size_t i = 0; i < kGroup; i += kSums) {
      body(i + 0, kSum<0>, at(i + 0));
      body(i + 1, kSum<1>, at(i + 1));
      body(i + 2, kSum<2>, at(i + 2));
      body(i + 3, kSum<3>, at(i + 3));
    }
  }
};

// Of int4 and uint4.
template <WeightCode kCode>
struct FourBitCodes {
  static constexpr std::size_t kBits = 4;
  static constexpr bool kHasOffsets = WeightFormat(kCode).has_offsets();
  static constexpr std::array<std::int8_t, 16> kValues = four_bit_values(kCode);

  template <typename Body>
  static HWY_INLINE void for_inputs(const std::byte* group, std::size_t vector, const Body& body) {
    const DI di;
    const auto* const words = reinterpret_cast<const std::int32_t*>(group) + vector * kWidth;
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
    // The lowest four bits of a lane choose one of 16 floats.
    const __m512 levels = _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kValues.data()))));
    for (std::size_t word = 0; word < kGroup / 8; ++word) {
      const __m512i codes = _mm512_loadu_si512(words + word * kBlock);
      body(word * 8 + 0, kSum<0>, VW{_mm512_permutexvar_ps(codes, levels)});
      body(word * 8 + 1, kSum<1>, VW{_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), levels)});
      body(word * 8 + 2, kSum<2>, VW{_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8), levels)});
      body(word * 8 + 3, kSum<3>, VW{_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 12), levels)});
      body(word * 8 + 4, kSum<0>, VW{_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 16), levels)});
      body(word * 8 + 5, kSum<1>, VW{_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 20), levels)});
      body(word * 8 + 6, kSum<2>, VW{_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 24), levels)});
      body(word * 8 + 7, kSum<3>, VW{_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 28), levels)});
    }
    static_cast<void>(di);
#elif HWY_TARGET == HWY_SCALAR
    for (std::size_t i = 0; i < kGroup; ++i) {
      const auto word = static_cast<std::uint32_t>(words[i / 8 * kBlock]);
      const std::int8_t level = kValues[word >> 4 * (i % 8) & 15];
      body(i, kSum<0>, hn::Set(DW(), static_cast<float>(level)));
    }
    static_cast<void>(di);
#else
    // A byte's level is looked up, then each of a word's four is widened.
    const hn::Repartition<std::int8_t, DI> bytes;
    const auto levels = hn::LoadDup128(bytes, kValues.data());
    const auto low_half = hn::Set(bytes, std::int8_t{15});
    for (std::size_t word = 0; word < kGroup / 8; ++word) {
      const auto codes = hn::LoadU(di, words + word * kBlock);
      const auto even = hn::And(hn::BitCast(bytes, codes), low_half);
      const auto odd = hn::And(hn::BitCast(bytes, hn::ShiftRight<4>(codes)), low_half);
      const auto even_levels = hn::BitCast(di, hn::TableLookupBytes(levels, even));
      const auto odd_levels = hn::BitCast(di, hn::TableLookupBytes(levels, odd));
      const auto widened = [&](auto levels_of_4) HWY_ATTR {
        return hn::ConvertTo(DW(), hn::ShiftRight<24>(levels_of_4));
      };
      body(word * 8 + 0, kSum<0>, widened(hn::ShiftLeft<24>(even_levels)));
      body(word * 8 + 1, kSum<1>, widened(hn::ShiftLeft<24>(odd_levels)));
      body(word * 8 + 2, kSum<2>, widened(hn::ShiftLeft<16>(even_levels)));
      body(word * 8 + 3, kSum<3>, widened(hn::ShiftLeft<16>(odd_levels)));
      body(word * 8 + 4, kSum<0>, widened(hn::ShiftLeft<8>(even_levels)));
      body(word * 8 + 5, kSum<1>, widened(hn::ShiftLeft<8>(odd_levels)));
      body(word * 8 + 6, kSum<2>, widened(even_levels));
      body(word * 8 + 7, kSum<3>, widened(odd_levels));
    }
#endif
  }
};

// Calls body.operator()<Codes>() with the codes of a format.
void for_codes(const WeightFormat& format, const auto& body) {
  if (format.code == WeightCode::int8) return body.template operator()<Int8Codes>();
  if (format.code == WeightCode::uint4) {
    return body.template operator()<FourBitCodes<WeightCode::uint4>>();
  }
  body.template operator()<FourBitCodes<WeightCode::int4>>();
}

// Where a block has the parts of group `group`.
template <typename Codes>
struct GroupAt {
  const std::byte* scales;
  const std::byte* offsets;
  const std::byte* codes;

  GroupAt(const CodedMatrix& weights, const std::byte* block, std::size_t group) {
    const auto inputs = static_cast<std::size_t>(weights.inputs);
    const std::size_t vector = kBlock * sizeof(std::uint16_t);
    const std::size_t all = inputs / kGroup * vector;
    const std::size_t code_bytes = kGroup * kBlock * Codes::kBits / 8;
    scales = block + group * vector;
    offsets = block + all + group * vector;
    codes = block + all * (Codes::kHasOffsets ? 2 : 1) + group * code_bytes;
  }
};

// A block of outputs of kTokens tokens, by as many sums as hide the latency of additions.
template <typename Codes, std::size_t kTokens>
HWY_INLINE void multiply_block(const CodedProduct& p, std::size_t output, std::size_t token) {
  const DW d;
  const auto inputs = static_cast<std::size_t>(p.weights.inputs);
  const std::size_t groups = inputs / kGroup;
  const std::byte* const block = p.weights.block(p.first + static_cast<std::int64_t>(output));
  VW totals[kTokens][kVectors];
  for (auto& of : totals) {
    for (VW& total : of) total = hn::Zero(d);
  }
  for (std::size_t group = 0; group < groups; ++group) {
    const GroupAt<Codes> at(p.weights, block, group);
    const float* const x = p.x + token * inputs + group * kGroup;
    const float* const x_sums = p.sums + token * groups + group;
    for (std::size_t v = 0; v < kVectors; ++v) {
      constexpr std::size_t kOwnSums = kTokens >= 8 ? 1 : kTokens == 4 ? 2 : kSums;
      VW sums[kTokens][kOwnSums];
      for (auto& of : sums) {
        for (VW& sum : of) sum = hn::Zero(d);
      }
      Codes::for_inputs(at.codes, v, [&](std::size_t i, auto turn, VW weights) HWY_ATTR {
        for (std::size_t t = 0; t < kTokens; ++t) {
          VW& sum = sums[t][turn % kOwnSums];
          sum = hn::MulAdd(weights, hn::Set(d, x[t * inputs + i]), sum);
        }
      });
      const std::size_t lane = v * kWidth * sizeof(std::uint16_t);
      const VW scales = half_floats(at.scales + lane);
      for (std::size_t t = 0; t < kTokens; ++t) {
        VW sum = sums[t][0];
        for (std::size_t s = 1; s < kOwnSums; ++s) sum = hn::Add(sum, sums[t][s]);
        totals[t][v] = hn::MulAdd(scales, sum, totals[t][v]);
        if constexpr (Codes::kHasOffsets) {
          const VW offsets = half_floats(at.offsets + lane);
          totals[t][v] = hn::MulAdd(offsets, hn::Set(d, x_sums[t * groups]), totals[t][v]);
        }
      }
    }
  }
  const std::size_t end = std::min(output + kBlock, static_cast<std::size_t>(p.outputs));
  for (std::size_t t = 0; t < kTokens; ++t) {
    float* const y = p.y + (token + t) * static_cast<std::size_t>(p.y_stride);
    HWY_ALIGN float results[kBlock];
    for (std::size_t v = 0; v < kVectors; ++v) hn::Store(totals[t][v], d, results + v * kWidth);
    for (std::size_t o = output; o < end; ++o) {
      const float sum = results[o - output] + (p.bias == nullptr ? 0.0f : p.bias[o]);
      y[o] = p.accumulate ? y[o] + sum : sum;
    }
  }
}

// A block's codes stay in the first cache while tokens take turns.
template <typename Codes>
void multiply_codes(const CodedProduct& p) {
  const auto tokens = static_cast<std::size_t>(p.tokens);
  for (std::size_t o = 0; o < static_cast<std::size_t>(p.outputs); o += kBlock) {
    std::size_t t = 0;
    for (; t + 8 <= tokens; t += 8) multiply_block<Codes, 8>(p, o, t);
    for (; t + 4 <= tokens; t += 4) multiply_block<Codes, 4>(p, o, t);
    for (; t + 2 <= tokens; t += 2) multiply_block<Codes, 2>(p, o, t);
    if (t < tokens) multiply_block<Codes, 1>(p, o, t);
  }
}

void multiply(const CodedProduct& p) {
  for_codes(p.weights.format, [&]<typename Codes>() { multiply_codes<Codes>(p); });
}

// Rounds to nearest, ties to even.
HWY_INLINE void store_bf16(VW values, std::uint16_t* to) {
  const hn::RebindToUnsigned<DW> words;
  const hn::Rebind<std::uint16_t, DW> halves;
  const auto bits = hn::BitCast(words, values);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(words, 0x7fffu)));
  hn::StoreU(hn::TruncateTo(halves, hn::ShiftRight<16>(rounded)), halves, to);
}
HWY_INLINE void store_as(VW values, std::uint16_t* to) { store_bf16(values, to); }
HWY_INLINE void store_as(VW values, float* to) { hn::StoreU(values, DW(), to); }

// `to`: the columns of the first `count` outputs of a block, `stride` elements from input to input.
template <typename Codes, typename T>
void widen_block(const CodedMatrix& weights, const std::byte* block, std::size_t count, T* to,
                 std::size_t stride) {
  const std::size_t groups = static_cast<std::size_t>(weights.inputs) / kGroup;
  for (std::size_t group = 0; group < groups; ++group) {
    const GroupAt<Codes> at(weights, block, group);
    for (std::size_t v = 0; v * kWidth < count; ++v) {
      const std::size_t lane = v * kWidth * sizeof(std::uint16_t);
      const VW scales = half_floats(at.scales + lane);
      VW offsets = hn::Zero(DW());
      if constexpr (Codes::kHasOffsets) offsets = half_floats(at.offsets + lane);
      T* const column = to + group * kGroup * stride + v * kWidth;
      const std::size_t left = count - v * kWidth;
      Codes::for_inputs(at.codes, v, [&](std::size_t i, auto /*turn*/, VW codes) HWY_ATTR {
        const VW values = hn::MulAdd(codes, scales, offsets);
        if (left >= kWidth) return store_as(values, column + i * stride);
        // The rest of a vector would lie in the next input's columns.
        HWY_ALIGN T whole[kWidth];
        store_as(values, whole);
        std::copy_n(whole, left, column + i * stride);
      });
    }
  }
}

template <typename Codes, typename T>
void widen_codes(const CodedMatrix& weights, std::int64_t first, std::size_t outputs, T* to) {
  for (std::size_t output = 0; output < outputs; output += kBlock) {
    const std::byte* const block = weights.block(first + static_cast<std::int64_t>(output));
    widen_block<Codes>(weights, block, std::min(kBlock, outputs - output), to + output, outputs);
  }
}

template <typename T>
void widen_to(const CodedMatrix& weights, std::int64_t first, std::int64_t outputs, T* to) {
  for_codes(weights.format, [&]<typename Codes>() {
    widen_codes<Codes>(weights, first, static_cast<std::size_t>(outputs), to);
  });
}

void widen_f32(const CodedMatrix& weights, std::int64_t first, std::int64_t outputs, float* to) {
  widen_to(weights, first, outputs, to);
}
void widen_bf16(const CodedMatrix& weights, std::int64_t first, std::int64_t outputs,
                std::uint16_t* to) {
  widen_to(weights, first, outputs, to);
}

}  // namespace sluice::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::cpu {

HWY_EXPORT(multiply);
HWY_EXPORT(widen_f32);
HWY_EXPORT(widen_bf16);

namespace {

constexpr auto kLanesOfBlock = static_cast<std::size_t>(kCodedBlock);

// The units of a coded row that keep together: an f16, an int8 code, four bytes of int4 codes.
struct RowPart {
  std::size_t begin, end, unit;
};
std::array<RowPart, 2> parts_of(const WeightFormat& format, std::int64_t inputs) {
  const CodedRow at(format, inputs);
  const std::size_t unit = format.code == WeightCode::int8 ? 1 : 4;
  return {RowPart{0, at.codes, 2}, RowPart{at.codes, format.row_bytes(inputs), unit}};
}

// Copies a row's part to its lane of a block. A copy of a constant size is one instruction.
template <std::size_t kUnit>
void interleave(const RowPart& part, const std::byte* row, std::size_t lane, std::byte* block) {
  for (std::size_t at = part.begin; at < part.end; at += kUnit) {
    std::memcpy(block + at * kLanesOfBlock + lane * kUnit, row + at, kUnit);
  }
}

}  // namespace

// Every part of a row begins at 16 times its offset in the block.
void pack_rows(const CodedMatrix& to, std::int64_t first, std::int64_t count,
               const std::byte* rows) {
  const std::size_t row_bytes = to.format.row_bytes(to.inputs);
  for (std::int64_t row = 0; row < count; row += kCodedBlock) {
    std::byte* const block = to.block(first + row);
    const auto here = static_cast<std::size_t>(std::min(kCodedBlock, count - row));
    if (here < kLanesOfBlock) std::memset(block, 0, kLanesOfBlock * row_bytes);
    for (const RowPart& part : parts_of(to.format, to.inputs)) {
      for (std::size_t lane = 0; lane < here; ++lane) {
        const std::byte* const from = rows + (static_cast<std::size_t>(row) + lane) * row_bytes;
        if (part.unit == 1) interleave<1>(part, from, lane, block);
        if (part.unit == 2) interleave<2>(part, from, lane, block);
        if (part.unit == 4) interleave<4>(part, from, lane, block);
      }
    }
  }
}

void unpack_row(const CodedMatrix& weights, std::int64_t output, float* to) {
  std::vector<std::byte> row(weights.format.row_bytes(weights.inputs));
  const auto lane = static_cast<std::size_t>(output % kCodedBlock);
  const std::byte* const block = weights.block(output - output % kCodedBlock);
  for (const RowPart& part : parts_of(weights.format, weights.inputs)) {
    for (std::size_t at = part.begin; at < part.end; at += part.unit) {
      std::memcpy(row.data() + at, block + at * kLanesOfBlock + lane * part.unit, part.unit);
    }
  }
  decode_row(row.data(), weights.format, weights.inputs, to);
}

void multiply_coded(const CodedProduct& product) {
  check(product.weights.format.is_coded(), "coded weights: format");
  HWY_DYNAMIC_DISPATCH(multiply)(product);
}

void widen_columns(const CodedMatrix& weights, std::int64_t first, std::int64_t outputs,
                   DType dtype, std::byte* to) {
  if (dtype == DType::f32) {
    return HWY_DYNAMIC_DISPATCH(widen_f32)(weights, first, outputs, reinterpret_cast<float*>(to));
  }
  check(dtype == DType::bf16, "coded weights: dtype");
  HWY_DYNAMIC_DISPATCH(widen_bf16)
  (weights, first, outputs, reinterpret_cast<std::uint16_t*>(to));
}

}  // namespace sluice::cpu
#endif  // HWY_ONCE
