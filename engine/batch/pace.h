// Estimates how many tokens of a prompt fit in a time, by the chunks measured so far.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace sluice::batch {

class Pace {
 public:
  // Notes the time of a chunk of `tokens`. Newer chunks weigh more, because later tokens of a
  // prompt attend to more and take longer.
  void note_piece(std::int64_t tokens, double seconds) {
    if (tokens <= 0) return;
    const double each = seconds / static_cast<double>(tokens);
    token_seconds_ = token_seconds_ == 0.0 ? each : (token_seconds_ + each) / 2;
  }
  void note_step(double seconds) {
    step_seconds_ = step_seconds_ == 0.0 ? seconds : 0.9 * step_seconds_ + 0.1 * seconds;
  }

  // Seconds for a chunk beside decode steps; `limit` > 0 is in milliseconds, and 0 stands for twice
  // a decode step.
  double seconds(double limit) const {
    if (limit > 0.0) return limit / 1000.0;
    return 2.0 * step_seconds_;
  }
  // At least kLeast, so that a prompt goes on however slow the machine is.
  std::int64_t tokens(double seconds) const {
    if (token_seconds_ <= 0.0) return kFirst;
    const double fit = seconds / token_seconds_;
    return std::max(kLeast, static_cast<std::int64_t>(std::min(fit, 1e6)));
  }

 private:
  static constexpr std::int64_t kLeast = 16;
  static constexpr std::int64_t kFirst = 64;  // nothing has been measured

  double token_seconds_ = 0.0;
  double step_seconds_ = 0.0;
};

}  // namespace sluice::batch
