// Which share of the rows that are only at home the host attends to, while the others cross to the
// device: one that was given, or the one with which both need as long, from what steps took.
#pragma once

#include <cstdint>
#include <optional>

namespace sluice {

class HostShare {
 public:
  // Throws Error{usage} unless `fixed`, if given, is from 0 to 1.
  explicit HostShare(std::optional<double> fixed = std::nullopt);

  bool is_fixed() const { return fixed_.has_value(); }
  // 0: the host had better not.
  double share() const { return fixed_.value_or(share_); }
  // Of `pages` pages at home.
  std::int64_t pages_of(std::int64_t pages) const;

  // What one side did in a step while the other did its part.
  struct Part {
    std::int64_t rows = 0;
    double seconds = 0.0;
  };
  // Changes nothing if the share is fixed. Rates are averages over steps, so that a moment in which
  // the machine was busy counts little.
  void learn(const Part& host, const Part& device);

 private:
  std::optional<double> fixed_;
  double share_ = 0.5;
  std::int64_t steps_ = 0;
  double host_rate_ = 0.0;  // rows per second
  double device_rate_ = 0.0;
};

}  // namespace sluice
