#include "cpu/values/page.h"

#include <cstring>

#include "lib/check.h"
#include "lib/value_tiles.h"

// Old instruction sets get the portable code; everything else is worth a variant, AVX-512 VNNI
// included, because it adds products of 16-bit numbers in one instruction.
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/values/page.cc"
#include <hwy/foreach_target.h>
// Highway compiles what follows once per instruction set.
#include "cpu/runtime/simd-inl.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET == HWY_AVX3_DL
// VNNI is part of this target, but Highway does not tell the compiler.
#pragma GCC push_options
#pragma GCC target("avx512vnni")
#endif
namespace sluice::cpu::HWY_NAMESPACE {

using DW = hn::RebindToUnsigned<DF>;
using DI = hn::RebindToSigned<DF>;
constexpr auto kTokens = static_cast<std::size_t>(kPageTokens);

float weigh(float* logits, float reference) {
  const DF df;
  constexpr float kLog2E = 1.4426950408889634f;
  const auto log2e = hn::Set(df, kLog2E);
  const auto base = hn::Set(df, reference);
  auto sum = hn::Zero(df);
  for (std::size_t i = 0; i < kTokens; i += kLanes) {
    const auto weight = exp2_of(hn::Mul(hn::Sub(hn::LoadU(df, logits + i), base), log2e));
    hn::StoreU(weight, df, logits + i);
    sum = hn::Add(sum, weight);
  }
  return sum_lanes(sum);
}

float sum_of(const float* weights) {
  const DF df;
  auto sum = hn::Zero(df);
  for (std::size_t i = 0; i < kTokens; i += kLanes) {
    sum = hn::Add(sum, hn::LoadU(df, weights + i));
  }
  return sum_lanes(sum);
}

// Loads the first `count` elements of a vector; the others are 0.
template <typename D, typename T>
HWY_INLINE hn::Vec<D> load_some(D d, const T* from, std::size_t count) {
  if (count == kLanes) return hn::LoadU(d, from);
  HWY_ALIGN T lanes[kLanes] = {};
  for (std::size_t i = 0; i < count; ++i) lanes[i] = from[i];
  return hn::Load(d, lanes);
}

HWY_INLINE void store_some(VF vector, float* to, std::size_t count) {
  const DF df;
  if (count == kLanes) return hn::StoreU(vector, df, to);
  HWY_ALIGN float lanes[kLanes];
  hn::Store(vector, df, lanes);
  for (std::size_t i = 0; i < count; ++i) to[i] = lanes[i];
}

HWY_INLINE VF load_halves(const std::uint16_t* from, std::size_t count) {
  if (count == kLanes) return load_floats(reinterpret_cast<const hwy::float16_t*>(from));
  HWY_ALIGN float floats[kLanes] = {};
  for (std::size_t i = 0; i < count; ++i) floats[i] = f16_to_float(from[i]);
  return hn::Load(DF(), floats);
}

// Weights of a page as 16-bit integers, scaled so that the heaviest becomes 32767.
template <int kQueries>
struct IntegerWeights {
  HWY_ALIGN std::int16_t weights[kQueries][kTokens];
  float units[kQueries];  // weight of one integer step

  explicit IntegerWeights(const PageWeights* queries) {
    const DF df;
    constexpr float kLargest = 32767.0f;
    for (int q = 0; q < kQueries; ++q) {
      const float* const from = queries[q].weights;
      auto most = hn::Zero(df);
      for (std::size_t i = 0; i < kTokens; i += kLanes) {
        most = hn::Max(most, hn::LoadU(df, from + i));
      }
      const float heaviest = hn::GetLane(hn::MaxOfLanes(df, most));
      units[q] = heaviest / kLargest * queries[q].factor;
      const auto factor = hn::Set(df, heaviest > 0.0f ? kLargest / heaviest : 0.0f);
      for (std::size_t i = 0; i < kTokens; i += kLanes) {
        const auto rounded = hn::NearestInt(hn::Mul(hn::LoadU(df, from + i), factor));
        const hn::Rebind<std::int16_t, DF> d16;
        hn::StoreU(hn::DemoteTo(d16, rounded), d16, weights[q] + i);
      }
    }
  }

