// Counters and gauges of a batcher, which other threads read while a step runs.
#pragma once

#include <cstdint>
#include <mutex>

#include "sluice/batcher.h"
#include "sluice/ledger.h"

namespace sluice::batch {

class Meter {
 public:
  BatcherStats stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  void change(const auto& how) {
    const std::lock_guard lock(mutex_);
    how(stats_);
  }

  // Tokens that are free now and that no running sequence will need: `claimed` of the last
  // set_claimed() are.
  std::int64_t unclaimed() const {
    const std::lock_guard lock(mutex_);
    return stats_.free_tokens - claimed_;
  }
  void set_claimed(std::int64_t tokens) {
    const std::lock_guard lock(mutex_);
    claimed_ = tokens;
  }

  void note_first_token(double seconds) {
    change([&](BatcherStats& stats) {
      ++stats.answer_tokens;
      stats.first_token_seconds.add(seconds);
    });
  }
  void note_token(double seconds) {
    change([&](BatcherStats& stats) {
      ++stats.answer_tokens;
      stats.output_token_seconds.add(seconds);
    });
  }
  void note_finish(FinishReason reason) {
    change([&](BatcherStats& stats) { ++stats.finished[static_cast<std::size_t>(reason)]; });
  }

 private:
  mutable std::mutex mutex_;
  BatcherStats stats_;
  std::int64_t claimed_ = 0;
};

// Sums of ledgers, by phase, tiers and cause.
class TrafficSum {
 public:
  void add(const Ledger& ledger);
  std::vector<TierTraffic> list() const;  // non-zero ones

 private:
  static constexpr int kTiers = 3;
  static constexpr int kKinds = kPhases * kTiers * kTiers * kCauses;
  static TierTraffic kind(int index);

  std::array<Traffic, kKinds> totals_{};
};

}  // namespace sluice::batch
