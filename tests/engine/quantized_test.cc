// Quantised safetensors: weights to the bit, as an encoder of the test's own packed them, and
// everything that is not computed refused by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/folder_source.h"
#include "lib/weight_code.h"
#include "sluice/engine.h"
#include "sluice/half.h"
#include "tests/io/test_files.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/random.h"
#include "tests/support/random_checkpoint.h"
#include "tests/support/temp_dir.h"

namespace sluice {
namespace {

using Json = nlohmann::json;
using testing::entry;
using testing::expect_error;
using testing::Random;
using Shape = std::vector<std::int64_t>;

// A safetensors file in the making.
class Tensors {
 public:
  void add(const std::string& name, const std::string& dtype, const Shape& shape,
           const std::string& bytes) {
    header_ += (header_.empty() ? "" : ",") +
               entry(name, dtype, Json(shape).dump(), data_.size(), data_.size() + bytes.size());
    data_ += bytes;
  }
  template <typename T>
  void add(const std::string& name, const std::string& dtype, const Shape& shape,
           const std::vector<T>& values) {
    add(name, dtype, shape,
        std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)));
  }
  std::string file() const { return testing::safetensors("{" + header_ + "}", data_); }

 private:
  std::string header_;
  std::string data_;
};

// A matrix [outputs, inputs] of codes, with scales [groups, outputs] and zeros to subtract.
struct Codes {
  std::int64_t outputs;
  std::int64_t inputs;
  std::int64_t group;
  std::vector<int> codes;             // [outputs, inputs]
  std::vector<int> zeros;             // [groups, outputs]
  std::vector<std::uint16_t> scales;  // f16 or bf16, the same

  std::int64_t groups() const { return inputs / group; }
  int code(std::int64_t row, std::int64_t column) const {
    return codes[static_cast<std::size_t>(row * inputs + column)];
  }
  int zero(std::int64_t row, std::int64_t g) const {
    return zeros[static_cast<std::size_t>(g * outputs + row)];
  }
  std::uint16_t scale(std::int64_t row, std::int64_t g) const {
    return scales[static_cast<std::size_t>(g * outputs + row)];
  }
};

Codes random_codes(Random& random, std::int64_t outputs, std::int64_t inputs, std::int64_t group,
                   int bits, bool is_f16, bool symmetric) {
  Codes result{outputs, inputs, group, {}, {}, {}};
  const int most = (1 << bits) - 1;
  for (std::int64_t i = 0; i < outputs * inputs; ++i) {
    result.codes.push_back(static_cast<int>(random.integer(0, most)));
  }
  for (std::int64_t i = 0; i < result.groups() * outputs; ++i) {
    result.zeros.push_back(symmetric ? (most + 1) / 2 : static_cast<int>(random.integer(1, most)));
    const float scale = std::exp(random.normal(1)[0]) / 50.0f;
    result.scales.push_back(is_f16 ? float_to_f16(scale) : float_to_bf16(scale));
  }
  return result;
}

// The weights by their definition, in fp64 and rounded once: the product of a scale of 11 bits and
// a difference of 9 is exact.
std::vector<std::uint16_t> weights_of(const Codes& c, bool is_f16) {
  std::vector<std::uint16_t> result;
  for (std::int64_t row = 0; row < c.outputs; ++row) {
    for (std::int64_t column = 0; column < c.inputs; ++column) {
      const std::int64_t g = column / c.group;
      const double scale = is_f16 ? f16_to_float(c.scale(row, g)) : bf16_to_float(c.scale(row, g));
      const double value = scale * (c.code(row, column) - c.zero(row, g));
      result.push_back(is_f16 ? float_to_f16(static_cast<float>(value))
                              : float_to_bf16(static_cast<float>(value)));
    }
  }
  return result;
}

// Words of `bits` a code, filled from `code(word, place)`, lowest bits first.
std::vector<std::uint32_t> pack(std::int64_t words, int bits,
                                const std::function<int(std::int64_t, int)>& code) {
  std::vector<std::uint32_t> result;
  for (std::int64_t word = 0; word < words; ++word) {
    std::uint32_t value = 0;
    for (int place = 0; place < 32 / bits; ++place) {
      value += static_cast<std::uint32_t>(code(word, place)) << (bits * place);
    }
    result.push_back(value);
  }
  return result;
}

