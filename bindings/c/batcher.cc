// Batcher and streams.
#include "sluice/batcher.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

#include "bindings/c/call.h"
#include "bindings/c/objects.h"

namespace sluice::c {
namespace {

// A century; a longer wait could overflow a clock.
constexpr std::int64_t kMostMs = std::int64_t{100} * 365 * 24 * 3600 * 1000;

struct BatcherObject {
  static constexpr Kind kKind{"sluice_batcher"};

  BatcherObject(std::shared_ptr<EngineObject> of, const BatcherOptions& options)
      : engine(std::move(of)), batcher(engine->engine, options) {}

  std::shared_ptr<EngineObject> engine;
  Batcher batcher;
};

// Ends the use of a caller's mask, whose `user` need not outlive the stream's handle.
struct MaskUse {
  std::recursive_mutex mutex;  // a mask may free its stream
  bool is_over = false;
};

struct StreamObject {
  static constexpr Kind kKind{"sluice_stream"};
  Stream stream;
  std::shared_ptr<MaskUse> mask;
  bool has_logprobs = false;
  Use::Owner owner;
  // The newest piece, for the pointers that callers get.
  Piece piece;
  std::vector<std::int32_t> tokens;
  std::vector<float> logprobs;
};

std::chrono::milliseconds milliseconds(std::int64_t count, const char* name) {
  if (count < 0 || count > kMostMs) {
    refuse(std::string("`") + name + "` " + std::to_string(count) + ": give 0 to " +
           std::to_string(kMostMs) + " milliseconds");
  }
  return std::chrono::milliseconds(count);
}

// Calls load_prefixes() or save_prefixes().
template <auto kWork>
sluice_code prefixes(sluice_batcher* batcher, const char* directory,
                     sluice_saved_prefixes* result) {
  return call([&] {
    const auto object = find<BatcherObject>(batcher);
    if (result != nullptr) require_struct(result, "result");
    const SavedPrefixes found = (object->batcher.*kWork)(need(directory, "directory"));
    if (result == nullptr) return;
    const auto skipped = static_cast<std::int64_t>(found.skipped.size());
    write(result, {0, found.sessions, found.tokens, skipped});
  });
}

BatcherOptions batcher_options(const Engine& engine, const sluice_batcher_options& from) {
  BatcherOptions to;
  to.context = from.context;
  to.policies = policies(from.policies, from.policy_count,
                         [&](const char* text) { return engine.policy(text); });
  if (from.running != 0) to.running = from.running;
  if (from.no_prefix_cache != 0) to.cached = 0;
  to.tokens = from.tokens;
  if (from.queued < 0) refuse("`queued` is negative");
  if (from.queued != 0) to.queued = static_cast<std::size_t>(from.queued);
  to.prefill_ms = from.prefill_ms;
  to.device_memory = set(from.device_memory);
  to.host_memory = set(from.host_memory);
  to.loads_prefixes = from.loads_prefixes != 0;
  to.indexed_tokens = from.indexed_tokens;
  return to;
}

LogitRules rules_of(const sluice_request& from, const std::shared_ptr<MaskUse>& use) {
  LogitRules to;
  to.presence_penalty = from.presence_penalty;
  to.frequency_penalty = from.frequency_penalty;
  for (const sluice_bias& bias : array(from.bias, from.bias_count, "bias")) {
    to.bias.push_back({bias.token, bias.bias});
  }
  if (from.mask == nullptr) return to;
  to.mask = [use, mask = from.mask, user = from.mask_user](std::span<const TokenId> answer,
                                                           std::span<float> logits) {
    const std::lock_guard lock(use->mutex);
    if (use->is_over) return;
    if (mask(user, answer.data(), answer.size(), logits.data(), logits.size()) != 0) {
      refuse("the mask ended the request");
    }
  };
  return to;
}

Request request_of(const EngineObject& engine, const sluice_request& from,
                   const std::shared_ptr<MaskUse>& use) {
  Request to;
  to.prompt = copy(from.prompt, from.prompt_count, "prompt");
  to.sampling = sampling_params(from.sampling);
  to.rules = rules_of(from, use);
  to.end_tokens = copy(from.end_tokens, from.end_token_count, "end_tokens");
  to.ignore_eos = from.ignore_eos != 0;
  if (from.choices != 0) to.choices = from.choices;
  if (from.policy != nullptr) to.policy = engine.engine.policy(from.policy);
  to.priority = from.priority;
  to.waits = from.no_wait == 0;
  if (from.timeout_ms != 0) {
    to.deadline = std::chrono::steady_clock::now() + milliseconds(from.timeout_ms, "timeout_ms");
  }
  if (from.logprobs != 0) to.logprobs = 0;
  to.constraint = constraint_of(from.constraint, engine);
  return to;
}

sluice_piece show(StreamObject& object, Piece piece) {
  object.piece = std::move(piece);
  object.tokens.clear();
  object.logprobs.clear();
  for (const ScoredToken& scored : object.piece.tokens) {
    object.tokens.push_back(scored.token);
    object.logprobs.push_back(scored.logprob);
  }
  sluice_piece to{};
  to.state = SLUICE_PIECE;
  to.choice = object.piece.choice;
  to.text = object.piece.text.c_str();
  to.text_bytes = object.piece.text.size();
  to.tokens = object.tokens.data();
  to.token_count = object.tokens.size();
  to.logprobs = object.has_logprobs ? object.logprobs.data() : nullptr;
  to.finish = finish_of(object.piece.finish);
  return to;
}

sluice_batcher_stats stats_of(const BatcherStats& from) {
  sluice_batcher_stats to{};
  to.submitted = from.submitted;
  to.refused = from.refused;
  to.failed = from.failed;
  to.prompt_tokens = from.prompt_tokens;
  to.reused_tokens = from.reused_tokens;
  to.answer_tokens = from.answer_tokens;
  to.preemptions = from.preemptions;
  to.steps = from.steps;
  to.queued = from.queued;
  to.running = from.running;
  to.cached = from.cached;
  to.free_tokens = from.free_tokens;
  to.planned_tokens = from.planned_tokens;
  return to;
}

}  // namespace
}  // namespace sluice::c

