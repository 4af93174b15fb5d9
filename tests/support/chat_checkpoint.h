// A small random model with a tokenizer of bytes and control tokens, and a chat template.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/byte_level.h"
#include "sluice/engine.h"
#include "tests/io/test_files.h"

namespace sluice::testing {

class ChatCheckpoint {
 public:
  static constexpr TokenId kVocabulary = 384;  // of golden/qwen3

  // `format`: an entry of chat_cases.json. Tokens `a` and `b` swap ids.
  explicit ChatCheckpoint(const nlohmann::json& format, TokenId a = 0, TokenId b = 0) {
    const std::filesystem::path golden = SLUICE_TEST_DATA "/golden/qwen3";
    for (const char* name : {"config.json", "model.safetensors"}) {
      std::filesystem::create_symlink(golden / name, directory_.path() / name);
    }
    directory_.write("tokenizer_config.json", format["config"].dump());
    directory_.write("tokenizer.json", tokenizer(a, b).dump());
  }

  const std::filesystem::path& path() const { return directory_.path(); }

  static nlohmann::json recorded() {
    return nlohmann::json::parse(read_bytes(SLUICE_TEST_DATA "/chat_cases.json"));
  }
  static nlohmann::json format(const std::string& name) {
    const nlohmann::json all = recorded();
    for (const nlohmann::json& entry : all["formats"]) {
      if (entry["name"] == name) return entry;
    }
    throw std::runtime_error("no format " + name);
  }

 private:
  // Byte tokens first, then the control tokens, then names for the model's other ids.
  static nlohmann::json tokenizer(TokenId a, TokenId b) {
    const auto id = [a, b](TokenId i) { return i == a ? b : i == b ? a : i; };
    nlohmann::json vocab = nlohmann::json::object();
    TokenId next = 0;
    for (; next < 256; ++next) vocab[byte_symbol(static_cast<std::uint8_t>(next))] = id(next);
    nlohmann::json added = nlohmann::json::array();
    const auto add = [&](const std::string& content, bool special) {
      vocab[content] = id(next);  // the id counts here, but not in added_tokens
      added.push_back({{"id", id(next++)}, {"content", content}, {"special", special}});
    };
    const nlohmann::json all = recorded();
    for (const nlohmann::json& token : all["tokenizer_patch"]["added_tokens"]) {
      add(token["content"], token["special"]);
    }
    while (next < kVocabulary) add("<" + std::to_string(next) + ">", false);
    return {{"added_tokens", added},
            {"normalizer", nullptr},
            {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
            {"post_processor", nullptr},
            {"decoder", {{"type", "ByteLevel"}}},
            {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}}};
  }

  TempDir directory_;
};

}  // namespace sluice::testing