void add_gptq(Tensors& to, const std::string& name, const Codes& c, int bits, int offset) {
  const int n = 32 / bits;
  to.add(name + ".qweight", "I32", {c.inputs / n, c.outputs},
         pack(c.inputs / n * c.outputs, bits, [&](std::int64_t word, int place) {
           return c.code(word % c.outputs, word / c.outputs * n + place);
         }));
  const std::int64_t width = c.outputs / n;
  to.add(name + ".qzeros", "I32", {c.groups(), width},
         pack(c.groups() * width, bits, [&](std::int64_t word, int place) {
           return c.zero(word % width * n + place, word / width) - offset;
         }));
  to.add(name + ".scales", "F16", {c.groups(), c.outputs}, c.scales);
  std::vector<std::int32_t> order;
  for (std::int64_t i = 0; i < c.inputs; ++i)
    order.push_back(static_cast<std::int32_t>(i / c.group));
  to.add(name + ".g_idx", "I32", {c.inputs}, order);
}

void add_awq(Tensors& to, const std::string& name, const Codes& c) {
  constexpr std::array kOrder = {0, 2, 4, 6, 1, 3, 5, 7};
  const std::int64_t width = c.outputs / 8;
  to.add(name + ".qweight", "I32", {c.inputs, width},
         pack(c.inputs * width, 4, [&](std::int64_t word, int place) {
           return c.code(word % width * 8 + kOrder.at(static_cast<std::size_t>(place)),
                         word / width);
         }));
  to.add(name + ".qzeros", "I32", {c.groups(), width},
         pack(c.groups() * width, 4, [&](std::int64_t word, int place) {
           return c.zero(word % width * 8 + kOrder.at(static_cast<std::size_t>(place)),
                         word / width);
         }));
  to.add(name + ".scales", "F16", {c.groups(), c.outputs}, c.scales);
}

void add_packed(Tensors& to, const std::string& name, const Codes& c, int bits, bool symmetric) {
  const int n = 32 / bits;
  const std::int64_t width = (c.inputs + n - 1) / n;
  to.add(name + ".weight_packed", "I32", {c.outputs, width},
         pack(c.outputs * width, bits, [&](std::int64_t word, int place) {
           const std::int64_t column = word % width * n + place;
           return column < c.inputs ? c.code(word / width, column) : 0;
         }));
  to.add(name + ".weight_shape", "I64", {2}, std::vector<std::int64_t>{c.outputs, c.inputs});
  std::vector<std::uint16_t> scales;
  for (std::int64_t row = 0; row < c.outputs; ++row) {
    for (std::int64_t g = 0; g < c.groups(); ++g) scales.push_back(c.scale(row, g));
  }
  to.add(name + ".weight_scale", "BF16", {c.outputs, c.groups()}, scales);
  if (symmetric) return;
  const std::int64_t rows = (c.outputs + n - 1) / n;
  to.add(name + ".weight_zero_point", "I32", {rows, c.groups()},
         pack(rows * c.groups(), bits, [&](std::int64_t word, int place) {
           const std::int64_t row = word / c.groups() * n + place;
           return row < c.outputs ? c.zero(row, word % c.groups()) : 0;
         }));
}

Json gptq_config(int bits, std::int64_t group, const char* format = "gptq") {
  return {{"quant_method", "gptq"}, {"bits", bits}, {"group_size", group},
          {"desc_act", false},      {"sym", true},  {"checkpoint_format", format}};
}

Json awq_config(std::int64_t group) {
  return {{"quant_method", "awq"},
          {"bits", 4},
          {"group_size", group},
          {"version", "gemm"},
          {"zero_point", true}};
}

