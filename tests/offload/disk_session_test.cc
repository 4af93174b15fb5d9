// Sessions whose rows lie on disk answer as sessions with all rows in host memory do, and read from
// disk what the ledger says.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/cpu_backend.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_pool.h"
#include "offload/step/kv_session.h"
#include "offload/step/solo_step.h"
#include "tests/support/late_backend.h"
#include "tests/support/plan.h"
#include "tests/support/random.h"
#include "tests/support/script.h"
#include "tests/support/silent_disk.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/test_disk.h"
#include "tests/support/twin_sessions.h"

namespace sluice {
namespace {

using testing::Script;

const KvShape kShape{4, 8, 2, 32, DType::bf16};
constexpr std::int64_t kContext = 700;

enum class DeviceTier { own, shared };

// The least that suffices, `more` bytes in each tier, and at least this many blocks in host memory.
KvPlan plan_of(const KvShape& shape, const Policy& policy, DeviceTier device, std::uint64_t more,
               std::int64_t blocks_in_host = 0) {
  KvRequest request;
  request.shape = shape;
  request.context = kContext;
  request.chunk = 64;
  request.sequences = 4;
  request.policies = {&policy, 1};
  request.on = testing::cpu_info();
  request.disk = DiskRoom();
  if (device == DeviceTier::own) request.device_cap = std::uint64_t{1} << 40;
  request.disk->host.cap = std::uint64_t{1} << 40;
  const auto halve = [&](std::uint64_t& cap) {
    std::uint64_t refused = 0;
    while (cap - refused > 1) {
      const std::uint64_t middle = refused + (cap - refused) / 2;
      const std::uint64_t was = std::exchange(cap, middle);
      try {
        plan_kv(request);
      } catch (const Error&) {
        refused = middle;
        cap = was;
      }
    }
    cap += more;
  };
  if (request.device_cap) halve(*request.device_cap);
  halve(request.disk->host.cap);
  while (plan_kv(request).host_blocks < blocks_in_host) request.disk->host.cap += 64 << 10;
  return plan_kv(request);
}

class DiskSessions : public testing::OnDisk {
 protected:
  std::shared_ptr<KvPool> pool(const KvPlan& plan, const Policy& policy,
                               const DiskFactory& factory = {}) {
    const bool dense = policy == Policy();
    return std::make_shared<KvPool>(
        backend_.make_queue(), plan, dense ? std::span<const Policy>() : std::span(&policy, 1),
        own_scorers(), HostAttender(), DiskSource{{parent_}, DiskAccess::automatic, factory});
  }
  // The same plan with all rows in host memory.
  std::shared_ptr<KvPool> in_memory(KvPlan plan, const Policy& policy) {
    plan.on_disk = false;
    return pool(plan, policy);
  }

  cpu::CpuBackend backend_{testing::LateBackend::one_thread()};
};

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

// Counts what a disk was asked for, and breaks it.
using FaultCounts = std::array<std::uint64_t, testing::kDiskFaults>;

struct Faulty {
  explicit Faulty(std::uint64_t first_seed, double fault_rate)
      : seed(first_seed), rate(fault_rate) {}

  DiskFactory factory() {
    return [this](const SpillFile& file, const DiskLimits&, auto) -> std::unique_ptr<Disk> {
      return std::make_unique<CountedDisk>(*this, file.size() / kSectorBytes);
    };
  }

  std::uint64_t seed;
  double rate;
  FaultCounts faults{};  // of disks that are gone

 private:
  struct CountedDisk : testing::SimulatedDisk {
    CountedDisk(Faulty& its_faulty, std::size_t sectors)
        : SimulatedDisk(sectors, its_faulty.seed, its_faulty.rate), faulty(its_faulty) {}
    CountedDisk(const CountedDisk&) = delete;
    CountedDisk& operator=(const CountedDisk&) = delete;
    ~CountedDisk() override {
      for (std::size_t i = 0; i < faults().size(); ++i) faulty.faults[i] += faults()[i];
    }

