// Drawing a token from logits.
#pragma once

#include <cstdint>
#include <span>

#include "sluice/types.h"

namespace sluice {

// What to draw, in the order of SamplingParams and with its meanings. A set of the most likely
// tokens takes those of lower ids first where logits are equal; the draw goes through ids in order.
struct SampleParams {
  double temperature = 0.0;  // 0: the most likely token
  int top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  double random = 0.0;  // in [0, 1)
};

// Throws what throw_bad_logit() and throw_no_candidate() throw.
TokenId sample_token(std::span<const float> logits, const SampleParams& params);

// Throws Error{internal}: the logit of `id` is NaN or +Inf.
[[noreturn]] void throw_bad_logit(std::int64_t id, float logit);
// Throws Error{internal}: every logit is -Inf.
[[noreturn]] void throw_no_candidate();

}  // namespace sluice
