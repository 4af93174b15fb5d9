// Softmax over long rows of scores.
#pragma once

#include <cstdint>

namespace sluice::cpu {

// x = softmax(x). False, with x undefined, if a score is NaN or +Inf or none is above -Inf.
// Sums are fp32 in as many parts as a vector has lanes.
bool softmax(float* x, std::int64_t count);

// to += from.
void add_to(const float* from, std::int64_t count, float* to);

}  // namespace sluice::cpu
