// The lightest weight that stays when only the heaviest of a list are kept.
#pragma once

#include <cstdint>
#include <span>

namespace sluice::cpu {

// A cut through non-negative weights keeps every weight above `weight` and the first `ties` that
// equal it.
struct Cut {
  float weight = 0.0f;
  std::int64_t ties = 0;
};

// The cut that keeps the `count` heaviest of `weights`; among equals the first.
Cut cut_by_count(std::span<const float> weights, std::int64_t count);

// The cut that keeps the fewest whose sum reaches `target`; everything if the sum falls short.
Cut cut_by_weight(std::span<const float> weights, double target);

}  // namespace sluice::cpu