using namespace sluice::c;  // NOLINT(google-build-using-namespace)

sluice_code sluice_batcher_open(sluice_engine* engine, const sluice_batcher_options* options,
                                sluice_batcher** batcher) {
  return call([&] {
    const auto object = find<EngineObject>(engine);
    need(batcher, "batcher");
    const auto to = batcher_options(object->engine, read(options, "options"));
    *batcher = add<BatcherObject, sluice_batcher>(std::make_shared<BatcherObject>(object, to));
  });
}

sluice_code sluice_batcher_free(sluice_batcher* batcher) {
  return call([&] { take<BatcherObject>(batcher); });
}

sluice_code sluice_batcher_submit(sluice_batcher* batcher, const sluice_request* request,
                                  sluice_stream** stream) {
  return call([&] {
    const auto object = find<BatcherObject>(batcher);
    need(stream, "stream");
    auto use = std::make_shared<MaskUse>();
    sluice::Request made = request_of(*object->engine, read(request, "request"), use);
    const bool has_logprobs = made.logprobs.has_value();
    auto streaming =
        std::make_shared<StreamObject>(object->batcher.submit(std::move(made)), use, has_logprobs);
    *stream = add<StreamObject, sluice_stream>(std::move(streaming));
  });
}

sluice_code sluice_batcher_drain(sluice_batcher* batcher, int64_t patience_ms) {
  return call([&] {
    find<BatcherObject>(batcher)->batcher.drain(milliseconds(patience_ms, "patience_ms"));
  });
}

sluice_code sluice_batcher_load_prefixes(sluice_batcher* batcher, const char* directory,
                                         sluice_saved_prefixes* result) {
  return prefixes<&sluice::Batcher::load_prefixes>(batcher, directory, result);
}

sluice_code sluice_batcher_save_prefixes(sluice_batcher* batcher, const char* directory,
                                         sluice_saved_prefixes* result) {
  return prefixes<&sluice::Batcher::save_prefixes>(batcher, directory, result);
}

sluice_code sluice_batcher_stats_read(sluice_batcher* batcher, sluice_batcher_stats* stats) {
  return call([&] {
    const auto object = find<BatcherObject>(batcher);
    require_struct(stats, "stats");
    write(stats, stats_of(object->batcher.stats()));
  });
}

sluice_code sluice_stream_next(sluice_stream* stream, int64_t timeout_ms, sluice_piece* piece) {
  return call([&] {
    const auto object = find<StreamObject>(stream);
    const Use use(object->owner, StreamObject::kKind.name);
    require_struct(piece, "piece");
    auto next = timeout_ms == -1
                    ? object->stream.next()
                    : object->stream.next_within(milliseconds(timeout_ms, "timeout_ms"));
    if (next) return write(piece, show(*object, std::move(*next)));
    sluice_piece none{};
    none.state = object->stream.ended() ? SLUICE_ENDED : SLUICE_NO_PIECE;
    write(piece, none);
  });
}

sluice_code sluice_stream_cancel(sluice_stream* stream) {
  return call([&] { find<StreamObject>(stream)->stream.cancel(); });
}

sluice_code sluice_stream_usage(sluice_stream* stream, sluice_usage* usage) {
  return call([&] {
    const auto object = find<StreamObject>(stream);
    require_struct(usage, "usage");
    const sluice::Usage from = object->stream.usage();
    write(usage, {0, from.prompt_tokens, from.reused_tokens, from.answer_tokens, from.preemptions,
                  from.queue_seconds, from.first_token_seconds, from.seconds});
  });
}

sluice_code sluice_stream_free(sluice_stream* stream) {
  return call([&] {
    const auto object = take<StreamObject>(stream);
    object->stream.cancel();
    const std::lock_guard lock(object->mask->mutex);
    object->mask->is_over = true;
  });
}