  // Weights of tokens 2 i and 2 i + 1, in memory order.
  HWY_INLINE std::int32_t pair(int q, std::size_t i) const {
    std::int32_t both;
    std::memcpy(&both, weights[q] + 2 * i, sizeof(both));
    return both;
  }
};

// sum + the two products of adjacent 16-bit numbers. `odd` takes the products that some processors
// sum separately.
HWY_INLINE hn::Vec<DI> add_products(hn::Vec<DW> codes, std::int32_t pair, hn::Vec<DI> sum,
                                    hn::Vec<DI>& odd) {
  const DI di;
#if HWY_TARGET == HWY_SCALAR
  // Highway's one-lane vectors have no halves.
  const auto both = static_cast<std::int32_t>(hn::GetLane(codes));
  static_cast<void>(odd);
  return hn::Add(sum, hn::Set(di, (both & 0xffff) * static_cast<std::int16_t>(pair) +
                                      (both >> 16) * (pair >> 16)));
#elif HWY_TARGET == HWY_AVX3_DL
  // A single instruction that Highway does not use yet.
  static_cast<void>(odd);
  return hn::Vec<DI>{_mm512_dpwssd_epi32(sum.raw, codes.raw, hn::Set(di, pair).raw)};
#else
  const hn::Repartition<std::int16_t, DI> d16;
  return hn::ReorderWidenMulAccumulate(di, hn::BitCast(d16, codes),
                                       hn::BitCast(d16, hn::Set(di, pair)), sum, odd);
#endif
}

// Vectors of channels that share the loads of weights: with the sums of four queries they fit the
// registers.
constexpr std::size_t kWide = kLanes == 16 ? 2 : 1;

// Sums over a page's tokens of weight * code, of kVectors vectors of neighbouring channels. Codes
// come in pairs, as 16-bit numbers side by side.
template <int kQueries, std::size_t kVectors>
class CodeSums {
 public:
  CodeSums() {
    for (int q = 0; q < kQueries; ++q) {
      for (std::size_t v = 0; v < kVectors; ++v) even_[q][v] = odd_[q][v] = hn::Zero(DI());
    }
  }

  HWY_INLINE void add(const hn::Vec<DW> (&codes)[kVectors], const IntegerWeights<kQueries>& weights,
                      std::size_t i) {
    for (int q = 0; q < kQueries; ++q) {
      const std::int32_t pair = weights.pair(q, i);
      for (std::size_t v = 0; v < kVectors; ++v) {
        even_[q][v] = add_products(codes[v], pair, even_[q][v], odd_[q][v]);
      }
    }
  }

  HWY_INLINE VF of(int q, std::size_t v) const {
    return hn::ConvertTo(DF(), hn::RearrangeToOddPlusEven(even_[q][v], odd_[q][v]));
  }

 private:
  hn::Vec<DI> even_[kQueries][kVectors];
  hn::Vec<DI> odd_[kQueries][kVectors];
};

// Adds all codes of neighbouring channels, pair by pair. `words` are `stride` apart; there are
// kVectors vectors of channels, or `channels` of one.
template <int kBits, int kQueries, std::size_t kVectors>
HWY_INLINE void add_codes(const std::uint32_t* words, std::size_t stride, std::size_t channels,
                          const IntegerWeights<kQueries>& weights,
                          CodeSums<kQueries, kVectors>& sums) {
  const DW dw;
  constexpr int kLowBits = ValueTiles::low_bits(kBits);
  constexpr std::size_t kPairs = 16 / kLowBits;  // per word
  constexpr std::size_t kWords = kTokens / 2 / kPairs;
  const auto mask = hn::Set(dw, ((1u << kLowBits) - 1u) * 0x10001u);
  const auto highest = hn::Set(dw, 0x40004u);
  hn::Vec<DW> word[kVectors];
  hn::Vec<DW> high[kVectors];
  hn::Vec<DW> codes[kVectors];
  for (std::size_t w = 0; w < kWords; ++w) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      const std::uint32_t* const from = words + v * kLanes;
      word[v] = load_some(dw, from + w * stride, channels);
      if constexpr (kBits == 3) {
        high[v] = load_some(dw, from + (kWords + w / 2) * stride, channels);
        high[v] = hn::ShiftRightSame(high[v], static_cast<int>(w % 2 * 8));
      }
    }
    for (std::size_t i = 0; i < kPairs; ++i) {
      for (std::size_t v = 0; v < kVectors; ++v) {
        codes[v] = hn::And(word[v], mask);
        if constexpr (kBits == 3) {
          const int at = ValueTiles::high_place(static_cast<int>(2 * i)).shift;
          const auto bit = hn::ShiftRightSame(hn::ShiftLeft<2>(high[v]), at);
          codes[v] = hn::Or(codes[v], hn::And(bit, highest));
        }
        word[v] = hn::ShiftRight<kLowBits>(word[v]);
      }
      sums.add(codes, weights, w * kPairs + i);
    }
  }
}

