#include "lib/read_heads.h"

#include <cmath>

#include "sluice/half.h"

namespace sluice {
namespace {

struct F32 {
  using Element = float;
  static float load(float element) { return element; }
  static float store(float value) { return value; }
};
struct F16 {
  using Element = std::uint16_t;
  static float load(std::uint16_t element) { return f16_to_float(element); }
  static std::uint16_t store(float value) { return float_to_f16(value); }
};
struct Bf16 {
  using Element = std::uint16_t;
  static float load(std::uint16_t element) { return bf16_to_float(element); }
  static std::uint16_t store(float value) { return float_to_bf16(value); }
};

void dispatch(DType dtype, const auto& body) {
  switch (dtype) {
    case DType::f32:
      return body(F32());
    case DType::f16:
      return body(F16());
    case DType::bf16:
      return body(Bf16());
  }
}

// Calls body(vector, elements) for every head of every token.
template <typename Element>
void for_heads(const HeadArray& array, const auto& body) {
  auto* const data = static_cast<Element*>(array.data);
  for (std::int64_t token = 0; token < array.tokens; ++token) {
    for (std::int64_t head = 0; head < array.heads; ++head) {
      body(token * array.heads + head,
           data + token * array.token_stride + head * array.head_stride);
    }
  }
}

}  // namespace

void read_heads(const ReadHeadsParams& p) {
  dispatch(p.from.dtype, [&](auto format) {
    using Format = decltype(format);
    using Element = typename Format::Element;
    for_heads<Element>(p.from, [&](std::int64_t vector, const Element* from) {
      float* const to = p.to + vector * p.from.head_dim;
      bool good = true;
      for (int c = 0; c < p.from.head_dim; ++c) {
        const float value = Format::load(from[c]) * p.factor;
        const bool fits = std::abs(value) < p.limit;
        to[c] = fits ? value : 0.0f;
        good &= fits;
      }
      if (!good) p.bad[vector] = 1;
    });
  });
}

void write_heads(const float* from, const HeadArray& to) {
  dispatch(to.dtype, [&](auto format) {
    using Format = decltype(format);
    using Element = typename Format::Element;
    for_heads<Element>(to, [&](std::int64_t vector, Element* elements) {
      for (int c = 0; c < to.head_dim; ++c) {
        elements[c] = Format::store(from[vector * to.head_dim + c]);
      }
    });
  });
}

// The largest f16 is 65504; numbers from 65520 on round to infinity. (2^59)^2 times 256 channels is
// below the largest f32 and bf16.
float magnitude_limit(const RowFormat& rows) { return rows == DType::f16 ? 65520.0f : 0x1p59f; }

}  // namespace sluice
