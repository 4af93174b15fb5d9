#include "cpu/runtime/elementwise.h"

#include <cmath>
#include <cstring>

#include "lib/check.h"
#include "sluice/half.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/runtime/elementwise.cc"
#include <hwy/foreach_target.h>
// Highway compiles what follows once per instruction set.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Halves = hn::Rebind<std::uint16_t, Floats>;
using Words = hn::Rebind<std::uint32_t, Floats>;

// Calls body(i) for whole vectors and tail(i) for the elements after them.
template <typename Body, typename Tail>
HWY_INLINE void for_vectors(std::int64_t count, const Body& body, const Tail& tail) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(Floats()));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(i);
  for (; i < count; ++i) tail(i);
}

void bf16_to_f32(const std::uint16_t* from, float* to, std::int64_t count) {
  const Floats f;
  for_vectors(
      count,
      [&](std::int64_t i) {
        const auto wide = hn::PromoteTo(Words(), hn::LoadU(Halves(), from + i));
        hn::StoreU(hn::BitCast(f, hn::ShiftLeft<16>(wide)), f, to + i);
      },
      [&](std::int64_t i) { to[i] = bf16_to_float(from[i]); });
}

void f16_to_f32(const std::uint16_t* from, float* to, std::int64_t count) {
  std::int64_t i = 0;
  // Highway makes infinities finite on targets without f16 conversion, so only AVX2 and up use it.
#if HWY_TARGET <= HWY_AVX2
  const Floats f;
  const hn::Rebind<hwy::float16_t, Floats> f16;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f));
  for (; i + lanes <= count; i += lanes) {
    const auto halves = hn::BitCast(f16, hn::LoadU(Halves(), from + i));
    hn::StoreU(hn::PromoteTo(f, halves), f, to + i);
  }
#endif
  for (; i < count; ++i) to[i] = f16_to_float(from[i]);
}

void f32_to_bf16(const float* from, std::uint16_t* to, std::int64_t count) {
  const Floats f;
  const Words w;
  for_vectors(
      count,
      [&](std::int64_t i) {
        const auto x = hn::LoadU(f, from + i);
        const auto bits = hn::BitCast(w, x);
        const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(w, 1u));
        const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(w, 0x7fffu)));
        const auto quiet = hn::Or(bits, hn::Set(w, 0x400000u));
        const auto result = hn::IfThenElse(hn::RebindMask(w, hn::IsNaN(x)), quiet, rounded);
        hn::StoreU(hn::TruncateTo(Halves(), hn::ShiftRight<16>(result)), Halves(), to + i);
      },
      [&](std::int64_t i) { to[i] = float_to_bf16(from[i]); });
}

void rms_norm(const float* x, const float* weight, float epsilon, std::int64_t columns, float* y) {
  const Floats f;
  auto squares = hn::Zero(f);
  float rest = 0.0f;
  for_vectors(
      columns,
      [&](std::int64_t i) {
        const auto v = hn::LoadU(f, x + i);
        squares = hn::MulAdd(v, v, squares);
      },
      [&](std::int64_t i) { rest += x[i] * x[i]; });
  const float sum = hn::GetLane(hn::SumOfLanes(f, squares)) + rest;
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(columns) + epsilon);
  const auto factors = hn::Set(f, factor);
  for_vectors(
      columns,
      [&](std::int64_t i) {
        const auto scaled = hn::Mul(hn::LoadU(f, x + i), factors);
        hn::StoreU(hn::Mul(scaled, hn::LoadU(f, weight + i)), f, y + i);
      },
      [&](std::int64_t i) { y[i] = x[i] * factor * weight[i]; });
}

