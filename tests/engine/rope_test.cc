#include "engine/rope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "tests/io/test_files.h"

namespace sluice {
namespace {

using Json = nlohmann::json;
using testing::expect_error;

RopeConfig parse(const Json& config) {
  return parse_rope(JsonObject(config, "config.json"), 40960);
}

const Llama3Scaling* llama3_of(const RopeConfig& rope) {
  return std::get_if<Llama3Scaling>(&rope.scaling);
}

void expect_refused(ErrorCode code, const Json& config, const std::string& part) {
  expect_error(code, "config.json: " + part, [&] { parse(config); });
}

Json llama3() {
  return {{"rope_type", "llama3"},
          {"factor", 8.0},
          {"low_freq_factor", 1.0},
          {"high_freq_factor", 4.0},
          {"original_max_position_embeddings", 8192}};
}

Json llama3_with(const std::string& key, const Json& value) {
  Json scaling = llama3();
  scaling[key] = value;
  return scaling;
}

TEST(Rope, BothStylesSayTheSame) {
  const RopeConfig old_style = parse({{"rope_theta", 500000.0}, {"rope_scaling", llama3()}});
  const RopeConfig new_style = parse({{"rope_parameters", llama3_with("rope_theta", 500000.0)}});
  EXPECT_EQ(new_style.theta, 500000.0);
  ASSERT_TRUE(llama3_of(new_style));
  EXPECT_EQ(llama3_of(new_style)->high_freq_factor, 4.0);
  EXPECT_EQ(inverse_frequencies(old_style, 128), inverse_frequencies(new_style, 128));

  Json older = llama3_with("type", "llama3");
  older.erase("rope_type");
  EXPECT_TRUE(llama3_of(parse({{"rope_scaling", older}})));
  expect_refused(ErrorCode::corrupt, {{"rope_parameters", llama3()}, {"rope_scaling", llama3()}},
                 "rope_scaling stands beside rope_parameters");
}

// transformers 5, PreTrainedConfig.standardize_rope_params
TEST(Rope, TheOriginalContextMayStandElsewhere) {
  const auto original = [](const Json& config) {
    return llama3_of(parse(config))->original_max_position_embeddings;
  };
  const char* const key = "original_max_position_embeddings";
  EXPECT_EQ(original({{"rope_scaling", llama3()}}), 8192.0);
  EXPECT_EQ(original({{key, 64}, {"rope_scaling", llama3()}}), 64.0);
  EXPECT_EQ(original({{"rope_scaling", llama3_with(key, nullptr)}}), 40960.0)
      << "max_position_embeddings";
}

TEST(Rope, IsPlainWhereNothingElseIsSaid) {
  const std::vector<Json> plain = {Json::object(),
                                   {{"rope_scaling", nullptr}},
                                   {{"rope_scaling", {{"type", "default"}}}},
                                   {{"rope_parameters", {{"rope_type", "default"}}}},
                                   {{"rope_parameters", Json::object()}}};
  for (const Json& config : plain) {
    EXPECT_EQ(parse(config).theta, 10000.0) << config;
    EXPECT_EQ(parse(config).scaling.index(), 0u) << config;
  }
  EXPECT_EQ(parse({{"rope_theta", 1e6}}).theta, 1e6);
  EXPECT_EQ(parse({{"rope_theta", 1e6}, {"rope_parameters", {{"rope_type", "default"}}}}).theta,
            1e6);
}

TEST(Rope, OtherTypesAreRefusedByName) {
  for (const std::string type : {"dynamic", "longrope", "mrope", "su"}) {
    expect_refused(ErrorCode::unsupported, {{"rope_scaling", {{"type", type}, {"factor", 4.0}}}},
                   "rope_scaling.type is '" + type + "'");
    expect_refused(ErrorCode::unsupported, {{"rope_parameters", {{"rope_type", type}}}},
                   "rope_parameters.rope_type is '" + type + "'");
  }
  expect_refused(ErrorCode::unsupported,
                 {{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}},
                 "rope_parameters differs from layer to layer");
  expect_refused(ErrorCode::unsupported, {{"rope_parameters", {{"partial_rotary_factor", 0.25}}}},
                 "rope_parameters.partial_rotary_factor is not 1");
  expect_refused(ErrorCode::corrupt, {{"rope_scaling", {{"factor", 4.0}}}},
                 "rope_scaling.rope_type is missing");
  expect_refused(ErrorCode::corrupt, {{"rope_scaling", "llama3"}},
                 "rope_scaling is a string, not an object");
}

TEST(Rope, NumbersAreBounded) {
  for (const std::string key : {"factor", "low_freq_factor", "high_freq_factor"}) {
    expect_refused(ErrorCode::corrupt, {{"rope_scaling", llama3_with(key, nullptr)}},
                   "rope_scaling." + key + " is missing");
  }
  for (const std::string key :
       {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    const std::string name = "rope_scaling." + key;
    expect_refused(ErrorCode::corrupt, {{"rope_scaling", llama3_with(key, 0)}}, name + " is 0");
    expect_refused(ErrorCode::corrupt, {{"rope_scaling", llama3_with(key, "8")}},
                   name + " is a string");
  }
  expect_refused(ErrorCode::corrupt, {{"rope_scaling", llama3_with("high_freq_factor", 1.0)}},
                 "rope_scaling.high_freq_factor is not larger");
  expect_refused(ErrorCode::corrupt, {{"rope_theta", -1.0}}, "rope_theta is -1");
  expect_refused(ErrorCode::corrupt, {{"rope_theta", 0.0}}, "rope_theta is 0");
}

// Frequencies in fp64, as the Llama 3.1 reference writes the rule: by the number of turns that a
// channel makes within the original context.
std::vector<double> reference_frequencies(double theta, int head_dim,
                                          const Llama3Scaling* scaling) {
  std::vector<double> result;
  for (int i = 0; i < head_dim / 2; ++i) {
    const double frequency = std::exp(-std::log(theta) * 2.0 * i / head_dim);
    double share = 1.0;  // of the frequency that stays
    if (scaling != nullptr) {
      const double turns =
          scaling->original_max_position_embeddings * frequency / (2.0 * std::numbers::pi);
      share = std::clamp((turns - scaling->low_freq_factor) /
                             (scaling->high_freq_factor - scaling->low_freq_factor),
                         0.0, 1.0);
    }
    const double factor = scaling == nullptr ? 1.0 : scaling->factor;
    result.push_back(frequency * (share + (1.0 - share) / factor));
  }
  return result;
}

// fp32 rounds the exponent i/d to 2^-25, which ln(theta) < 14 magnifies, and a few operations
// follow at 2^-24 each.
constexpr double kTolerance = 2e-6;

void expect_frequencies(const RopeConfig& rope, int head_dim) {
  const std::vector<double> expected = reference_frequencies(rope.theta, head_dim, llama3_of(rope));
  const std::vector<float> actual = inverse_frequencies(rope, head_dim);
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i] / expected[i], 1.0, kTolerance) << i;
  }
}

