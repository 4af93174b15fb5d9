// The selections of one step: how many rows were kept, and which share of the weight they carry.
#pragma once

#include <cstdint>
#include <vector>

namespace sluice {

struct LayerSelection {
  int layer = 0;
  bool follower = false;    // reused the selection of an earlier layer
  std::int64_t tokens = 0;  // query tokens
  double attended = 0.0;    // rows attended per KV head and token: selected, and the newest page
  double selected = 0.0;    // rows selected per KV head and token
  // Estimated weight of the selected rows and the newest page, mean over query heads; 1 for
  // streaming. For an anchor that attends to everything: the weight its followers attend to.
  double alpha = 0.0;
  double smallest_alpha = 0.0;
  std::int64_t cut = 0;  // (token, KV head) pairs in which a cap cut the selection
  // Selected positions, ascending, of token t and KV head h at t * kv_heads + h; empty unless
  // SessionOptions::reports_positions. They exclude the newest page, which is always attended.
  std::vector<std::vector<std::int32_t>> positions;
};

// One entry per layer that selected, or attended to a selection.
using StepSelection = std::vector<LayerSelection>;

}  // namespace sluice
