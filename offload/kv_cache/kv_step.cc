#include <algorithm>
#include <string>
#include <utility>

#include "lib/current_error.h"
#include "offload/kv_cache/kv_cache_impl.h"

namespace sluice {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::usage, message); }

std::string name_of(int layer) { return "layer " + std::to_string(layer); }

}  // namespace

KvStep::Impl::Impl(std::shared_ptr<KvCache::Impl> owner,
                   std::vector<std::shared_ptr<KvSequence::Impl>> of_sequences, Phase of_phase)
    : cache(std::move(owner)),
      sequences(std::move(of_sequences)),
      phase(of_phase),
      appended(static_cast<std::size_t>(shape().layers)),
      attended(appended) {}

KvStep::Impl::~Impl() {
  if (!is_under_way) return;
  const std::lock_guard lock(cache->mutex);
  fail_all({ErrorCode::internal, "its step was not ended"});
  // Waits, so that this step's work is done before the next step reports.
  try {
    cache->pool->queue().synchronize();
  } catch (const Error& error) {
    fail_all(error);
  }
  cache->end_step();
}

KvStep KvStep::Impl::begin(std::shared_ptr<KvCache::Impl> cache,
                           std::vector<std::shared_ptr<KvSequence::Impl>> sequences, Phase phase,
                           std::optional<std::int64_t> tokens) {
  auto step = std::make_unique<Impl>(std::move(cache), std::move(sequences), phase);
  const auto lock = step->cache->between_steps();
  std::vector<KvSession*> sessions;
  for (const auto& sequence : step->sequences) sessions.push_back(&sequence->usable());
  try {
    if (tokens) {
      step->solo.emplace(*sessions.front(), phase, *tokens);
    } else {
      step->batch.emplace(sessions);
    }
  } catch (...) {
    const Error error = current_error();
    for (const auto& sequence : step->sequences) {
      if (sequence->kv->in_step()) sequence->failure = error;
    }
    throw;
  }
  step->tokens = tokens.value_or(static_cast<std::int64_t>(sessions.size()));
  step->is_under_way = true;
  step->cache->stepping = std::this_thread::get_id();
  return KvStep(std::move(step));
}

void KvStep::Impl::require_under_way() const {
  if (!is_under_way) refuse("the step is over; begin_step() makes another");
}

std::optional<Error> KvStep::Impl::failure_of_all() const {
  for (const auto& sequence : sequences) {
    if (!sequence->failure) return std::nullopt;
  }
  return sequences.front()->failure;
}

void KvStep::Impl::fail_all(const Error& error) {
  for (const auto& sequence : sequences) {
    if (!sequence->failure) sequence->failure = error;
  }
}

void KvStep::Impl::do_or_fail(const auto& work) {
  try {
    return work();
  } catch (...) {
    fail_all(current_error());
  }
  // Waits, because issued work may still write to the caller's memory.
  try {
    cache->pool->queue().synchronize();
  } catch (const Error& error) {
    fail_all(error);
  }
  throw Error(*failure_of_all());
}

void KvStep::Impl::require_layer(int layer) const {
  if (const auto failure = failure_of_all()) throw Error(*failure);
  if (layer >= 0 && layer < shape().layers) return;
  refuse(name_of(layer) + ": there are 0 to " + std::to_string(shape().layers - 1));
}

// Layers that reuse a selection come after the one that makes it.
void KvStep::Impl::require_selection(int layer) const {
  const Policy& policy = session().policy();
  if (phase != Phase::decode || policy.is_dense(layer)) return;
  int source = layer;
  while (source > 0 && !policy.selects(source)) --source;
  if (source == layer || attended[static_cast<std::size_t>(source)]) return;
  refuse(name_of(layer) + " reuses the selection of " + name_of(source) +
         ", which was not attended yet in this step");
}

void KvStep::Impl::require_complete() const {
  for (int layer = 0; layer < shape().layers; ++layer) {
    if (!appended[static_cast<std::size_t>(layer)]) {
      refuse(name_of(layer) + " has no rows of this step yet");
    }
    if (phase == Phase::decode && !attended[static_cast<std::size_t>(layer)]) {
      refuse(name_of(layer) + " was not attended in this step, which decodes");
    }
  }
}

bool KvStep::Impl::waits(std::initializer_list<Tier> arrays) const {
  return cache->waits || std::find(arrays.begin(), arrays.end(), Tier::host) != arrays.end();
}

void KvStep::Impl::fail_bad(int layer, std::int64_t token,
                            const std::optional<CallerArrays::Bad>& bad) {
  KvSequence::Impl& sequence = *sequences[batch ? static_cast<std::size_t>(token) : 0];
  if (!bad || sequence.failure) return;
  sequence.failure = Error(
      ErrorCode::numeric, std::string("the ") + bad->what + " of " + name_of(layer) + ", KV head " +
                              std::to_string(bad->kv_head) + ", token " + std::to_string(token) +
                              " of the step, are NaN, infinite or too large for the rows");
}