Json packed_config(int bits, std::int64_t group) {
  Json weights = {{"num_bits", bits},
                  {"type", "int"},
                  {"symmetric", true},
                  {"dynamic", false},
                  {"actorder", nullptr}};
  weights["strategy"] = group > 0 ? "group" : "channel";
  weights["group_size"] = group > 0 ? Json(group) : Json();
  return {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"quantization_status", "compressed"},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", nullptr}}}}},
          {"ignore", {"lm_head"}}};
}

Json float_config(const char* strategy) {
  Json weights = {{"num_bits", 8}, {"type", "float"}, {"strategy", strategy}, {"symmetric", true}};
  if (std::string_view(strategy) == "block") weights["block_structure"] = {128, 128};
  return {
      {"quant_method", "compressed-tensors"},
      {"format", "float-quantized"},
      {"config_groups",
       {{"group_0",
         {{"weights", weights}, {"input_activations", {{"num_bits", 8}, {"dynamic", true}}}}}}}};
}

class Quantized : public ::testing::Test {
 protected:
  std::unique_ptr<const TensorSource> open(const Json& config, const Tensors& tensors) {
    directory_.write("config.json", Json{{"quantization_config", config}}.dump());
    directory_.write("model.safetensors", tensors.file());
    return FolderSource(directory_.path()).tensors();
  }

  // Reads the weight whole, and from odd places.
  void expect_weights(const TensorSource& source, const std::vector<std::uint16_t>& expected,
                      DType dtype, const Shape& shape) {
    const auto all = source.tensors();
    ASSERT_TRUE(all.contains("m.weight"));
    const SourceTensor& tensor = all.at("m.weight");
    EXPECT_EQ(tensor.info->dtype, dtype);
    EXPECT_EQ(tensor.info->shape, shape);
    EXPECT_EQ(all.size(), 1u);  // nothing of what it is made of is left
    const auto read = [&](std::size_t first, std::size_t count) {
      std::vector<std::uint16_t> part(count);
      source.read(tensor, first * 2, std::as_writable_bytes(std::span(part)));
      return part;
    };
    ASSERT_EQ(read(0, expected.size()), expected);
    Random random(9);
    for (int i = 0; i < 20; ++i) {
      const auto first = static_cast<std::size_t>(random.integer(0, std::ssize(expected) - 1));
      const auto count = static_cast<std::size_t>(
          random.integer(0, static_cast<std::int64_t>(expected.size() - first)));
      const auto at = expected.begin() + static_cast<std::ptrdiff_t>(first);
      ASSERT_EQ(read(first, count), std::vector(at, at + static_cast<std::ptrdiff_t>(count)))
          << first << " " << count;
    }
    if (tensor.code != WeightCode::elements) expect_codes(source, tensor, expected);
  }

  // Reads the rows' codes, and runs of them, in the tensor's own code and in int8. Their weights
  // are those expected before either was rounded.
  static void expect_codes(const TensorSource& source, const SourceTensor& tensor,
                           const std::vector<std::uint16_t>& expected) {
    const std::int64_t rows = tensor.info->shape[0];
    const std::int64_t inputs = tensor.info->shape[1];
    std::vector<float> weights(expected.size());
    std::transform(expected.begin(), expected.end(), weights.begin(),
                   *tensor.info->dtype == DType::f16 ? f16_to_float : bf16_to_float);
    float largest = 0.0f;
    for (const float weight : weights) largest = std::max(largest, std::abs(weight));
    for (const WeightFormat& format : {WeightFormat(tensor.code), WeightFormat(WeightCode::int8)}) {
      const std::size_t row_bytes = format.row_bytes(inputs);
      for (const std::int64_t first : {std::int64_t{0}, rows / 3, rows - 1}) {
        std::vector<std::byte> coded(static_cast<std::size_t>(rows - first) * row_bytes);
        source.read_codes(tensor, first, format.code, coded);
        std::vector<float> row(static_cast<std::size_t>(inputs));
        for (std::int64_t r = first; r < rows; ++r) {
          decode_row(coded.data() + static_cast<std::size_t>(r - first) * row_bytes, format, inputs,
                     row.data());
          for (std::int64_t i = 0; i < inputs; ++i) {
            const float weight = weights[static_cast<std::size_t>(r * inputs + i)];
            ASSERT_NEAR(row[static_cast<std::size_t>(i)], weight,
                        0x1p-8f * std::abs(weight) + 0x1p-10f * largest)
                << to_string(format) << " row " << r << " input " << i;
          }
        }
      }
    }
  }

