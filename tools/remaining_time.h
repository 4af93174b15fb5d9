// How long the rest of a prompt takes.
#pragma once

#include <optional>
#include <vector>

namespace sluice::tools {

// Every token of a prompt attends to those before it, so n tokens take a n + b n^2 seconds. Both
// are fitted to the newest measurement and the one nearest half of its tokens, because the first
// steps of a prompt are slower than the others.
class RemainingTime {
 public:
  // `tokens` were read `seconds` after the prompt began; both grow from call to call.
  void note(double tokens, double seconds);
  // Seconds from the newest measurement until `total` tokens are read; none after fewer than two.
  std::optional<double> until(double total) const;

 private:
  struct Measurement {
    double tokens;
    double seconds;
  };
  std::vector<Measurement> measurements_;
};

}  // namespace sluice::tools
