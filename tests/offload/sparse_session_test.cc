// Sessions whose decode steps select: what they attend to, what they count, and that steps of
// several tokens, rewinding and corrections change nothing that they should not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "cpu/cpu_backend.h"
#include "offload/step/kv_session.h"
#include "sluice/errors.h"
#include "tests/support/counting_backend.h"
#include "tests/support/plan.h"
#include "tests/support/random.h"
#include "tests/support/script.h"

namespace sluice {
namespace {

using sluice::testing::CountingBackend;
using sluice::testing::largest_difference;
using sluice::testing::Script;

constexpr double kTolerance = 3e-5;  // fp32 sums of a few thousand terms of order one

KvSession make_session(Backend& backend, const KvShape& shape, std::int64_t context,
                       const std::vector<Policy>& policies, std::int64_t batch = 1,
                       std::optional<std::uint64_t> cap = std::nullopt) {
  return testing::session_of(
      backend, testing::plan_on(backend.info(), shape, context, 256, cap, policies, batch),
      policies);
}

// Every method with a budget that leaves nothing out.
const char* const kComplete[] = {
    "select=exact prune=top_k(100000)",
    "select=int4 prune=top_k(1/1)",
    "select=int4 bits=2 prune=top_p(1)",
    "select=int4 bits=3 prune=top_p(1)",
    "select=int4 bits=1 prune=top_p(1) compensate=values(bits=1)",
    "select=sparq(r=4) prune=top_k(1/1) compensate=mean_value",
    "select=quest prune=top_k(1/1)",
    "select=streaming sinks=4 recent=100000",
    "select=sparq candidates=1/1 prune=top_p(1) compensate=mean_value",
    "select=quest candidates=1/1 prune=top_p(1)",
    "select=exact candidates=1/1 prune=top_p(1) compensate=mean_value",
    "select=int4 prune=top_k(1/1) dense=0 anchors=1",
    "select=exact prune=top_k(1/1) anchors=0 anchors_attend=all",
    "select=int4 prune=top_k(1/1) compensate=values",
    "select=sparq candidates=1/1 prune=top_p(1) compensate=values(bits=4,pages=1)",
};

class CompleteBudget : public ::testing::TestWithParam<const char*> {};

TEST_P(CompleteBudget, EqualsDense) {
  const Policy policy = parse_policy(GetParam());
  for (const int group : {1, 2, 4, 8}) {
    const int head_dim = group == 4 ? 64 : group == 8 ? 128 : 32;
    const KvShape shape{3, 2 * group, 2, head_dim, DType::bf16};
    const std::int64_t context = 600;
    const Script script(shape, context, 7);
    for (const std::int64_t prompt : {1, 127, 128, 500}) {
      cpu::CpuBackend backend{cpu::CpuOptions{}};
      KvSession dense = make_session(backend, shape, context, {});
      KvSession sparse = make_session(backend, shape, context, {policy});
      script.prefill(dense, prompt);
      script.prefill(sparse, prompt);
      for (int i = 0; i < 3; ++i) {
        const auto expected = script.step(dense, Phase::decode, 1);
        const auto actual = script.step(sparse, Phase::decode, 1);
        ASSERT_LT(largest_difference(expected, actual), kTolerance)
            << "group " << group << " prompt " << prompt;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Methods, CompleteBudget, ::testing::ValuesIn(kComplete));

// Every method with a budget that leaves most out.
const char* const kSparse[] = {
    "select=exact prune=top_k(64)",
    "select=int4 prune=top_p(0.8) sinks=2 recent=16",
    "select=sparq(r=8) prune=top_k(40) recent=10 compensate=mean_value",
    "select=quest prune=top_k(64)",
    "select=streaming sinks=4 recent=60",
    "select=sparq candidates=1/4 prune=top_p(0.9) cap=50 compensate=mean_value",
    "select=quest candidates=1/2 prune=top_p(0.9)",
    "select=int4 prune=top_k(50) dense=0 anchors=1",
    "select=exact prune=top_k(50) dense=0 anchors=1 anchors_attend=all",
    "select=int4 prune=top_p(0.5) anchors=0,2 anchors_attend=all compensate=mean_value",
    "select=int4 prune=top_k(16) compensate=values",
    "select=int4 bits=1 prune=top_k(16) compensate=values(bits=1,pages=0.8)",
    "select=sparq candidates=1/4 prune=top_p(0.9) cap=50 compensate=values(bits=3,pages=0.5)",
    "select=int4 prune=top_k(50) compensate=values(bits=4,pages=1) dense=0 anchors=1",
    "sluice cap=50 0:bits=2 1:cap=8 1:compensate=values(bits=3) 2:prune=top_p(0.5) 2:bits=3",
};

class SparseBudget : public ::testing::TestWithParam<const char*> {
 protected:
  KvShape shape_{3, 8, 2, 32, DType::bf16};
  std::int64_t context_ = 700;
  Script script_{shape_, context_, 9};
  Policy policy_ = parse_policy(GetParam());
};

// A step of several tokens shows each token what it would see alone, and the next step begins with
// the index of the page that they completed.
TEST_P(SparseBudget, SeveralTokensInAStepEqualOneByOne) {
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  KvSession single = make_session(backend, shape_, context_, {policy_});
  KvSession batched = make_session(backend, shape_, context_, {policy_}, 16);
  script_.prefill(single, 505);
  script_.prefill(batched, 505);
  const auto width = static_cast<std::size_t>(script_.query_width());
  // Many queries at a time may be rounded to bf16; only layers that attend to everything have many.
  const bool is_sparse = policy_.dense_layers.empty() && !policy_.dense_anchors;
  const double tolerance = is_sparse ? kTolerance : 0.01;
  for (const std::size_t tokens : {7u, 16u, 3u}) {
    ASSERT_LE(static_cast<std::int64_t>(tokens), batched.decode_room());
    const std::vector<float> together =
        script_.step(batched, Phase::decode, static_cast<std::int64_t>(tokens));
    for (std::size_t token = 0; token < tokens; ++token) {
      const std::vector<float> alone = script_.step(single, Phase::decode, 1);
      for (std::size_t layer = 0; layer < 3; ++layer) {
        const auto first =
            together.begin() + static_cast<std::int64_t>((layer * tokens + token) * width);
        const auto own = alone.begin() + static_cast<std::int64_t>(layer * width);
        ASSERT_LT(largest_difference({first, first + script_.query_width()},
                                     {own, own + script_.query_width()}),
                  tolerance)
            << "token " << token << " layer " << layer;
      }
    }
  }
}

// Whatever is on the device and however small the arena: the same rows give the same answer.
TEST_P(SparseBudget, ACapChangesNothingAndHolds) {
  const std::int64_t prompt = 300;
  const auto plan = [&](std::optional<std::uint64_t> cap) {
    return testing::plan_of(shape_, context_, 64, cap, true, {&policy_, 1});
  };
  CountingBackend free;
  KvSession expected = testing::session_of(free, plan(std::nullopt), {&policy_, 1});
  script_.prefill(expected, prompt);
  const std::vector<float> answer = script_.step(expected, Phase::decode, 1);
  const std::uint64_t overhead = expected.plan().index_bytes + expected.plan().work_bytes;
  const std::uint64_t page = kPageTokens * shape_.row_bytes();
  for (const std::uint64_t cap : {overhead + 12 * page, overhead + 64 * page}) {
    CountingBackend backend(cap);
    KvSession session = testing::session_of(backend, plan(cap), {&policy_, 1});
    script_.prefill(session, prompt);
    backend.host_rows_attended = 0;
    EXPECT_LT(largest_difference(answer, script_.step(session, Phase::decode, 1)), kTolerance);
    EXPECT_LE(backend.device_peak, cap);
    EXPECT_EQ(backend.host_rows_attended, 0u);
  }
}

TEST_P(SparseBudget, RewindingForgetsEverything) {
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  KvSession straight = make_session(backend, shape_, context_, {policy_});
  script_.prefill(straight, 500);
  const std::vector<float> expected = script_.step(straight, Phase::decode, 1);
  for (const std::int64_t further : {1, 20, 150}) {
    KvSession session = make_session(backend, shape_, context_, {policy_});
    script_.prefill(session, 500);
    for (std::int64_t i = 0; i < further; ++i) script_.step(session, Phase::decode, 1);
    session.truncate(500);
    EXPECT_LT(largest_difference(expected, script_.step(session, Phase::decode, 1)), kTolerance);
  }
}

TEST_P(SparseBudget, ReportsWhatItDid) {
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  KvSession session = make_session(backend, shape_, context_, {policy_});
  script_.prefill(session, 600);
  script_.step(session, Phase::decode, 1);
  const StepSelection& selection = session.selection();
  ASSERT_EQ(selection.size(), policy_.dense_layers.empty() ? 3u : 2u);
  std::uint64_t attended = 0;
  for (const LayerSelection& layer : selection) {
    EXPECT_EQ(layer.follower, !policy_.selects(layer.layer));
    EXPECT_GT(layer.selected, 0.0);
    EXPECT_LT(layer.selected, 512.0);
    const bool is_dense = policy_.is_dense(layer.layer);
    EXPECT_DOUBLE_EQ(layer.attended, is_dense ? 601 : layer.selected + 600 % kPageTokens + 1);
    EXPECT_GT(layer.alpha, 0.0);
    EXPECT_LE(layer.alpha, 1.0);
    EXPECT_LE(layer.smallest_alpha, layer.alpha + 1e-6);
    attended += static_cast<std::uint64_t>(std::lround(layer.attended * shape_.kv_heads));
  }
  const Traffic hits = session.ledger().total(Phase::decode, Tier::host, Tier::host, Cause::hit);
  const std::uint64_t dense =
      policy_.dense_layers.size() * 601 * static_cast<std::uint64_t>(shape_.kv_heads);
  EXPECT_EQ(hits.rows, attended + dense);
  EXPECT_EQ(hits.bytes, hits.rows * shape_.row_bytes());
  const Traffic index =
      session.ledger().total(Phase::decode, Tier::host, Tier::host, Cause::index_read);
  EXPECT_EQ(index.rows > 0, policy_.select.name != "streaming");
}

INSTANTIATE_TEST_SUITE_P(Methods, SparseBudget, ::testing::ValuesIn(kSparse));

// A layer does what it would do if all layers had its settings, and counts as much.
TEST(SparseSession, LayersHaveSettingsOfTheirOwn) {
  const KvShape shape{5, 8, 2, 32, DType::bf16};
  const Script script(shape, 700, 12);
  const Policy policy = parse_policy(
      "select=int4 prune=top_p(0.9) cap=40 compensate=mean_value 0:bits=2 1:cap=none "
      "1:prune=top_k(7) 2,3:compensate=values(bits=4,pages=0.6) 3:bits=2 3:cap=3 1,4:bits=3");
  const auto width = static_cast<std::ptrdiff_t>(script.query_width());
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  KvSession mixed = make_session(backend, shape, 700, {policy});
  script.prefill(mixed, 600);
  std::vector<KvSession> uniform;
  for (int layer = 0; layer < shape.layers; ++layer) {
    uniform.push_back(make_session(backend, shape, 700, {policy.at(layer)}));
    script.prefill(uniform.back(), 600);
  }
  for (int token = 0; token < 70; ++token) {
    const std::vector<float> all = script.step(mixed, Phase::decode, 1);
    for (int layer = 0; layer < shape.layers; ++layer) {
      SCOPED_TRACE(layer);
      KvSession& session = uniform[static_cast<std::size_t>(layer)];
      const std::vector<float> expected = script.step(session, Phase::decode, 1);
      const auto own = [&](const std::vector<float>& out) {
        return std::vector<float>(out.begin() + layer * width, out.begin() + (layer + 1) * width);
      };
      // How many rows are attended at a time is the pool's, and may round otherwise.
      ASSERT_LT(largest_difference(own(expected), own(all)), kTolerance) << token;
      const auto at = static_cast<std::size_t>(layer);
      ASSERT_EQ(mixed.selection()[at].selected, session.selection()[at].selected);
      ASSERT_EQ(mixed.selection()[at].alpha, session.selection()[at].alpha);
      for (const Cause cause : {Cause::hit, Cause::index_read, Cause::value_read}) {
        const auto read = [&](const KvSession& by) {
          return by.ledger().total(Phase::decode, layer, Tier::host, Tier::host, cause);
        };
        ASSERT_EQ(read(mixed), read(session));
      }
    }
  }
}

// Steps of several tokens that begin among resident rows and end beyond them.
TEST(SparseSession, AStepMayLeaveTheResidentRows) {
  const KvShape shape{2, 4, 2, 32, DType::f32};
  const Policy policy = parse_policy("select=int4 prune=top_k(40)");
  const std::int64_t context = 1500;
  const Script script(shape, 400, 5);
  const auto plan = [&](std::optional<std::uint64_t> cap) {
    return testing::plan_of(shape, context, 64, cap, true, {&policy, 1}, 16, 0);
  };
  CountingBackend free;
  KvSession expected = testing::session_of(free, plan(std::nullopt), {&policy, 1});
  std::uint64_t cap = plan(std::uint64_t{1} << 40).device_bytes;
  while (plan(cap).resident_tokens >= 300) cap -= 50 * shape.row_bytes();
  CountingBackend backend(cap);
  KvSession session = testing::session_of(backend, plan(cap), {&policy, 1});
  const std::int64_t resident = session.plan().resident_tokens;
  ASSERT_GE(resident, 128);
  for (KvSession* s : {&expected, &session}) script.prefill(*s, resident - 7);
  for (int i = 0; i < 3; ++i) {
    const std::vector<float> answer = script.decode(expected, 16);
    EXPECT_LT(largest_difference(answer, script.decode(session, 16)), kTolerance) << i;
  }
  // Prefill steps may, too.
  expected.truncate(resident - 3);
  session.truncate(resident - 3);
  const std::vector<float> answer = script.step(expected, Phase::prefill, 64);
  EXPECT_LT(largest_difference(answer, script.step(session, Phase::prefill, 64)), kTolerance);
}

// Under a cap that holds all rows of the dense layers, or a part, and next to none of others'.
TEST(SparseSession, DenseLayersFindTheirRowsOnTheDevice) {
  const KvShape shape{3, 4, 2, 32, DType::f32};
  const Policy policy = parse_policy("select=int4 prune=top_k(40) dense=1");
  const std::int64_t context = 1500;
  const Script script(shape, context, 5);
  const auto plan = [&](std::optional<std::uint64_t> cap) {
    return testing::plan_of(shape, context, 64, cap, true, {&policy, 1}, 16, 0);
  };
  CountingBackend free;
  KvSession expected = testing::session_of(free, plan(std::nullopt), {&policy, 1});
  script.prefill(expected, 1200);
  const std::vector<float> answer = script.decode(expected, 20);
  const std::vector<float> several = script.step(expected, Phase::decode, 16);
  const std::uint64_t all = plan(std::uint64_t{1} << 40).device_bytes;
  const std::uint64_t of_layer = context * shape.token_bytes() / 3;
  for (const std::uint64_t missing : {of_layer + of_layer / 2, 2 * of_layer}) {
    CountingBackend backend(all - missing);
    KvSession session = testing::session_of(backend, plan(all - missing), {&policy, 1});
    const KvPlan& planned = session.plan();
    ASSERT_GT(planned.dense_resident_tokens, planned.resident_tokens);
    script.prefill(session, 1200);
    EXPECT_LT(largest_difference(answer, script.decode(session, 20)), kTolerance);
    EXPECT_LT(largest_difference(several, script.step(session, Phase::decode, 16)), kTolerance);
    const Ledger& ledger = session.ledger();
    const auto missed = [&](int layer) {
      return ledger.total(Phase::decode, layer, Tier::host, Tier::device, Cause::miss).rows;
    };
    // The newest page is on the device; a step of several tokens reads the others once.
    const std::int64_t away = 1200 / kPageTokens * kPageTokens - planned.dense_resident_tokens;
    EXPECT_EQ(missed(1), ledger.steps(Phase::decode) * 2u *
                             static_cast<std::uint64_t>(std::max<std::int64_t>(0, away)));
    EXPECT_GT(missed(0), 0u);
  }
}

TEST(SparseSession, PlansEveryByteOfTheHost) {
  const KvShape shape{3, 8, 2, 32, DType::bf16};
  for (const char* text : {"sluice", "twilight dense=0", "select=dense prefill=zipvl(0.9)",
                           "select=sparq prune=top_k(9) prefill=zipvl(0.5,evict)"}) {
    const Policy policy = parse_policy(text);
    const KvPlan plan = testing::plan_of(shape, 500, 64, std::nullopt, true, {&policy, 1}, 4);
    CountingBackend backend(MemoryAccount::kNoCap, plan.host_bytes);
    KvSession session = testing::session_of(backend, plan, {&policy, 1});
    if (policy.prefill.tau > 0.0) continue;
    const Script script(shape, 500, 5);
    script.prefill(session, 490);
    script.step(session, Phase::decode, 4);
    EXPECT_LE(backend.account(Tier::host).peak(), plan.host_bytes) << text;
  }
}

// What is not fetched is approximated the better the more bits its values have, and far better than
// by their mean. One row is fetched here, or none.
TEST(SparseSession, ValuesStandForRows) {
  const KvShape shape{2, 8, 2, 64, DType::bf16};
  const std::int64_t context = 1000;
  const Script script(shape, context, 5);
  const auto answer = [&](const std::vector<Policy>& policies) {
    cpu::CpuBackend backend{cpu::CpuOptions{}};
    KvSession session = make_session(backend, shape, context, policies);
    script.prefill(session, 900);
    return script.step(session, Phase::decode, 1);
  };
  const std::vector<float> dense = answer({});
  const auto error = [&](const std::string& compensate, const std::string& prune = "top_k(1)") {
    const std::vector<float> got =
        answer({parse_policy("select=exact prune=" + prune + " compensate=" + compensate)});
    double sum = 0.0;
    for (std::size_t i = 0; i < dense.size(); ++i) {
      sum += std::pow(static_cast<double>(got[i]) - static_cast<double>(dense[i]), 2);
    }
    return std::sqrt(sum / static_cast<double>(dense.size()));
  };
  const double one = error("values(bits=1,pages=1)");
  const double two = error("values(bits=2,pages=1)");
  const double three = error("values(bits=3,pages=1)");
  const double four = error("values(bits=4,pages=1)");
  const double few_pages = error("values(bits=4,pages=0.1)");
  const double no_row = error("values(bits=4,pages=1)", "none");
  const double mean = error("mean_value");
  EXPECT_LT(four, 0.6 * three);
  EXPECT_LT(three, 0.6 * two);
  EXPECT_LT(two, 0.8 * one);
  EXPECT_LT(one, 0.8 * mean);
  EXPECT_LT(four, 0.5 * few_pages);
  EXPECT_LT(few_pages, mean);
  EXPECT_LT(four, no_row);
  EXPECT_LT(no_row, 0.6 * mean);
}

// Anchors that attend to everything do, and layers that follow attend to what the anchor's own
// exact scores chose: the same as where an anchor attends to its choice.
TEST(SparseSession, DenseAnchorsSelectForOthers) {
  const KvShape shape{2, 8, 2, 32, DType::bf16};
  const Script script(shape, 400, 5);
  const auto answer = [&](const char* text) {
    cpu::CpuBackend backend{cpu::CpuOptions{}};
    KvSession session = make_session(backend, shape, 400, {parse_policy(text)});
    script.prefill(session, 300);
    return script.step(session, Phase::decode, 1);
  };
  const auto layer = [&](const std::vector<float>& of, std::int64_t number) {
    const auto first = of.begin() + static_cast<std::ptrdiff_t>(number * script.query_width());
    return std::vector<float>(first, first + static_cast<std::ptrdiff_t>(script.query_width()));
  };
  const std::vector<float> dense = answer("dense");
  const std::vector<float> paper =
      answer("select=exact prune=top_k(30) anchors=0 anchors_attend=all");
  const std::vector<float> sparse = answer("select=exact prune=top_k(30) anchors=0");
  EXPECT_LT(largest_difference(layer(paper, 0), layer(dense, 0)), kTolerance);
  EXPECT_LT(largest_difference(layer(paper, 1), layer(sparse, 1)), kTolerance);
  EXPECT_GT(largest_difference(layer(sparse, 0), layer(dense, 0)), 0.01);
  EXPECT_GT(largest_difference(layer(sparse, 1), layer(dense, 1)), 0.01);
}

TEST(SparseSession, CandidatesKeepWhatIsAlwaysKept) {
  const KvShape shape{1, 4, 2, 32, DType::bf16};
  const Script script(shape, 600, 5);
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  for (const char* text : {"select=int4 prune=top_k(8) recent=250 sinks=3",
                           "select=int4 candidates=8 prune=top_k(8) recent=250 sinks=3"}) {
    KvSession session = make_session(backend, shape, 600, {parse_policy(text)});
    script.prefill(session, 520);
    script.step(session, Phase::decode, 1);
    // The newest 250 of 521 tokens reach 241 before the unfinished page of 9.
    EXPECT_EQ(session.selection().at(0).selected, 241 + 3) << text;
  }
}

// A step of the script, whose key or value in layer 1 is damaged, after 300 tokens.
void expect_damage_is_named(const Script& script, const char* text, const char* what) {
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  KvSession session = make_session(backend, script.shape(), 400, {parse_policy(text)});
  script.prefill(session, 300);
  try {
    script.step(session, Phase::decode, 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::numeric);
    EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
  }
}

TEST(SparseSession, NamesLayerAndHeadOfWhatIsNoNumber) {
  for (const int group : {1, 2}) {
    const KvShape shape{2, 2 * group, 2, 32, DType::bf16};
    for (const float value : {std::nanf(""), INFINITY}) {
      for (const char* text : {"select=int4 prune=top_k(8)", "select=exact prune=top_k(8)"}) {
        // In a whole page, among the newest rows, and the newest itself.
        for (const std::int64_t position : {40, 290, 300}) {
          SCOPED_TRACE(std::string(text) + ", position " + std::to_string(position));
          Script script(shape, 400, 3);
          script.damage_key(1, position, value);
          expect_damage_is_named(script, text, "layer 1, KV head 0");
        }
      }
      Script script(shape, 400, 3);
      script.damage_value(1, 40, value);
      expect_damage_is_named(script, "select=int4 prune=top_k(8) compensate=values",
                             "a value of layer 1, KV head 0");
    }
  }
}

TEST(SparseSession, RefusesToEvictWhatAnotherPolicyAttendsTo) {
  const KvShape shape{4, 4, 2, 32, DType::bf16};
  const auto expect_refusal = [&](const char* other, const char* what) {
    const std::vector<Policy> policies = {parse_policy("zipvl prefill=zipvl(0.9,evict)"),
                                          parse_policy(other)};
    EXPECT_NO_THROW(testing::plan_of(shape, 600, 64, std::nullopt, true, {&policies[1], 1}));
    try {
      testing::plan_of(shape, 600, 64, std::nullopt, true, policies);
      ADD_FAILURE() << other;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage) << other;
      EXPECT_THAT(error.what(), ::testing::HasSubstr(std::string("evicts and ") + what));
    }
  };
  expect_refusal("tidaldecode anchors=2", "anchors");
  expect_refusal("select=int4 prune=top_k(8) anchors=0", "anchors");
  expect_refusal("select=int4 prune=top_k(8) correct=4", "corrections");
}

TEST(SparseSession, RefusesWhatItWasNotPlannedFor) {
  const KvShape shape{2, 4, 2, 32, DType::bf16};
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  KvSession session =
      make_session(backend, shape, 400, {parse_policy("select=int4 prune=top_k(8)")});
  EXPECT_THROW(session.use(parse_policy("quest")), Error);
  EXPECT_THROW(session.use(parse_policy("select=int4 prune=top_k(8) compensate=values")), Error);
  EXPECT_THROW(make_session(backend, shape, 400,
                            {parse_policy("select=int4 prune=top_k(8) compensate=values"),
                             parse_policy("select=int4 prune=top_k(8) compensate=values(bits=3)")}),
               Error);
  EXPECT_THROW(make_session(backend, shape, 400,
                            {parse_policy("select=int4 prune=top_k(8) bits=2"),
                             parse_policy("select=int4 prune=top_k(8)")}),
               Error);
  EXPECT_THROW(make_session(backend, shape, 400,
                            {parse_policy("select=int4 prune=top_k(8) bits=3"),
                             parse_policy("select=int4 prune=top_k(8) bits=3 1:bits=2")}),
               Error);
  for (const char* const other :
       {"select=quest candidates=64 prune=top_k(8)", "select=int4 prune=top_k(8)"}) {
    try {
      make_session(backend, shape, 400, {parse_policy("sparq"), parse_policy(other)});
      ADD_FAILURE() << other;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("select=sparq reads the channels of keys as"));
    }
  }
  EXPECT_NO_THROW(
      make_session(backend, shape, 400, {parse_policy("sparq"), parse_policy("quest")}));
  EXPECT_THROW(make_session(backend, shape, 400, {parse_policy("tidaldecode")}), Error);
}

}  // namespace
}  // namespace sluice
