// Rotary position embedding: what config.json says about it and the frequencies that follow.
#pragma once

#include <optional>
#include <vector>

#include "model/json_object.h"

namespace sluice {

// Llama 3.1's stretching of the context: low frequencies are divided by `factor`, high ones stay,
// those between are interpolated.
struct Llama3Scaling {
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_position_embeddings = 8192.0;
};

struct RopeConfig {
  double theta = 10000.0;
  std::optional<Llama3Scaling> llama3;
};

// Reads `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).
// Throws Error{unsupported} for a rope type other than default and llama3, naming it, and
// Error{corrupt}.
RopeConfig parse_rope(const JsonObject& config);

// [head_dim / 2] frequencies in radians per token, in fp32 and in torch's order of operations, so
// that they equal those that transformers computes with.
// Source: transformers, modeling_rope_utils.py, _compute_default_rope_parameters and
// _compute_llama3_parameters; llama-models, models/llama3/model.py, apply_scaling.
std::vector<float> inverse_frequencies(const RopeConfig& rope, int head_dim);

}  // namespace sluice
