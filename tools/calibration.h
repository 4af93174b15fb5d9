// Measurements of `sluice calibrate` on a model, over passages of a text.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sluice/engine.h"
#include "sluice/policy.h"
#include "tools/eval_runner.h"

namespace sluice::tools {

// The result, and every measurement behind it.
struct Calibration {
  Policy policy;
  std::string table;      // for people
  nlohmann::json report;  // for programs, an object
};

// TidalDecode's choice of layers (Yang et al. 2024, section 4.3 and its table of re-selection
// layers): layers 0 and 1 are dense, layer 2 selects, and one or two later layers select anew.
// Measured by needles with these budgets of tokens per KV head.
Calibration calibrate_anchors(Engine& engine, const PassageBuilder& passages,
                              const TaskOptions& options, const std::vector<std::int64_t>& budgets);
// Throws Error{unsupported} for a model with too few layers.
void require_anchors(const ModelInfo& info);

// The cost to minimise first; the other one breaks ties.
enum class Saving : std::uint8_t {
  bus,     // rows that are read per decoded token, besides the newest page
  device,  // bytes of the index
};

struct LayerChoices {
  std::vector<std::int64_t> rows = {0, 16, 64, 256};  // per KV head
  std::vector<int> value_bits = {1, 2, 4};
  std::vector<int> key_bits = {3};
  double loss = 0.002;  // upper bound, nats per token, KL(dense || policy), all layers together
  Saving saving = Saving::bus;
};

// Per-layer settings of `values`: the cheapest that lose at most choices.loss. Each choice of each
// layer is measured with all other layers dense, and losses are assumed to add up; the plan that
// this gives is then measured as a whole and tightened or loosened a few times. The table says
// whether the loss bound holds.
Calibration calibrate_layers(Engine& engine, const PassageBuilder& passages,
                             const TaskOptions& options, const LayerChoices& choices);

}  // namespace sluice::tools