TEST(Rope, FrequenciesEqualTheReferenceInFp64) {
  for (const int head_dim : {32, 64, 80, 128, 256}) {
    SCOPED_TRACE(head_dim);
    expect_frequencies({10000.0, {}}, head_dim);
    expect_frequencies({500000.0, {}}, head_dim);
    expect_frequencies({500000.0, Llama3Scaling{8.0, 1.0, 4.0, 8192.0}}, head_dim);
    expect_frequencies({500000.0, Llama3Scaling{32.0, 1.0, 4.0, 8192.0}}, head_dim);
    expect_frequencies({500000.0, Llama3Scaling{8.0, 1.0, 4.0, 256.0}}, head_dim);
  }
}

TEST(Rope, Llama31StretchesLowFrequenciesOnly) {
  const std::vector<float> plain = inverse_frequencies({500000.0, {}}, 128);
  const std::vector<float> stretched = inverse_frequencies({500000.0, Llama3Scaling{8.0}}, 128);
  int kept = 0;
  int divided = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    kept += stretched[i] == plain[i] ? 1 : 0;
    divided += stretched[i] == plain[i] / 8.0f ? 1 : 0;
  }
  // Wavelengths below 2048 stay: 2 pi 500000^(i/64) < 2048 for i <= 28. Above 8192: i >= 35.
  EXPECT_EQ(kept, 29);
  EXPECT_EQ(divided, 29);
  EXPECT_EQ(stretched[0], 1.0f);
}

