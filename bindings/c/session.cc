// Sessions, and the generate loop.
#include <algorithm>
#include <memory>
#include <utility>

#include "bindings/c/call.h"
#include "bindings/c/objects.h"
#include "bindings/c/session_options.h"
#include "sluice/generate.h"

namespace sluice::c {
namespace {

// A session in use by this thread's call.
class UsedSession {
 public:
  explicit UsedSession(sluice_session* handle)
      : object_(find<SessionObject>(handle)), use_(object_->owner, SessionObject::kKind.name) {}

  SessionObject& object() { return *object_; }
  Session* operator->() { return &object_->session; }
  Session& operator*() { return object_->session; }
  std::size_t vocabulary() const { return object_->vocabulary(); }

 private:
  std::shared_ptr<SessionObject> object_;
  Use use_;
};

void open(std::shared_ptr<EngineObject> engine, Session session, sluice_session** to) {
  auto object = std::make_shared<SessionObject>(std::move(engine), std::move(session));
  *to = add<SessionObject, sluice_session>(std::move(object));
}

Progress progress_of(sluice_progress_callback callback, void* user) {
  if (callback == nullptr) return {};
  return [=](std::int64_t done, std::int64_t total) { return callback(user, done, total) == 0; };
}

// Looks at a cancel while the call that it belongs to runs; never stops if there is none.
Stop stop_of(std::shared_ptr<CancelObject> cancel) {
  if (cancel == nullptr) return {};
  return [cancel = std::move(cancel)] { return cancel->is_set.load(); };
}

std::shared_ptr<CancelObject> cancel_of(sluice_cancel* handle) {
  return handle != nullptr ? find<CancelObject>(handle) : nullptr;
}

// The options of a generate call, which ends once `cancel`, which may be null, is set, or a
// callback sets `has_ended`.
GenerateOptions generate_options(const sluice_generate_options& from,
                                 const std::shared_ptr<CancelObject>& cancel, bool& has_ended) {
  GenerateOptions options;
  options.sampling = sampling_params(from.sampling);
  options.end_tokens = copy(from.end_tokens, from.end_token_count, "end_tokens");
  options.ignore_eos = from.ignore_eos != 0;
  options.history = copy(from.history, from.history_count, "history");
  options.on_prefill = progress_of(from.on_progress, from.user);
  if (from.on_text != nullptr) {
    options.on_text = [&has_ended, user = from.user,
                       callback = from.on_text](std::string_view text) {
      if (has_ended) return;
      const std::string whole(text);  // with a NUL, for callers who print it
      has_ended = callback(user, whole.c_str(), whole.size()) != 0;
    };
  }
  if (cancel != nullptr || from.on_text != nullptr) {
    options.interrupt = [&has_ended, cancel] {
      return has_ended || (cancel != nullptr && cancel->is_set);
    };
  }
  return options;
}

sluice_generate_result result_of(const GenerateResult& from) {
  sluice_generate_result to{};
  to.finish = finish_of(from.reason);
  to.pending = from.pending.value_or(-1);
  to.answer_tokens = static_cast<std::int64_t>(from.tokens.size());
  to.prefill_tokens = from.timings.prefill_tokens;
  to.prefill_seconds = from.timings.prefill_seconds;
  to.first_token_seconds = from.timings.first_token_seconds;
  to.decode_seconds = from.timings.decode_seconds;
  to.drafted = from.drafts.drafted;
  to.accepted = from.drafts.accepted;
  to.recomputed_tokens = from.recomputed_tokens;
  return to;
}

}  // namespace

SamplingParams sampling_params(const sluice_sampling* sampling) {
  const sluice_sampling from = read(sampling, "sampling");
  SamplingParams to;
  to.temperature = from.temperature;
  if (from.top_p != 0.0) to.top_p = from.top_p;
  to.min_p = from.min_p;
  if (from.repetition_penalty != 0.0) to.repetition_penalty = from.repetition_penalty;
  to.top_k = from.top_k;
  to.max_tokens = from.max_tokens;
  to.seed = from.seed;
  to.stop = strings(from.stop, from.stop_count, "stop");
  return to;
}

sluice_finish finish_of(std::optional<FinishReason> reason) {
  return reason ? static_cast<sluice_finish>(static_cast<int>(*reason) + SLUICE_END_OF_TEXT)
                : SLUICE_NOT_FINISHED;
}
static_assert(static_cast<int>(FinishReason::end_of_text) == 0);
static_assert(static_cast<int>(FinishReason::deadline) + SLUICE_END_OF_TEXT == SLUICE_DEADLINE);

}  // namespace sluice::c

