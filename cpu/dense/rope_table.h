// Cosines and sines of the rotary embedding for the positions of a step.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/backend/dense_ops.h"

namespace sluice::cpu {

// The table of the current positions is computed once per step and kept, because every layer
// rotates queries and keys by the same angles.
class RopeTable {
 public:
  void update(const RopeParams& params);

  const float* cosines(std::int64_t token) const { return cosines_.data() + token * half_; }
  const float* sines(std::int64_t token) const { return sines_.data() + token * half_; }

 private:
  // Returns true if the table starts with the positions of `params`.
  bool holds(const RopeParams& params) const;

  std::int64_t half_ = 0;
  float factor_ = 1.0f;
  std::vector<float> frequencies_;       // [half]
  std::vector<std::int64_t> positions_;  // [tokens]
  std::vector<float> cosines_;           // [tokens, half]
  std::vector<float> sines_;             // [tokens, half]
};

}  // namespace sluice::cpu