  testing::TempDir directory_;
  Random random_{31};
};

TEST_F(Quantized, Gptq) {
  for (const int bits : {4, 8}) {
    for (const std::int64_t group : {32, 96}) {
      const Codes codes = random_codes(random_, 320, 96, group, bits, true, false);
      for (const char* format : {"gptq", "gptq_v2"}) {
        Tensors tensors;
        add_gptq(tensors, "m", codes, bits, std::string_view(format) == "gptq" ? 1 : 0);
        const auto source = open(gptq_config(bits, group == 96 ? -1 : group, format), tensors);
        expect_weights(*source, weights_of(codes, true), DType::f16, {320, 96});
        EXPECT_EQ(source->tensors().at("m.weight").code,
                  bits == 8 ? WeightCode::int8 : WeightCode::uint4);
      }
    }
  }
}

TEST_F(Quantized, Awq) {
  const Codes codes = random_codes(random_, 528, 128, 64, 4, true, false);
  Tensors tensors;
  add_awq(tensors, "m", codes);
  expect_weights(*open(awq_config(64), tensors), weights_of(codes, true), DType::f16, {528, 128});
}

TEST_F(Quantized, Packed) {
  for (const int bits : {4, 8}) {
    for (const bool symmetric : {true, false}) {
      const Codes groups = random_codes(random_, 42, 128, 32, bits, false, symmetric);
      Tensors tensors;
      add_packed(tensors, "m", groups, bits, symmetric);
      expect_weights(*open(packed_config(bits, 32), tensors), weights_of(groups, false),
                     DType::bf16, {42, 128});
      // Rows that end within a word.
      const Codes channel = random_codes(random_, 6, 91, 91, bits, false, symmetric);
      Tensors others;
      add_packed(others, "m", channel, bits, symmetric);
      expect_weights(*open(packed_config(bits, 0), others), weights_of(channel, false), DType::bf16,
                     {6, 91});
    }
  }
}

// Scales of coded rows are f16: where these would be coarse or infinite, weights are decoded.
TEST_F(Quantized, ScalesBeyondF16AreDecoded) {
  for (const float scale : {1e-6f, 1e3f}) {
    Codes codes = random_codes(random_, 6, 64, 32, 4, false, true);
    std::fill(codes.scales.begin(), codes.scales.end(), float_to_bf16(scale));
    Tensors tensors;
    add_packed(tensors, "m", codes, 4, true);
    const auto source = open(packed_config(4, 32), tensors);
    EXPECT_EQ(source->tensors().at("m.weight").code, WeightCode::elements) << scale;
    expect_weights(*source, weights_of(codes, false), DType::bf16, {6, 64});
  }
}

// E4M3 by its definition: 4 bits of exponent with bias 7, 3 of mantissa; no infinities.
double e4m3(int code) {
  const int exponent = code / 8 % 16;
  const double value = exponent == 0 ? code % 8 / 8.0 * std::pow(2.0, -6)
                                     : (1.0 + code % 8 / 8.0) * std::pow(2.0, exponent - 7);
  return code >= 128 ? -value : value;
}

