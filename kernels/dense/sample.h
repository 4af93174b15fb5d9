// Drawing tokens from logits on the device.
#pragma once

#include <span>

#include "kernels/runtime/launch.h"
#include "lib/backend.h"

namespace sluice::cuda {

inline constexpr int kSampleRows = 64;  // of one launch: 1.5 KiB of arguments

// As draw_token() of each row, with weights and their sums in f32: up to kSampleRows. `results` are
// host-visible, `params` host arrays.
void sample(const Matrix& logits, std::span<const SampleParams> params, SampledToken* results,
            const Launch& launch);

}  // namespace sluice::cuda
