// Memory-bound operations between matrix multiplications, in SIMD. All run on the calling thread.
#pragma once

#include <cstdint>

#include "lib/backend/dense_ops.h"

namespace sluice::cpu {

// Address of row `row` of a matrix.
inline std::byte* row_of(const Matrix& matrix, std::int64_t row) {
  return static_cast<std::byte*>(matrix.data) +
         static_cast<std::size_t>(row * matrix.stride) * size_of(matrix.dtype);
}

// Converts `count` elements from one dtype to another; to 16 bits it rounds to nearest, ties to
// even.
void convert(const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t count);

// Converts row by row; both shapes must be equal.
void cast(const Matrix& from, const Matrix& to);

// y = x / sqrt(mean(x^2) + epsilon) * weight. Source: Zhang and Sennrich 2019.
void rms_norm_row(const float* x, const float* weight, float epsilon, std::int64_t columns,
                  float* y);

// y = silu(gate) * up. Source: Shazeer 2020, "GLU variants improve transformer".
void swiglu_row(const float* gate, const float* up, std::int64_t columns, float* y);

// Rotates the pairs (x[i], x[i + head_dim/2]) by the angles whose cosines and sines are given.
// Source: Su et al. 2021 (RoFormer), in the halves convention of Hugging Face checkpoints.
void rope_head(float* x, const float* cosines, const float* sines, std::int64_t head_dim);

}  // namespace sluice::cpu
