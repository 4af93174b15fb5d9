// Outputs of Hugging Face transformers for the checkpoints of tests/data/golden (fp32 arithmetic on
// the stored bf16 weights).
#pragma once

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "sluice/types.h"

namespace sluice::testing {

struct Golden {
  std::string name;
  std::filesystem::path model;
  std::vector<TokenId> ids;
  double mean_nll = 0.0;
  std::vector<std::int64_t> positions;
  std::vector<std::vector<TokenId>> top_ids;   // [positions, 8], likeliest first
  std::vector<std::vector<float>> top_logits;  // [positions, 8], of `top_ids`
  std::vector<TokenId> greedy;                 // continuation after the last of `ids`
};

// Names the parameter in failure messages.
inline void PrintTo(const Golden& golden, std::ostream* out) { *out << golden.name; }

inline Golden parse_golden(const std::string& name, const std::filesystem::path& model,
                           const nlohmann::json& json) {
  return {name,
          model,
          json.at("ids").get<std::vector<TokenId>>(),
          json.at("mean_nll").get<double>(),
          json.at("positions").get<std::vector<std::int64_t>>(),
          json.at("top_ids").get<std::vector<std::vector<TokenId>>>(),
          json.at("top_logits").get<std::vector<std::vector<float>>>(),
          json.at("greedy").get<std::vector<TokenId>>()};
}

inline std::vector<Golden> load_goldens() {
  const std::filesystem::path data = std::filesystem::path(SLUICE_TEST_DATA) / "golden";
  std::vector<Golden> goldens;
  for (const char* name : {"llama3_rope", "llama_d80", "llama_mqa128", "mistral", "qwen2", "qwen3",
                           "mistral_linear", "qwen3_yarn", "llama_mqa128_yarn"}) {
    std::ifstream file(data / name / "golden.json");
    goldens.push_back(parse_golden(name, data / name, nlohmann::json::parse(file)));
  }
  std::ifstream file(data / "sluice-22m.json");
  const nlohmann::json json = nlohmann::json::parse(file);
  const std::filesystem::path model =
      std::filesystem::path(SLUICE_SOURCE_DIR) / "models" / "sluice-22m";
  for (const char* name : {"prose_400", "needle_6k"}) {
    goldens.push_back(parse_golden(name, model, json.at(name)));
  }
  return goldens;
}

}  // namespace sluice::testing
