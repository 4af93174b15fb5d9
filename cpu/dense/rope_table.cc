#include "cpu/dense/rope_table.h"

#include <algorithm>
#include <cmath>

#include "lib/rope_turns.h"

namespace sluice::cpu {

bool RopeTable::holds(const RopeParams& p) const {
  if (p.head_dim / 2 != half_ || p.factor != factor_ ||
      p.tokens > static_cast<std::int64_t>(positions_.size()) ||
      !std::equal(frequencies_.begin(), frequencies_.end(), p.inverse_frequency)) {
    return false;
  }
  const auto end = positions_.begin() + p.tokens;
  return std::all_of(positions_.begin(), end, [&, token = std::int64_t{0}](auto at) mutable {
    return at == p.position_of(token++);
  });
}

void RopeTable::update(const RopeParams& p) {
  if (holds(p)) return;
  half_ = p.head_dim / 2;
  factor_ = p.factor;
  frequencies_.assign(p.inverse_frequency, p.inverse_frequency + half_);
  positions_.clear();
  cosines_.clear();
  sines_.clear();
  std::vector<std::uint64_t> turns(frequencies_.size());
  std::transform(frequencies_.begin(), frequencies_.end(), turns.begin(), turn_per_token);
  for (std::int64_t token = 0; token < p.tokens; ++token) {
    positions_.push_back(p.position_of(token));
    for (const std::uint64_t turn : turns) {
      const float angle = angle_at(turn, positions_.back());
      cosines_.push_back(factor_ * std::cos(angle));
      sines_.push_back(factor_ * std::sin(angle));
    }
  }
}

}  // namespace sluice::cpu