using namespace sluice::c;  // NOLINT(google-build-using-namespace)

sluice_code sluice_session_open(sluice_engine* engine, const sluice_session_options* options,
                                sluice_session** session) {
  return call([&] {
    const auto object = find<EngineObject>(engine);
    need(session, "session");
    open(object, object->engine.new_session(session_options(object->engine, options)), session);
  });
}

sluice_code sluice_session_fork(sluice_session* session, sluice_session** fork) {
  return call([&] {
    UsedSession used(session);
    need(fork, "fork");
    open(used.object().engine, used->fork(), fork);
  });
}

sluice_code sluice_session_sibling(sluice_session* session, sluice_session** sibling) {
  return call([&] {
    UsedSession used(session);
    need(sibling, "sibling");
    open(used.object().engine, used->sibling(), sibling);
  });
}

sluice_code sluice_session_free(sluice_session* session) {
  return call([&] { take<SessionObject>(session); });
}

sluice_code sluice_session_prefill(sluice_session* session, const int32_t* tokens, size_t count,
                                   sluice_progress_callback on_progress, void* user,
                                   sluice_cancel* cancel, float* logits, size_t capacity) {
  return call([&] {
    UsedSession used(session);
    require_floats(logits, capacity, used.vocabulary());
    const auto row = used->prefill(array(tokens, count, "tokens"), progress_of(on_progress, user),
                                   stop_of(cancel_of(cancel)));
    if (row.empty()) throw Ending{SLUICE_STOPPED, "the callback or `cancel` stopped the prompt"};
    if (logits != nullptr) std::copy(row.begin(), row.end(), logits);
  });
}

sluice_code sluice_session_recompute(sluice_session* session, sluice_progress_callback on_progress,
                                     void* user, sluice_cancel* cancel, float* logits,
                                     size_t capacity) {
  return call([&] {
    UsedSession used(session);
    require_floats(logits, capacity, used.vocabulary());
    if (used->length() == 0)
      throw sluice::Error(sluice::ErrorCode::prompt, "the session has no tokens");
    const auto row = used->recompute(progress_of(on_progress, user), stop_of(cancel_of(cancel)));
    if (row.empty()) throw Ending{SLUICE_STOPPED, "the callback or `cancel` stopped it"};
    if (logits != nullptr) std::copy(row.begin(), row.end(), logits);
  });
}

sluice_code sluice_session_decode(sluice_session* session, int32_t token, float* logits,
                                  size_t capacity) {
  return call([&] {
    UsedSession used(session);
    require_floats(logits, capacity, used.vocabulary());
    const auto row = used->decode(token);
    if (logits != nullptr) std::copy(row.begin(), row.end(), logits);
  });
}

sluice_code sluice_session_score(sluice_session* session, const int32_t* tokens, size_t count,
                                 float* logprobs, size_t capacity) {
  return call([&] {
    UsedSession used(session);
    if (count > 1) need(logprobs, "logprobs");
    require_floats(logprobs, capacity, count > 0 ? count - 1 : 0);
    const std::vector<float> scores = used->score(array(tokens, count, "tokens"));
    std::copy(scores.begin(), scores.end(), logprobs);
  });
}

sluice_code sluice_session_use(sluice_session* session, const char* policy) {
  return call([&] {
    UsedSession used(session);
    used->use(used.object().engine->engine.policy(need(policy, "policy")));
  });
}

sluice_code sluice_session_policy(sluice_session* session, char* text, size_t capacity,
                                  size_t* bytes) {
  return call([&] {
    UsedSession used(session);
    put(to_string(used->policy()), text, capacity, bytes);
  });
}

sluice_code sluice_session_truncate(sluice_session* session, int64_t length) {
  return call([&] { UsedSession(session)->truncate(length); });
}

