// Everything that a decoder does to single elements or rows: norms, rotations, conversions.
#pragma once

#include <span>

#include "kernels/launch.h"
#include "lib/backend.h"
#include "lib/selection.h"

namespace sluice::cuda {

void embed(const Matrix& table, std::span<const TokenId> ids, const Matrix& y, cudaStream_t stream);
void rms_norm(const RmsNormParams& params, cudaStream_t stream);
void rope(const RopeParams& params, cudaStream_t stream);
void swiglu(const SwigluParams& params, cudaStream_t stream);
void cast(const Matrix& from, const Matrix& to, cudaStream_t stream);
void append(const AppendParams& params, cudaStream_t stream);
void sum_values(const SumValuesParams& params, cudaStream_t stream);
void compensate(const CompensateParams& params, cudaStream_t stream);
// y[row] = bias, or y[row] += bias.
void add_bias(const float* bias, const Matrix& y, bool accumulate, cudaStream_t stream);

}  // namespace sluice::cuda
