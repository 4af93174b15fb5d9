#include "cpu/values/project.h"

#include <array>
#include <cstddef>

#include "lib/check.h"
#include "sluice/batch.h"

// Old instruction sets get the portable code.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/values/project.cc"
#include <hwy/foreach_target.h>
// Highway compiles what follows once per instruction set.
#include "cpu/runtime/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu::HWY_NAMESPACE {

constexpr std::size_t kTokensAtOnce = 8;
static_assert(kPageTokens % kTokensAtOnce == 0);

// Channels [first, first + kLanes) of all tokens. `column`: those of the basis' vectors, one
// channel of values after the other, [head_dim, kLanes]; 0 past the last vector.
void project_lanes(const Basis& basis, const float* values, const float* column, std::size_t first,
                   float* out) {
  const DF df;
  const auto d = static_cast<std::size_t>(basis.head_dim);
  const auto channels = static_cast<std::size_t>(basis.channels());
  const std::size_t count = HWY_MIN(channels - first, kLanes);
  HWY_ALIGN float lanes[kLanes];
  for (std::size_t token = 0; token < kPageTokens; token += kTokensAtOnce) {
    const float* const from = values + token * d;
    VF sums[kTokensAtOnce];
    for (VF& sum : sums) sum = hn::Zero(df);
    for (std::size_t c = 0; c < d; ++c) {
      const VF vectors = hn::LoadU(df, column + c * kLanes);
      for (std::size_t t = 0; t < kTokensAtOnce; ++t) {
        sums[t] = hn::MulAdd(hn::Set(df, from[t * d + c]), vectors, sums[t]);
      }
    }
    for (std::size_t t = 0; t < kTokensAtOnce; ++t) {
      hn::Store(sums[t], df, lanes);
      for (std::size_t i = 0; i < count; ++i) out[(token + t) * channels + first + i] = lanes[i];
    }
  }
}

void project(const Basis& basis, const float* values, float* out) {
  const auto d = static_cast<std::size_t>(basis.head_dim);
  const auto channels = static_cast<std::size_t>(basis.channels());
  std::vector<float> column(d * kLanes);
  for (std::size_t first = 0; first < channels; first += kLanes) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      const bool is_one = first + i < channels;
      for (std::size_t c = 0; c < d; ++c) {
        column[c * kLanes + i] = is_one ? basis.vectors[(first + i) * d + c] : 0.0f;
      }
    }
    project_lanes(basis, values, column.data(), first, out);
  }
}

float product(const float* a, const float* b, std::size_t count) {
  const DF df;
  auto sum = hn::Zero(df);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    sum = hn::MulAdd(hn::LoadU(df, a + i), hn::LoadU(df, b + i), sum);
  }
  float all = sum_lanes(sum);
  for (; i < count; ++i) all += a[i] * b[i];
  return all;
}

// to += factor * from
void add_scaled(const float* from, float factor, std::size_t count, float* to) {
  const DF df;
  const VF factors = hn::Set(df, factor);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(hn::MulAdd(factors, hn::LoadU(df, from + i), hn::LoadU(df, to + i)), df, to + i);
  }
  for (; i < count; ++i) to[i] += factor * from[i];
}

// `out`: [head_dim], zeros.
void unproject_to(const Basis& basis, const float* values, float read, const float* sums,
                  float* out) {
  const auto d = static_cast<std::size_t>(basis.head_dim);
  for (std::size_t i = 0; i < d / 2; ++i) {
    const float* const vector = basis.vectors + i * d;
    add_scaled(vector, sums[i] - read * product(vector, values, d), d, out);
  }
}

}  // namespace sluice::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::cpu {

HWY_EXPORT(project);
HWY_EXPORT(unproject_to);

std::vector<float> projected(const Basis& basis, const std::vector<float>& values) {
  check(values.size() == static_cast<std::size_t>(kPageTokens * basis.head_dim),
        "projected: a page of values");
  std::vector<float> out(static_cast<std::size_t>(kPageTokens * basis.channels()));
  HWY_DYNAMIC_DISPATCH(project)(basis, values.data(), out.data());
  return out;
}

void unproject(const Basis& basis, const float* values, float read, float* sums) {
  constexpr std::size_t kMaxHeadDim = 256;
  const auto d = static_cast<std::size_t>(basis.head_dim);
  check(d <= kMaxHeadDim, "unproject: head_dim");
  std::array<float, kMaxHeadDim> out{};
  HWY_DYNAMIC_DISPATCH(unproject_to)(basis, values, read, sums, out.data());
  for (std::size_t c = 0; c < d; ++c) sums[c] = out[c];
}

}  // namespace sluice::cpu
#endif  // HWY_ONCE
