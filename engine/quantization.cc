#include "engine/quantization.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <string_view>

#include "lib/text.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kLeastGroup = 8;  // a word of 4-bit codes
constexpr std::int64_t kMostGroup = 1 << 16;
constexpr std::int64_t kFp8Block = 128;

bool is_empty(const Json& value) {
  return value.is_null() || value == false ||
         ((value.is_object() || value.is_array()) && value.empty());
}

void require_empty(const JsonObject& config, const char* key) {
  if (!config.has(key) || is_empty(config.value(key))) return;
  config.unsupported(key, "is given, which Sluice does not compute");
}

void require_false(const JsonObject& config, const char* key) {
  if (!config.has(key)) return;
  if (config.boolean(key, false)) config.unsupported(key, "is true, which Sluice does not compute");
}

// One of `known`, in any case; the first if not given.
std::string one_of(const JsonObject& config, const char* key,
                   std::initializer_list<std::string_view> known) {
  std::string value = config.string(key, std::string(*known.begin()));
  std::transform(value.begin(), value.end(), value.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (std::find(known.begin(), known.end(), value) != known.end()) return value;
  std::string list;
  for (const std::string_view each : known) {
    list += (list.empty() ? "" : " and ") + in_quotes(std::string(each));
  }
  config.unsupported(key, "is " + in_quotes(value) + ", but Sluice handles only " + list);
}

int bits_of(const JsonObject& config, const char* key) {
  const std::int64_t bits = config.integer(key, 1, 64);
  if (bits != 4 && bits != 8) {
    config.unsupported(key, "is " + std::to_string(bits) + ", but Sluice handles only 4 and 8");
  }
  return static_cast<int>(bits);
}

// -1 stands for whole rows.
std::int64_t group_of(const JsonObject& config) {
  const std::int64_t group = config.integer("group_size", -1, kMostGroup);
  if (group == -1) return 0;
  if (group < kLeastGroup || group % kLeastGroup != 0) {
    config.unsupported("group_size", "is " + std::to_string(group) +
                                         ", but Sluice handles multiples of 8, and -1");
  }
  return group;
}

Quantization gptq(const JsonObject& config) {
  Quantization result;
  result.method = QuantMethod::gptq;
  result.bits = bits_of(config, "bits");
  result.group = group_of(config);
  require_false(config, "desc_act");
  require_empty(config, "dynamic");
  one_of(config, "pack_dtype", {"int32"});
  const bool is_first = one_of(config, "checkpoint_format", {"gptq", "gptq_v2"}) == "gptq";
  result.zero_offset = is_first ? 1 : 0;
  result.name = "gptq int" + std::to_string(result.bits);
  return result;
}

Quantization awq(const JsonObject& config) {
  Quantization result;
  result.method = QuantMethod::awq;
  result.bits = bits_of(config, "bits");
  if (result.bits != 4) config.unsupported("bits", "is 8, but AWQ has 4");
  result.group = group_of(config);
  one_of(config, "version", {"gemm"});
  if (!config.boolean("zero_point", true)) {
    config.unsupported("zero_point", "is false, but AWQ checkpoints have zero points");
  }
  result.name = "awq int4";
  return result;
}

std::int64_t block_of(const JsonObject& config, const char* key) {
  if (!config.has(key)) return 0;
  if (config.value(key) != Json::array({kFp8Block, kFp8Block})) {
    config.unsupported(key, "is " + config.value(key).dump() + ", but Sluice handles [128,128]");
  }
  return kFp8Block;
}

Quantization fp8(const JsonObject& config) {
  Quantization result;
  one_of(config, "fmt", {"e4m3", "float8_e4m3fn"});
  result.block = block_of(config, "weight_block_size");
  result.name = "fp8 e4m3";
  return result;
}

Quantization float_scheme(const JsonObject& weights, const std::string& strategy) {
  Quantization result;
  if (bits_of(weights, "num_bits") != 8) {
    weights.unsupported("num_bits", "is 4, but Sluice handles floats of 8 bits");
  }
  if (strategy == "group") weights.unsupported("strategy", "is 'group' for floats");
  if (strategy == "block") {
    result.block = block_of(weights, "block_structure");
    if (result.block == 0) weights.corrupt("block_structure", "is missing");
  }
  result.name = "fp8 e4m3";
  return result;
}

Quantization int_scheme(const JsonObject& weights, const std::string& strategy) {
  Quantization result;
  result.method = QuantMethod::packed;
  result.bits = bits_of(weights, "num_bits");
  if (strategy == "tensor" || strategy == "block") {
    weights.unsupported("strategy", "is " + in_quotes(strategy) + " for integers");
  }
  if (strategy == "group") {
    result.group = group_of(weights);
    if (result.group == 0) weights.corrupt("group_size", "is -1 where strategy is 'group'");
  }
  result.name = "compressed-tensors int" + std::to_string(result.bits);
  return result;
}

Quantization scheme_of(const JsonObject& group, bool is_float) {
  require_empty(group, "output_activations");
  // Activations stay as they are, which for floats loses less than what the file asks for.
  if (!is_float) require_empty(group, "input_activations");
  if (!group.has("weights")) group.corrupt("weights", "is missing");
  const JsonObject weights = group.object("weights");
  require_false(weights, "dynamic");
  if (weights.has("actorder")) one_of(weights, "actorder", {"static", "weight"});
  one_of(weights, "type", {is_float ? std::string_view("float") : std::string_view("int")});
  const std::string strategy = one_of(weights, "strategy", {"tensor", "channel", "group", "block"});
  return is_float ? float_scheme(weights, strategy) : int_scheme(weights, strategy);
}

Quantization compressed_tensors(const JsonObject& config) {
  const std::string format =
      one_of(config, "format", {"dense", "pack-quantized", "float-quantized"});
  if (format == "dense") config.unsupported("format", "is missing or 'dense'");
  one_of(config, "quantization_status", {"compressed"});
  require_empty(config, "kv_cache_scheme");
  require_empty(config, "transform_config");
  if (config.has("sparsity_config")) {
    const JsonObject sparsity = config.object("sparsity_config");
    one_of(sparsity, "format", {"dense"});
  }
  const JsonObject groups = config.object("config_groups");
  const Json& all = config.value("config_groups");
  if (all.size() != 1) {
    config.unsupported("config_groups",
                       "has " + std::to_string(all.size()) + " groups, but Sluice handles one");
  }
  return scheme_of(groups.object(all.begin().key().c_str()), format == "float-quantized");
}

}  // namespace

std::optional<Quantization> parse_quantization(const JsonObject& config) {
  if (!config.has("quantization_config")) return std::nullopt;
  const JsonObject of = config.object("quantization_config");
  const std::string method = of.string("quant_method");
  if (method == "gptq") return gptq(of);
  if (method == "awq") return awq(of);
  if (method == "fp8") return fp8(of);
  if (method == "compressed-tensors") return compressed_tensors(of);
  of.unsupported("quant_method", "is " + in_quotes(method) +
                                     ", but Sluice handles 'gptq', 'awq', 'fp8' and "
                                     "'compressed-tensors'");
}

}  // namespace sluice