TEST(Rope, LinearScalingDividesAllFrequencies) {
  const RopeConfig linear = parse({{"rope_scaling", {{"type", "linear"}, {"factor", 8.0}}}});
  const std::vector<float> plain = inverse_frequencies({}, 128);
  const std::vector<float> actual = inverse_frequencies(linear, 128);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(actual[i], plain[i] / 8.0f);
  EXPECT_EQ(linear.attention_factor(), 1.0);
  expect_refused(ErrorCode::corrupt, {{"rope_scaling", {{"type", "linear"}}}},
                 "rope_scaling.factor is missing");
}

// As Qwen3's README has it.
Json yarn() {
  return {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32768}};
}

RopeConfig yarn_with(const Json& changes) {
  Json scaling = yarn();
  for (const auto& [key, value] : changes.items()) scaling[key] = value;
  return parse({{"rope_theta", 1e6}, {"rope_scaling", scaling}});
}

TEST(Rope, YarnKeepsHighFrequenciesAndDividesLowOnes) {
  const RopeConfig rope = yarn_with(Json::object());
  const std::vector<float> plain = inverse_frequencies({1e6, {}}, 128);
  const std::vector<float> actual = inverse_frequencies(rope, 128);
  // Channel i makes 32768 / (2 pi 1e6^(i/64)) turns: 32 at 23.6, 1 at 39.7.
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const double share = std::clamp((static_cast<double>(i) - 23.0) / (40.0 - 23.0), 0.0, 1.0);
    EXPECT_NEAR(actual[i] / plain[i], 1.0 - share + share / 4.0, 1e-6) << i;
  }
  // Without whole channels as bounds the ramp is another, but not beyond a channel.
  const std::vector<float> exact = inverse_frequencies(yarn_with({{"truncate", false}}), 128);
  EXPECT_EQ(exact[23], plain[23]);
  EXPECT_LT(exact[24], plain[24]);
  EXPECT_GT(exact[24], actual[24]);
  EXPECT_EQ(exact[40], actual[40]);
}

TEST(Rope, YarnsAttentionFactorFollowsFromWhatIsThere) {
  EXPECT_NEAR(yarn_with(Json::object()).attention_factor(), 0.1 * std::log(4.0) + 1.0, 1e-12);
  EXPECT_EQ(yarn_with({{"factor", 1.0}}).attention_factor(), 1.0);
  EXPECT_EQ(yarn_with({{"attention_factor", 1.5}}).attention_factor(), 1.5);
  EXPECT_NEAR(yarn_with({{"mscale", 0.5}}).attention_factor(), 0.1 * std::log(4.0) + 1.0, 1e-12)
      << "mscale counts beside mscale_all_dim";
  EXPECT_NEAR(yarn_with({{"mscale", 0.5}, {"mscale_all_dim", 2.0}}).attention_factor(),
              (0.05 * std::log(4.0) + 1.0) / (0.2 * std::log(4.0) + 1.0), 1e-12);
}

TEST(Rope, YarnsFactorIsTheRatioOfContextsWhereItIsNotGiven) {
  const auto factor = [](const Json& config) {
    return std::get<YarnScaling>(parse(config).scaling).factor;
  };
  EXPECT_EQ(
      factor(
          {{"rope_scaling",
            {{"type", "yarn"}, {"factor", nullptr}, {"original_max_position_embeddings", 8192}}}}),
      5.0);
  EXPECT_EQ(factor({{"rope_scaling", {{"type", "yarn"}}}}), 1.0);
  EXPECT_EQ(
      factor({{"original_max_position_embeddings", 4096}, {"rope_scaling", {{"type", "yarn"}}}}),
      10.0);
}

TEST(Rope, YarnsNumbersAreBounded) {
  const auto refused = [](const Json& changes, const std::string& part) {
    expect_error(ErrorCode::corrupt, "config.json: rope_scaling." + part,
                 [&] { yarn_with(changes); });
  };
  refused({{"factor", 0.5}}, "factor is 0.5");
  refused({{"factor", "4"}}, "factor is a string");
  refused({{"original_max_position_embeddings", 0}}, "original_max_position_embeddings is 0");
  refused({{"beta_fast", 0.5}}, "beta_fast is smaller than beta_slow");
  refused({{"beta_slow", 0}}, "beta_slow is 0");
  refused({{"attention_factor", 0}}, "attention_factor is 0");
  refused({{"truncate", 1}}, "truncate is a number");
  refused({{"rope_theta", 1.0}}, "rope_theta is 1, with which yarn has no frequencies");
}

}  // namespace
}  // namespace sluice
