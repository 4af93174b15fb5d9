// Rows that a layer chooses early are those that its early query would choose by itself, and they
// are attended with its own query.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/reference/backend.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_pool.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"
#include "tests/support/script.h"
#include "tests/support/twin_sessions.h"

namespace sluice {
namespace {

using testing::Script;

constexpr std::int64_t kContext = 900;
constexpr std::int64_t kPrompt = 600;

// One query head per KV head: then today's selection by top_k does not depend on the newest rows,
// which take no part in an early one either.
const KvShape kSingle{5, 2, 2, 32, DType::f32};
const KvShape kGrouped{5, 6, 2, 32, DType::f32};

KvPlan plan_of(const BackendInfo& on, const KvShape& shape, std::span<const Policy> policies) {
  KvRequest request;
  request.on = on;
  request.shape = shape;
  request.context = kContext;
  request.chunk = 200;
  request.sequences = 4;
  request.policies = policies;
  request.reports_positions = true;
  return plan_kv(request);
}

class EarlyRows : public ::testing::TestWithParam<testing::NamedBackend> {
 protected:
  // A session that has appended the prompt.
  KvSession session(const KvShape& shape, const Policy& policy, const Script& script) {
    if (backend_ == nullptr) backend_ = GetParam().make();
    const auto pool = std::make_shared<KvPool>(backend_->make_queue(),
                                               plan_of(backend_->info(), shape, {&policy, 1}),
                                               std::span(&policy, 1));
    KvSession session(pool);
    script.append(session, kPrompt);
    return session;
  }

  std::unique_ptr<Backend> backend_;
};

using Positions = std::vector<std::vector<std::int32_t>>;

const Positions& positions_of(const KvSession& session, int layer) {
  const StepSelection& all = session.selection();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const LayerSelection& each) { return each.layer == layer; });
  return found->positions;
}

TEST_P(EarlyRows, AreTheEarlyQuerysOwn) {
  const std::uint64_t seed = testing::seed(21);
  SCOPED_TRACE(testing::seed_message(seed));
  const Script script(kSingle, kContext, seed);
  Script guesses = script;
  guesses.believe_guesses();
  for (const char* const line :
       {"select=int4 prune=top_k(30)", "select=int4 prune=top_k(30) sinks=2 recent=100",
        "select=sparq(r=12) prune=top_k(30) compensate=mean_value",
        "select=int4 prune=top_k(30) compensate=values", "select=quest prune=top_k(64)"}) {
    for (const char* const how : {" early=half", " early=layer"}) {
      SCOPED_TRACE(::testing::Message() << line << how);
      const Policy policy = parse_policy(std::string(line) + how);
      KvSession early = session(kSingle, policy, script);
      KvSession real = session(kSingle, parse_policy(line), script);
      KvSession guessing = session(kSingle, parse_policy(line), guesses);
      std::set<int> other;
      for (int step = 0; step < 3; ++step) {
        script.step(early, Phase::decode, 2);
        script.step(real, Phase::decode, 2);
        guesses.step(guessing, Phase::decode, 2);
        for (int layer = 0; layer < kSingle.layers; ++layer) {
          const bool is_early = policy.early_at(layer) != Early::none;
          EXPECT_EQ(is_early, layer > 0);
          EXPECT_EQ(positions_of(early, layer), positions_of(is_early ? guessing : real, layer))
              << "layer " << layer;
          if (positions_of(early, layer) != positions_of(real, layer)) other.insert(layer);
        }
      }
      EXPECT_EQ(other.size(), 4u);
    }
  }
}