void KvStep::Impl::fail_bad_rows(int layer) {
  for (std::int64_t token = 0; token < tokens; ++token) {
    fail_bad(layer, token, cache->arrays.bad_rows(layer, tokens, token));
  }
  if (const auto failure = failure_of_all()) throw Error(*failure);
}

void KvStep::Impl::fail_bad_queries(int layer) {
  for (std::int64_t token = 0; token < tokens; ++token) {
    fail_bad(layer, token, cache->arrays.bad_queries(layer, token));
  }
  if (const auto failure = failure_of_all()) throw Error(*failure);
}

void KvStep::Impl::append(int layer, const KvInput& keys, const KvInput& values) {
  require_layer(layer);
  if (appended[static_cast<std::size_t>(layer)]) {
    refuse(name_of(layer) + " has its rows of this step already");
  }
  cache->arrays.require("keys", keys, shape().kv_heads, tokens);
  cache->arrays.require("values", values, shape().kv_heads, tokens);
  const bool waits = this->waits({keys.layout.tier, values.layout.tier});
  do_or_fail([&] {
    const NewRows rows = cache->arrays.read_rows(layer, keys, values, tokens);
    if (batch) {
      batch->append(layer, rows);
    } else {
      solo->append(layer, rows);
    }
    if (waits) cache->pool->queue().synchronize();
  });
  appended[static_cast<std::size_t>(layer)] = true;
  latest = layer;
  if (waits) fail_bad_rows(layer);
}

void KvStep::Impl::attend(int layer, const KvInput& input, const KvOutput& out, float* lse) {
  require_layer(layer);
  if (layer != latest) refuse(name_of(layer) + " is attended right after its rows were appended");
  if (attended[static_cast<std::size_t>(layer)]) {
    refuse(name_of(layer) + " was attended in this step already");
  }
  require_selection(layer);
  cache->arrays.require("queries", input, shape().query_heads, tokens);
  cache->arrays.require("out", out, shape().query_heads, tokens);
  const bool waits = this->waits({input.layout.tier, out.layout.tier});
  do_or_fail([&] {
    const Queries queries = cache->arrays.read_queries(layer, input, tokens);
    if (batch) {
      batch->attend(layer, queries);
    } else {
      solo->attend(layer, queries);
    }
    cache->arrays.write(out, lse, tokens);
    if (waits) cache->pool->queue().synchronize();
  });
  attended[static_cast<std::size_t>(layer)] = true;
  if (waits) fail_bad_queries(layer);
}

// Reports the errors that calls on a caller's stream did not wait for.
void KvStep::Impl::fail_bad_of_all() {
  if (cache->waits) return;
  cache->pool->queue().synchronize();
  for (int layer = 0; layer < shape().layers; ++layer) {
    const auto at = static_cast<std::size_t>(layer);
    if (appended[at]) fail_bad_rows(layer);
    if (attended[at]) fail_bad_queries(layer);
  }
}

std::optional<Error> KvStep::Impl::end() {
  if (const auto failure = failure_of_all()) return failure;
  require_complete();
  std::vector<std::optional<Error>> outcomes(sequences.size());
  try {
    do_or_fail([&] {
      fail_bad_of_all();
      if (batch) {
        batch->issue_report();
        outcomes = batch->end();
      } else {
        solo->end();
      }
    });
  } catch (const Error&) {
    return failure_of_all();
  }
  std::optional<Error> first;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    std::optional<Error>& failure = sequences[i]->failure;
    if (!failure) failure = outcomes[i];
    if (!first) first = failure;
  }
  return first;
}

KvStep::KvStep(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KvStep::KvStep(KvStep&&) noexcept = default;
KvStep& KvStep::operator=(KvStep&&) noexcept = default;
KvStep::~KvStep() = default;

KvStep::Impl& KvStep::impl() const {
  if (impl_ == nullptr) refuse("a step that was moved from");
  return *impl_;
}

void KvStep::append(int layer, const KvInput& keys, const KvInput& values) {
  const std::lock_guard lock(impl().cache->mutex);
  impl_->require_under_way();
  impl_->append(layer, keys, values);
}

void KvStep::attend(int layer, const KvInput& queries, const KvOutput& out, float* lse) {
  const std::lock_guard lock(impl().cache->mutex);
  impl_->require_under_way();
  impl_->attend(layer, queries, out, lse);
}

void KvStep::end() {
  Impl& step = impl();
  std::optional<Error> failure;
  // Sequences whose handles are gone end with the step; their destructors wait for the mutex.
  std::vector<std::shared_ptr<KvSequence::Impl>> sequences;
  {
    const std::lock_guard lock(step.cache->mutex);
    step.require_under_way();
    failure = step.end();
    step.is_under_way = false;
    step.solo.reset();
    step.batch.reset();
    sequences = std::move(step.sequences);
    step.cache->end_step();
  }
  if (failure) throw Error(*failure);
}

}  // namespace sluice
