// Sessions on a disk that breaks answer as those in memory do, or end; the others go on.
#include <gtest/gtest.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "offload/plan/planner.h"
#include "offload/step/kv_pool.h"
#include "offload/step/kv_session.h"
#include "sluice/errors.h"
#include "tests/support/disk_sessions.h"
#include "tests/support/random.h"
#include "tests/support/script.h"
#include "tests/support/silent_disk.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/twin_sessions.h"

namespace sluice {
namespace {

using testing::DiskSessions;
using testing::Script;

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

}  // namespace
}  // namespace sluice
