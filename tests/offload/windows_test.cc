// Sessions whose layers attend to windows of different lengths, against attention in fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/step/kv_batch.h"
#include "sluice/errors.h"
#include "tests/support/counting_backend.h"
#include "tests/support/expect.h"
#include "tests/support/plan.h"
#include "tests/support/script.h"
#include "tests/support/script_oracle.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::CountingBackend;
using testing::Script;

constexpr std::int64_t kContext = 700;
constexpr std::int64_t kChunk = 100;
const KvShape kShape{4, 4, 2, 32, DType::f32};
// Shorter than a page, all, longer than a page, and longer than the context.
const std::vector<std::int64_t> kWindows = {40, 0, 300, 100000};
constexpr double kTolerance = 3e-5;  // fp32 sums of a few hundred terms of order one

KvRequest request_of(std::span<const Policy> policies, const BackendInfo& on) {
  KvRequest request;
  request.shape = kShape;
  request.on = on;
  request.windows = kWindows;
  request.context = kContext;
  request.chunk = kChunk;
  request.sequences = 3;
  request.decode_batch = 8;
  request.policies = policies;
  return request;
}

// The largest error of a step's attention in the layers with a window, and with `all` in every
// layer. `got`: [layers][tokens, query_heads, head_dim].
double error_of(const Script& script, std::int64_t first, std::int64_t tokens,
                const std::vector<float>& got, bool all) {
  double error = 0.0;
  const auto width = static_cast<std::size_t>(script.query_width());
  const auto d = static_cast<std::size_t>(kShape.head_dim);
  for (std::size_t layer = 0; layer < kWindows.size(); ++layer) {
    const std::int64_t window = kWindows[layer];
    if (window == 0 && !all) continue;
    const auto sees = [&](std::int64_t token, std::int64_t row) {
      return window == 0 || token - row < window;
    };
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (int head = 0; head < kShape.query_heads; ++head) {
        const std::vector<double> expected =
            testing::attention_of(script, layer, first + t, head, sees);
        const std::size_t at =
            (layer * static_cast<std::size_t>(tokens) + static_cast<std::size_t>(t)) * width +
            static_cast<std::size_t>(head) * d;
        for (std::size_t c = 0; c < d; ++c) {
          error = std::max(error, std::abs(expected[c] - static_cast<double>(got[at + c])));
        }
      }
    }
  }
  return error;
}

// Steps that cross the borders of pages and windows.
void expect_steps(KvSession& session, const Script& script, bool all) {
  const auto step = [&](Phase phase, std::int64_t tokens) {
    const std::int64_t first = session.length();
    const std::vector<float> got = script.step(session, phase, tokens);
    EXPECT_LT(error_of(script, first, tokens, got, all || phase != Phase::decode), kTolerance)
        << to_string(phase) << " of " << tokens << " tokens after " << first;
  };
  step(Phase::prefill, std::min<std::int64_t>(30, session.plan().chunk));
  for (int i = 0; i < 12; ++i) step(Phase::decode, 1);
  for (const std::int64_t tokens : {86, 100, 100, 64, 1}) {
    step(Phase::prefill, std::min<std::int64_t>(tokens, session.plan().chunk));
  }
  for (int i = 0; i < 3; ++i) step(Phase::decode, 1);
  session.truncate(session.length() - 2);
  step(Phase::correction, 2);
  step(Phase::decode, std::min<std::int64_t>(4, session.decode_room()));
}

class Windows : public ::testing::TestWithParam<const char*> {
 protected:
  Policy policy_ = parse_policy(GetParam());
  bool all_ = policy_.select.name == "dense";
  Script script_{kShape, kContext, 11};
};

TEST_P(Windows, AreAttendedWhateverThePolicy) {
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const KvPlan plan = plan_kv(request_of({&policy_, 1}, backend.info()));
  KvSession session = testing::session_of(backend, plan, {&policy_, 1});
  expect_steps(session, script_, all_);
}

// Under a cap rows stream from host memory, and only those that a window shows.
TEST_P(Windows, AreAllThatACapBringsToTheDevice) {
  const KvPlan free = plan_kv(request_of({&policy_, 1}, CountingBackend().info()));
  for (const std::uint64_t pages : {8, 20}) {
    KvRequest request = request_of({&policy_, 1}, CountingBackend().info());
    request.device_cap = free.index_bytes + free.work_bytes + free.table_bytes +
                         pages * kPageTokens * kShape.token_bytes() / 2;
    const KvPlan plan = plan_kv(request);
    ASSERT_FALSE(plan.all_resident());
    CountingBackend backend(*request.device_cap);
    KvSession session = testing::session_of(backend, plan, {&policy_, 1});
    expect_steps(session, script_, all_);
    const Ledger& ledger = session.ledger();
    EXPECT_EQ(ledger.crossed(Tier::device, Tier::host).bytes, backend.device_to_host);
    if (all_) {
      EXPECT_EQ(ledger.crossed(Tier::host, Tier::device).bytes, backend.host_to_device);
    }
    // Layer 0 sees 40 tokens of more than 400.
    const auto missed = [&] {
      return ledger.total(Phase::decode, 0, Tier::host, Tier::device, Cause::miss).rows;
    };
    const std::uint64_t before = missed();
    for (int i = 0; i < 10; ++i) script_.step(session, Phase::decode, 1);
    EXPECT_LE(missed() - before, 10u * 40 * 2);
    EXPECT_LE(backend.device_peak, *request.device_cap);
  }
}

