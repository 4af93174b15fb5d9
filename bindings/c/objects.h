// The objects behind the handles of engines, sessions and text.
#pragma once

#include <atomic>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "bindings/c/handles.h"
#include "bindings/c/sluice.h"
#include "sluice/chat.h"
#include "sluice/constraint.h"
#include "sluice/engine.h"
#include "sluice/sampling.h"

namespace sluice::c {

struct EngineObject {
  static constexpr Kind kKind{"sluice_engine"};
  Engine engine;
  std::filesystem::path model;
  std::mutex mutex;
  // Made when they are asked for; under the mutex.
  std::optional<ChatFormat> format;
  std::optional<Constraints> constraints;
};

struct SessionObject {
  static constexpr Kind kKind{"sluice_session"};
  std::shared_ptr<EngineObject> engine;
  Session session;
  Use::Owner owner;

  std::size_t vocabulary() const {
    return static_cast<std::size_t>(engine->engine.info().vocabulary);
  }
};

struct CancelObject {
  static constexpr Kind kKind{"sluice_cancel"};
  std::atomic<bool> is_set = false;
};

struct ConstraintObject {
  static constexpr Kind kKind{"sluice_constraint"};
  std::shared_ptr<EngineObject> engine;
  Constraint constraint;
};

// The constraint of an answer of `engine`; none for NULL. Throws Error{usage} for one of another
// engine.
std::optional<Constraint> constraint_of(sluice_constraint* handle, const EngineObject& engine);

// The policies of a session, a batcher or a cache; `parse` gives one by its text.
template <typename Parse>
std::vector<Policy> policies(const char* const* texts, std::size_t count, const Parse& parse) {
  std::vector<Policy> all;
  for (std::size_t i = 0; i < count; ++i) {
    if (texts == nullptr || texts[i] == nullptr) {
      throw Error(ErrorCode::usage, "`policies`: NULL instead of a text");
    }
    all.push_back(parse(texts[i]));
  }
  return all;
}

SamplingParams sampling_params(const sluice_sampling* sampling);
sluice_finish finish_of(std::optional<FinishReason> reason);

}  // namespace sluice::c