// Adds channels [first, first + kVectors * kLanes), or the remaining ones if kVectors is 1.
template <int kBits, int kQueries, std::size_t kVectors>
HWY_INLINE void add_channels(const ValuePage& page, std::size_t first, const PageWeights* queries,
                             const IntegerWeights<kQueries>& weights) {
  const DF df;
  const auto d = static_cast<std::size_t>(page.channels);
  const std::size_t channels = kVectors > 1 ? kLanes : HWY_MIN(d - first, kLanes);
  auto* const data = const_cast<std::byte*>(page.page);
  CodeSums<kQueries, kVectors> sums;
  add_codes<kBits>(ValueTiles::words(data, page.channels) + first, d, channels, weights, sums);
  for (std::size_t v = 0; v < kVectors; ++v) {
    const std::size_t at = first + v * kLanes;
    const VF scale = load_halves(ValueTiles::scales(data) + at, channels);
    const VF zero = load_halves(ValueTiles::scales(data) + d + at, channels);
    for (int q = 0; q < kQueries; ++q) {
      float* const out = queries[q].out + at;
      const VF codes = hn::Mul(sums.of(q, v), hn::Set(df, weights.units[q]));
      VF sum = hn::MulAdd(scale, codes, load_some(df, out, channels));
      sum = hn::MulAdd(zero, hn::Set(df, queries[q].sum), sum);
      store_some(sum, out, channels);
    }
  }
}

template <int kBits, int kQueries>
void add_bits(const ValuePage& page, const PageWeights* queries) {
  const IntegerWeights<kQueries> weights(queries);
  const auto d = static_cast<std::size_t>(page.channels);
  std::size_t first = 0;
  for (; first + kWide * kLanes <= d; first += kWide * kLanes) {
    add_channels<kBits, kQueries, kWide>(page, first, queries, weights);
  }
  for (; first < d; first += kLanes) {
    add_channels<kBits, kQueries, 1>(page, first, queries, weights);
  }
}

template <int kQueries>
void add_to_queries(const ValuePage& page, const PageWeights* queries) {
  if (page.bits == 1) add_bits<1, kQueries>(page, queries);
  if (page.bits == 2) add_bits<2, kQueries>(page, queries);
  if (page.bits == 3) add_bits<3, kQueries>(page, queries);
  if (page.bits == 4) add_bits<4, kQueries>(page, queries);
}

void add_page(const ValuePage& page, const PageWeights* queries, std::size_t count) {
  switch (count) {
    case 1:
      return add_to_queries<1>(page, queries);
    case 2:
      return add_to_queries<2>(page, queries);
    case 3:
      return add_to_queries<3>(page, queries);
    default:
      return add_to_queries<4>(page, queries);
  }
}

}  // namespace sluice::cpu::HWY_NAMESPACE
#if HWY_TARGET == HWY_AVX3_DL
#pragma GCC pop_options
#endif
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::cpu {

HWY_EXPORT(weigh);
HWY_EXPORT(sum_of);
HWY_EXPORT(add_page);

float weigh_page(float* logits, float reference) {
  return HWY_DYNAMIC_DISPATCH(weigh)(logits, reference);
}

float sum_page(const float* weights) { return HWY_DYNAMIC_DISPATCH(sum_of)(weights); }

void add_value_page(const ValuePage& page, std::span<const PageWeights> queries) {
  check(!queries.empty() && queries.size() <= kMostPageQueries, "add_value_page: queries");
  HWY_DYNAMIC_DISPATCH(add_page)(page, queries.data(), queries.size());
}

}  // namespace sluice::cpu
#endif  // HWY_ONCE
