#include "model/rope.h"

#include <cmath>
#include <numbers>
#include <string>

#include "lib/text.h"

namespace sluice {
namespace {

constexpr double kMaxTheta = 1e12;

Llama3Scaling parse_llama3(const JsonObject& scaling) {
  Llama3Scaling result;
  result.factor = scaling.number("factor", 1.0, 1e6);
  result.low_freq_factor = scaling.number("low_freq_factor", 1e-3, 1e6);
  result.high_freq_factor = scaling.number("high_freq_factor", 1e-3, 1e6);
  result.original_max_position_embeddings = static_cast<double>(
      scaling.integer("original_max_position_embeddings", 1, std::int64_t{1} << 30));
  if (result.high_freq_factor <= result.low_freq_factor) {
    scaling.corrupt("high_freq_factor", "is not larger than low_freq_factor");
  }
  return result;
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

RopeConfig parse_rope(const JsonObject& config) {
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
  if (type == "llama3") {
    rope.llama3 = parse_llama3(scaling);
  } else if (type != "default") {
    scaling.unsupported(type_key,
                        "is " + in_quotes(type) + ", but Sluice handles default and llama3");
  }
  return rope;
}

std::vector<float> inverse_frequencies(const RopeConfig& rope, int head_dim) {
  std::vector<float> frequencies;
  for (int channel = 0; channel < head_dim; channel += 2) {
    const float exponent = static_cast<float>(channel) / static_cast<float>(head_dim);
    const float frequency = 1.0f / std::pow(static_cast<float>(rope.theta), exponent);
    frequencies.push_back(rope.llama3 ? stretch(frequency, *rope.llama3) : frequency);
  }
  return frequencies;
}

}  // namespace sluice
