// Everything that a decoder does to single elements: norms, rotations, conversions.
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/backend.h"

namespace sluice::cuda {

void embed(const Matrix& table, const TokenId* ids, const Matrix& y, const Launch& launch);
void rms_norm(const RmsNormParams& params, const Launch& launch);
void rope(const RopeParams& params, const Launch& launch);
void swiglu(const SwigluParams& params, const Launch& launch);
void cast(const Matrix& from, const Matrix& to, const Launch& launch);
void read_heads(const ReadHeadsParams& params, const Launch& launch);
// y[row] = bias, or y[row] += bias.
void add_bias(const float* bias, const Matrix& y, bool accumulate, const Launch& launch);

}  // namespace sluice::cuda