// Sequences of different lengths in one step, each through its own windows.
TEST_P(Windows, MoveWithEachTokenOfABatch) {
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const KvPlan plan = plan_kv(request_of({&policy_, 1}, backend.info()));
  const auto pool = std::make_shared<KvPool>(backend.make_queue(), plan, std::span(&policy_, 1));
  const std::vector<Script> scripts = {Script(kShape, kContext, 1), Script(kShape, kContext, 2),
                                       Script(kShape, kContext, 3)};
  std::vector<KvSession> sessions;
  for (std::size_t i = 0; i < scripts.size(); ++i) {
    sessions.emplace_back(pool);
    scripts[i].append(sessions[i], std::vector<std::int64_t>{20, 255, 640}[i]);
  }
  for (int i = 0; i < 3; ++i) {
    const std::vector<KvSession*> together = {&sessions[0], &sessions[1], &sessions[2]};
    const std::vector<const Script*> by = {&scripts[0], &scripts[1], &scripts[2]};
    const std::vector<std::vector<float>> got = testing::step_together(together, by);
    for (std::size_t s = 0; s < sessions.size(); ++s) {
      EXPECT_LT(error_of(scripts[s], sessions[s].length() - 1, 1, got[s], all_), kTolerance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, Windows,
                         ::testing::Values("dense", "select=int4 prune=top_k(40)",
                                           "select=int4 prune=top_k(16) compensate=values",
                                           "select=exact prune=top_k(50) dense=0 anchors=1",
                                           "select=quest prune=top_k(64) early=half"));

class WindowsOnDisk : public testing::OnDisk {};

TEST_F(WindowsOnDisk, ReadOnlyThePagesThatTheyShow) {
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  KvRequest request = request_of({}, backend.info());
  request.disk = DiskRoom();
  request.disk->host.cap = std::uint64_t{1} << 22;
  request.device_cap = std::uint64_t{2} << 20;
  const KvPlan plan = plan_kv(request);
  ASSERT_TRUE(plan.on_disk);
  const auto pool = std::make_shared<KvPool>(backend.make_queue(), plan, std::span<const Policy>(),
                                             own_scorers(), HostAttender(), DiskSource{{parent_}});
  KvSession session(pool);
  const Script script(kShape, kContext, 5);
  expect_steps(session, script, true);
}

TEST(WindowsPlan, RefusesPoliciesThatChooseAmongHiddenTokens) {
  const auto refuse = [](const char* text, const std::string& why) {
    const Policy policy = parse_policy(text);
    testing::expect_error(ErrorCode::unsupported, why, [&] {
      plan_kv(request_of({&policy, 1}, CountingBackend().info()));
    });
  };
  refuse("select=dense prefill=zipvl(0.9)", "layers of this model see a window");
  refuse("select=int4 prune=top_k(40) anchors=0",
         "follow layer 0, which sees only a window of 40 tokens");
}

TEST(WindowsPlan, NamesABackendWithoutThem) {
  BackendInfo info = CountingBackend().info();
  info.name = "cuda:0";
  info.windows = false;
  testing::expect_error(ErrorCode::unsupported, "device cuda:0 has no attention to a window",
                        [&] { plan_kv(request_of({}, info)); });
}

TEST(WindowsPlan, WantsAWindowPerLayer) {
  KvRequest request = request_of({}, CountingBackend().info());
  request.windows.pop_back();
  testing::expect_error(ErrorCode::usage, "`windows` needs one entry per layer",
                        [&] { plan_kv(request); });
  request.windows.push_back(-1);
  testing::expect_error(ErrorCode::usage, "a window has 0 (all)", [&] { plan_kv(request); });
}

// Layers that attend to everything get the memory under a cap first.
TEST(WindowsPlan, GivesMemoryToLayersWithoutOne) {
  KvRequest request = request_of({}, CountingBackend().info());
  request.device_cap = 400 * kShape.token_bytes();
  const KvPlan plan = plan_kv(request);
  EXPECT_EQ(plan.dense_layers, std::vector<int>{1});
  EXPECT_GT(plan.dense_resident_tokens, plan.resident_tokens);
}

}  // namespace
}  // namespace sluice
