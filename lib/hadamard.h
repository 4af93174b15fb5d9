// The Hadamard rotation of keys before they are coded in a few bits.
//
// A logit's error is the sum over channels of q_c times the error of the key's channel c. A query
// is largest where keys are, and the steps of codes are widest there, so a few channels make most
// of the error. A rotation by a Hadamard matrix spreads them over all channels. It is orthogonal,
// so (H q) . (H k) = q . k. Source: Ashkboos et al. 2024, "QuaRot" (arXiv 2404.00456), section 4.
//
// Values are not rotated: in attention's sums every channel's error is its own, and rotated values
// in 2, 3 or 4 bits have the same squared error to within 1 %.
//
// The matrix has a power of two as its size. Any other head_dim is rotated in blocks of the largest
// power of two that divides it: 80 = 5 * 16, 96 = 3 * 32.
#pragma once

#include <cstdint>

namespace sluice {

struct Rotation {
  int block = 1;  // channels, a power of two; 1: no rotation
  float scale = 1.0f;

  // The rotation of vectors of `head_dim` channels.
  static constexpr Rotation of(int head_dim) {
    Rotation rotation;
    while (head_dim % (2 * rotation.block) == 0) rotation.block *= 2;
    int rest = rotation.block;
    for (; rest > 2; rest /= 4) rotation.scale *= 0.5f;
    if (rest == 2) rotation.scale *= 0.70710678118654752440f;
    return rotation;
  }
};

// Keys are clamped to +-kMostRotated before their rotation, so that no sum overflows. Codes lose
// nothing by it: with f16 scales and zeros, the largest key of 4 bits is 16 * 65504.
inline constexpr float kMostRotated = 1048576.0f;

// Rotates `count` elements in place, a multiple of the block. All backends add in this order, so
// that they build the same codes.
template <typename T>
void rotate(T* x, std::int64_t count, const Rotation& rotation) {
  for (int stride = 1; stride < rotation.block; stride *= 2) {
    for (std::int64_t first = 0; first < count; first += 2 * stride) {
      for (std::int64_t at = first; at < first + stride; ++at) {
        const T a = x[at];
        const T b = x[at + stride];
        x[at] = a + b;
        x[at + stride] = a - b;
      }
    }
  }
  if (rotation.block == 1) return;
  for (std::int64_t at = 0; at < count; ++at) x[at] *= static_cast<T>(rotation.scale);
}

}  // namespace sluice
