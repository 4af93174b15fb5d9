#include "engine/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "engine/config_limits.h"
#include "lib/text.h"

namespace sluice {
namespace {

// As in transformers: the config's key, else the scaling's.
std::int64_t original_context(const JsonObject& config, const JsonObject& scaling,
                              std::int64_t max_position_embeddings) {
  constexpr const char* kKey = "original_max_position_embeddings";
  const JsonObject& place = config.has(kKey) ? config : scaling;
  return place.integer(kKey, 1, std::int64_t{1} << 30, max_position_embeddings);
}

Llama3Scaling parse_llama3(const JsonObject& scaling, std::int64_t original) {
  Llama3Scaling result;
  result.factor = scaling.number("factor", 1.0, 1e6);
  result.low_freq_factor = scaling.number("low_freq_factor", 1e-3, 1e6);
  result.high_freq_factor = scaling.number("high_freq_factor", 1e-3, 1e6);
  result.original_max_position_embeddings = static_cast<double>(original);
  if (result.high_freq_factor <= result.low_freq_factor) {
    scaling.corrupt("high_freq_factor", "is not larger than low_freq_factor");
  }
  return result;
}

YarnScaling parse_yarn(const JsonObject& scaling, double theta, std::int64_t original,
                       std::int64_t max_position_embeddings) {
  YarnScaling result;
  result.original_max_position_embeddings = static_cast<double>(original);
  result.factor =
      scaling.number("factor", 1.0, 1e6,
                     static_cast<double>(max_position_embeddings) / static_cast<double>(original));
  result.beta_fast = scaling.number("beta_fast", 1e-3, 1e6, result.beta_fast);
  result.beta_slow = scaling.number("beta_slow", 1e-3, 1e6, result.beta_slow);
  if (result.beta_fast < result.beta_slow) {
    scaling.corrupt("beta_fast", "is smaller than beta_slow");
  }
  if (theta <= 1.0) scaling.corrupt("rope_theta", "is 1, with which yarn has no frequencies");
  result.truncate = scaling.boolean("truncate", result.truncate);
  double temperature = yarn_temperature(result.factor);
  // mscale and mscale_all_dim count only together, as in DeepSeek's configs.
  const double scale = scaling.number("mscale", 0.0, 1e3, 0.0);
  const double scale_all = scaling.number("mscale_all_dim", 0.0, 1e3, 0.0);
  if (scale != 0.0 && scale_all != 0.0) {
    temperature =
        yarn_temperature(result.factor, scale) / yarn_temperature(result.factor, scale_all);
  }
  result.attention_factor = scaling.number("attention_factor", 1e-3, 1e3, temperature);
  return result;
}

// The channel, of `half` channels, that makes `turns` turns within the original context.
double yarn_channel(const YarnScaling& scaling, double turns, double theta, int half) {
  const double wavelength = scaling.original_max_position_embeddings / turns;
  return half * std::log(wavelength / (2.0 * std::numbers::pi)) / std::log(theta);
}

void stretch(std::vector<float>& frequencies, const YarnScaling& scaling, double theta) {
  const auto half = static_cast<int>(frequencies.size());
  double first = yarn_channel(scaling, scaling.beta_fast, theta, half);
  double last = yarn_channel(scaling, scaling.beta_slow, theta, half);
  if (scaling.truncate) {
    first = std::floor(first);
    last = std::ceil(last);
  }
  first = std::max(first, 0.0);
  last = std::min(last, 2.0 * half - 1.0);
  if (first == last) last += 0.001;
  for (int i = 0; i < half; ++i) {
    float& frequency = frequencies[static_cast<std::size_t>(i)];
    const float ramp =
        (static_cast<float>(i) - static_cast<float>(first)) / static_cast<float>(last - first);
    const float kept = 1.0f - std::clamp(ramp, 0.0f, 1.0f);
    const float divided = 1.0f / (static_cast<float>(scaling.factor) * (1.0f / frequency));
    frequency = divided * (1.0f - kept) + frequency * kept;
  }
}

float stretch(float frequency, const Llama3Scaling& scaling) {
  const auto factor = static_cast<float>(scaling.factor);
  const auto low = static_cast<float>(scaling.low_freq_factor);
  const auto context = scaling.original_max_position_embeddings;
  // torch divides a number by a tensor as number * (1 / tensor).
  const float wavelength = 1.0f / frequency * static_cast<float>(2.0 * std::numbers::pi);
  if (wavelength > static_cast<float>(context / scaling.low_freq_factor)) return frequency / factor;
  if (wavelength < static_cast<float>(context / scaling.high_freq_factor)) return frequency;
  const float smooth = (1.0f / wavelength * static_cast<float>(context) - low) /
                       static_cast<float>(scaling.high_freq_factor - scaling.low_freq_factor);
  return (1.0f - smooth) * frequency / factor + smooth * frequency;
}

}  // namespace

double yarn_temperature(double factor, double scale) {
  return factor <= 1.0 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0;
}

RopeConfig parse_rope(const JsonObject& config, std::int64_t max_position_embeddings) {
  RopeConfig rope;
  rope.theta = config.number("rope_theta", 1.0, kMaxTheta, rope.theta);
  if (config.has("rope_scaling") && config.has("rope_parameters")) {
    config.corrupt("rope_scaling", "stands beside rope_parameters, which replaces it");
  }
  const char* const key = config.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  if (!config.has(key)) return rope;

  const JsonObject scaling = config.object(key);
  if (scaling.has("full_attention") || scaling.has("sliding_attention")) {
    config.unsupported(key, "differs from layer to layer");
  }
  if (scaling.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0) {
    scaling.unsupported("partial_rotary_factor", "is not 1");
  }
  rope.theta = scaling.number("rope_theta", 1.0, kMaxTheta, rope.theta);
  const char* const type_key = scaling.has("rope_type") ? "rope_type" : "type";
  if (!scaling.has(type_key) && scaling.has("factor")) scaling.corrupt("rope_type", "is missing");
  const std::string type = scaling.string(type_key, "default");
  if (type == "linear") {
    rope.scaling = LinearScaling{scaling.number("factor", 1.0, 1e6)};
  } else if (type == "llama3") {
    rope.scaling =
        parse_llama3(scaling, original_context(config, scaling, max_position_embeddings));
  } else if (type == "yarn") {
    const std::int64_t original = original_context(config, scaling, max_position_embeddings);
    rope.scaling = parse_yarn(scaling, rope.theta, original, max_position_embeddings);
  } else if (type != "default") {
    scaling.unsupported(type_key, "is " + in_quotes(type) +
                                      ", but Sluice handles default, linear, llama3 and yarn");
  }
  return rope;
}

std::vector<float> inverse_frequencies(const RopeConfig& rope, int head_dim) {
  std::vector<float> frequencies;
  for (int channel = 0; channel < head_dim; channel += 2) {
    const float exponent = static_cast<float>(channel) / static_cast<float>(head_dim);
    frequencies.push_back(1.0f / std::pow(static_cast<float>(rope.theta), exponent));
  }
  if (const auto* const yarn = std::get_if<YarnScaling>(&rope.scaling)) {
    stretch(frequencies, *yarn, rope.theta);
  }
  for (float& frequency : frequencies) {
    if (const auto* const linear = std::get_if<LinearScaling>(&rope.scaling)) {
      frequency /= static_cast<float>(linear->factor);
    } else if (const auto* const llama3 = std::get_if<Llama3Scaling>(&rope.scaling)) {
      frequency = stretch(frequency, *llama3);
    }
  }
  if (const auto* const factors = std::get_if<FactorScaling>(&rope.scaling)) {
    for (std::size_t i = 0; i < frequencies.size(); ++i) frequencies[i] /= factors->factors[i];
  }
  return frequencies;
}

double RopeConfig::attention_factor() const {
  const auto* const yarn = std::get_if<YarnScaling>(&scaling);
  return yarn == nullptr ? 1.0 : yarn->attention_factor;
}

}  // namespace sluice
