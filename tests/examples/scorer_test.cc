// The scorer of examples/scorer by itself and through sessions, against sums in fp64 that share
// nothing with it: what it estimates, what is selected by it, that its index survives forks and
// rewinding, and that its bytes are planned, capped and in the ledger.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "offload/attention/counted_reads.h"
#include "offload/step/kv_session.h"
#include "offload/step/solo_step.h"
#include "signs.h"
#include "sluice/element.h"
#include "sluice/errors.h"
#include "sluice/kv_cache.h"
#include "tests/examples/signs_oracle.h"
#include "tests/support/backends.h"
#include "tests/support/counting_backend.h"
#include "tests/support/elements.h"
#include "tests/support/plan.h"
#include "tests/support/script.h"

namespace sluice {
namespace {

using testing::CountingBackend;
using testing::largest_difference;
using testing::Random;
using testing::Script;
using testing::SignsOracle;
using testing::upload;

constexpr double kTolerance = 3e-5;  // fp32 sums of a few thousand terms of order one

Scorers with_signs() {
  Scorers scorers;
  scorers.add(std::make_shared<signs::Signs>());
  return scorers;
}

Policy policy_of(const std::string& text) { return parse_policy(text, with_signs()); }

KvPlan plan_of(const BackendInfo& on, const KvShape& shape, std::int64_t context,
               const Policy& policy, std::optional<std::uint64_t> cap = std::nullopt,
               std::int64_t sequences = 1) {
  const Scorers scorers = with_signs();
  KvRequest request;
  request.shape = shape;
  request.on = on;
  request.context = context;
  request.chunk = 64;
  request.sequences = sequences;
  request.policies = {&policy, 1};
  request.scorers = &scorers;
  request.device_cap = cap;
  return plan_kv(request);
}

KvSession session_of(Backend& backend, const KvPlan& plan, const Policy& policy) {
  return testing::session_of(backend, plan, {&policy, 1}, with_signs());
}

class Signs : public ::testing::TestWithParam<testing::NamedBackend> {};

// Pages built as runs and by batches, then scored: bit for bit no backend equals another, but all
// equal the definition.
TEST_P(Signs, EstimatesWhatTheDefinitionSays) {
  const std::unique_ptr<testing::Device> backend = testing::make_or_skip(GetParam());
  if (backend == nullptr) return;
  const std::uint64_t seed = testing::seed(31);
  SCOPED_TRACE(testing::seed_message(seed));
  for (const int head_dim : {32, 80, 128}) {
    const KvShape shape{1, 6, 2, head_dim, DType::bf16};
    const std::int64_t pages = 3;
    const std::int64_t tokens = pages * kPageTokens + 5;
    const Script script(shape, tokens, seed);
    const SignsOracle oracle(shape, script, 0, tokens);
    const std::size_t row_bytes = shape.row_bytes();
    // One sequence, number 1 of 2, whose pages and tiles lie in no order.
    const std::vector<PageSlots> table = {{}, {}, {}, {}, {2, -1}, {0, -1}, {3, -1}, {1, -1}};
    const std::vector<std::int32_t> tiles = {-1, -1, 1, 0};
    std::vector<std::byte> rows(static_cast<std::size_t>(shape.kv_heads) * 4 * kPageTokens *
                                row_bytes);
    std::vector<std::byte> run = rows;
    for (int head = 0; head < shape.kv_heads; ++head) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        const float* const k = script.k(0, t) + head * head_dim;
        const std::vector<std::byte> key = testing::encoded({k, k + head_dim}, shape.rows.element);
        const std::int64_t slot = table[static_cast<std::size_t>(4 + t / kPageTokens)].device;
        const std::int64_t page = head * 4 + slot;
        std::copy(key.begin(), key.end(),
                  rows.begin() + (page * kPageTokens + t % kPageTokens) *
                                     static_cast<std::int64_t>(row_bytes));
        std::copy(
            key.begin(), key.end(),
            run.begin() + (head * 4 * kPageTokens + t) * static_cast<std::int64_t>(row_bytes));
      }
    }
    const Buffer device = upload(*backend, rows);
    const Buffer in_turn = upload(*backend, run);
    const Buffer slots = upload(*backend, table);
    const Buffer places = upload(*backend, tiles);
    const signs::Signs scorer;
    RunScorer call;
    call.use.shape = shape;
    call.memory.page_bytes = (signs::PageLayout{head_dim}.bytes() + 63) / 64 * 64;
    call.memory.slots = 2;
    const Buffer memory =
        upload(*backend, std::vector<std::byte>(2 * 2 * kTilePages * call.memory.page_bytes));
    call.memory.pages = memory.data();
    call.memory.table = reinterpret_cast<const std::int32_t*>(places.data());
    call.memory.table_stride = 2;
    call.processor = backend->info().processor;
    call.stream = backend->queue->native_stream();
    call.rows.device = device.data();
    call.rows.device_stride = static_cast<std::int64_t>(4 * kPageTokens * row_bytes);
    call.rows.pages = reinterpret_cast<const PageSlots*>(slots.data());
    call.rows.table_stride = 4;
    // The first page as a run, the others when a batch ends them; one token of it ends none.
    BuildScorer build{call, {}};
    build.pages.count = 1;
    build.pages.run_sequence = 1;
    build.pages.run_rows = in_turn.data();
    build.pages.head_stride = call.rows.device_stride;
    scorer.build(build);
    const Buffer ends =
        upload(*backend, std::vector<BatchToken>{{1, 255}, {1, 127 + 100}, {1, 383}});
    build.pages = {};
    build.pages.count = 3;
    build.pages.batch = {reinterpret_cast<const BatchToken*>(ends.data()), 3, 512};
    build.pages.paged = call.rows;
    scorer.build(build);