    Faulty& faulty;
  };
};

// Sessions of one pool on a disk that breaks, each beside a twin in memory. A session may end with
// an error; it never gives another answer than its twin, and its end leaves the others as they are.
class FaultySessions : public DiskSessions {
 protected:
  void play(const Policy& policy, std::uint64_t seed) {
    Faulty faulty(seed, 0.02);
    // In every second round of policies some blocks lie in host memory.
    const bool has_blocks = seed / kPolicies % 2 == 1;
    const std::pair name(to_string(policy), has_blocks);
    if (!plans_.contains(name)) {
      const DeviceTier device = has_blocks ? DeviceTier::own : DeviceTier::shared;
      plans_.emplace(name, plan_of(kShape, policy, device, 20 << 10, has_blocks ? 3 : 0));
    }
    const KvPlan& plan = plans_.at(name);
    one_ = std::make_shared<KvPool>(backend_.make_queue(), plan, std::span(&policy, 1),
                                    own_scorers(), HostAttender(),
                                    DiskSource{{parent_}, DiskAccess::automatic, faulty.factory()});
    other_ = in_memory(plan, policy);
    random_.emplace(seed);
    twins_.clear();
    for (int i = 0; i < 3; ++i) begin(seed + static_cast<std::uint64_t>(i));
    for (int round = 0; round < 12 && !HasFatalFailure(); ++round) {
      const std::int64_t kind = random_->integer(0, 5);
      if (twins_.empty() || (kind == 0 && twins_.size() < 4)) begin(seed + 100);
      if (kind == 1) fork();
      if (kind == 2) truncate();
      decode();
    }
    twins_.clear();
    one_.reset();
    for (std::size_t i = 0; i < faults_.size(); ++i) faults_[i] += faulty.faults[i];
  }

  static constexpr std::uint64_t kPolicies = 4;
  std::uint64_t ended_ = 0;
  std::uint64_t steps_ = 0;
  FaultCounts faults_{};

 private:
  // Runs `body` for twin `at`, which ends if that throws what a disk may throw.
  template <class Body>
  void attempt(std::size_t at, Body body) {
    try {
      body(twins_[at]);
    } catch (const Error& error) {
      ASSERT_TRUE(error.code() == ErrorCode::io || error.code() == ErrorCode::corrupt)
          << error.what();
      end(at);
    }
  }
  void end(std::size_t at) {
    twins_.erase(twins_.begin() + static_cast<std::ptrdiff_t>(at));
    ++ended_;
  }

