// Made-up queries, keys and values for every position and layer, the same however they are run.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <vector>

#include "offload/step/kv_batch.h"
#include "offload/step/kv_prompt.h"
#include "offload/step/kv_session.h"
#include "offload/step/solo_step.h"
#include "tests/support/expect.h"
#include "tests/support/random.h"

namespace sluice::testing {

class Script {
 public:
  Script(const KvShape& shape, std::int64_t tokens, std::uint64_t seed) : shape_(shape) {
    Random random(seed);
    for (int layer = 0; layer < shape.layers; ++layer) {
      q_.push_back(random.normal(tokens * query_width(), 2.0f));
      k_.push_back(random.normal(tokens * key_width()));
      v_.push_back(random.normal(tokens * key_width()));
    }
    guess();
  }

  const KvShape& shape() const { return shape_; }
  std::int64_t query_width() const { return std::int64_t{shape_.query_heads} * shape_.head_dim; }
  std::int64_t key_width() const { return std::int64_t{shape_.kv_heads} * shape_.head_dim; }
  const float* q(std::size_t layer, std::int64_t at) const {
    return q_[layer].data() + at * query_width();
  }
  // What an earlier hidden state makes of q: like it, and not the same.
  const float* early_q(std::size_t layer, std::int64_t at) const {
    return early_q_[layer].data() + at * query_width();
  }
  const float* k(std::size_t layer, std::int64_t at) const {
    return k_[layer].data() + at * key_width();
  }
  const float* v(std::size_t layer, std::int64_t at) const {
    return v_[layer].data() + at * key_width();
  }

  void damage_key(int layer, std::int64_t position, float value) {
    k_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(position * key_width())] = value;
  }

