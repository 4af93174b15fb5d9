// What decoding read and moved, summed over many steps.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>

#include "sluice/engine.h"

namespace sluice::tools {

// From one tier to another, or in place, and why.
using Movement = std::tuple<Tier, Tier, Cause>;

// Sums over all decoded tokens and layers.
struct Cost {
  std::int64_t tokens = 0;
  double attended = 0.0;  // rows per KV head, summed over layers and tokens
  double selected = 0.0;  // of them, those outside the newest page
  double alpha = 0.0;     // of layers that select, mean over query heads
  std::int64_t alphas = 0;
  std::int64_t cut = 0;  // (layer, token, KV head) in which a cap cut the selection
  // What the sessions' ledgers counted while decoding and correcting.
  std::map<Movement, Traffic> traffic;

  Cost& operator+=(const Cost& other);
};

// What one step of `tokens` attended, from the session's own account; no traffic.
Cost cost_of(const Session& session, std::int64_t tokens);

// What a session's ledger counts from here on, and what its corrections attend.
class CostMeter {
 public:
  explicit CostMeter(const Session& session);
  Cost read() const;

 private:
  const Session* session_;
  std::map<Movement, Traffic> before_;
  std::uint64_t corrected_;
};

}  // namespace sluice::tools
