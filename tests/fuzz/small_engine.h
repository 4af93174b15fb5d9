// A model of some hundred thousand random weights with a tokenizer of bytes, and its chat format,
// which last as long as the process.
#pragma once

#include "sluice/chat.h"
#include "sluice/engine.h"
#include "tests/support/chat_checkpoint.h"

namespace sluice::fuzz {

inline const std::filesystem::path& small_model() {
  static const testing::ChatCheckpoint checkpoint(testing::ChatCheckpoint::format("chatml"));
  return checkpoint.path();
}

inline Engine& small_engine() {
  static Engine engine = [] {
    EngineConfig config;
    config.model = small_model();
    config.threads = 1;
    config.chunk = 64;
    return Engine::open(config);
  }();
  return engine;
}

inline const ChatFormat& small_chat() {
  static const ChatFormat format = ChatFormat::load(small_model(), small_engine().tokenizer());
  return format;
}

}  // namespace sluice::fuzz