sluice_code sluice_session_length(sluice_session* session, int64_t* length) {
  return call([&] {
    UsedSession used(session);
    *need(length, "length") = used->length();
  });
}

sluice_code sluice_session_tokens(sluice_session* session, int32_t* tokens, size_t capacity,
                                  size_t* count) {
  return call([&] {
    UsedSession used(session);
    put(used->tokens(), tokens, capacity, count);
  });
}

sluice_code sluice_session_save(sluice_session* session, const char* directory, const char* note,
                                size_t note_bytes) {
  return call([&] {
    UsedSession used(session);
    const auto text = array(note, note_bytes, "note");
    used->save(need(directory, "directory"), {text.data(), text.size()});
  });
}

sluice_code sluice_session_load(sluice_session* session, const char* directory) {
  return call([&] { UsedSession(session)->load(need(directory, "directory")); });
}

sluice_code sluice_saved_session(sluice_engine* engine, const char* directory, int64_t* tokens,
                                 char* note, size_t capacity, size_t* bytes) {
  return call([&] {
    const auto object = find<EngineObject>(engine);
    const sluice::SavedSession saved = object->engine.saved_session(need(directory, "directory"));
    if (tokens != nullptr) *tokens = static_cast<std::int64_t>(saved.tokens.size());
    put(saved.note, note, capacity, bytes);
  });
}

sluice_code sluice_session_ledger_json(sluice_session* session, char* json, size_t capacity,
                                       size_t* bytes) {
  return call([&] {
    UsedSession used(session);
    put(used->ledger().to_json(), json, capacity, bytes);
  });
}

sluice_code sluice_engine_step(sluice_engine* engine, sluice_session* const* sessions,
                               const int32_t* tokens, size_t count, float* logits, size_t capacity,
                               sluice_code* codes) {
  return call([&] {
    const auto object = find<EngineObject>(engine);
    const auto handles = array(sessions, count, "sessions");
    const auto ids = array(tokens, count, "tokens");
    if (count > 0) need(codes, "codes");
    std::vector<std::unique_ptr<UsedSession>> used;
    std::vector<sluice::StepToken> step;
    for (std::size_t i = 0; i < count; ++i) {
      used.push_back(std::make_unique<UsedSession>(handles[i]));
      step.push_back({&**used.back(), ids[i]});
    }
    const auto vocabulary = static_cast<std::size_t>(object->engine.info().vocabulary);
    require_floats(logits, capacity, count * vocabulary);
    const auto results = object->engine.step(step);
    for (std::size_t i = 0; i < count; ++i) {
      const sluice::StepResult& result = results[i];
      codes[i] = result.error ? call([&] { throw sluice::Error(*result.error); }) : SLUICE_OK;
      if (result.error || logits == nullptr) continue;
      std::copy(result.logits.begin(), result.logits.end(), logits + i * vocabulary);
    }
  });
}

sluice_code sluice_generate(sluice_session* session, const int32_t* prompt, size_t count,
                            const sluice_generate_options* options, int32_t* answer,
                            size_t capacity, sluice_generate_result* result) {
  return call([&] {
    UsedSession used(session);
    const sluice_generate_options from = read(options, "options");
    if (result != nullptr) require_struct(result, "result");
    bool has_ended = false;
    sluice::GenerateOptions generating = generate_options(from, cancel_of(from.cancel), has_ended);
    generating.constraint = constraint_of(from.constraint, *used.object().engine);
    sluice::LookupDrafter lookup;
    if (from.lookup_drafts != 0) {
      generating.drafter = &lookup;
      generating.drafts = from.lookup_drafts;
    }
    if (answer != nullptr) {
      const int most = std::max(generating.sampling.max_tokens, 0);
      require_capacity(static_cast<std::size_t>(most), capacity, "tokens");
    }
    const sluice::GenerateResult made = sluice::generate(
        used.object().engine->engine, *used, array(prompt, count, "prompt"), generating);
    if (answer != nullptr) std::copy(made.tokens.begin(), made.tokens.end(), answer);
    if (result != nullptr) write(result, result_of(made));
  });
}
