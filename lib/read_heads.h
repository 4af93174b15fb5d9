// Arrays of heads in host memory, of any dtype and strides, to dense f32 and back.
#pragma once

#include "lib/backend/dense_ops.h"

namespace sluice {

// What `read_heads` does, for host memory.
void read_heads(const ReadHeadsParams& params);

// Dense f32 [tokens, heads, head_dim] to an array of any dtype and strides; rounds to nearest.
void write_heads(const float* from, const HeadArray& to);

// What magnitudes of queries, keys and values are to be below: rows of `dtype` hold them, and no
// sum of products of them overflows.
float magnitude_limit(DType dtype);

}  // namespace sluice
