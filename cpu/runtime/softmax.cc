// Exponentials of scores, with the processor's widest vectors.
#include "cpu/runtime/softmax.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/runtime/softmax.cc"
#include <hwy/foreach_target.h>
// Highway compiles what follows once per instruction set.
#include <numbers>

#include "cpu/runtime/simd-inl.h"
#include "sluice/types.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu {
namespace HWY_NAMESPACE {

constexpr auto kTokens = static_cast<std::size_t>(kPageTokens);

// e^(x - reference).
HWY_INLINE VF exp_of(VF x, VF reference) {
  return exp2_of(hn::Mul(hn::Sub(x, reference), hn::Set(DF(), std::numbers::log2e_v<float>)));
}

// Replaces whole vectors at x[i] by body(vector, i), then each remaining element, which is
// broadcast to all lanes.
template <typename Body>
HWY_INLINE void for_vectors(float* x, std::size_t count, const Body& body) {
  const DF df;
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(body(hn::LoadU(df, x + i), i), df, x + i);
  for (; i < count; ++i) x[i] = hn::GetLane(body(hn::Set(df, x[i]), i));
}

// The sum of x.
HWY_INLINE float sum_all(const float* x, std::size_t count) {
  const DF df;
  VF sums = hn::Zero(df);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums = hn::Add(sums, hn::LoadU(df, x + i));
  float sum = sum_lanes(sums);
  for (; i < count; ++i) sum += x[i];
  return sum;
}

// The sum of x * y.
HWY_INLINE float sum_products(const float* x, const float* y, std::size_t count) {
  const DF df;
  VF sums = hn::Zero(df);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    sums = hn::MulAdd(hn::LoadU(df, x + i), hn::LoadU(df, y + i), sums);
  }
  float sum = sum_lanes(sums);
  for (; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

// -Inf if `count` is 0; unspecified if an element is NaN.
HWY_INLINE float largest_of(const float* x, std::size_t count) {
  const DF df;
  VF maxima = hn::Set(df, kMinusInfinity);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) maxima = hn::Max(maxima, hn::LoadU(df, x + i));
  float largest = hn::GetLane(hn::MaxOfLanes(df, maxima));
  for (const float rest : std::span(x + i, count - i)) largest = HWY_MAX(largest, rest);
  return largest;
}

bool softmax_kernel(float* x, std::int64_t count, float* lse) {
  const DF df;
  const auto n = static_cast<std::size_t>(count);
  VF maxima = hn::Set(df, kMinusInfinity);
  // A NaN makes this sum NaN, +Inf makes it +Inf or NaN; finite values and -Inf do not.
  VF strange = hn::Zero(df);
  for_vectors(x, n, [&](VF v, std::size_t) {
    maxima = hn::Max(maxima, v);
    strange = hn::Add(strange, hn::Mul(hn::Max(v, hn::Zero(df)), hn::Zero(df)));
    strange = hn::IfThenElse(hn::IsNaN(v), v, strange);
    return v;
  });
  const VF highest = hn::MaxOfLanes(df, maxima);
  if (!(sum_lanes(strange) == 0.0f) || !(hn::GetLane(highest) > kMinusInfinity)) return false;

  for_vectors(x, n, [&](VF v, std::size_t) { return exp_of(v, highest); });
  const float sum = sum_all(x, n);
  if (lse != nullptr) *lse = hn::GetLane(highest) + std::log(sum);
  const VF scale = hn::Set(df, 1.0f / sum);
  for_vectors(x, n, [&](VF v, std::size_t) { return hn::Mul(v, scale); });
  return true;
}

PageSum exp_page_kernel(float* x) {
  const DF df;
  const float level = largest_of(x, kTokens);
  const VF highest = hn::Set(df, level);
  const VF reference = softmax_reference(highest);
  VF sums = hn::Zero(df);
  for (std::size_t i = 0; i < kTokens; i += kLanes) {
    const VF weight = exp_of(hn::LoadU(df, x + i), reference);
    sums = hn::Add(sums, weight);
    hn::StoreU(weight, df, x + i);
  }
  return {level, sum_lanes(sums)};
}

bool softmax_pages_kernel(float* levels, const float* sums, std::int64_t pages, float* lse) {
  const auto n = static_cast<std::size_t>(pages);
  const float highest = largest_of(levels, n);
  if (highest == kMinusInfinity) return false;
  const VF reference = hn::Set(DF(), highest);
  for_vectors(levels, n, [&](VF v, std::size_t) { return exp_of(v, reference); });
  const float sum = sum_products(levels, sums, n);
  if (std::isnan(sum)) return false;
  if (lse != nullptr) *lse = highest + std::log(sum);
  const VF scale = hn::Set(DF(), 1.0f / sum);
  for_vectors(levels, n, [&](VF v, std::size_t) { return hn::Mul(v, scale); });
  return true;
}

float sum_page_rows_kernel(const PageRow* rows, std::size_t count, float* sums) {
  const DF df;
  VF maxima = hn::Set(df, kMinusInfinity);
  for (std::size_t i = 0; i < kTokens; i += kLanes) {
    VF sum = hn::Zero(df);
    for (std::size_t r = 0; r < count; ++r) {
      sum = hn::MulAdd(hn::Set(df, rows[r].factor), hn::LoadU(df, rows[r].weights + i), sum);
    }
    maxima = hn::Max(maxima, sum);
    hn::StoreU(sum, df, sums + i);
  }
  return hn::GetLane(hn::MaxOfLanes(df, maxima));
}

void multiply_kernel(float* x, std::int64_t count, float factor) {
  const VF all = hn::Set(DF(), factor);
  for_vectors(x, static_cast<std::size_t>(count),
              [&](VF v, std::size_t) { return hn::Mul(v, all); });
}

void add_kernel(const float* from, std::int64_t count, float factor, float* to) {
  const DF df;
  const auto n = static_cast<std::size_t>(count);
  const VF all = hn::Set(df, factor);
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(hn::MulAdd(all, hn::LoadU(df, from + i), hn::LoadU(df, to + i)), df, to + i);
  }
  for (; i < n; ++i) to[i] += factor * from[i];
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::cpu {

HWY_EXPORT(softmax_kernel);
HWY_EXPORT(exp_page_kernel);
HWY_EXPORT(softmax_pages_kernel);
HWY_EXPORT(sum_page_rows_kernel);
HWY_EXPORT(multiply_kernel);
HWY_EXPORT(add_kernel);

bool softmax(float* x, std::int64_t count, float* lse) {
  return HWY_DYNAMIC_DISPATCH(softmax_kernel)(x, count, lse);
}

PageSum exp_page(float* x) { return HWY_DYNAMIC_DISPATCH(exp_page_kernel)(x); }

bool softmax_pages(float* levels, const float* sums, std::int64_t pages, float* lse) {
  return HWY_DYNAMIC_DISPATCH(softmax_pages_kernel)(levels, sums, pages, lse);
}

float sum_page_rows(std::span<const PageRow> rows, float* sums) {
  return HWY_DYNAMIC_DISPATCH(sum_page_rows_kernel)(rows.data(), rows.size(), sums);
}

void multiply(float* x, std::int64_t count, float factor) {
  HWY_DYNAMIC_DISPATCH(multiply_kernel)(x, count, factor);
}

void add_to(const float* from, std::int64_t count, float* to, float factor) {
  HWY_DYNAMIC_DISPATCH(add_kernel)(from, count, factor, to);
}

}  // namespace sluice::cpu
#endif  // HWY_ONCE
