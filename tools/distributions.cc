#include "tools/distributions.h"

#include <algorithm>
#include <cmath>

namespace sluice::tools {

std::vector<float> log_probabilities(std::span<const float> logits) {
  const float highest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x - highest));
  const auto shift = static_cast<float>(static_cast<double>(highest) + std::log(sum));
  std::vector<float> result(logits.begin(), logits.end());
  for (float& x : result) x -= shift;
  return result;
}

double divergence(std::span<const float> dense, std::span<const float> other) {
  double sum = 0.0;
  for (std::size_t i = 0; i < dense.size(); ++i) {
    const auto p = static_cast<double>(dense[i]);
    sum += std::exp(p) * (p - static_cast<double>(other[i]));
  }
  return std::max(sum, 0.0);  // rounding may leave a sum below 0
}

std::ptrdiff_t likeliest(std::span<const float> values) {
  return std::max_element(values.begin(), values.end()) - values.begin();
}

}  // namespace sluice::tools
