// Converts arrays of heads in host memory, of any dtype and strides, to dense f32 and back.
#pragma once

#include "lib/backend/dense_ops.h"

namespace sluice {

// The operation `read_heads` in host memory.
void read_heads(const ReadHeadsParams& params);

// Converts dense f32 [tokens, heads, head_dim] to an array of any dtype and strides; rounds to
// nearest.
void write_heads(const float* from, const HeadArray& to);

// Magnitudes of queries, keys and values have to be below this limit, because then `rows`
// can hold them and no sum of their products overflows.
float magnitude_limit(const RowFormat& rows);

}  // namespace sluice
