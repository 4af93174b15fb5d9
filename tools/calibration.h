// What `sluice calibrate` finds out about a model, on passages of a text.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sluice/engine.h"
#include "sluice/policy.h"
#include "tools/eval_runner.h"

namespace sluice::tools {

// What was found, and everything that was measured on the way.
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

// What is saved first, the other where that is equal.
enum class Saving : std::uint8_t {
  bus,     // rows that are read per decoded token, besides the newest page
  device,  // bytes of the index
};

struct LayerChoices {
  std::vector<std::int64_t> rows = {0, 16, 64, 256};  // per KV head
  std::vector<int> value_bits = {2, 4};
  std::vector<int> key_bits = {4};
  double loss = 0.002;  // most nats per token, KL(dense || policy), of the whole
  Saving saving = Saving::bus;
};

// What every layer keeps under `values`, the cheapest that loses at most choices.loss: each choice
// of each layer is measured with all others dense, losses are taken for additive, and what that
// gives is measured as a whole, then tightened or loosened a few times. The table says whether the
// loss holds.
Calibration calibrate_layers(Engine& engine, const PassageBuilder& passages,
                             const TaskOptions& options, const LayerChoices& choices);

}  // namespace sluice::tools
