#include "offload/attention/host_share.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// Steps that are not measured: threads start and memory is touched for the first time.
constexpr std::int64_t kFirstSteps = 2;
// Weight of the latest step in the running average.
constexpr double kWeight = 0.25;
// A smaller share is dropped for good: waking the host costs more than it saves.
constexpr double kLeastShare = 1.0 / 32;
// The device keeps some rows, so that its rate stays measurable.
constexpr double kMostShare = 1.0 - kLeastShare;

double average(double before, double now) {
  return before > 0.0 ? before + kWeight * (now - before) : now;
}

}  // namespace

HostShare::HostShare(std::optional<double> fixed) : fixed_(fixed) {
  if (!fixed || (*fixed >= 0.0 && *fixed <= 1.0)) return;
  throw Error(ErrorCode::usage,
              "`host_attention` must be a share from 0 to 1, not " + digits(*fixed));
}

std::int64_t HostShare::pages_of(std::int64_t pages) const {
  return std::llround(share() * static_cast<double>(pages));
}

void HostShare::learn(const Part& host, const Part& device) {
  const bool tells = host.rows > 0 && host.seconds > 0.0 && device.rows > 0 && device.seconds > 0.0;
  if (fixed_ || !tells || steps_++ < kFirstSteps) return;
  host_rate_ = average(host_rate_, static_cast<double>(host.rows) / host.seconds);
  device_rate_ = average(device_rate_, static_cast<double>(device.rows) / device.seconds);
  const double share = host_rate_ / (host_rate_ + device_rate_);
  share_ = share < kLeastShare ? 0.0 : std::min(share, kMostShare);
}

}  // namespace sluice
