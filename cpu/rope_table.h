// Cosines and sines of the rotary embedding for a range of positions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sluice::cpu {

// Every layer rotates queries and keys by the same angles, so the table of the current positions
// is computed once per step and kept.
class RopeTable {
 public:
  // Angles are products of fp32 numbers, as the checkpoints were trained with.
  void update(std::int64_t first_position, std::int64_t tokens,
              std::span<const float> inverse_frequency);

  const float* cosines(std::int64_t token) const { return cosines_.data() + token * half_; }
  const float* sines(std::int64_t token) const { return sines_.data() + token * half_; }

 private:
  std::int64_t first_ = 0;
  std::int64_t tokens_ = 0;
  std::int64_t half_ = 0;
  std::vector<float> frequencies_;
  std::vector<float> cosines_;  // [tokens, half]
  std::vector<float> sines_;    // [tokens, half]
};

}  // namespace sluice::cpu
