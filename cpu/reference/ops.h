// Operations of lib/backend.h as plain loops: the definition that faster code is held to.
// Shapes and sources are those of the parameter structs there. Single-threaded; sums are fp64.
#pragma once

#include "lib/backend/dense_ops.h"
#include "lib/backend/kv_ops.h"
#include "sluice/element.h"

namespace sluice::cpu {

// Element `index` of an array of `dtype`.
float read_element(const void* data, DType dtype, std::int64_t index);
void write_element(void* data, DType dtype, std::int64_t index, float value);

// Channel `c` of a row's key or value.
inline float key_element(const KvShape& shape, const std::byte* row, std::int64_t c) {
  return sluice::read_element(row, shape.rows.key(), c);
}
inline float value_element(const KvShape& shape, const std::byte* row, std::int64_t c) {
  return sluice::read_element(row + shape.value_offset(), shape.rows.value(), c);
}

void reference_embed(const EmbedParams& params);
// `weight` has the values of params.weight, [outputs, inputs].
void reference_linear(const LinearParams& params, const float* weight);
void reference_rms_norm(const RmsNormParams& params);
void reference_rope(const RopeParams& params);
void reference_swiglu(const SwigluParams& params);
void reference_cast(const CastParams& params);
void reference_sample(const SampleParams& params);
// Padding bytes of a row past its values (row_bytes() rounds up) are left unchanged.
void reference_append(const AppendParams& params);
void reference_append_batch(const AppendBatchParams& params);

}  // namespace sluice::cpu
