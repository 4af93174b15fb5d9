// Softmax over long rows of scores.
#pragma once

#include <cstdint>

namespace sluice::cpu {

// x = softmax(x); `lse`, if there is one, is the log-sum-exp of x before. False, with both
// undefined, if a score is NaN or +Inf or none is above -Inf. Sums are fp32 in as many parts as a
// vector has lanes.
bool softmax(float* x, std::int64_t count, float* lse = nullptr);

// to += from.
void add_to(const float* from, std::int64_t count, float* to);

}  // namespace sluice::cpu