// Attention of one KV head's query to some positions of a script, in fp64.
std::vector<double> attend(const Script& script, int layer, std::int64_t token, int head,
                           const std::vector<std::int64_t>& positions) {
  const KvShape& shape = script.shape();
  const auto at = static_cast<std::size_t>(layer);
  const int d = shape.head_dim;
  const float* const q = script.q(at, token) + std::int64_t{head} * d;
  const std::int64_t row = std::int64_t{head / shape.group()} * d;
  double sum = 0.0;
  std::vector<double> out(static_cast<std::size_t>(d));
  for (const std::int64_t position : positions) {
    double logit = 0.0;
    for (int c = 0; c < d; ++c) {
      logit += static_cast<double>(q[c]) * static_cast<double>(script.k(at, position)[row + c]);
    }
    const double weight = std::exp(logit / std::sqrt(static_cast<double>(d)));
    sum += weight;
    for (int c = 0; c < d; ++c) {
      out[static_cast<std::size_t>(c)] +=
          weight * static_cast<double>(script.v(at, position)[row + c]);
    }
  }
  for (double& value : out) value /= sum;
  return out;
}

std::vector<std::int64_t> all_from(std::int64_t first, std::int64_t end) {
  std::vector<std::int64_t> positions;
  for (std::int64_t at = first; at < end; ++at) positions.push_back(at);
  return positions;
}

// The layer's own query attends to the reported rows and to the newest page.
TEST_P(EarlyRows, AreAttendedWithTheLayersQuery) {
  const std::uint64_t seed = testing::seed(22);
  SCOPED_TRACE(testing::seed_message(seed));
  const Script script(kGrouped, kContext, seed);
  for (const char* const line :
       {"select=int4 prune=top_k(30) early=half", "select=int4 prune=top_p(0.7) cap=60 early=layer",
        "select=sparq candidates=1/4 prune=top_p(0.8) cap=40 early=half",
        "select=quest prune=top_k(64) dense=0 anchors=1,3 early=half"}) {
    SCOPED_TRACE(line);
    KvSession early = session(kGrouped, parse_policy(line), script);
    const std::int64_t token = early.length();
    const std::vector<float> out = script.step(early, Phase::decode, 1);
    for (int layer = 1; layer < kGrouped.layers; ++layer) {
      for (int head = 0; head < kGrouped.query_heads; ++head) {
        const auto& chosen =
            positions_of(early, layer)[static_cast<std::size_t>(head / kGrouped.group())];
        EXPECT_FALSE(chosen.empty());
        std::vector<std::int64_t> positions(chosen.begin(), chosen.end());
        for (const std::int64_t at : all_from(token / kPageTokens * kPageTokens, token + 1)) {
          positions.push_back(at);
        }
        const std::vector<double> expected = attend(script, layer, token, head, positions);
        const float* const actual =
            out.data() + (std::int64_t{layer} * kGrouped.query_heads + head) * kGrouped.head_dim;
        for (std::size_t c = 0; c < expected.size(); ++c) {
          ASSERT_NEAR(static_cast<double>(actual[c]), expected[c], 2e-4)
              << "layer " << layer << " head " << head;
        }
      }
    }
  }
}

// Value tiles get the weights of the layer's own query: all tokens in 4 bits are close to its dense
// attention, though fewer of the heaviest are exact, and far from what the early query would see.
TEST_P(EarlyRows, LeaveValueTilesTheLayersQuery) {
  const std::uint64_t seed = testing::seed(23);
  SCOPED_TRACE(testing::seed_message(seed));
  for (const KvShape& shape : {kSingle, kGrouped}) {
    const Script script(shape, kContext, seed);
    Script guesses = script;
    guesses.believe_guesses();
    const auto error_of = [&](const std::string& line, const Script& decoded) {
      KvSession session = this->session(shape, parse_policy(line), script);
      const std::int64_t token = session.length();
      const std::vector<float> out = decoded.step(session, Phase::decode, 1);
      double error = 0.0;
      for (int layer = 1; layer < shape.layers; ++layer) {
        for (int head = 0; head < shape.query_heads; ++head) {
          const std::vector<double> exact =
              attend(script, layer, token, head, all_from(0, token + 1));
          const float* const actual =
              out.data() + (std::int64_t{layer} * shape.query_heads + head) * shape.head_dim;
          for (std::size_t c = 0; c < exact.size(); ++c) {
            error += std::pow(static_cast<double>(actual[c]) - exact[c], 2);
          }
        }
      }
      return std::sqrt(error / static_cast<double>(out.size()));
    };
    const std::string line = "select=int4 prune=top_k(8) compensate=values(bits=4,pages=1)";
    const double usual = error_of(line, script);
    const double guessed = error_of(line, guesses);
    for (const char* const how : {" early=half", " early=layer"}) {
      const double early = error_of(line + how, script);
      EXPECT_LT(early, 2.5 * usual) << how;
      EXPECT_LT(early, guessed / 3) << how;
    }
  }
}

