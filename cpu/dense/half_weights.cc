#include "cpu/dense/half_weights.h"

#include "lib/check.h"

// Old instruction sets get the portable code; everything else is worth a variant.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dense/half_weights.cc"
#include <hwy/foreach_target.h>
// Highway compiles what follows once per instruction set.
#include "cpu/runtime/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu::HWY_NAMESPACE {

// kRows outputs of kTokens tokens.
template <typename T, std::size_t kRows, std::size_t kTokens>
HWY_INLINE void multiply_tile(const FewProduct& p, const float* HWY_RESTRICT x, std::int64_t output,
                              float* HWY_RESTRICT y) {
  const DF df;
  const auto inputs = static_cast<std::size_t>(p.inputs);
  const T* const rows = reinterpret_cast<const T*>(p.weights + output * p.inputs);
  VF sums[kRows][kTokens];
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t t = 0; t < kTokens; ++t) sums[r][t] = hn::Zero(df);
  }
  std::size_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    VF weights[kRows];
    for (std::size_t r = 0; r < kRows; ++r) weights[r] = load_floats(rows + r * inputs + i);
    for (std::size_t t = 0; t < kTokens; ++t) {
      const VF values = hn::LoadU(df, x + t * inputs + i);
      for (std::size_t r = 0; r < kRows; ++r) {
        sums[r][t] = hn::MulAdd(weights[r], values, sums[r][t]);
      }
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    const auto o = static_cast<std::size_t>(output) + r;
    for (std::size_t t = 0; t < kTokens; ++t) {
      float sum = sum_lanes(sums[r][t]);
      for (std::size_t c = i; c < inputs; ++c) {
        sum += load_float(rows + r * inputs + c) * x[t * inputs + c];
      }
      float& to = y[t * static_cast<std::size_t>(p.y_stride) + o];
      if (p.bias != nullptr) sum += p.bias[o];
      to = p.accumulate ? to + sum : sum;
    }
  }
}

// All outputs of kTokens tokens from `token` on, kRows at a time: as many sums as registers hold,
// whose additions hide each other's latency.
template <typename T, std::size_t kRows, std::size_t kTokens>
HWY_INLINE void multiply_tokens(const FewProduct& p, std::int64_t token) {
  const float* const x = p.x + token * p.inputs;
  float* const y = p.y + token * p.y_stride;
  constexpr auto kStep = static_cast<std::int64_t>(kRows);
  std::int64_t output = 0;
  for (; output + kStep <= p.outputs; output += kStep) {
    multiply_tile<T, kRows, kTokens>(p, x, output, y);
  }
  for (; output < p.outputs; ++output) multiply_tile<T, 1, kTokens>(p, x, output, y);
}

template <typename T>
void multiply_rows(const FewProduct& p) {
  std::int64_t token = 0;
  for (; token + 4 <= p.tokens; token += 4) multiply_tokens<T, 2, 4>(p, token);
  for (; token + 2 <= p.tokens; token += 2) multiply_tokens<T, 4, 2>(p, token);
  if (token < p.tokens) multiply_tokens<T, 8, 1>(p, token);
}

void multiply(const FewProduct& p) {
  if (p.dtype == DType::bf16) return multiply_rows<hwy::bfloat16_t>(p);
  multiply_rows<hwy::float16_t>(p);
}

}  // namespace sluice::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::cpu {

HWY_EXPORT(multiply);

void multiply_few(const FewProduct& product) {
  check(product.dtype == DType::bf16 || product.dtype == DType::f16, "half weights: dtype");
  HWY_DYNAMIC_DISPATCH(multiply)(product);
}

}  // namespace sluice::cpu
#endif  // HWY_ONCE
