// Decoder operations other than attention, on the CPU. Operations and parameters are defined in
// lib/backend/dense_ops.h; every pointer is host memory. Matrix products are in linear.h.
#pragma once

#include "cpu/dense/rope_table.h"
#include "cpu/runtime/threads.h"
#include "lib/backend/dense_ops.h"

namespace sluice::cpu {

void embed(const EmbedParams& params);
void rms_norm(const RmsNormParams& params, Threads& threads);
// `table` holds the angles of these positions.
void rope(const RopeParams& params, const RopeTable& table, Threads& threads);
void swiglu(const SwigluParams& params, Threads& threads);
void cast(const CastParams& params, Threads& threads);
void sample(const SampleParams& params, Threads& threads);

}  // namespace sluice::cpu