// A query that was guessed right gives the answer that the layer itself would have given.
TEST_P(EarlyRows, LoseNothingIfTheGuessIsRight) {
  const std::uint64_t seed = testing::seed(24);
  SCOPED_TRACE(testing::seed_message(seed));
  Script script(kSingle, kContext, seed);
  script.guess_right();
  for (const char* const line : {"select=int4 prune=top_k(30)", "sparq prune=top_k(30)",
                                 "select=int4 prune=top_k(20) compensate=values",
                                 "select=int4 prune=top_k(20) compensate=values(bits=3,pages=0.6)",
                                 "select=int4 prune=top_k(30) dense=0 anchors=1"}) {
    for (const char* const how : {" early=half", " early=layer"}) {
      SCOPED_TRACE(::testing::Message() << line << how);
      KvSession early = session(kSingle, parse_policy(std::string(line) + how), script);
      KvSession real = session(kSingle, parse_policy(line), script);
      for (int step = 0; step < 3; ++step) {
        testing::expect_same(script.step(early, Phase::decode, 1),
                             script.step(real, Phase::decode, 1), 2e-5f);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Followers bring their anchor's rows early and choose nothing, so that nothing is lost.
TEST_P(EarlyRows, OfFollowersAreTheirAnchors) {
  const std::uint64_t seed = testing::seed(25);
  SCOPED_TRACE(testing::seed_message(seed));
  const Script script(kGrouped, kContext, seed);
  const std::string line = "select=exact prune=top_k(30) dense=0,1 anchors=2 anchors_attend=all";
  KvSession early = session(kGrouped, parse_policy(line + " early=half"), script);
  KvSession real = session(kGrouped, parse_policy(line), script);
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(script.step(early, Phase::decode, 1), script.step(real, Phase::decode, 1));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, EarlyRows,
                         ::testing::Values(testing::reference_backend(),
                                           testing::cpu_backend(DType::f32)),
                         testing::name_of);

// Sessions answer the same with a row cache and without, through forks, truncations and steps of
// several sessions.
TEST(EarlySessions, AnswerAsWithoutARowCache) {
  const std::uint64_t seed = testing::seed(26);
  SCOPED_TRACE(testing::seed_message(seed));
  const KvShape shape{5, 4, 2, 32, DType::bf16};
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  for (const char* const line :
       {"select=int4 prune=top_k(40) early=half", "select=int4 prune=top_k(40) early=layer",
        "select=int4 prune=top_k(16) compensate=values early=layer",
        "select=int4 prune=top_k(40) dense=0 anchors=1,3 early=half"}) {
    SCOPED_TRACE(line);
    const Policy policy = parse_policy(line);
    KvRequest request;
    request.shape = shape;
    request.context = 700;
    request.chunk = 64;
    request.sequences = 4;
    request.policies = {&policy, 1};
    request.on = backend.info();
    const KvPlan free = plan_kv(request);
    const std::uint64_t block = kPageTokens * shape.token_bytes();
    request.device_cap = free.index_bytes + free.work_bytes + free.table_bytes + 7 * block;
    const KvPlan cached = plan_kv(request);
    EXPECT_GT(cached.cache_rows, 0);
    KvPlan plain = cached;  // the same pieces of attention, but for the cache
    plain.cache_rows = 0;
    const auto pool = [&](const KvPlan& plan) {
      return std::make_shared<KvPool>(backend.make_queue(), plan, std::span(&policy, 1));
    };
    testing::play_twins(pool(cached), pool(plain), seed, {});
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace sluice