  void begin(std::uint64_t seed) {
    twins_.push_back({KvSession(one_), KvSession(other_), script_of(seed)});
    attempt(twins_.size() - 1, [&](testing::Twins& two) {
      const std::int64_t tokens = random_->integer(200, 600);
      two.script.append(two.other, tokens);
      prefill(two.one, seed % kScripts, tokens);
    });
  }
  // Prompts are attended to densely, so what comes out depends on the script alone.
  void prefill(KvSession& session, std::uint64_t number, std::int64_t tokens) {
    const Script& script = script_of(number);
    while (session.length() < tokens) {
      const std::int64_t first = session.length();
      const std::int64_t now = std::min(tokens - first, session.plan().chunk);
      const std::vector<float> actual = script.step(session, Phase::prefill, now);
      const auto width = static_cast<std::size_t>(script.query_width());
      const std::size_t count = static_cast<std::size_t>(now) * width;
      for (std::size_t layer = 0; layer < actual.size() / count; ++layer) {
        const auto expected = prompts_[number][layer].begin() +
                              static_cast<std::ptrdiff_t>(static_cast<std::size_t>(first) * width);
        float difference = 0.0f;
        for (std::size_t i = 0; i < count; ++i) {
          difference = std::max(difference, std::abs(actual[layer * count + i] -
                                                     expected[static_cast<std::ptrdiff_t>(i)]));
        }
        // Rows on disk are attended to in other pieces than those that stayed, and a few tokens in
        // fp32 where many are in bf16. Rows of another page differ by their own size.
        const bool is_whole = now == session.plan().chunk;
        ASSERT_LT(difference, is_whole ? 5e-3f : 5e-2f)
            << "layer " << layer << ", prompt of " << tokens << " tokens from " << first;
      }
    }
  }
  // [layers][tokens, width] of a prompt in memory.
  std::vector<std::vector<float>> prompt_of(const Script& script) {
    const Policy dense;
    KvPlan plan = plan_of(kShape, dense, DeviceTier::shared, 20 << 10);
    KvSession session(in_memory(plan, dense));
    std::vector<std::vector<float>> layers(static_cast<std::size_t>(kShape.layers));
    while (session.length() < kContext) {
      const std::int64_t now = std::min(kContext - session.length(), session.plan().chunk);
      const std::vector<float> all = script.step(session, Phase::prefill, now);
      const std::size_t count = all.size() / layers.size();
      for (std::size_t layer = 0; layer < layers.size(); ++layer) {
        const auto from = all.begin() + static_cast<std::ptrdiff_t>(layer * count);
        layers[layer].insert(layers[layer].end(), from, from + static_cast<std::ptrdiff_t>(count));
      }
    }
    return layers;
  }
  // One of a few, because making one takes as long as the steps that it is for.
  const Script& script_of(std::uint64_t seed) {
    for (std::uint64_t i = scripts_.size(); i < kScripts; ++i) {
      scripts_.emplace_back(kShape, kContext, i);
      prompts_.push_back(prompt_of(scripts_.back()));
    }
    return scripts_[seed % kScripts];
  }
  std::size_t any() {
    return static_cast<std::size_t>(
        random_->integer(0, static_cast<std::int64_t>(twins_.size()) - 1));
  }
  void fork() {
    if (twins_.empty() || twins_.size() == 4) return;
    const std::size_t at = any();
    twins_.push_back({twins_[at].one.fork(), twins_[at].other.fork(), twins_[at].script});
  }
  void truncate() {
    if (twins_.empty()) return;
    attempt(any(), [&](testing::Twins& two) {
      const std::int64_t length = random_->integer(two.length() / 2, two.length());
      two.one.truncate(length);
      two.other.truncate(length);
    });
  }

  void decode() {
    std::vector<KvSession*> ones;
    std::vector<KvSession*> others;
    std::vector<const Script*> scripts;
    for (testing::Twins& two : twins_) {
      if (two.length() == kContext) continue;
      ones.push_back(&two.one);
      others.push_back(&two.other);
      scripts.push_back(&two.script);
    }
    for (int step = 0; step < 10 && !ones.empty(); ++step) {
      if (std::any_of(ones.begin(), ones.end(),
                      [](KvSession* s) { return s->length() == kContext; })) {
        return;
      }
      std::vector<std::optional<Error>> outcomes;
      const std::vector<std::vector<float>> actual =
          testing::step_readable(ones, scripts, outcomes);
      const auto expected = testing::step_together(others, scripts);
      for (std::size_t i = 0; i < ones.size(); ++i) {
        if (outcomes[i]) {
          ASSERT_TRUE(outcomes[i]->code() == ErrorCode::io ||
                      outcomes[i]->code() == ErrorCode::corrupt)
              << outcomes[i]->what();
          continue;
        }
        ++steps_;
        ASSERT_EQ(actual[i], expected[i]) << "session " << i << " step " << step;
      }
      if (std::any_of(outcomes.begin(), outcomes.end(), [](auto& e) { return e.has_value(); })) {
        return drop_failed();
      }
    }
  }
  // Sessions that failed stay in their step.
  void drop_failed() {
    const std::size_t before = twins_.size();
    std::erase_if(twins_, [](const testing::Twins& two) { return two.one.in_step(); });
    ASSERT_LT(twins_.size(), before) << "a step failed and no session";
    ended_ += before - twins_.size();
  }

