#include "cpu/value_page.h"

#include <cstring>

#include "lib/check.h"
#include "lib/value_tiles.h"

// Old instruction sets get the portable code; everything else is worth a variant.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/value_page.cc"
#include <hwy/foreach_target.h>
// Highway compiles what follows once per instruction set.
#include "cpu/attention_simd-inl.h"

HWY_BEFORE_NAMESPACE();
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
  return hn::GetLane(hn::SumOfLanes(df, sum));
}

float sum_of(const float* weights) {
  const DF df;
  auto sum = hn::Zero(df);
  for (std::size_t i = 0; i < kTokens; i += kLanes) {
    sum = hn::Add(sum, hn::LoadU(df, weights + i));
  }
  return hn::GetLane(hn::SumOfLanes(df, sum));
}

// The first `count` of a vector, which may be fewer than it holds.
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

// Weights of a page as 16-bit integers: the heaviest is the largest of them.
template <int kQueries>
struct IntegerWeights {
  HWY_ALIGN std::int16_t weights[kQueries][kTokens];
  float units[kQueries];  // what one counts

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

  // Those of tokens 2 i and 2 i + 1, as they lie in memory.
  HWY_INLINE std::int32_t pair(int q, std::size_t i) const {
    std::int32_t both;
    std::memcpy(&both, weights[q] + 2 * i, sizeof(both));
    return both;
  }
};

// Sums over a page's tokens of weight * code, of neighbouring channels. Codes come in pairs, as 16-
// bit numbers side by side: two products and their sum are one instruction.
template <int kQueries>
class CodeSums {
 public:
  CodeSums() {
    for (int q = 0; q < kQueries; ++q) even_[q] = odd_[q] = hn::Zero(DI());
  }

  HWY_INLINE void add(hn::Vec<DW> codes, const IntegerWeights<kQueries>& weights, std::size_t i) {
    const DI di;
    for (int q = 0; q < kQueries; ++q) {
#if HWY_TARGET == HWY_SCALAR
      // Highway's vectors of one number have no halves.
      const auto both = static_cast<std::int32_t>(hn::GetLane(codes));
      const std::int32_t sum = (both & 0xffff) * weights.weights[q][2 * i] +
                               (both >> 16) * weights.weights[q][2 * i + 1];
      even_[q] = hn::Add(even_[q], hn::Set(di, sum));
#else
      const hn::Repartition<std::int16_t, DI> d16;
      const auto pair = hn::BitCast(d16, hn::Set(di, weights.pair(q, i)));
      even_[q] =
          hn::ReorderWidenMulAccumulate(di, hn::BitCast(d16, codes), pair, even_[q], odd_[q]);
#endif
    }
  }

  HWY_INLINE VF of(int q) const {
    return hn::ConvertTo(DF(), hn::RearrangeToOddPlusEven(even_[q], odd_[q]));
  }

 private:
  hn::Vec<DI> even_[kQueries];
  hn::Vec<DI> odd_[kQueries];
};

// All codes of neighbouring channels, pair by pair. `words` are `stride` apart.
template <int kBits, int kQueries>
HWY_INLINE void add_codes(const std::uint32_t* words, std::size_t stride, std::size_t channels,
                          const IntegerWeights<kQueries>& weights, CodeSums<kQueries>& sums) {
  const DW dw;
  constexpr int kLowBits = ValueTiles::low_bits(kBits);
  constexpr std::size_t kPairs = 16 / kLowBits;  // of a word
  constexpr std::size_t kWords = kTokens / 2 / kPairs;
  const auto mask = hn::Set(dw, ((1u << kLowBits) - 1u) * 0x10001u);
  const auto highest = hn::Set(dw, 0x40004u);
  for (std::size_t w = 0; w < kWords; ++w) {
    auto word = load_some(dw, words + w * stride, channels);
    auto high = word;
    if constexpr (kBits == 3) {
      high = load_some(dw, words + (kWords + w / 2) * stride, channels);
      high = hn::ShiftRightSame(high, static_cast<int>(w % 2 * 8));
    }
    for (std::size_t i = 0; i < kPairs; ++i) {
      auto codes = hn::And(word, mask);
      if constexpr (kBits == 3) {
        const int at = ValueTiles::high_place(static_cast<int>(2 * i)).shift;
        const auto bit = hn::ShiftRightSame(hn::ShiftLeft<2>(high), at);
        codes = hn::Or(codes, hn::And(bit, highest));
      }
      sums.add(codes, weights, w * kPairs + i);
      word = hn::ShiftRight<kLowBits>(word);
    }
  }
}

template <int kBits, int kQueries>
HWY_INLINE void add_channels(const ValuePage& page, std::size_t first, const PageWeights* queries,
                             const IntegerWeights<kQueries>& weights) {
  const DF df;
  const auto d = static_cast<std::size_t>(page.head_dim);
  const std::size_t channels = HWY_MIN(d - first, kLanes);
  auto* const data = const_cast<std::byte*>(page.page);
  CodeSums<kQueries> sums;
  add_codes<kBits>(ValueTiles::words(data, page.head_dim) + first, d, channels, weights, sums);
  const VF scale = load_halves(ValueTiles::scales(data) + first, channels);
  const VF zero = load_halves(ValueTiles::scales(data) + d + first, channels);
  for (int q = 0; q < kQueries; ++q) {
    float* const out = queries[q].out + first;
    const VF codes = hn::Mul(sums.of(q), hn::Set(df, weights.units[q]));
    VF sum = hn::MulAdd(scale, codes, load_some(df, out, channels));
    sum = hn::MulAdd(zero, hn::Set(df, queries[q].sum), sum);
    store_some(sum, out, channels);
  }
}

template <int kQueries>
void add_to_queries(const ValuePage& page, const PageWeights* queries) {
  const IntegerWeights<kQueries> weights(queries);
  const auto d = static_cast<std::size_t>(page.head_dim);
  for (std::size_t first = 0; first < d; first += kLanes) {
    if (page.bits == 2) add_channels<2, kQueries>(page, first, queries, weights);
    if (page.bits == 3) add_channels<3, kQueries>(page, first, queries, weights);
    if (page.bits == 4) add_channels<4, kQueries>(page, first, queries, weights);
  }
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
