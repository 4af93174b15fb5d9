// Rotary position embedding: its settings in config.json and the frequencies computed from them.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "engine/json_object.h"

namespace sluice {

// Llama 3.1's stretching of the context: low frequencies are divided by `factor`, high ones stay,
// those between are interpolated.
struct Llama3Scaling {
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_position_embeddings = 8192.0;
};

// All frequencies are divided by `factor` (position interpolation).
struct LinearScaling {
  double factor = 1.0;
};

// Frequencies that make fewer than `beta_slow` turns within the original context are divided by
// `factor`, those that make more than `beta_fast` stay, those between are interpolated. Queries and
// keys are multiplied by `attention_factor`. Source: Peng et al. 2023, YaRN, sections 3.2 to 3.4.
struct YarnScaling {
  double factor = 1.0;
  double attention_factor = 1.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double original_max_position_embeddings = 8192.0;
  bool truncate = true;  // interpolation starts and ends at whole channels
};

// The factor on queries and on keys, from that by which the context is stretched (section 3.4).
double yarn_temperature(double factor, double scale = 1.0);

// Every frequency is divided by its own factor, [head_dim / 2]: how GGUF files store the scaling of
// Llama 3.1.
struct FactorScaling {
  std::vector<float> factors;
};

struct RopeConfig {
  double theta = 10000.0;
  std::variant<std::monostate, LinearScaling, Llama3Scaling, YarnScaling, FactorScaling> scaling;

  // The factor on cosines and sines.
  double attention_factor() const;
};

// Reads `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5) of a
// model for `max_position_embeddings` tokens. Throws Error{unsupported} for a rope type other than
// default, linear, llama3 and yarn, naming it, and Error{corrupt}.
RopeConfig parse_rope(const JsonObject& config, std::int64_t max_position_embeddings);

// [head_dim / 2] frequencies in radians per token, in fp32 and in torch's order of operations, so
// that they equal those that transformers computes with.
// Source: transformers, modeling_rope_utils.py, _compute_default_rope_parameters,
// _compute_linear_scaling_rope_parameters, _compute_yarn_parameters and
// _compute_llama3_parameters; llama-models, models/llama3/model.py, apply_scaling.
std::vector<float> inverse_frequencies(const RopeConfig& rope, int head_dim);

}  // namespace sluice
