// Sessions of one pool beside sessions of another that must give the same answers, whatever is
// written, forgotten, forked and corrected.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "offload/step/kv_pool.h"
#include "offload/step/kv_session.h"
#include "tests/support/random.h"
#include "tests/support/script.h"

namespace sluice::testing {

// What play_twins() checks.
struct TwinChecks {
  float tolerance = 0.0f;  // between answers; 0: equal to the bit
  std::function<void()> after_step = [] {};
};

inline void expect_same(const std::vector<float>& actual, const std::vector<float>& expected,
                        float tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  if (tolerance == 0.0f) {
    ASSERT_EQ(actual, expected);
    return;
  }
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance) << "at " << i;
  }
}

// A session and its twin in the other pool.
struct Twins {
  KvSession one;
  KvSession other;
  Script script;

  std::int64_t length() const { return other.length(); }
};

// Decodes up to `steps` tokens of all twins that have room, together.
inline void decode_twins(std::vector<Twins>& twins, std::int64_t context, std::int64_t steps,
                         const TwinChecks& checks) {
  std::vector<KvSession*> ones;
  std::vector<KvSession*> others;
  std::vector<const Script*> scripts;
  for (Twins& each : twins) {
    if (each.length() == context) continue;
    ones.push_back(&each.one);
    others.push_back(&each.other);
    scripts.push_back(&each.script);
  }
  for (std::int64_t step = 0; step < steps && !ones.empty(); ++step) {
    if (std::any_of(ones.begin(), ones.end(),
                    [&](KvSession* s) { return s->length() == context; })) {
      break;
    }
    const auto expected = step_together(others, scripts);
    const auto actual = step_together(ones, scripts);
    for (std::size_t i = 0; i < ones.size(); ++i) {
      SCOPED_TRACE(::testing::Message() << "session " << i << " step " << step);
      expect_same(actual[i], expected[i], checks.tolerance);
      if (::testing::Test::HasFatalFailure()) return;
    }
    checks.after_step();
  }
}

// Plays 40 rounds of forks, ends, truncations, prompts, corrections and steps of up to four twins
// in pools planned for four sequences.
inline void play_twins(const std::shared_ptr<KvPool>& one, const std::shared_ptr<KvPool>& other,
                       std::uint64_t seed, const TwinChecks& checks) {
  Random random(seed);
  const KvShape& shape = one->plan().shape;
  const std::int64_t context = one->plan().context;
  std::vector<Twins> twins;
  twins.push_back({KvSession(one), KvSession(other), Script(shape, context, seed)});
  for (KvSession* session : {&twins[0].one, &twins[0].other}) {
    twins[0].script.prefill(*session, context * 4 / 7);
  }
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(::testing::Message() << "round " << round);
    const auto at =
        static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(twins.size()) - 1));
    Twins& two = twins[at];
    const std::int64_t length = two.length();
    switch (random.integer(0, 9)) {
      case 0:
        if (twins.size() == 4) break;
        twins.push_back({two.one.fork(), two.other.fork(), two.script});
        break;
      case 1:
        if (twins.size() > 1) twins.erase(twins.begin() + static_cast<std::ptrdiff_t>(at));
        break;
      case 2: {
        // Other tokens follow.
        const std::int64_t shorter = random.integer(length / 3, length);
        two.one.truncate(shorter);
        two.other.truncate(shorter);
        Script next(shape, context, static_cast<std::uint64_t>(random.integer(1, 1 << 30)));
        next.begin_as(two.script, shorter);
        two.script = std::move(next);
        break;
      }
      case 3: {
        const std::int64_t tokens = std::min<std::int64_t>(random.integer(1, 64), context - length);
        if (tokens == 0) break;
        two.script.append(two.one, tokens);
        two.script.append(two.other, tokens);
        break;
      }
      case 4: {
        const std::int64_t tokens = random.integer(1, std::min<std::int64_t>(length, 60));
        std::vector<std::vector<float>> results;
        for (KvSession* session : {&two.one, &two.other}) {
          session->truncate(length - tokens);
          results.push_back(two.script.step(*session, Phase::correction, tokens));
        }
        expect_same(results[0], results[1], checks.tolerance);
        break;
      }
      default:
        decode_twins(twins, context, random.integer(1, 40), checks);
    }
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace sluice::testing
