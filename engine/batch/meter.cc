#include "engine/batch/meter.h"

#include <algorithm>

namespace sluice {

Histogram Histogram::of_seconds() {
  Histogram histogram;
  histogram.bounds = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,   0.2,   0.5,
                      1.0,   2.0,   5.0,   10.0, 30.0, 60.0, 120.0, 300.0, 600.0};
  histogram.counts.resize(histogram.bounds.size() + 1);
  return histogram;
}

void Histogram::add(double value) {
  const auto bucket = std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin();
  ++counts[static_cast<std::size_t>(bucket)];
  sum += value;
  ++count;
}

namespace batch {

TierTraffic TrafficSum::kind(int index) {
  TierTraffic kind;
  kind.cause = static_cast<Cause>(index % kCauses);
  index /= kCauses;
  kind.to = static_cast<Tier>(index % kTiers);
  index /= kTiers;
  kind.from = static_cast<Tier>(index % kTiers);
  kind.phase = static_cast<Phase>(index / kTiers);
  return kind;
}

void TrafficSum::add(const Ledger& ledger) {
  for (int i = 0; i < kKinds; ++i) {
    const TierTraffic one = kind(i);
    totals_[static_cast<std::size_t>(i)] += ledger.total(one.phase, one.from, one.to, one.cause);
  }
}

std::vector<TierTraffic> TrafficSum::list() const {
  std::vector<TierTraffic> all;
  for (int i = 0; i < kKinds; ++i) {
    TierTraffic one = kind(i);
    one.traffic = totals_[static_cast<std::size_t>(i)];
    if (one.traffic.rows > 0 || one.traffic.bytes > 0) all.push_back(one);
  }
  return all;
}

}  // namespace batch
}  // namespace sluice