TEST_F(Quantized, Fp8) {
  EXPECT_EQ(e4m3(0x7e), 448.0);
  EXPECT_EQ(e4m3(1), std::pow(2.0, -9));
  struct Case {
    Json config;
    const char* scales;
    Shape shape;
    std::int64_t rows, columns;  // that share a scale
  };
  const Json fp8 = {{"quant_method", "fp8"}, {"activation_scheme", "dynamic"}};
  Json blocks = fp8;
  blocks["weight_block_size"] = {128, 128};
  const std::vector<Case> cases = {
      {fp8, "weight_scale", {}, 300, 200},
      {fp8, "weight_scale", {1}, 300, 200},
      {float_config("tensor"), "weight_scale", {1}, 300, 200},
      {float_config("channel"), "weight_scale", {300, 1}, 1, 200},
      {float_config("block"), "weight_scale", {3, 2}, 128, 128},
      {blocks, "weight_scale_inv", {3, 2}, 128, 128},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.config.dump());
    std::vector<std::uint8_t> codes;
    for (int i = 0; i < 300 * 200; ++i) {
      const auto code = static_cast<std::uint8_t>(random_.integer(0, 255));
      codes.push_back(code % 128 == 127 ? 0 : code);
    }
    std::int64_t count = 1;
    for (const std::int64_t size : one.shape) count *= size;
    const std::vector<float> scales = random_.normal(count);
    std::vector<std::uint16_t> expected;
    for (std::int64_t row = 0; row < 300; ++row) {
      for (std::int64_t column = 0; column < 200; ++column) {
        const std::int64_t across = (200 + one.columns - 1) / one.columns;
        const float scale =
            scales[static_cast<std::size_t>(row / one.rows * across + column / one.columns)];
        const float code =
            static_cast<float>(e4m3(codes[static_cast<std::size_t>(row * 200 + column)]));
        expected.push_back(float_to_bf16(code * scale));
      }
    }
    Tensors tensors;
    tensors.add("m.weight", "F8_E4M3", {300, 200}, codes);
    tensors.add(std::string("m.") + one.scales, "F32", one.shape, scales);
    tensors.add("m.input_scale", "F32", {}, std::vector<float>{1.0f});
    expect_weights(*open(one.config, tensors), expected, DType::bf16, {300, 200});
  }
}

// ---- Refusals

TEST_F(Quantized, ConfigsThatAreNotComputedAreRefusedByName) {
  const Codes codes = random_codes(random_, 16, 64, 32, 4, true, false);
  Tensors gptq;
  add_gptq(gptq, "m", codes, 4, 1);
  const auto refuse = [&](Json config, const std::string& part,
                          ErrorCode code = ErrorCode::unsupported) {
    SCOPED_TRACE(config.dump());
    expect_error(code, part, [&] { open(config, gptq); });
  };
  const auto with = [](Json config, const char* key, const Json& value) {
    config[key] = value;
    return config;
  };
  const Json config = gptq_config(4, 32);
  open(config, gptq);
  refuse(with(config, "desc_act", true), "desc_act is true");
  refuse(with(config, "bits", 3), "bits is 3");
  refuse(with(config, "bits", -4), "bits", ErrorCode::corrupt);
  refuse(with(config, "group_size", 0), "group_size is 0");
  refuse(with(config, "group_size", 12), "group_size is 12");
  refuse(with(config, "group_size", 1e9), "group_size", ErrorCode::corrupt);
  refuse(with(config, "dynamic", {{"-:lm_head", 1}}), "dynamic is given");
  refuse(with(config, "checkpoint_format", "marlin"), "checkpoint_format is 'marlin'");
  refuse(with(config, "quant_method", "bitsandbytes"), "quant_method is 'bitsandbytes'");
  refuse(with(config, "quant_method", 3), "quant_method", ErrorCode::corrupt);
  refuse(Json::object(), "quant_method", ErrorCode::corrupt);
  refuse(with(awq_config(32), "version", "gemv"), "version is 'gemv'");
  refuse(with(awq_config(32), "zero_point", false), "zero_point is false");
  refuse(with(awq_config(32), "bits", 8), "bits is 8");
  refuse({{"quant_method", "fp8"}, {"fmt", "e5m2"}}, "fmt is 'e5m2'");
  refuse({{"quant_method", "fp8"}, {"weight_block_size", {64, 128}}}, "weight_block_size is [64");
  const Json packed = packed_config(4, 32);
  refuse(with(packed, "format", "marlin-24"), "format is 'marlin-24'");
  refuse(with(packed, "kv_cache_scheme", {{"num_bits", 8}}), "kv_cache_scheme is given");
  refuse(with(packed, "config_groups", Json::object()), "config_groups has 0 groups");
  refuse(with(packed, "sparsity_config", {{"format", "sparse-24-bitmask"}}), "sparse-24-bitmask");
  const auto with_weights = [&](const char* key, const Json& value) {
    Json changed = packed;
    changed["config_groups"]["group_0"]["weights"][key] = value;
    return changed;
  };
  refuse(with_weights("actorder", "group"), "actorder is 'group'");
  refuse(with_weights("num_bits", 2), "num_bits is 2");
  refuse(with_weights("type", "float"), "type is 'float'");
  refuse(with_weights("strategy", "tensor"), "strategy is 'tensor'");
  refuse(with_weights("group_size", -1), "group_size", ErrorCode::corrupt);
  Json activations = packed;
  activations["config_groups"]["group_0"]["input_activations"] = {{"num_bits", 8}};
  refuse(activations, "input_activations is given");
}

