// How the weights of a Hugging Face checkpoint are quantised: the quantization_config of its
// config.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/json_object.h"

namespace sluice {

enum class QuantMethod : std::uint8_t {
  gptq,    // codes [inputs / codes in a word, outputs], with zeros and scales by group of inputs
  awq,     // codes [inputs, outputs / 8] in AWQ's order, the same
  packed,  // compressed-tensors "pack-quantized": codes [outputs, inputs / codes in a word]
  fp8      // E4M3, with scales by tensor, by row or by block
};

struct Quantization {
  QuantMethod method = QuantMethod::fp8;
  int bits = 8;
  std::int64_t group = 0;  // inputs that share a scale; 0: all of a row
  int zero_offset = 0;     // added to stored zeros: 1 in the first format of GPTQ
  std::int64_t block = 0;  // fp8: rows and columns of a block; 0: scales by tensor or row
  std::string name;        // for reports: "gptq int4"
};

// None if the config has no quantization_config. Throws Error{unsupported} or Error{corrupt} naming
// the field, for anything that would have to be computed in another way.
// Sources: transformers' GPTQConfig, AwqConfig and FineGrainedFP8Config; compressed-tensors'
// QuantizationConfig.
std::optional<Quantization> parse_quantization(const JsonObject& config);

}  // namespace sluice
