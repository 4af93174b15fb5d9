// Sessions of sluice-22m: its engine, tokens of a book, and helpers to inspect logits.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "sluice/engine.h"

namespace sluice::testing {

inline const std::filesystem::path kModel = SLUICE_SOURCE_DIR "/models/sluice-22m";

inline EngineConfig config_for(const std::string& device = "cpu") {
  EngineConfig config;
  config.model = kModel;
  config.device = device;
  config.compute = DType::f32;
  config.kv_dtype = device == "cpu" ? DType::f32 : DType::bf16;
  config.chunk = 128;
  return config;
}

inline std::vector<TokenId> book_tokens(const Engine& engine, std::size_t count) {
  std::ifstream file(SLUICE_TEST_DATA "/needle_6k.txt");
  std::stringstream text;
  text << file.rdbuf();
  std::vector<TokenId> tokens = engine.encode_prompt(text.str());
  tokens.resize(count);
  return tokens;
}

inline std::vector<float> copy_of(std::span<const float> logits) {
  return {logits.begin(), logits.end()};
}

inline TokenId likeliest(std::span<const float> logits) {
  return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// The margin of the likeliest token over the next.
inline float lead(std::vector<float> logits) {
  std::nth_element(logits.begin(), logits.begin() + 1, logits.end(), std::greater<>());
  return logits[0] - logits[1];
}

// Greedy continuation of a prompt.
inline std::vector<TokenId> continuation(Session& session, std::span<const TokenId> prompt,
                                         int count) {
  std::vector<TokenId> tokens = {likeliest(session.prefill(prompt))};
  while (static_cast<int>(tokens.size()) < count) {
    tokens.push_back(likeliest(session.decode(tokens.back())));
  }
  return tokens;
}

}  // namespace sluice::testing