TEST_F(Quantized, TensorsThatContradictThemAreRefused) {
  const Codes codes = random_codes(random_, 16, 64, 32, 4, true, false);
  Codes damaged = codes;
  for (const int bad : {0x7e00, 0x7c00}) {  // NaN, infinity
    damaged.scales[3] = static_cast<std::uint16_t>(bad);
    Tensors tensors;
    add_gptq(tensors, "m", damaged, 4, 1);
    expect_error(ErrorCode::corrupt, "'m.scales' has a scale that is NaN or infinite",
                 [&] { open(gptq_config(4, 32), tensors); });
  }
  Tensors none;
  none.add("m.weight", "F16", {1, 1}, std::vector<std::uint16_t>{0});
  expect_error(ErrorCode::corrupt, "has no tensor of gptq int4",
               [&] { open(gptq_config(4, 32), none); });
  Tensors alone;
  alone.add("m.qweight", "I32", {8, 16}, std::vector<std::int32_t>(128));
  expect_error(ErrorCode::corrupt, "'m.qweight' has no 'm.scales'",
               [&] { open(gptq_config(4, 32), alone); });
  expect_error(ErrorCode::corrupt, "groups of 40 do not divide",
               [&] { open(gptq_config(4, 40), alone); });
  Tensors empty;
  empty.add("m.qweight", "I32", {0, 16}, std::vector<std::int32_t>());
  expect_error(ErrorCode::corrupt, "no matrix", [&] { open(gptq_config(4, 32), empty); });
  Tensors twisted;
  add_gptq(twisted, "m", random_codes(random_, 16, 64, 64, 4, true, false), 4, 1);
  expect_error(ErrorCode::corrupt, "has the shape [1, 16], not [2, 16]",
               [&] { open(gptq_config(4, 32), twisted); });
  Tensors ordered;
  Codes other = codes;
  add_gptq(ordered, "m", other, 4, 1);
  Tensors unordered;
  unordered.add("m.qweight", "I32", {8, 16}, std::vector<std::int32_t>(128));
  unordered.add("m.scales", "F16", {2, 16}, std::vector<std::uint16_t>(32));
  unordered.add("m.qzeros", "I32", {2, 2}, std::vector<std::int32_t>(4));
  std::vector<std::int32_t> order(64, 0);
  order[1] = 1;
  unordered.add("m.g_idx", "I32", {64}, order);
  expect_error(ErrorCode::unsupported, "'m.g_idx' puts input 1 into another group",
               [&] { open(gptq_config(4, 32), unordered); });
  Tensors shaped;
  shaped.add("m.weight_packed", "I32", {4, 8}, std::vector<std::int32_t>(32));
  shaped.add("m.weight_shape", "I64", {2}, std::vector<std::int64_t>{4, std::int64_t{1} << 60});
  expect_error(ErrorCode::corrupt, "'m.weight_shape' says",
               [&] { open(packed_config(4, 32), shaped); });
  Tensors scaled;
  scaled.add("m.weight", "F8_E4M3", {4, 8}, std::vector<std::uint8_t>(32));
  scaled.add("m.weight_scale", "F8_E4M3", {4}, std::vector<std::uint8_t>(4));
  expect_error(ErrorCode::corrupt, "'m.weight_scale' is F8_E4M3", [&] {
    open({{"quant_method", "fp8"}}, scaled);
  });
}

