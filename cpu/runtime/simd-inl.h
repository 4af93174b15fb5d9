// Vector helpers shared by the attention kernels, compiled once per instruction set. Include only
// from files that Highway's foreach_target.h re-includes.
#if defined(SLUICE_CPU_ATTENTION_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_CPU_ATTENTION_SIMD_INL_H_
#undef SLUICE_CPU_ATTENTION_SIMD_INL_H_
#else
#define SLUICE_CPU_ATTENTION_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "sluice/half.h"
#include "sluice/row_code.h"
#include "sluice/row_format.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
inline constexpr std::size_t kLanes = hn::MaxLanes(DF());

inline constexpr float kMinusInfinity = -HUGE_VALF;

// kLanes elements from one on as floats.
HWY_INLINE VF load_floats(const float* from) { return hn::LoadU(DF(), from); }

HWY_INLINE VF load_floats(const hwy::bfloat16_t* from) {
  return hn::PromoteTo(DF(), hn::LoadU(hn::Rebind<hwy::bfloat16_t, DF>(), from));
}

HWY_INLINE float load_float(const float* from) { return *from; }
HWY_INLINE float load_float(const hwy::bfloat16_t* from) { return bf16_to_float(from->bits); }
HWY_INLINE float load_float(const hwy::float16_t* from) {
  std::uint16_t bits;
  hwy::CopySameSize(from, &bits);
  return f16_to_float(bits);
}

HWY_INLINE VF load_floats(const hwy::float16_t* from) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(DF(), load_float(from));  // Highway's own makes infinities and NaNs finite
#else
  return hn::PromoteTo(DF(), hn::LoadU(hn::Rebind<hwy::float16_t, DF>(), from));
#endif
}

// A code of PartCode::int8; the element is scale * code. The functions above give the codes.
struct Int8Code {
  std::int8_t value;
};

HWY_INLINE float load_float(const Int8Code* from) { return from->value; }
HWY_INLINE VF load_floats(const Int8Code* from) {
  const hn::Rebind<std::int8_t, DF> codes;
  const hn::RebindToSigned<DF> integers;
  return hn::ConvertTo(DF(), hn::PromoteTo(integers, hn::LoadU(codes, &from->value)));
}

// Two codes of PartCode::int4. load_channels() below gives elements.
struct Int4Pair {
  std::uint8_t both;
};

// The scale of a key or value that begins at `part`, for what the functions above and below load.
template <typename T>
inline constexpr bool kHasScale = std::is_same_v<T, Int8Code>;
template <typename T>
HWY_INLINE float scale_of(const T* part) {
  if constexpr (kHasScale<T>) return sluice::scale_of(reinterpret_cast<const std::byte*>(part));
  return 1.0f;
}

// Channels [c, c + kLanes) of a key or value that begins at `part`, and channel c; c is a multiple
// of kLanes. Times scale_of(part) they are the elements.
template <typename T>
HWY_INLINE VF load_channels(const T* part, std::size_t c) {
  return load_floats(part + c);
}
template <typename T>
HWY_INLINE float load_channel(const T* part, std::size_t c) {
  return load_float(part + c);
}
// Vectors of 16 channels or less lie in half a group.
HWY_INLINE VF load_channels(const Int4Pair* part, std::size_t c) {
  static_assert(kLanes <= kInt4Group / 2);
  const hn::Rebind<std::int8_t, DF> bytes;
  const hn::RebindToSigned<DF> integers;
  const std::size_t group = c / kInt4Group;
  const auto* const codes = reinterpret_cast<const std::int8_t*>(part) + group * kInt4Group / 2;
  const auto both = hn::PromoteTo(integers, hn::LoadU(bytes, codes + c % (kInt4Group / 2)));
  const auto own = c % kInt4Group < kInt4Group / 2 ? hn::ShiftRight<28>(hn::ShiftLeft<28>(both))
                                                   : hn::ShiftRight<4>(both);
  const float scale =
      int4_scale(reinterpret_cast<const std::byte*>(part), static_cast<std::int64_t>(group));
  return hn::Mul(hn::ConvertTo(DF(), own), hn::Set(DF(), scale));
}
HWY_INLINE float load_channel(const Int4Pair* part, std::size_t c) {
  return decode_element(PartCode::int4, reinterpret_cast<const std::byte*>(part),
                        static_cast<std::int64_t>(c));
}
// Bytes of channels.
template <typename T>
HWY_INLINE constexpr std::size_t bytes_of(std::size_t channels) {
  return std::is_same_v<T, Int4Pair> ? channels / 2 : channels * sizeof(T);
}

