// Rows and bytes that decoding read and moved, summed over many steps: separately for the first
// tokens behind a context, which still fill the row cache, and for those after them.
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
  double selected = 0.0;  // attended rows outside the newest page
  double alpha = 0.0;     // of layers that select, mean over query heads
  std::int64_t alphas = 0;
  std::int64_t cut = 0;  // (layer, token, KV head) in which a cap cut the selection
                         // The sessions' ledger counts while decoding and correcting.
  std::map<Movement, Traffic> traffic;

  Cost& operator+=(const Cost& other);
};

// Tokens decoded behind a context before its costs count as steady: a row cache begins empty, and
// after these tokens the rows that steps select again and again are mostly resident.
inline constexpr std::int64_t kColdTokens = 64;

struct DecodeCost {
  Cost cold;  // the first kColdTokens behind every context
  Cost warm;  // those after them
  Cost all() const;
  DecodeCost& operator+=(const DecodeCost& other);
};

// Follows the ledger of a session from a prefill on, step by step.
class CostMeter {
 public:
  explicit CostMeter(const Session& session);
  // Called after every decode step: adds the cost of the step, and of a correction right before it,
  // to `cost`; null: not counted. The first token of a step decides between cold and warm.
  void end_step(DecodeCost* cost);

 private:
  const Session* session_;
  std::int64_t decoded_ = 0;  // tokens
  std::map<Movement, Traffic> counted_;
  std::uint64_t corrected_ = 0;
};

}  // namespace sluice::tools
