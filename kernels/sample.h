// Drawing a token from logits on the device.
#pragma once

#include "kernels/launch.h"
#include "lib/backend.h"

namespace sluice::cuda {

struct SampledToken {
  TokenId id = -1;   // -1: every logit is -Inf
  TokenId bad = -1;  // the first token whose logit is NaN or +Inf; -1: there is none
  float bad_logit = 0.0f;
};

// As sample_token(), with weights and their sums in f32. `result` is host-visible.
void sample(const Matrix& logits, const SampleParams& params, SampledToken* result,
            const Launch& launch);

}  // namespace sluice::cuda