  void damage_value(int layer, std::int64_t position, float value) {
    v_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(position * key_width())] = value;
  }
  void damage_query(int layer, std::int64_t position, float value) {
    q_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(position * query_width())] = value;
    guess();
  }
  void scale_queries(float factor) {
    for (std::vector<float>& layer : q_) {
      for (float& value : layer) value *= factor;
    }
    guess();
  }
  // Gives all tokens the first token's queries.
  void repeat_queries() {
    for (std::vector<float>& layer : q_) {
      for (auto at = layer.begin() + query_width(); at != layer.end(); at += query_width()) {
        std::copy_n(layer.begin(), query_width(), at);
      }
    }
    guess();
  }
  // Replaces queries, keys and values at positions [first, first + tokens).
  void renew(std::int64_t first, std::int64_t tokens, Random& random) {
    const auto fill = [&](std::vector<float>& to, std::int64_t width, float deviation) {
      const std::vector<float> values = random.normal(tokens * width, deviation);
      std::copy(values.begin(), values.end(), to.begin() + first * width);
    };
    for (std::size_t layer = 0; layer < q_.size(); ++layer) {
      fill(q_[layer], query_width(), 2.0f);
      fill(k_[layer], key_width(), 1.0f);
      fill(v_[layer], key_width(), 1.0f);
    }
    guess();
  }
  // Adds one vector to the queries of these tokens and another to their keys, in every layer.
  void shift(std::int64_t first, std::int64_t tokens, float deviation, Random& random) {
    const auto add = [&](std::vector<float>& to, std::int64_t width) {
      const std::vector<float> by = random.normal(width, deviation);
      for (std::int64_t at = first * width; at < (first + tokens) * width; ++at) {
        to[static_cast<std::size_t>(at)] += by[static_cast<std::size_t>(at % width)];
      }
    };
    for (std::size_t layer = 0; layer < q_.size(); ++layer) {
      add(q_[layer], query_width());
      add(k_[layer], key_width());
    }
    guess();
  }
  // Takes the first `tokens` tokens from another script.
  void begin_as(const Script& other, std::int64_t tokens) {
    for (std::size_t layer = 0; layer < q_.size(); ++layer) {
      std::copy_n(other.q_[layer].begin(), tokens * query_width(), q_[layer].begin());
      std::copy_n(other.k_[layer].begin(), tokens * key_width(), k_[layer].begin());
      std::copy_n(other.v_[layer].begin(), tokens * key_width(), v_[layer].begin());
    }
    guess();
  }
  // Makes the early queries exact.
  void guess_right() { early_q_ = q_; }
  // Makes them the queries of all steps.
  void believe_guesses() { q_ = early_q_; }

  // Runs positions [length, length + tokens) as one step; returns all layers' attention output.
  std::vector<float> step(KvSession& session, Phase phase, std::int64_t tokens) const {
    const std::int64_t first = session.length();
    std::vector<float> result;
    SoloStep step(session, phase, tokens);
    for (std::size_t layer = 0; layer < q_.size(); ++layer) {
      std::vector<float> out(static_cast<std::size_t>(tokens * query_width()));
      std::vector<float> lse(static_cast<std::size_t>(tokens * shape_.query_heads));
      const int next = static_cast<int>(layer) + 1;
      begin_early(session, step, next, Early::layer, first);
      step.append(static_cast<int>(layer), {k(layer, first), v(layer, first), key_width()});
      step.attend(static_cast<int>(layer),
                  {q(layer, first), query_width(), out.data(), lse.data()});
      begin_early(session, step, next, Early::half, first);
      result.insert(result.end(), out.begin(), out.end());
    }
    step.end();
    return result;
  }

  // Has a layer of a step choose its rows, if it does that at this point.
  void begin_early(const KvSession& session, SoloStep& step, int layer, Early point,
                   std::int64_t first) const {
    if (layer == shape_.layers || step.early(layer) != point) return;
    const float* const q = early_q(static_cast<std::size_t>(layer), first);
    session.pool()->queue().branch(layer % 2, [&] {
      step.choose_early(layer, {q, query_width(), nullptr, nullptr});
    });
  }

  // Decodes the next `tokens` tokens in steps of the largest size.
  std::vector<float> decode(KvSession& session, std::int64_t tokens) const {
    std::vector<float> result;
    while (tokens > 0) {
      const std::int64_t now = std::min(tokens, session.decode_room());
      const std::vector<float> part = step(session, Phase::decode, now);
      result.insert(result.end(), part.begin(), part.end());
      tokens -= now;
    }
    return result;
  }

  void prefill(KvSession& session, std::int64_t tokens) const {
    while (tokens > 0) {
      const std::int64_t now = std::min(tokens, session.plan().chunk);
      step(session, Phase::prefill, now);
      tokens -= now;
    }
  }
  // The next `tokens` tokens as a prompt of a policy whose prefill is sparse.
  void sparse_prompt(KvSession& session, std::int64_t tokens) const {
    const std::int64_t before = session.length();
    const std::int64_t chunk = session.plan().chunk;
    std::vector<float> out(static_cast<std::size_t>(chunk * query_width()));
    std::vector<float> lse(static_cast<std::size_t>(chunk * shape_.query_heads));
    KvPrompt prompt(session, tokens);
    for (std::size_t layer = 0; layer < q_.size(); ++layer) {
      const int number = static_cast<int>(layer);
      const auto for_pieces = [&](const auto& body) {
        for (std::int64_t first = 0; first < tokens; first += chunk) {
          prompt.take(first, std::min(chunk, tokens - first));
          const std::int64_t at = before + first;
          body(at, Queries{q(layer, at), query_width(), out.data(), lse.data()});
        }
      };
      for_pieces([&](std::int64_t at, const Queries& queries) {
        prompt.append(number, {k(layer, at), v(layer, at), key_width()});
        prompt.collect(queries);
      });
      prompt.choose(number);
      for_pieces([&](std::int64_t, const Queries& queries) { prompt.attend(number, queries); });
    }
    prompt.end();
  }
  // Appends the rows of the next `tokens` tokens without attention.
  void append(KvSession& session, std::int64_t tokens) const {
    while (tokens > 0) {
      const std::int64_t first = session.length();
      const std::int64_t now = std::min(tokens, session.plan().chunk);
      SoloStep step(session, Phase::prefill, now);
      for (std::size_t layer = 0; layer < q_.size(); ++layer) {
        step.append(static_cast<int>(layer), {k(layer, first), v(layer, first), key_width()});
      }
      step.end();
      tokens -= now;
    }
  }

 private:
  void guess() {
    early_q_ = q_;
    for (std::vector<float>& layer : early_q_) {
      for (std::size_t i = 0; i < layer.size(); ++i) layer[i] *= i % 3 == 0 ? 0.3f : 1.1f;
    }
  }

  KvShape shape_;
  std::vector<std::vector<float>> q_, k_, v_;  // [layers][tokens, heads, head_dim]
  std::vector<std::vector<float>> early_q_;
};

