#include "cpu/value_page.h"

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

// Sums over a page's tokens of weight * code, of neighbouring channels.
template <int kQueries>
struct CodeSums {
  VF sums[kQueries];

  // The code of a token, times `factor`.
  HWY_INLINE void add(hn::Vec<DW> code, const PageWeights* queries, int token) {
    const DF df;
    const auto value = hn::ConvertTo(df, hn::BitCast(hn::RebindToSigned<DF>(), code));
    for (int q = 0; q < kQueries; ++q) {
      sums[q] = hn::MulAdd(value, hn::Set(df, queries[q].weights[token]), sums[q]);
    }
  }
};

// The lower bits of all codes; of three bits, two.
template <int kLowBits, int kQueries>
HWY_INLINE void add_low(const std::uint32_t* words, std::size_t stride, std::size_t channels,
                        const PageWeights* queries, CodeSums<kQueries>& sums) {
  const DW dw;
  const auto mask = hn::Set(dw, (1u << kLowBits) - 1u);
  constexpr int kWordTokens = 32 / kLowBits;
  for (int first = 0; first < kPageTokens; first += kWordTokens, words += stride) {
    auto word = load_some(dw, words, channels);
    for (int token = first; token < first + kWordTokens; token += 2) {
      sums.add(hn::And(word, mask), queries, token);
      sums.add(hn::And(hn::ShiftRight<16>(word), mask), queries, token + 1);
      word = hn::ShiftRight<kLowBits>(word);
    }
  }
}

// The highest of three bits, which counts four.
template <int kQueries>
HWY_INLINE void add_high(const std::uint32_t* words, std::size_t stride, std::size_t channels,
                         const PageWeights* queries, CodeSums<kQueries>& sums) {
  const DW dw;
  const auto one = hn::Set(dw, 1u);
  for (int token = 0; token < kPageTokens; ++token) {
    const ValueTiles::Place place = ValueTiles::high_place(token);
    const auto word =
        load_some(dw, words + static_cast<std::size_t>(place.word) * stride, channels);
    const auto bit = hn::And(hn::ShiftRightSame(word, place.shift), one);
    sums.add(hn::ShiftLeft<2>(bit), queries, token);
  }
}

template <int kBits, int kQueries>
HWY_INLINE void add_channels(const ValuePage& page, std::size_t first, const PageWeights* queries) {
  const DF df;
  const auto d = static_cast<std::size_t>(page.head_dim);
  const std::size_t channels = HWY_MIN(d - first, kLanes);
  auto* const data = const_cast<std::byte*>(page.page);
  const std::uint32_t* const words = ValueTiles::words(data, page.head_dim) + first;
  CodeSums<kQueries> sums;
  for (VF& sum : sums.sums) sum = hn::Zero(df);
  add_low<ValueTiles::low_bits(kBits)>(words, d, channels, queries, sums);
  if constexpr (kBits == 3) add_high(words, d, channels, queries, sums);
  const VF scale = load_halves(ValueTiles::scales(data) + first, channels);
  const VF zero = load_halves(ValueTiles::scales(data) + d + first, channels);
  for (int q = 0; q < kQueries; ++q) {
    float* const out = queries[q].out + first;
    VF sum = load_some(df, out, channels);
    sum = hn::MulAdd(scale, sums.sums[q], sum);
    sum = hn::MulAdd(zero, hn::Set(df, queries[q].sum), sum);
    store_some(sum, out, channels);
  }
}

template <int kQueries>
void add_to_queries(const ValuePage& page, const PageWeights* queries) {
  const auto d = static_cast<std::size_t>(page.head_dim);
  for (std::size_t first = 0; first < d; first += kLanes) {
    if (page.bits == 2) add_channels<2, kQueries>(page, first, queries);
    if (page.bits == 3) add_channels<3, kQueries>(page, first, queries);
    if (page.bits == 4) add_channels<4, kQueries>(page, first, queries);
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
