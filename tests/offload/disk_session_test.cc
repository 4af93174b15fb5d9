// Sessions whose rows lie on disk answer as sessions with all rows in host memory do, and read from
// disk what the ledger says.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "offload/plan/planner.h"
#include "offload/step/kv_batch.h"
#include "offload/step/kv_pool.h"
#include "offload/step/kv_session.h"
#include "offload/step/solo_step.h"
#include "sluice/errors.h"
#include "tests/support/disk_sessions.h"
#include "tests/support/late_backend.h"
#include "tests/support/random.h"
#include "tests/support/script.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/twin_sessions.h"

namespace sluice {
namespace {

using testing::DiskSessions;
using testing::Script;

class DiskPolicies : public DiskSessions, public ::testing::WithParamInterface<const char*> {
 protected:
  // Dense layers attend to streamed rows in other parts, and sums of values lose tokens in another
  // order, so these differ by rounding.
  float tolerance() const {
    const bool rounds = policy_.is_dense(0) || policy_.is_dense(1) ||
                        policy_.compensates(0, Compensation::mean_value);
    return rounds ? 2e-5f : 0.0f;
  }

  Policy policy_ = parse_policy(GetParam());
};

TEST_P(DiskPolicies, AnswerAsInMemory) {
  const std::uint64_t seed = testing::seed(7);
  SCOPED_TRACE(testing::seed_message(seed));
  KvShape coded = kShape;
  coded.rows = RowCode::int8;
  KvShape small = kShape;
  small.rows = RowCode::k8v4;
  for (const auto& [shape, device, more, blocks] : {std::tuple(kShape, DeviceTier::shared, 0, 0),
                                                    {kShape, DeviceTier::own, 80 << 10, 0},
                                                    {kShape, DeviceTier::own, 0, 3},
                                                    {coded, DeviceTier::shared, 0, 0},
                                                    {coded, DeviceTier::own, 40 << 10, 2},
                                                    {small, DeviceTier::shared, 0, 0}}) {
    SCOPED_TRACE(::testing::Message()
                 << to_string(shape.rows) << ", more " << more << ", in host memory " << blocks);
    const KvPlan plan = plan_of(shape, policy_, device, static_cast<std::uint64_t>(more), blocks);
    ASSERT_LT(plan.host_blocks, plan.blocks);
    testing::play_twins(pool(plan, policy_), in_memory(plan, policy_), seed,
                        {.tolerance = tolerance()});
    if (HasFatalFailure()) return;
  }
}

// One step whose results are there once the queue is idle.
std::vector<std::vector<float>> issue_step(KvSession& session, const Script& script, Phase phase,
                                           std::int64_t tokens) {
  std::vector<std::vector<float>> results;
  const std::int64_t first = session.length();
  SoloStep step(session, phase, tokens);
  for (int layer = 0; layer < script.shape().layers; ++layer) {
    const auto at = static_cast<std::size_t>(layer);
    results.emplace_back(static_cast<std::size_t>(tokens * script.query_width()));
    float* const out = results.back().data();
    results.emplace_back(static_cast<std::size_t>(tokens * script.shape().query_heads));
    script.begin_early(session, step, layer + 1, Early::layer, first);
    step.append(layer, {script.k(at, first), script.v(at, first), script.key_width()});
    step.attend(layer, {script.q(at, first), script.query_width(), out, results.back().data()});
    script.begin_early(session, step, layer + 1, Early::half, first);
  }
  step.end();
  return results;
}

// Rows that were read may still be on their way to the device when the next ones are wanted.
TEST_F(DiskSessions, KeepRowsUntilTheyAreOnTheDevice) {
  const std::uint64_t first = testing::seed(11);
  testing::LateBackend late;
  for (const char* const name :
       {"dense", "select=int4 prune=top_k(50) dense=1", "select=int4 prune=top_k(50) early=half",
        "select=int4 prune=top_k(20) compensate=values early=layer"}) {
    const Policy policy = parse_policy(name);
    const auto policies = policy == Policy() ? std::span<const Policy>() : std::span(&policy, 1);
    const KvPlan plan = plan_of(kShape, policy, DeviceTier::own, 0);
    for (std::uint64_t seed = first; seed < first + 6; ++seed) {
      SCOPED_TRACE(::testing::Message() << name << ", " << testing::seed_message(seed));
      late.begin(seed);
      const auto pool = std::make_shared<KvPool>(late.make_queue(), plan, policies, own_scorers(),
                                                 HostAttender(), DiskSource{{parent_}});
      const Script script(kShape, kContext, seed);
      KvSession one(pool);
      KvSession other(in_memory(plan, policy));
      std::vector<std::vector<std::vector<float>>> actual;
      std::vector<std::vector<std::vector<float>>> expected;
      const auto step = [&](Phase phase, std::int64_t tokens) {
        actual.push_back(issue_step(one, script, phase, tokens));
        expected.push_back(issue_step(other, script, phase, tokens));
      };
      while (other.length() < 500) step(Phase::prefill, 20);
      while (other.length() < kContext) step(Phase::decode, 1);
      pool->queue().synchronize();
      for (std::size_t i = 0; i < actual.size(); ++i) {
        for (std::size_t part = 0; part < actual[i].size(); ++part) {
          SCOPED_TRACE(::testing::Message() << "step " << i << " part " << part);
          testing::expect_same(actual[i][part], expected[i][part], 2e-5f);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Steps of a batch that are recorded once for each number of sessions.
class RecordedSteps {
 public:
  RecordedSteps(const Script& script, std::int64_t most) : script_(script) {
    const auto layers = static_cast<std::size_t>(script.shape().layers);
    const auto rows = static_cast<std::size_t>(most);
    q_.assign(layers, std::vector<float>(rows * static_cast<std::size_t>(script.query_width())));
    out_ = q_;
    k_.assign(layers, std::vector<float>(rows * static_cast<std::size_t>(script.key_width())));
    v_ = k_;
    lse_.resize(rows * static_cast<std::size_t>(script.shape().query_heads));
  }

  // The attention output of every session, one after the other, by layer.
  std::vector<std::vector<float>> step(std::span<KvSession* const> sessions) {
    const auto count = static_cast<std::int64_t>(sessions.size());
    for (std::size_t layer = 0; layer < q_.size(); ++layer) {
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t at = sessions[static_cast<std::size_t>(i)]->length();
        const auto put = [&](std::vector<float>& to, const float* from, std::int64_t width) {
          std::copy_n(from, width, to.begin() + i * width);
        };
        put(q_[layer], script_.q(layer, at), script_.query_width());
        put(k_[layer], script_.k(layer, at), script_.key_width());
        put(v_[layer], script_.v(layer, at), script_.key_width());
      }
    }
    KvBatch batch(sessions);
    batch.queue().replay(batch.recording(), [&] {
      for (std::size_t layer = 0; layer < q_.size(); ++layer) {
        batch.append(static_cast<int>(layer),
                     {k_[layer].data(), v_[layer].data(), script_.key_width()});
        batch.attend(static_cast<int>(layer),
                     {q_[layer].data(), script_.query_width(), out_[layer].data(), lse_.data()});
      }
      batch.issue_report();
    });
    for (const std::optional<Error>& error : batch.end()) {
      if (error) throw Error(*error);
    }
    std::vector<std::vector<float>> results = out_;
    for (std::vector<float>& layer : results) {
      layer.resize(static_cast<std::size_t>(count * script_.query_width()));
    }
    return results;
  }

 private:
  const Script& script_;
  std::vector<std::vector<float>> q_, k_, v_, out_;  // [layers][most, width]
  std::vector<float> lse_;
};

// A step of few sessions that was recorded before one of many fetches rows for few.
TEST_F(DiskSessions, RecordedStepsFetchForTheirOwnTokens) {
  const std::uint64_t seed = testing::seed(13);
  SCOPED_TRACE(testing::seed_message(seed));
  testing::LateBackend late;
  late.begin(seed);
  late.records = true;
  const Policy policy = parse_policy("select=int4 prune=top_k(40)");
  const KvPlan plan = plan_of(kShape, policy, DeviceTier::own, 0);
  const auto on_disk =
      std::make_shared<KvPool>(late.make_queue(), plan, std::span(&policy, 1), own_scorers(),
                               HostAttender(), DiskSource{{parent_}});
  const auto in_memory = this->in_memory(plan, policy);
  const Script script(kShape, kContext, seed);
  RecordedSteps late_steps(script, 3);
  RecordedSteps plain_steps(script, 3);
  std::vector<KvSession> ones;
  std::vector<KvSession> others;
  for (const std::int64_t tokens : {500, 300, 420}) {
    for (const auto& [pool, list] : {std::pair(on_disk, &ones), {in_memory, &others}}) {
      list->emplace_back(pool);
      while (list->back().length() < tokens) {
        const std::int64_t left = tokens - list->back().length();
        const auto results =
            issue_step(list->back(), script, Phase::prefill, std::min(left, plan.chunk));
        pool->queue().synchronize();
      }
    }
  }
  for (const std::size_t count : {1, 3, 1, 2, 1, 3, 2}) {
    SCOPED_TRACE(::testing::Message() << count << " sessions");
    std::vector<KvSession*> now;
    std::vector<KvSession*> twins;
    for (std::size_t i = 0; i < count; ++i) {
      now.push_back(&ones[i]);
      twins.push_back(&others[i]);
    }
    EXPECT_EQ(late_steps.step(now), plain_steps.step(twins));
  }
}

// Whose reads end when they are allowed to.
class HeldDisk : public testing::SimulatedDisk {
 public:
  HeldDisk(std::size_t sectors, const std::atomic<bool>& holds, std::atomic<int>& held)
      : SimulatedDisk(sectors, 1, 0.0), holds_(holds), held_(held) {}

  bool start(const DiskOperation& operation) override {
    if (!SimulatedDisk::start(operation)) return false;
    if (holds_ && operation.action == DiskAction::read) ++held_;
    return true;
  }
  std::size_t retire(std::span<DiskResult> results, bool wait) override {
    if (holds_) return 0;
    return SimulatedDisk::retire(results, wait);
  }

 private:
  const std::atomic<bool>& holds_;
  std::atomic<int>& held_;
};

// A layer that chooses early asks the disk for its rows, and only waits for them when it attends.
TEST_F(DiskSessions, ReadWhileTheLayerBeforeComputes) {
  const Policy policy = parse_policy("select=int4 prune=top_k(50) early=layer");
  const KvPlan plan = plan_of(kShape, policy, DeviceTier::own, 0);
  std::atomic<bool> holds = false;
  std::atomic<int> held = 0;
  const DiskFactory factory = [&](const SpillFile& file, const DiskLimits&, auto) {
    return std::make_unique<HeldDisk>(file.size() / kSectorBytes, holds, held);
  };
  const auto on_disk = std::make_shared<KvPool>(
      backend_.make_queue(), plan, std::span(&policy, 1), own_scorers(), HostAttender(),
      DiskSource{{parent_}, DiskAccess::automatic, factory});
  const Script script(kShape, kContext, 3);
  KvSession session(on_disk);
  script.prefill(session, 500);
  on_disk->disk()->wait_for_writes();
  const std::int64_t first = session.length();
  SoloStep step(session, Phase::decode, 1);
  std::vector<float> out(static_cast<std::size_t>(script.query_width()));
  std::vector<float> lse(static_cast<std::size_t>(kShape.query_heads));
  for (int layer = 0; layer < kShape.layers; ++layer) {
    const auto at = static_cast<std::size_t>(layer);
    for (const Early point : {Early::layer, Early::half}) {
      if (point == Early::half) {
        step.append(layer, {script.k(at, first), script.v(at, first), script.key_width()});
        step.attend(layer, {script.q(at, first), script.query_width(), out.data(), lse.data()});
      }
      if (layer + 1 == kShape.layers || step.early(layer + 1) != point) continue;
      EXPECT_EQ(point, layer + 1 == 3 ? Early::layer : Early::half);
      held = 0;
      holds = true;
      script.begin_early(session, step, layer + 1, point, first);  // would hang if it waited
      for (int tries = 0; held == 0 && tries < 5000; ++tries) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_GT(held, 0) << "layer " << layer + 1 << " asked the disk for nothing";
      holds = false;
    }
  }
  step.end();
}

// Bytes that the ledger counts are those that the disk was asked for.
TEST_F(DiskSessions, LedgerCountsWhatTheDiskMoves) {
  for (const char* const name : {"dense", "select=int4 prune=top_k(40) dense=1"}) {
    SCOPED_TRACE(name);
    const Policy policy = parse_policy(name);
    std::vector<std::uint64_t> read;
    for (const std::int64_t blocks_in_host : {0, 1, 2}) {
      const auto pool =
          this->pool(plan_of(kShape, policy, DeviceTier::own, 60 << 10, blocks_in_host), policy);
      KvSession session(pool);
      Script script(kShape, kContext, 3);
      script.prefill(session, 400);
      script.decode(session, 200);
      KvSession other(pool);
      script.prefill(other, 500);
      KvSession* const both[] = {&session, &other};
      const Script* const scripts[] = {&script, &script};
      for (int step = 0; step < 5; ++step) testing::step_together(both, scripts);
      const auto crossed = [&](Tier from, Tier to) {
        return session.ledger().crossed(from, to).bytes + other.ledger().crossed(from, to).bytes;
      };
      PageStore& store = pool->disk()->store();
      pool->disk()->wait_for_writes();
      store.flush().wait();  // behind which the disk's thread has counted what came before
      const DiskCounts counts = store.counts();
      EXPECT_GT(counts.read_bytes, 0u);
      EXPECT_EQ(crossed(Tier::disk, Tier::host), counts.read_bytes);
      EXPECT_EQ(crossed(Tier::host, Tier::disk), counts.written_bytes);
      read.push_back(counts.read_bytes);
    }
    EXPECT_LT(read[1], read[0]);
    EXPECT_LT(read[2], read[1]);
  }
}

// Blocks in host memory take no room on the disk, and nothing is read from it if it has none.
TEST_F(DiskSessions, LeaveTheDiskWhatHostMemoryDoesNotHold) {
  const Policy dense;
  const KvPlan none = plan_of(kShape, dense, DeviceTier::own, 0);
  const KvPlan some = plan_of(kShape, dense, DeviceTier::own, 0, 2);
  const std::uint64_t of_block = none.disk_bytes / static_cast<std::uint64_t>(none.blocks);
  EXPECT_EQ(some.disk_bytes,
            none.disk_bytes - static_cast<std::uint64_t>(some.host_blocks) * of_block);
  EXPECT_GT(some.host_bytes, none.host_bytes + of_block);  // fewer sectors need fewer checksums
  const auto pool = this->pool(plan_of(kShape, dense, DeviceTier::own, 0, 8), dense);
  KvSession session(pool);
  Script script(kShape, kContext, 5);
  script.prefill(session, 600);
  script.decode(session, 20);
  EXPECT_GT(session.ledger().crossed(Tier::host, Tier::device).bytes, 0u);
  // The store keeps one block.
  const std::uint64_t first = static_cast<std::uint64_t>(kShape.layers) * kShape.kv_heads *
                              kPageTokens * kShape.row_bytes();
  EXPECT_LE(session.ledger().crossed(Tier::host, Tier::disk).bytes, first);
}

// So are those that move outside of a step: when sessions are cut, and when they end.
TEST_F(DiskSessions, LedgersCountWhatCutsAndEndsMove) {
  const std::uint64_t seed = testing::seed(17);
  SCOPED_TRACE(testing::seed_message(seed));
  testing::Random random(seed);
  std::uint64_t outside = 0;  // bytes written outside of a step
  for (const char* const name :
       {"dense", "select=int4 prune=top_k(20) compensate=values", "select=quest prune=top_k(60)"}) {
    SCOPED_TRACE(name);
    const Policy policy = parse_policy(name);
    const auto pool =
        this->pool(plan_of(kShape, policy, DeviceTier::own, 0, name[0] == 'd' ? 0 : 3), policy);
    PageStore& store = pool->disk()->store();
    const auto counts = [&] {
      pool->disk()->wait_for_writes();
      store.flush().wait();
      return store.counts();
    };
    std::uint64_t read = 0;  // by sessions that have ended
    std::uint64_t written = 0;
    const auto add = [&](const Ledger& ledger) {
      read += ledger.crossed(Tier::disk, Tier::host).bytes;
      written += ledger.crossed(Tier::host, Tier::disk).bytes;
    };
    const Script script(kShape, kContext, seed);
    std::vector<KvSession> sessions;
    // Of two sessions that share their newest page, one goes on, and the other no longer needs it.
    script.prefill(sessions.emplace_back(pool), 512);
    sessions.push_back(sessions[0].fork());
    script.decode(sessions[1], 3);
    const std::uint64_t before_cut = counts().written_bytes;
    sessions[0].truncate(400);
    outside += counts().written_bytes - before_cut;
    for (int round = 0; round < 60; ++round) {
      const auto at = static_cast<std::size_t>(
          random.integer(0, static_cast<std::int64_t>(sessions.size()) - 1));
      KvSession& session = sessions[at];
      switch (random.integer(0, 3)) {
        case 0:
          if (sessions.size() < 4) sessions.push_back(session.fork());
          break;
        case 1:
          script.decode(session, std::min(random.integer(0, 1) == 0
                                              ? std::int64_t{20}
                                              : kPageTokens - session.length() % kPageTokens,
                                          kContext - session.length()));
          break;
        default: {
          const DiskCounts before = counts();
          if (sessions.size() > 1 && random.integer(0, 1) == 0) {
            add(session.ledger());
            sessions.erase(sessions.begin() + static_cast<std::ptrdiff_t>(at));
          } else {
            session.truncate(random.integer(session.length() * 3 / 4, session.length()));
          }
          outside += counts().written_bytes - before.written_bytes;
        }
      }
    }
    // What nobody has counted yet counts with the next step.
    while (sessions.size() > 3) {
      add(sessions.back().ledger());
      sessions.pop_back();
    }
    script.prefill(sessions.emplace_back(pool), 10);
    for (const KvSession& session : sessions) add(session.ledger());
    EXPECT_EQ(read, counts().read_bytes);
    EXPECT_EQ(written, counts().written_bytes);
  }
  EXPECT_GT(outside, 0u) << "no page was written outside of a step";
}

INSTANTIATE_TEST_SUITE_P(Policies, DiskPolicies,
                         ::testing::Values("dense",
                                           "select=int4 prune=top_p(0.8) sinks=2 recent=16",
                                           "select=sparq(r=8) prune=top_k(40) recent=10 "
                                           "compensate=mean_value",
                                           "select=quest candidates=1/2 prune=top_p(0.9)",
                                           "select=streaming sinks=4 recent=300",
                                           "select=int4 prune=top_k(50) anchors=0",
                                           "select=int4 prune=top_k(50) dense=1",
                                           "select=int4 prune=top_k(16) compensate=values",
                                           "select=int4 prune=top_k(50) early=half",
                                           "select=int4 prune=top_k(16) compensate=values "
                                           "early=layer",
                                           "select=int4 prune=top_k(50) anchors=0,2 early=half"));

}  // namespace
}  // namespace sluice