void swiglu(const float* gate, const float* up, std::int64_t columns, float* y) {
  const Floats f;
  const auto one = hn::Set(f, 1.0f);
  // Clamped because Highway's exp is undefined on overflow; from e^80 on the sigmoid is zero.
  const auto limit = hn::Set(f, 80.0f);
  for_vectors(
      columns,
      [&](std::int64_t i) {
        const auto g = hn::LoadU(f, gate + i);
        const auto silu = hn::Div(g, hn::Add(one, hn::Exp(f, hn::Min(hn::Neg(g), limit))));
        hn::StoreU(hn::Mul(silu, hn::LoadU(f, up + i)), f, y + i);
      },
      [&](std::int64_t i) { y[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i]; });
}

void rope(float* x, const float* cosines, const float* sines, std::int64_t head_dim) {
  const Floats f;
  const std::int64_t half = head_dim / 2;
  float* y = x + half;
  for_vectors(
      half,
      [&](std::int64_t i) {
        const auto a = hn::LoadU(f, x + i);
        const auto b = hn::LoadU(f, y + i);
        const auto c = hn::LoadU(f, cosines + i);
        const auto s = hn::LoadU(f, sines + i);
        hn::StoreU(hn::NegMulAdd(b, s, hn::Mul(a, c)), f, x + i);
        hn::StoreU(hn::MulAdd(a, s, hn::Mul(b, c)), f, y + i);
      },
      [&](std::int64_t i) {
        const float a = x[i];
        const float b = y[i];
        x[i] = a * cosines[i] - b * sines[i];
        y[i] = b * cosines[i] + a * sines[i];
      });
}

}  // namespace sluice::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::cpu {

HWY_EXPORT(bf16_to_f32);
HWY_EXPORT(f16_to_f32);
HWY_EXPORT(f32_to_bf16);
HWY_EXPORT(rms_norm);
HWY_EXPORT(swiglu);
HWY_EXPORT(rope);

void convert(const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t count) {
  const auto* halves = static_cast<const std::uint16_t*>(from);
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * size_of(from_dtype));
  } else if (from_dtype == DType::bf16 && to_dtype == DType::f32) {
    HWY_DYNAMIC_DISPATCH(bf16_to_f32)(halves, static_cast<float*>(to), count);
  } else if (from_dtype == DType::f16 && to_dtype == DType::f32) {
    HWY_DYNAMIC_DISPATCH(f16_to_f32)(halves, static_cast<float*>(to), count);
  } else if (from_dtype == DType::f32 && to_dtype == DType::bf16) {
    HWY_DYNAMIC_DISPATCH(f32_to_bf16)
    (static_cast<const float*>(from), static_cast<std::uint16_t*>(to), count);
  } else {
    // Only rows of an fp16 cache are converted to fp16, which is not hot.
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = from_dtype == DType::f32    ? static_cast<const float*>(from)[i]
                          : from_dtype == DType::bf16 ? bf16_to_float(halves[i])
                                                      : f16_to_float(halves[i]);
      if (to_dtype == DType::f32) {
        static_cast<float*>(to)[i] = value;
      } else {
        static_cast<std::uint16_t*>(to)[i] =
            to_dtype == DType::bf16 ? float_to_bf16(value) : float_to_f16(value);
      }
    }
  }
}

void cast(const Matrix& from, const Matrix& to) {
  check(from.rows == to.rows && from.columns == to.columns, "cast: shapes disagree");
  for (std::int64_t row = 0; row < from.rows; ++row) {
    convert(row_of(from, row), from.dtype, row_of(to, row), to.dtype, from.columns);
  }
}

void rms_norm_row(const float* x, const float* weight, float epsilon, std::int64_t columns,
                  float* y) {
  HWY_DYNAMIC_DISPATCH(rms_norm)(x, weight, epsilon, columns, y);
}

void swiglu_row(const float* gate, const float* up, std::int64_t columns, float* y) {
  HWY_DYNAMIC_DISPATCH(swiglu)(gate, up, columns, y);
}

void rope_head(float* x, const float* cosines, const float* sines, std::int64_t head_dim) {
  HWY_DYNAMIC_DISPATCH(rope)(x, cosines, sines, head_dim);
}

}  // namespace sluice::cpu
#endif  // HWY_ONCE
