// Steps of several tokens that are rejected in part, against sessions that never had the rejected
// ones: whatever was drafted, the cache is as if it had not been.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "offload/step/kv_batch.h"
#include "offload/step/kv_session.h"
#include "tests/support/backends.h"
#include "tests/support/batch_cases.h"
#include "tests/support/plan.h"
#include "tests/support/random.h"
#include "tests/support/script.h"

namespace sluice {
namespace {

using testing::Random;
using testing::Script;

constexpr KvShape kShape{2, 4, 2, 32, DType::f32};
constexpr std::int64_t kContext = 900;
constexpr std::int64_t kDrafts = 7;

// Several tokens of one session through KvBatch, where policies allow it.
std::vector<float> batch_step(const Script& script, KvSession& session, std::int64_t tokens) {
  const std::int64_t first = session.length();
  KvBatch batch(session, tokens);
  std::vector<float> result;
  const auto begin_early = [&](int layer, Early point) {
    if (layer == script.shape().layers || batch.early(layer) != point) return;
    const float* const q = script.early_q(static_cast<std::size_t>(layer), first);
    batch.queue().branch(layer % 2, [&] {
      batch.choose_early(layer, {q, script.query_width(), nullptr, nullptr});
    });
  };
  for (int layer = 0; layer < script.shape().layers; ++layer) {
    const auto at = static_cast<std::size_t>(layer);
    std::vector<float> out(static_cast<std::size_t>(tokens * script.query_width()));
    std::vector<float> lse(static_cast<std::size_t>(tokens * script.shape().query_heads));
    begin_early(layer + 1, Early::layer);
    batch.append(layer, {script.k(at, first), script.v(at, first), script.key_width()});
    batch.attend(layer, {script.q(at, first), script.query_width(), out.data(), lse.data()});
    begin_early(layer + 1, Early::half);
    result.insert(result.end(), out.begin(), out.end());
  }
  batch.issue_report();
  for (const std::optional<Error>& error : batch.end()) {
    if (error) throw Error(*error);
  }
  return result;
}

// Token `token` of a step of `tokens`, in all layers.
std::vector<float> token_of(const std::vector<float>& step, std::int64_t tokens, std::int64_t token,
                            std::int64_t width) {
  std::vector<float> result;
  for (std::int64_t layer = 0; layer < std::ssize(step) / (tokens * width); ++layer) {
    const auto from = step.begin() + (layer * tokens + token) * width;
    result.insert(result.end(), from, from + width);
  }
  return result;
}

class RejectedDrafts
    : public ::testing::TestWithParam<std::tuple<testing::NamedBackend, const char*, bool>> {};

TEST_P(RejectedDrafts, LeaveNoTrace) {
  const auto& [named, line, capped] = GetParam();
  const std::unique_ptr<testing::Device> device = testing::make_or_skip(named);
  if (device == nullptr) return;
  const std::vector<Policy> policies = {parse_policy(line)};
  const auto plan = [&](std::optional<std::uint64_t> cap) {
    return testing::plan_on(device->backend->info(), kShape, kContext, 64, cap, policies,
                            kDrafts + 1);
  };
  std::optional<std::uint64_t> cap;
  if (capped) cap = testing::least_cap([&](std::uint64_t bytes) { plan(bytes); });
  const std::uint64_t seed = 20 + std::string(line).size();
  SCOPED_TRACE(::testing::Message() << line << ", seed " << seed);
  Random random(seed);
  const Script script(kShape, kContext, seed);
  Script drafts(kShape, kContext, seed + 1);  // wrong from where they are not copied
  KvSession drafted = testing::session_of(*device->backend, plan(cap), policies);
  KvSession plain = testing::session_of(*device->backend, plan(cap), policies);
  script.prefill(drafted, 200);
  script.prefill(plain, 200);
  const bool is_reference = named.name == "reference";
  const int rounds = is_reference ? 20 : 100;  // the reference is slow
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(::testing::Message() << "round " << round << ", length " << plain.length());
    const std::int64_t length = plain.length();
    const std::int64_t tokens = random.integer(1, std::min(kDrafts + 1, drafted.decode_room()));
    const std::int64_t kept = random.integer(1, tokens);
    drafts.begin_as(script, length + kept);
    const bool is_batch = KvBatch::takes(drafted, tokens);
    const std::vector<float> step = is_batch ? batch_step(drafts, drafted, tokens)
                                             : drafts.step(drafted, Phase::decode, tokens);
    drafted.reject(tokens - kept);
    ASSERT_EQ(drafted.length(), length + kept);
    for (std::int64_t i = 0; i < kept; ++i) {
      const std::vector<float> expected = script.step(plain, Phase::decode, 1);
      const std::vector<float> actual = token_of(step, tokens, i, script.query_width());
      // The CPU cuts long lists of rows by the number of tokens, and runs of dense layers sum in
      // another order.
      if (is_batch && is_reference) {
        ASSERT_EQ(actual, expected) << "token " << i << " of " << tokens;
      } else {
        ASSERT_LT(testing::largest_difference(expected, actual), 1e-4) << i << " of " << tokens;
      }
    }
    // One token alone has to find the same rows, tiles and sums.
    ASSERT_EQ(script.step(drafted, Phase::decode, 1), script.step(plain, Phase::decode, 1));
  }
  EXPECT_EQ(drafted.ledger().tokens(Phase::decode), plain.ledger().tokens(Phase::decode));
}

INSTANTIATE_TEST_SUITE_P(Policies, RejectedDrafts,
                         ::testing::Combine(::testing::Values(testing::reference_backend(),
                                                              testing::cpu_backend(DType::f32)),
                                            ::testing::ValuesIn(testing::kBatchPolicies),
                                            ::testing::Bool()),
                         [](const auto& parameter) {
                           return std::get<0>(parameter.param).name +
                                  (std::get<2>(parameter.param) ? "_capped_" : "_free_") +
                                  std::to_string(parameter.index);
                         });

}  // namespace
}  // namespace sluice