// ---- A model

// A quantised checkpoint gives the logits of the same weights in a plain one, to the bit.
TEST(QuantizedModel, GivesTheLogitsOfItsWeights) {
  using Model = testing::RandomCheckpoint;
  Random random(8);
  const Model like(1);  // for its config
  const Json config = Json::parse(testing::read_bytes(like.path() / "config.json"));
  Tensors plain;
  Tensors coded;
  const auto add_plain = [&](const std::string& name, const Shape& shape, float mean, float unit) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    std::vector<std::uint16_t> values;
    for (const float value : random.normal(count, unit))
      values.push_back(float_to_f16(mean + value));
    plain.add(name, "F16", shape, values);
    coded.add(name, "F16", shape, values);
  };
  const auto add_coded = [&](const std::string& name, std::int64_t outputs, std::int64_t inputs) {
    const Codes codes = random_codes(random, outputs, inputs, 32, 4, true, false);
    plain.add(name + ".weight", "F16", {outputs, inputs}, weights_of(codes, true));
    add_awq(coded, name, codes);
  };
  const std::int64_t hidden = Model::kHidden;
  const std::int64_t kv = std::int64_t{Model::kKvHeads} * Model::kHeadDim;
  const std::int64_t q = std::int64_t{Model::kHeads} * Model::kHeadDim;
  add_plain("model.embed_tokens.weight", {Model::kVocabulary, hidden}, 0.0f, 1.0f);
  add_plain("lm_head.weight", {Model::kVocabulary, hidden}, 0.0f, 0.125f);
  add_plain("model.norm.weight", {hidden}, 1.0f, 0.1f);
  for (int layer = 0; layer < Model::kLayers; ++layer) {
    const std::string name = "model.layers." + std::to_string(layer) + ".";
    add_plain(name + "input_layernorm.weight", {hidden}, 1.0f, 0.1f);
    add_plain(name + "post_attention_layernorm.weight", {hidden}, 1.0f, 0.1f);
    add_coded(name + "self_attn.q_proj", q, hidden);
    add_coded(name + "self_attn.k_proj", kv, hidden);
    add_coded(name + "self_attn.v_proj", kv, hidden);
    add_coded(name + "self_attn.o_proj", hidden, q);
    add_coded(name + "mlp.gate_proj", Model::kIntermediate, hidden);
    add_coded(name + "mlp.up_proj", Model::kIntermediate, hidden);
    add_coded(name + "mlp.down_proj", hidden, Model::kIntermediate);
  }
  testing::TempDir plain_folder;
  plain_folder.write("config.json", config.dump());
  plain_folder.write("model.safetensors", plain.file());
  testing::TempDir coded_folder;
  Json quantized = config;
  quantized["quantization_config"] = awq_config(32);
  coded_folder.write("config.json", quantized.dump());
  coded_folder.write("model.safetensors", coded.file());
  const auto logits_of = [](const testing::TempDir& folder, std::optional<WeightFormat> weights) {
    EngineConfig engine_config = testing::config_for();
    engine_config.model = folder.path();
    engine_config.weights = weights;
    Engine engine = Engine::open(engine_config);
    EXPECT_EQ(engine.info().weight_dtype, DType::f16);
    Session session = engine.new_session(64);
    return testing::copy_of(session.prefill(std::vector<TokenId>{3, 1, 4, 1, 5, 9}));
  };
  for (const WeightCode code : {WeightCode::elements, WeightCode::int8}) {
    const std::vector<float> logits = logits_of(plain_folder, code);
    EXPECT_EQ(logits, logits_of(coded_folder, code));
    EXPECT_GT(*std::max_element(logits.begin(), logits.end()), 0.0f);
  }
  // In the codes of the file, whose offsets are rounded to f16 and whose weights are not.
  EXPECT_LT(testing::largest_difference(logits_of(plain_folder, std::nullopt),
                                        logits_of(coded_folder, std::nullopt)),
            0.02);
}

}  // namespace
}  // namespace sluice