  std::shared_ptr<KvPool> one_;
  std::shared_ptr<KvPool> other_;
  std::optional<testing::Random> random_;
  std::vector<testing::Twins> twins_;
  static constexpr std::uint64_t kScripts = 7;
  std::vector<Script> scripts_;
  std::vector<std::vector<std::vector<float>>> prompts_;  // [scripts], see prompt_of()
  std::map<std::pair<std::string, bool>, KvPlan> plans_;  // by policy, with blocks in host memory
};

TEST_F(FaultySessions, EndOrAnswerAsInMemory) {
  const std::uint64_t first = testing::seed(1);
  const char* const wish = std::getenv("SLUICE_SIMULATIONS");
  const std::uint64_t runs = wish == nullptr ? 12 : std::strtoull(wish, nullptr, 10);
  const Policy policies[kPolicies] = {parse_policy("select=int4 prune=top_k(16) compensate=values"),
                                      parse_policy("select=quest prune=top_k(60)"),
                                      parse_policy("select=int4 prune=top_k(30) early=half"),
                                      parse_policy("select=int4 prune=top_k(20) early=layer")};
  for (std::uint64_t seed = first; seed < first + runs; ++seed) {
    SCOPED_TRACE(testing::seed_message(seed));
    play(policies[seed % kPolicies], seed);
    if (HasFatalFailure()) return;
  }
  std::uint64_t all = 0;
  for (std::size_t i = 0; i < faults_.size(); ++i) {
    std::cout << testing::kDiskFaultNames[i] << " " << faults_[i] << ", ";
    all += faults_[i];
  }
  std::cout << "together " << all << " faults in " << runs << " seeds from " << first << " on; "
            << ended_ << " sessions ended, " << steps_ << " tokens as in memory\n";
  EXPECT_GT(ended_, 0u) << "no fault reached a session";
  EXPECT_GT(steps_, 100u) << "nearly no session survived";
}

// A disk that fails reads of a byte range once the range is set.
class BrokenDisk : public testing::SimulatedDisk {
 public:
  // `broken`: first byte and end; empty: nothing yet.
  BrokenDisk(std::size_t sectors, const std::pair<std::uint64_t, std::uint64_t>& broken)
      : SimulatedDisk(sectors, 1, 0.0), broken_(broken) {}

  bool start(const DiskOperation& operation) override {
    std::uint64_t end = operation.offset;
    for (const iovec& buffer : operation.buffers) end += buffer.iov_len;
    const bool fails = operation.action == DiskAction::read && operation.offset < broken_.second &&
                       end > broken_.first;
    if (!SimulatedDisk::start(operation)) return false;
    if (fails) failing_.insert(operation.tag);
    return true;
  }
  std::size_t retire(std::span<DiskResult> results, bool wait) override {
    const std::size_t count = SimulatedDisk::retire(results, wait);
    for (DiskResult& result : results.first(count)) {
      if (failing_.erase(result.tag) > 0) result.result = -EIO;
    }
    return count;
  }

 private:
  const std::pair<std::uint64_t, std::uint64_t>& broken_;
  std::set<std::uint64_t> failing_;  // tags
};

// Three sessions on a disk that can lose a page, and their twins in memory.
class LostPages : public DiskSessions {
 protected:
  void begin(const char* name) {
    ones_.clear();
    others_.clear();
    policy_ = parse_policy(name);
    broken_ = {};
    const KvPlan plan = plan_of(kShape, policy_, DeviceTier::own, 0);
    on_disk_ = pool(plan, policy_, [this](const SpillFile& file, const DiskLimits&, auto) {
      return std::make_unique<BrokenDisk>(file.size() / kSectorBytes, broken_);
    });
    const auto twins = in_memory(plan, policy_);
    for (int i = 0; i < 3; ++i) {
      script_.prefill(ones_.emplace_back(on_disk_), 400);
      script_.prefill(others_.emplace_back(twins), 400);
    }
  }
  // Loses page 1 of the second session in layer 1, where policies of these tests may be dense.
  void lose_page() {
    on_disk_->disk()->wait_for_writes();
    const DiskLayout& layout = on_disk_->disk()->layout();
    const PageSlots page = on_disk_->tables().page(1, 1, on_disk_->set_of(1));
    ASSERT_EQ(page.device, PageSlots::kNone) << "the page is not on disk";
    broken_.first = layout.address(1, 0, page.host);
    broken_.second = broken_.first + layout.page_bytes;
  }

