// Everything that a decoder does to single elements or rows: norms, rotations, conversions.
#pragma once

#include <span>

#include "kernels/launch.h"
#include "lib/backend.h"
#include "lib/selection.h"

namespace sluice::cuda {

void embed(const Matrix& table, std::span<const TokenId> ids, const Matrix& y,
           const Launch& launch);
void rms_norm(const RmsNormParams& params, const Launch& launch);
void rope(const RopeParams& params, const Launch& launch);
void swiglu(const SwigluParams& params, const Launch& launch);
void cast(const Matrix& from, const Matrix& to, const Launch& launch);
void append(const AppendParams& params, const Launch& launch);
void sum_values(const SumValuesParams& params, const Launch& launch);
// y[row] = bias, or y[row] += bias.
void add_bias(const float* bias, const Matrix& y, bool accumulate, const Launch& launch);

}  // namespace sluice::cuda