    const std::vector<BatchToken> at = {{1, 384}, {1, 300}, {1, 100}};
    const Buffer batch = upload(*backend, at);
    call.batch = {reinterpret_cast<const BatchToken*>(batch.data()), 3, 512};
    std::vector<float> q;
    for (const BatchToken& token : at) {
      q.insert(q.end(), script.q(0, token.position), script.q(0, token.position + 1));
    }
    const Buffer queries = upload(*backend, q);
    call.q = queries.floats();
    call.q_stride = script.query_width();
    const DType dtype = backend->info().logits.dtype;
    const std::vector<std::byte> untouched(3 * 6 * 512 * size_of(dtype), std::byte{0x11});
    const Buffer logits = upload(*backend, untouched);
    call.logits = {logits.data(), dtype, 512};
    const CountedReads reads(call, Tier::device);
    if (call.processor == Processor::host) call.reads = &reads;
    scorer.score(call);
    backend->synchronize();
    const std::vector<float> actual = testing::values_of(*backend, logits, dtype);
    const std::vector<float> before = testing::decoded(untouched, dtype);
    const double tolerance = dtype == DType::f16 ? 0.01 : 1e-4;  // of logits up to about 10
    for (std::size_t token = 0; token < at.size(); ++token) {
      for (std::size_t query = 0; query < 6; ++query) {
        const std::vector<double> expected =
            oracle.estimates(at[token].position, static_cast<int>(query));
        const std::size_t first = (token * 6 + query) * 512;
        for (std::size_t t = 0; t < 512; ++t) {
          if (t < expected.size()) {
            ASSERT_NEAR(actual[first + t], expected[t], tolerance) << head_dim << " " << t;
          } else {
            ASSERT_EQ(actual[first + t], before[first + t]) << "written beyond the pages";
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Signs, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

// Steps through sessions, in place and under a cap: outputs are those of the selections that the
// definition names.
TEST(SignsSession, SelectsWhatTheDefinitionSays) {
  const std::uint64_t seed = testing::seed(32);
  SCOPED_TRACE(testing::seed_message(seed));
  const Policy policy = policy_of("select=signs prune=top_k(64)");
  for (const int group : {1, 4}) {
    const KvShape shape{2, 2 * group, 2, 32, DType::bf16};
    const Script script(shape, 700, seed);
    const KvPlan free = plan_of(CountingBackend().info(), shape, 700, policy);
    const std::uint64_t cap = free.index_bytes + free.work_bytes + free.table_bytes +
                              8 * kPageTokens * shape.token_bytes() / 2;
    for (const bool capped : {false, true}) {
      CountingBackend backend(capped ? cap : MemoryAccount::kNoCap);
      const KvPlan plan = capped ? plan_of(backend.info(), shape, 700, policy, cap) : free;
      KvSession session = session_of(backend, plan, policy);
      script.prefill(session, 510);
      for (std::int64_t at = 510; at < 515; ++at) {
        const std::vector<float> actual = script.step(session, Phase::decode, 1);
        std::vector<float> expected;
        for (std::size_t layer = 0; layer < 2; ++layer) {
          const std::vector<float> of = SignsOracle(shape, script, layer, at + 1).output(at, 64);
          expected.insert(expected.end(), of.begin(), of.end());
        }
        ASSERT_LT(largest_difference(actual, expected), kTolerance)
            << "group " << group << ", position " << at << (capped ? ", capped" : "");
        EXPECT_EQ(session.selection().at(0).selected, at < 128 ? 0 : 64);
      }
      EXPECT_LE(backend.device_peak, capped ? cap : 0);
    }
  }
}

TEST(SignsSession, TheIndexSurvivesForksAndRewinding) {
  const std::uint64_t seed = testing::seed(33);
  SCOPED_TRACE(testing::seed_message(seed));
  const Policy policy = policy_of("select=signs prune=top_k(20) compensate=mean_value");
  const KvShape shape{2, 4, 2, 32, DType::bf16};
  const Script one(shape, 700, seed);
  const Script two(shape, 700, seed + 1);
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool = std::make_shared<KvPool>(backend.make_queue(),
                                             plan_of(backend.info(), shape, 700, policy, {}, 3),
                                             std::span(&policy, 1), with_signs());
  const auto answer = [&](std::int64_t shared, std::int64_t end) {
    KvSession fresh = session_of(backend, plan_of(backend.info(), shape, 700, policy), policy);
    one.prefill(fresh, shared);
    two.prefill(fresh, end - shared);
    return two.step(fresh, Phase::decode, 1);
  };
  KvSession root(pool);
  one.prefill(root, 300);
  KvSession fork = root.fork();
  // They share two pages, and a tile of which either then has a half of its own.
  two.prefill(fork, 220);
  one.prefill(root, 150);
  EXPECT_LT(largest_difference(two.step(fork, Phase::decode, 1), answer(300, 520)), kTolerance);
  // Pages that were forgotten are built again from other tokens.
  for (const std::int64_t length : {400, 384, 130, 128, 5}) {
    KvSession again = root.fork();
    again.truncate(length);
    two.prefill(again, 600 - length);
    EXPECT_LT(largest_difference(two.step(again, Phase::decode, 1), answer(length, 600)),
              kTolerance)
        << length;
  }
  KvSession alone = session_of(backend, plan_of(backend.info(), shape, 700, policy), policy);
  one.prefill(alone, 450);
  EXPECT_LT(largest_difference(one.step(root, Phase::decode, 1), one.step(alone, Phase::decode, 1)),
            kTolerance)
      << "the root is as it was";
}

TEST(SignsSession, ItsBytesArePlannedCappedAndInTheLedger) {
  const Policy policy = policy_of("select=signs prune=top_k(64)");
  const KvShape shape{3, 8, 2, 64, DType::bf16};
  const KvPlan plan = plan_of(CountingBackend().info(), shape, 1024, policy);
  const std::size_t page = 2 * 64 * 4 + 128 * 2 * 4;  // means and sizes; signs
  // Whole pages, and what a pool keeps of tiles for forks: never less than the pages of a sequence.
  const std::size_t regions = 3 * 2;
  EXPECT_GE(plan.index_bytes, regions * 8 * page);
  EXPECT_EQ(plan.index_bytes % (regions * kTilePages * page), 0u);
  EXPECT_LE(plan.index_bytes, regions * (8 + 2 * kTilePages) * page);
  EXPECT_THROW(plan_of(CountingBackend().info(), shape, 1024, policy, plan.index_bytes), Error);

  CountingBackend backend;
  KvSession session = session_of(backend, plan, policy);
  EXPECT_LE(backend.account(Tier::host).peak(), plan.host_bytes);
  const Script script(shape, 1024, 3);
  script.prefill(session, 700);
  script.step(session, Phase::decode, 1);
  const Traffic index =
      session.ledger().total(Phase::decode, Tier::host, Tier::host, Cause::index_read);
  const std::uint64_t newest = 700 % 128 + 1;
  EXPECT_EQ(index.bytes, regions * (5 * page + newest * 64 * 2)) << "pages, and newest keys";
  EXPECT_EQ(index.rows, regions * 701);
}

// A needle is a key along the query among random ones: of 640 tokens 64 are selected, so that a
// tenth would be found by chance.
TEST(SignsSession, FindsNeedles) {
  const std::uint64_t seed = testing::seed(34);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const KvShape shape{1, 1, 1, 64, DType::bf16};
  const Policy policy = policy_of("select=signs prune=top_k(64)");
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  int found = 0;
  constexpr int kTrials = 40;
  for (int trial = 0; trial < kTrials; ++trial) {
    const std::int64_t needle = random.integer(0, 639);
    const std::vector<float> q = random.normal(64);
    KvSession session = session_of(backend, plan_of(backend.info(), shape, 700, policy), policy);
    const auto step = [&](Phase phase, std::int64_t tokens) {
      const std::int64_t first = session.length();
      std::vector<float> k = random.normal(tokens * 64);
      std::vector<float> v(k.size());
      if (needle >= first && needle < first + tokens) {
        const auto at = static_cast<std::size_t>((needle - first) * 64);
        for (std::size_t c = 0; c < 64; ++c) k[at + c] += 0.5f * q[c];
        v[at] = 1.0f;
      }
      std::vector<float> queries;
      for (std::int64_t t = 0; t < tokens; ++t) queries.insert(queries.end(), q.begin(), q.end());
      std::vector<float> out(queries.size());
      std::vector<float> lse(static_cast<std::size_t>(tokens));
      SoloStep taken(session, phase, tokens);
      taken.append(0, {k.data(), v.data(), 64});
      taken.attend(0, {queries.data(), 64, out.data(), lse.data()});
      taken.end();
      return out;
    };
    for (int i = 0; i < 10; ++i) step(Phase::prefill, 64);
    if (step(Phase::decode, 1)[0] > 0.0f) ++found;
  }
  EXPECT_GE(found, kTrials * 3 / 4);
}

TEST(SignsSession, WorksWithEveryOtherWord) {
  const KvShape shape{3, 8, 2, 32, DType::bf16};
  const Script script(shape, 700, 9);
  for (const char* text :
       {"select=signs prune=top_p(1)", "select=signs prune=top_k(1/1) compensate=mean_value",
        "select=signs candidates=1/1 prune=top_p(1)",
        "select=signs prune=top_k(1/1) dense=0 anchors=1 sinks=4 recent=8"}) {
    const Policy policy = policy_of(text);
    EXPECT_EQ(parse_policy(to_string(policy), with_signs()), policy);
    EXPECT_EQ(policy_from_json(to_json(policy), with_signs()), policy);
    cpu::CpuBackend backend{cpu::CpuOptions{}};
    KvSession sparse = session_of(backend, plan_of(backend.info(), shape, 700, policy), policy);
    KvSession dense = session_of(backend, plan_of(backend.info(), shape, 700, {}), {});
    script.prefill(sparse, 500);
    script.prefill(dense, 500);
    EXPECT_LT(largest_difference(script.step(sparse, Phase::decode, 1),
                                 script.step(dense, Phase::decode, 1)),
              kTolerance)
        << text;
  }
}

// As somebody meets it who runs a model of his own: through public headers, on any device.
class SignsCache : public ::testing::TestWithParam<const char*> {};

TEST_P(SignsCache, AttendsToWhatTheDefinitionSays) {
  const std::uint64_t seed = testing::seed(35);
  SCOPED_TRACE(testing::seed_message(seed));
  KvConfig config;
  config.shape = {2, 8, 2, 64, DType::bf16};
  config.context = 700;
  config.chunk = 64;
  config.device = GetParam();
  config.scorers.add(std::make_shared<signs::Signs>());
  config.policies = {parse_policy("select=signs prune=top_k(64)", config.scorers)};
  std::optional<KvCache> cache;
  try {
    cache.emplace(config);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported || config.device != "cuda") throw;
    GTEST_SKIP() << error.what();
  }
  // A GPU rounds queries and weights to the 8 bits of the rows, and logits to f16: which of two
  // tokens that weigh nearly the same is chosen is then open.
  const bool on_gpu = config.device == "cuda";
  const double tolerance = on_gpu ? 0.05 : kTolerance;
  const double least_lead = on_gpu ? 0.01 : 0.0;
  int compared = 0;
  const Script script(config.shape, 700, seed);
  KvSequence sequence = cache->new_sequence();
  const auto run = [&](Phase phase, std::int64_t tokens) {
    const std::int64_t first = sequence.length();
    std::vector<float> all;
    KvStep step = sequence.begin_step(phase, tokens);
    for (int layer = 0; layer < 2; ++layer) {
      const auto at = static_cast<std::size_t>(layer);
      std::vector<float> out(static_cast<std::size_t>(tokens * script.query_width()));
      step.append(layer, script.k(at, first), script.v(at, first));
      step.attend(layer, script.q(at, first), out.data());
      all.insert(all.end(), out.begin(), out.end());
    }
    step.end();
    return all;
  };
  while (sequence.length() < 500)
    run(Phase::prefill, std::min<std::int64_t>(64, 500 - sequence.length()));
  double from_dense = 0.0;
  // Page 3 becomes whole on the way, and is scored from its index afterwards.
  for (std::int64_t at = 500; at < 516; ++at) {
    const std::vector<float> actual = run(Phase::decode, 1);
    for (std::size_t layer = 0; layer < 2; ++layer) {
      const SignsOracle oracle(config.shape, script, layer, at + 1);
      const std::vector<float> expected = oracle.output(at, 64);
      const std::vector<float> dense = oracle.output(at, 1000);
      for (int head = 0; head < config.shape.kv_heads; ++head) {
        if (oracle.lead(at, head, 64) < least_lead) continue;
        ++compared;
        const auto of_head = [&](const std::vector<float>& all, std::size_t first) {
          const auto width = static_cast<std::int64_t>(config.shape.group()) * 64;
          const auto begin = all.begin() + static_cast<std::int64_t>(first) + head * width;
          return std::vector<float>(begin, begin + width);
        };
        const std::vector<float> right = of_head(expected, 0);
        ASSERT_LT(largest_difference(of_head(actual, layer * expected.size()), right), tolerance)
            << "position " << at << " layer " << layer << " KV head " << head;
        from_dense = std::max(from_dense, largest_difference(right, of_head(dense, 0)));
      }
    }
  }
  EXPECT_GE(compared, 16) << "of 64";
  EXPECT_GT(from_dense, 3.0 * tolerance) << "dense attention would have passed";
}

INSTANTIATE_TEST_SUITE_P(Devices, SignsCache, ::testing::Values("cpu", "reference", "cuda"),
                         [](const auto& device) { return std::string(device.param); });

TEST(SignsSession, IsUnknownWhereItWasNotAdded) {
  EXPECT_THROW(parse_policy("select=signs prune=top_k(64)"), Error);
  const Policy policy = policy_of("select=signs prune=top_k(64)");
  KvRequest request;
  request.shape = {1, 1, 1, 32, DType::bf16};
  request.context = 100;
  request.policies = {&policy, 1};
  EXPECT_THROW(plan_kv(request), Error);
}

}  // namespace
}  // namespace sluice
