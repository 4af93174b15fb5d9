// The share of the rows only in host memory that the host attends to, while the others cross to the
// device: a given one, or the one at which both sides take equally long, learnt from step times.
#pragma once

#include <cstdint>
#include <optional>

namespace sluice {

class HostShare {
 public:
  // Throws Error{usage} unless `fixed`, if given, is from 0 to 1.
  explicit HostShare(std::optional<double> fixed = std::nullopt);

  bool is_fixed() const { return fixed_.has_value(); }
  // 0: device only.
  double share() const { return fixed_.value_or(share_); }
  // The host's part of `pages` pages in host memory.
  std::int64_t pages_of(std::int64_t pages) const;

  // One side's work in a step while the other side did its own.
  struct Part {
    std::int64_t rows = 0;
    double seconds = 0.0;
  };
  // Changes nothing if the share is fixed. Rates are averages over steps, so that one step on a
  // busy machine counts little.
  void learn(const Part& host, const Part& device);

 private:
  std::optional<double> fixed_;
  double share_ = 0.5;
  std::int64_t steps_ = 0;
  double host_rate_ = 0.0;  // rows per second
  double device_rate_ = 0.0;
};

}  // namespace sluice
