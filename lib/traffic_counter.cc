#include "sluice/traffic_counter.h"

#include <algorithm>
#include <utility>

namespace sluice {
namespace {

using Movement = std::tuple<Tier, Tier, Cause>;

bool is_counted(const Movement& movement, bool on_device, bool sees_keys) {
  const auto& [from, to, cause] = movement;
  if (from == Tier::disk || to == Tier::disk) return false;
  switch (cause) {
    case Cause::append:
    case Cause::write_back:
    case Cause::miss:
      return true;
    case Cause::hit:  // beside a device only those of the CPU's share are in host memory
      return !on_device || from == Tier::device;
    case Cause::index_read:
      return sees_keys && from != to;
    case Cause::value_read:
    case Cause::evict:
    case Cause::index_swap:
      return false;
  }
  return false;
}

std::string text_of(const Traffic& traffic) {
  return std::to_string(traffic.rows) + " rows, " + std::to_string(traffic.bytes) + " B";
}

}  // namespace

CountedTraffic TrafficCounter::take() {
  const std::lock_guard lock(mutex_);
  operations_ = 0;
  return std::exchange(counted_, {});
}

void TrafficCounter::add(Tier from, Tier to, Cause cause, Traffic traffic) {
  if (traffic.rows == 0) return;
  const std::lock_guard lock(mutex_);
  counted_.moved[{from, to, cause}] += traffic;
}

void TrafficCounter::add_beside(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  counted_.beside += bytes;
}

void TrafficCounter::add_missed(std::vector<MissedRows> rows) {
  const std::lock_guard lock(mutex_);
  for (MissedRows& of_head : rows) {
    of_head.operation = operations_;
    counted_.missed.push_back(std::move(of_head));
  }
  ++operations_;
}

std::string difference(const CountedTraffic& counted, std::span<const LedgerEntry> recorded,
                       bool sees_keys) {
  const bool on_device = std::any_of(recorded.begin(), recorded.end(), [](const auto& entry) {
    return entry.from == Tier::device || entry.to == Tier::device;
  });
  std::map<Movement, std::pair<Traffic, Traffic>> sums;  // counted and recorded
  for (const auto& [movement, traffic] : counted.moved) sums[movement].first = traffic;
  for (const LedgerEntry& entry : recorded) {
    sums[{entry.from, entry.to, entry.cause}].second += entry.traffic;
  }
  for (const auto& [movement, both] : sums) {
    if (both.first == both.second || !is_counted(movement, on_device, sees_keys)) continue;
    const auto& [from, to, cause] = movement;
    return std::string(to_string(cause)) + " from " + std::string(to_string(from)) + " to " +
           std::string(to_string(to)) + ": the ledger has " + text_of(both.second) +
           ", counted were " + text_of(both.first);
  }
  return "";
}

}  // namespace sluice
