#include "tools/remaining_time.h"

#include <algorithm>
#include <cmath>

namespace sluice::tools {

void RemainingTime::note(double tokens, double seconds) {
  if (tokens > 0.0) measurements_.push_back({tokens, seconds});
}

std::optional<double> RemainingTime::until(double total) const {
  if (measurements_.size() < 2) return std::nullopt;
  const Measurement& now = measurements_.back();
  const auto distance = [&](const Measurement& at) { return std::abs(at.tokens - now.tokens / 2); };
  const Measurement& half = *std::min_element(
      measurements_.begin(), measurements_.end() - 1,
      [&](const Measurement& x, const Measurement& y) { return distance(x) < distance(y); });
  if (half.tokens >= now.tokens) return std::nullopt;
  const double pace = now.seconds / now.tokens;
  const double slope = (pace - half.seconds / half.tokens) / (now.tokens - half.tokens);
  const double b = std::clamp(slope, 0.0, pace / now.tokens);
  const double a = pace - b * now.tokens;
  const double left = std::max(total - now.tokens, 0.0);
  return left * (a + b * (total + now.tokens));
}

}  // namespace sluice::tools