// Calls body(T()) with the type of a key's channels.
template <typename Body>
void dispatch_key(const PartFormat& format, const Body& body) {
  if (format.code == PartCode::int8) return body(Int8Code());
  switch (format.element) {
    case DType::f32:
      return body(0.0f);
    case DType::f16:
      return body(hwy::float16_t());
    case DType::bf16:
      return body(hwy::bfloat16_t());
  }
}

// The types of a row's two parts.
template <typename K, typename V>
struct RowTypes {
  using Key = K;
  using Value = V;
};

// Calls body(RowTypes<K, V>()).
template <typename Body>
void dispatch_rows(const RowFormat& format, const Body& body) {
  if (format.value().code == PartCode::int4) return body(RowTypes<Int8Code, Int4Pair>());
  dispatch_key(format.key(), [&](auto part) { body(RowTypes<decltype(part), decltype(part)>()); });
}

HWY_INLINE float sum_lanes(VF v) { return hn::GetLane(hn::SumOfLanes(DF(), v)); }

// 2^x for x <= 0 to about 1 ulp; 0 below 2^-126.5, NaN for NaN. 2^x = 2^n 2^f with n the nearest
// integer and |f| <= 1/2; 2^f = 1 + f g(f), g the interpolation of (2^f - 1) / f in six Chebyshev
// nodes, whose relative error is 2^-27.5.
HWY_INLINE VF exp2_of(VF x) {
  const DF df;
  const hn::RebindToUnsigned<DF> du;
  const VF least = hn::Set(df, -127.0f);
  x = hn::IfThenElse(hn::Lt(x, least), least, x);
  // Adding `magic` rounds x and leaves n + 127, the exponent field of 2^n (0 for 0), in the lowest
  // bits.
  const VF magic = hn::Set(df, 0x1.8p23f + 127.0f);
  const VF shifted = hn::Add(x, magic);
  const VF f = hn::Sub(x, hn::Sub(shifted, magic));
  VF y = hn::Set(df, 1.545316295e-4f);
  y = hn::MulAdd(y, f, hn::Set(df, 1.339086336e-3f));
  y = hn::MulAdd(y, f, hn::Set(df, 9.618082557e-3f));
  y = hn::MulAdd(y, f, hn::Set(df, 5.550357114e-2f));
  y = hn::MulAdd(y, f, hn::Set(df, 2.402265076e-1f));
  y = hn::MulAdd(y, f, hn::Set(df, 6.931471880e-1f));
  y = hn::MulAdd(y, f, hn::Set(df, 1.0f));
  return hn::Mul(y, hn::BitCast(df, hn::ShiftLeft<23>(hn::BitCast(du, shifted))));
}

// Reference that is subtracted from the logits: their maximum, unless all of them are -inf.
HWY_INLINE VF softmax_reference(VF highest) {
  const DF df;
  return hn::IfThenZeroElse(hn::Eq(highest, hn::Set(df, kMinusInfinity)), highest);
}

// Keys and values of up to a block of rows.
struct RowBlock {
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  std::size_t stride = 0;  // bytes
  std::size_t rows = 0;
  std::size_t ahead = 0;  // bytes from here to a later block, to be prefetched

  // Rows past the last repeat it, so nothing past the block is read; their weights are zero.
  template <typename T>
  HWY_INLINE const T* key(std::size_t row) const {
    return reinterpret_cast<const T*>(k + HWY_MIN(row, rows - 1) * stride);
  }
  template <typename T>
  HWY_INLINE const T* value(std::size_t row) const {
    return reinterpret_cast<const T*>(v + HWY_MIN(row, rows - 1) * stride);
  }
};

// to[0, padded) = from[0, count), a whole key or value, as floats, then zeros. `padded` is a
// multiple of kLanes.
template <typename T>
HWY_INLINE void unpack(const T* HWY_RESTRICT from, std::size_t count, std::size_t padded,
                       float* HWY_RESTRICT to) {
  const float scale = scale_of(from);
  const auto scaled = [&](VF v) { return kHasScale<T> ? hn::Mul(v, hn::Set(DF(), scale)) : v; };
  std::size_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    hn::StoreU(scaled(load_channels(from, c)), DF(), to + c);
  }
  for (; c < count; ++c) to[c] = load_channel(from, c) * scale;
  for (; c < padded; ++c) to[c] = 0.0f;
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice::cpu
HWY_AFTER_NAMESPACE();

#endif  // SLUICE_CPU_ATTENTION_SIMD_INL_H_