  const Script script_{kShape, kContext, 5};
  Policy policy_;
  std::pair<std::uint64_t, std::uint64_t> broken_;  // bytes of the disk
  std::shared_ptr<KvPool> on_disk_;
  std::vector<KvSession> ones_;
  std::vector<KvSession> others_;
};

// A page that cannot be read ends the session that has it, in dense layers, too.
TEST_F(LostPages, UnreadablePageEndsOneSessionOfABatch) {
  for (const char* const name : {"dense", "select=int4 prune=top_k(50) dense=1"}) {
    SCOPED_TRACE(name);
    begin(name);
    lose_page();
    if (HasFatalFailure()) return;
    const std::vector<const Script*> scripts(3, &script_);
    KvSession* const now[] = {ones_.data(), &ones_[1], &ones_[2]};
    KvSession* const twins[] = {others_.data(), &others_[1], &others_[2]};
    std::vector<std::optional<Error>> outcomes;
    const auto actual = testing::step_together(now, scripts, outcomes);
    const auto expected = testing::step_together(twins, scripts);
    ASSERT_TRUE(outcomes[1].has_value());
    EXPECT_EQ(outcomes[1]->code(), ErrorCode::io);
    EXPECT_TRUE(ones_[1].in_step());
    for (const std::size_t i : {0, 2}) {
      EXPECT_FALSE(outcomes[i].has_value());
      testing::expect_same(actual[i], expected[i], 2e-5f);
    }
    // The others go on.
    KvSession* const left[] = {ones_.data(), &ones_[2]};
    EXPECT_NO_THROW(testing::step_together(left, std::span(scripts).first(2)));
  }
}

// A step copies the page that it continues to the device. One that is lost ends its session alone.
TEST_F(LostPages, APageThatASessionContinuesEndsItAlone) {
  for (const char* const name : {"dense", "select=int4 prune=top_k(50)"}) {
    SCOPED_TRACE(name);
    begin(name);
    // The second session goes on inside page 1, in which its sequence's rows lie on disk.
    ones_[1].truncate(200);
    lose_page();
    if (HasFatalFailure()) return;
    const std::vector<const Script*> scripts(3, &script_);
    KvSession* const now[] = {ones_.data(), &ones_[1], &ones_[2]};
    std::vector<std::optional<Error>> outcomes;
    const auto actual = testing::step_readable(now, scripts, outcomes);
    ASSERT_TRUE(outcomes[1].has_value());
    EXPECT_EQ(outcomes[1]->code(), ErrorCode::io);
    EXPECT_TRUE(ones_[1].in_step());
    EXPECT_THROW(ones_[1].require_outside_step(), Error);
    // The others answer as if they were alone, and go on.
    const std::size_t living[] = {0, 2};
    for (const std::size_t i : living) {
      EXPECT_FALSE(outcomes[i].has_value());
      testing::expect_same(actual[i], script_.step(others_[i], Phase::decode, 1), 2e-5f);
    }
    KvSession* const left[] = {ones_.data(), &ones_[2]};
    for (int step = 0; step < 60; ++step) {
      const auto more = testing::step_together(left, std::span(scripts).first(2));
      for (std::size_t i = 0; i < 2; ++i) {
        testing::expect_same(more[i], script_.step(others_[living[i]], Phase::decode, 1), 2e-5f);
      }
    }
    // It has no step to take any more.
    KvSession* const only[] = {&ones_[1]};
    EXPECT_THROW(testing::step_readable(only, std::span(scripts).first(1), outcomes), Error);
  }
}

// A disk that stops answering ends the sessions that want something of it, after a time; nothing
// hangs, neither a step nor the end of the pool.
TEST_F(DiskSessions, ASilentDiskEndsItsSessions) {
  for (const char* const name :
       {"dense", "select=int4 prune=top_k(50)", "select=int4 prune=top_k(20) early=layer"}) {
    SCOPED_TRACE(name);
    const Policy policy = parse_policy(name);
    const auto policies = policy == Policy() ? std::span<const Policy>() : std::span(&policy, 1);
    const KvPlan plan = plan_of(kShape, policy, DeviceTier::own, 0);
    const auto silence = std::make_shared<testing::Silence>();
    const auto clock = std::make_shared<testing::TestClock>();
    const DiskFactory factory = [&](const SpillFile& file, const DiskLimits&, auto) {
      return std::make_unique<testing::SilentDisk>(file.size() / kSectorBytes, silence);
    };
    auto on_disk = std::make_shared<KvPool>(
        backend_.make_queue(), plan, policies, own_scorers(), HostAttender(),
        DiskSource{{parent_}, DiskAccess::automatic, factory, {std::chrono::seconds(60), clock}});
    const Script script(kShape, kContext, 5);
    std::vector<KvSession> sessions;
    for (int i = 0; i < 2; ++i) script.prefill(sessions.emplace_back(on_disk), 400);
    on_disk->disk()->wait_for_writes();
    silence->is_silent = true;
    clock->passes = true;
    for (KvSession& session : sessions) {
      try {
        while (session.length() < kContext) script.step(session, Phase::decode, 1);
        ADD_FAILURE() << "the disk was never asked";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::io);
        EXPECT_NE(std::string(error.what()).find("has not answered for 60 s"), std::string::npos)
            << error.what();
      }
      EXPECT_TRUE(session.in_step());
    }
    EXPECT_LE(clock->waited, std::chrono::nanoseconds(std::chrono::seconds(120)).count());
    KvSession late(on_disk);
    EXPECT_THROW(script.prefill(late, 600), Error);
    sessions.clear();
    late = KvSession(on_disk);
    on_disk.reset();
  }
}

// A fork that fails leaves nothing of the rows that it could not read in the row cache, where its
// parent would find them.
TEST_F(DiskSessions, RowsThatCouldNotBeReadAreNotCached) {
  const Policy policy = parse_policy("select=int4 prune=top_k(50)");
  const KvPlan plan = plan_of(kShape, policy, DeviceTier::own, 400 << 10);
  std::pair<std::uint64_t, std::uint64_t> broken;
  const DiskFactory factory = [&](const SpillFile& file, const DiskLimits&, auto) {
    return std::make_unique<BrokenDisk>(file.size() / kSectorBytes, broken);
  };
  const auto on_disk = std::make_shared<KvPool>(
      backend_.make_queue(), plan, std::span(&policy, 1), own_scorers(), HostAttender(),
      DiskSource{{parent_}, DiskAccess::automatic, factory});
  const Script script(kShape, kContext, 5);
  KvSession one(on_disk);
  KvSession other(in_memory(plan, policy));
  for (KvSession* const session : {&one, &other}) script.prefill(*session, 600);
  on_disk->disk()->wait_for_writes();
  KvSession fork = one.fork();
  broken = {0, std::uint64_t{1} << 40};
  EXPECT_THROW(script.step(fork, Phase::decode, 1), Error);
  broken = {0, 0};
  for (int step = 0; step < 5; ++step) {
    const std::vector<float> actual = script.step(one, Phase::decode, 1);
    ASSERT_EQ(actual, script.step(other, Phase::decode, 1)) << "step " << step;
  }
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