// The work of a batch that has begun: the next token of its sessions, each by its own script.
// Returns each session's attention output of all layers. Fills `outcomes` with what KvBatch::end()
// returns.
inline std::vector<std::vector<float>> step_batch(KvBatch& batch,
                                                  std::span<KvSession* const> sessions,
                                                  std::span<const Script* const> scripts,
                                                  std::vector<std::optional<Error>>& outcomes) {
  const Script& any = *scripts.front();
  const auto query_width = static_cast<std::size_t>(any.query_width());
  const auto key_width = static_cast<std::size_t>(any.key_width());
  std::vector<std::vector<float>> results(sessions.size());
  std::list<std::vector<float>> guesses;
  const auto begin_early = [&](int layer, Early point) {
    if (layer == any.shape().layers || batch.early(layer) != point) return;
    std::vector<float>& q = guesses.emplace_back();
    for (std::size_t i = 0; i < sessions.size(); ++i) {
      const float* const own =
          scripts[i]->early_q(static_cast<std::size_t>(layer), sessions[i]->length());
      q.insert(q.end(), own, own + query_width);
    }
    batch.queue().branch(layer % 2, [&] {
      batch.choose_early(layer,
                         {q.data(), static_cast<std::int64_t>(query_width), nullptr, nullptr});
    });
  };
  for (int layer = 0; layer < any.shape().layers; ++layer) {
    const auto at = static_cast<std::size_t>(layer);
    begin_early(layer + 1, Early::layer);
    std::vector<float> q, k, v;
    for (std::size_t i = 0; i < sessions.size(); ++i) {
      const std::int64_t position = sessions[i]->length();
      q.insert(q.end(), scripts[i]->q(at, position), scripts[i]->q(at, position) + query_width);
      k.insert(k.end(), scripts[i]->k(at, position), scripts[i]->k(at, position) + key_width);
      v.insert(v.end(), scripts[i]->v(at, position), scripts[i]->v(at, position) + key_width);
    }
    std::vector<float> out(q.size());
    std::vector<float> lse(sessions.size() * static_cast<std::size_t>(any.shape().query_heads));
    batch.append(layer, {k.data(), v.data(), static_cast<std::int64_t>(key_width)});
    batch.attend(layer, {q.data(), static_cast<std::int64_t>(query_width), out.data(), lse.data()});
    begin_early(layer + 1, Early::half);
    for (std::size_t i = 0; i < sessions.size(); ++i) {
      const float* const own = out.data() + i * query_width;
      results[i].insert(results[i].end(), own, own + query_width);
    }
  }
  batch.issue_report();
  outcomes = batch.end();
  return results;
}

// The same from its beginning, in one step of all sessions.
inline std::vector<std::vector<float>> step_together(std::span<KvSession* const> sessions,
                                                     std::span<const Script* const> scripts,
                                                     std::vector<std::optional<Error>>& outcomes) {
  KvBatch batch(sessions);
  return step_batch(batch, sessions, scripts, outcomes);
}

// The same for sessions some of whose pages may be lost: `outcomes` says which have ended.
inline std::vector<std::vector<float>> step_readable(std::span<KvSession* const> sessions,
                                                     std::span<const Script* const> scripts,
                                                     std::vector<std::optional<Error>>& outcomes) {
  std::optional<KvBatch> batch;
  outcomes = KvBatch::begin(batch, sessions);
  std::vector<std::vector<float>> results(sessions.size());
  if (!batch) return results;
  std::vector<KvSession*> left;
  std::vector<const Script*> their;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    if (outcomes[i]) continue;
    left.push_back(sessions[i]);
    their.push_back(scripts[i]);
  }
  std::vector<std::optional<Error>> ends;
  const std::vector<std::vector<float>> outputs = step_batch(*batch, left, their, ends);
  for (std::size_t i = 0, at = 0; i < sessions.size(); ++i) {
    if (outcomes[i]) continue;
    outcomes[i] = ends[at];
    results[i] = outputs[at++];
  }
  return results;
}

// All of them, or the first error is thrown.
inline std::vector<std::vector<float>> step_together(std::span<KvSession* const> sessions,
                                                     std::span<const Script* const> scripts) {
  std::vector<std::optional<Error>> outcomes;
  std::vector<std::vector<float>> results = step_together(sessions, scripts, outcomes);
  for (const std::optional<Error>& error : outcomes) {
    if (error) throw Error(*error);
  }
  return results;
}

}  // namespace sluice::testing
