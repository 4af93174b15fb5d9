#include "cpu/rope_table.h"

#include <algorithm>
#include <cmath>

namespace sluice::cpu {

void RopeTable::update(std::int64_t first_position, std::int64_t tokens,
                       std::span<const float> inverse_frequency) {
  if (first_position == first_ && tokens <= tokens_ &&
      std::equal(inverse_frequency.begin(), inverse_frequency.end(), frequencies_.begin(),
                 frequencies_.end())) {
    return;
  }
  first_ = first_position;
  tokens_ = tokens;
  half_ = static_cast<std::int64_t>(inverse_frequency.size());
  frequencies_.assign(inverse_frequency.begin(), inverse_frequency.end());
  cosines_.clear();
  sines_.clear();
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (const float frequency : inverse_frequency) {
      const float angle = static_cast<float>(first_position + token) * frequency;
      cosines_.push_back(std::cos(angle));
      sines_.push_back(std::sin(angle));
    }
  }
}

}  // namespace sluice::cpu
