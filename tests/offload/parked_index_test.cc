// Index tiles of sessions that do not step go to host memory and come back: sessions answer as in a
// pool that has the index of all of them on the device, to the bit, and the plan's bytes hold.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpu/cpu_backend.h"
#include "offload/plan/index_layout.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_batch.h"
#include "offload/step/kv_session.h"
#include "sluice/errors.h"
#include "tests/support/batch_cases.h"
#include "tests/support/plan.h"
#include "tests/support/random.h"
#include "tests/support/script.h"

namespace sluice {
namespace {

using testing::Random;
using testing::Script;
using testing::step_together;

const KvShape kShape{3, 4, 2, 32, DType::bf16};
constexpr std::int64_t kContext = 1100;
constexpr std::int64_t kSequences = 6;

// Presets, and what differs in what a tile has.
constexpr std::array kPolicies = {
    "values",
    "sluice",
    "sparq",
    "quest",
    "twilight",
    "compact",
    "tidaldecode anchors=2",
    "snapkv",
    "select=int4 prune=top_k(16) compensate=values early=layer",
    "select=sparq candidates=1/4 prune=top_k(16) bits=3 0:bits=4",
    "select=int4 prune=top_k(50) dense=0 prefill=pages(0.6)",
    "select=streaming sinks=4 recent=60",
};

KvRequest request_for(std::span<const Policy> policies, std::int64_t indexed) {
  KvRequest request;
  request.shape = kShape;
  request.on = testing::cpu_info();
  request.context = kContext;
  request.chunk = 128;
  request.sequences = kSequences;
  request.policies = policies;
  request.has_value_basis = true;
  request.device_cap = std::uint64_t{1} << 40;
  request.indexed_tokens = indexed;
  return request;
}

// The same places of rows, and room for the whole index.
KvPlan with_whole_index(KvPlan plan) {
  auto layout = std::make_shared<IndexLayout>(*plan.layout);
  layout->tiles = layout->all_tiles;
  plan.layout = std::move(layout);
  return plan;
}

cpu::CpuOptions one_thread() {
  cpu::CpuOptions options;
  options.threads = 1;
  return options;
}

struct Twins {
  KvSession parked;
  KvSession whole;
  Script script;

  std::int64_t length() const { return whole.length(); }
};

class World {
 public:
  World(const std::string& policy, std::uint64_t seed)
      : random_(seed), policies_{parse_policy(policy), Policy()} {
    KvRequest request = request_for(policies_, random_.integer(kContext, 2 * kContext));
    // All rows on the device, or few.
    if (random_.integer(0, 1) == 0) {
      const KvPlan all = plan_kv(request);
      request.device_cap = all.index_bytes + all.work_bytes + all.table_bytes +
                           (kSequences + 4) * kPageTokens * kShape.token_bytes();
    }
    plan_ = plan_kv(request);
    pool_ = testing::shared_pool(backend_, plan_, policies_);
    whole_ = testing::shared_pool(other_backend_, with_whole_index(plan_), policies_);
  }

  void act() {
    if (twins_.empty()) return open();
    switch (random_.integer(0, 11)) {
      case 0:
      case 1:
        return open();
      case 2:
        return fork();
      case 3:
        return end();
      case 4:
        return truncate();
      case 5:
      case 6:
        return append();
      case 7:
        return correct();
      case 8:
        return compare_tiles(any());
      case 9:
        return use();
      default:
        return decode();
    }
  }

  bool parks() const { return pool_->tables().parks_tiles(); }
  // Of tiles that went to host memory and of those that came back, for sessions that ended.
  std::uint64_t parked_rows() const { return down_; }
  std::uint64_t returned_rows() const { return up_; }

  void check_bytes() {
    EXPECT_EQ(backend_.account(Tier::device).peak(), plan_.device_bytes);
    EXPECT_LE(backend_.account(Tier::host).peak(), plan_.host_bytes);
  }
  void end_all() {
    while (!twins_.empty()) end(twins_.back());
    EXPECT_EQ(pool_->tables().tile_slots().used(), 0);
    EXPECT_EQ(pool_->tables().tile_slots().parked(), 0);
  }

 private:
  Twins& any() {
    return twins_[static_cast<std::size_t>(random_.integer(0, std::ssize(twins_) - 1))];
  }

  void open() {
    if (std::ssize(twins_) == kSequences) return;
    twins_.push_back(
        {KvSession(pool_), KvSession(whole_),
         Script(kShape, kContext, static_cast<std::uint64_t>(random_.integer(1, 1 << 30)))});
    append(twins_.back(), random_.integer(300, kContext - 1));
  }
  void fork() {
    if (std::ssize(twins_) == kSequences) return;
    Twins& twins = any();
    Twins child{twins.parked.fork(), twins.whole.fork(), twins.script};
    twins_.push_back(std::move(child));
  }
  void end() {
    if (random_.integer(0, 1) == 0) end(any());
  }
  void end(const Twins& twins) {
    count(twins);
    twins_.erase(twins_.begin() + (&twins - twins_.data()));
  }
  void truncate() {
    Twins& twins = any();
    const std::int64_t length = random_.integer(twins.length() / 2, twins.length());
    twins.parked.truncate(length);
    twins.whole.truncate(length);
  }
  void append() {
    Twins& twins = any();
    append(twins, std::min(random_.integer(1, 300), kContext - twins.length()));
  }
  static void append(Twins& twins, std::int64_t tokens) {
    twins.script.append(twins.parked, tokens);
    twins.script.append(twins.whole, tokens);
  }
  void correct() {
    Twins& twins = any();
    const std::int64_t tokens = std::min(twins.length(), random_.integer(1, 64));
    if (tokens == 0) return;
    std::vector<std::vector<float>> outputs;
    for (KvSession* session : {&twins.parked, &twins.whole}) {
      session->truncate(session->length() - tokens);
      outputs.push_back(twins.script.step(*session, Phase::correction, tokens));
    }
    ASSERT_EQ(outputs[0], outputs[1]);
  }
  void use() {
    Twins& twins = any();
    const Policy& policy = policies_[static_cast<std::size_t>(random_.integer(0, 1))];
    twins.parked.use(policy);
    twins.whole.use(policy);
  }

  // A few steps of some of the sessions, as many as have room together.
  void decode() {
    std::vector<KvSession*> parked, whole;
    std::vector<const Script*> scripts;
    std::vector<std::int32_t> sequences;
    const Policy* policy = nullptr;
    for (Twins& twins : twins_) {
      const bool is_other = policy != nullptr && !(twins.whole.policy() == *policy);
      if (is_other || twins.length() + 5 > kContext || random_.integer(0, 2) == 0) continue;
      sequences.push_back(twins.parked.sequence());
      if (!pool_->tables().has_slots(sequences, 5 * std::ssize(sequences))) {
        sequences.pop_back();
        continue;
      }
      policy = &twins.whole.policy();
      parked.push_back(&twins.parked);
      whole.push_back(&twins.whole);
      scripts.push_back(&twins.script);
    }
    if (parked.empty()) return;
    for (std::int64_t step = random_.integer(1, 5); step > 0; --step) {
      ASSERT_EQ(step_together(parked, scripts), step_together(whole, scripts))
          << parked.size() << " sessions of " << parked.front()->length() << " tokens and others";
    }
  }

  // What a file would have, of tiles that are full.
  void compare_tiles(const Twins& twins) {
    if (pool_->sparse() == nullptr) return;
    for (int layer = 0; layer < kShape.layers; ++layer) {
      const std::size_t bytes = pool_->sparse()->index().tile_bytes(layer);
      for (std::int64_t number = 0; number < twins.length() / kPageTokens / kTilePages; ++number) {
        std::vector<std::byte> here(bytes), there(bytes);
        pool_->save_tile(layer, twins.parked.sequence(), number, here.data());
        whole_->save_tile(layer, twins.whole.sequence(), number, there.data());
        ASSERT_EQ(here, there) << "tile " << number << " of layer " << layer;
      }
    }
  }

  void count(const Twins& twins) {
    for (const Phase phase : {Phase::prefill, Phase::decode, Phase::correction}) {
      const auto rows = [&](const KvSession& session, Tier from, Tier to) {
        return session.ledger().total(phase, from, to, Cause::index_swap).rows;
      };
      down_ += rows(twins.parked, Tier::device, Tier::host);
      up_ += rows(twins.parked, Tier::host, Tier::device);
      EXPECT_EQ(rows(twins.whole, Tier::device, Tier::host), 0u);
    }
  }

  Random random_;
  std::vector<Policy> policies_;
  cpu::CpuBackend backend_{one_thread()};
  cpu::CpuBackend other_backend_{one_thread()};
  KvPlan plan_;
  std::shared_ptr<KvPool> pool_;
  std::shared_ptr<KvPool> whole_;
  std::vector<Twins> twins_;
  std::uint64_t down_ = 0;
  std::uint64_t up_ = 0;
};

class OfPolicy : public ::testing::TestWithParam<const char*> {};

TEST_P(OfPolicy, AnswersAndTilesAreThoseOfAWholeIndex) {
  const std::uint64_t seed = testing::seed(1);
  for (std::uint64_t i = 0; i < 4; ++i) {
    SCOPED_TRACE(testing::seed_message(seed + i));
    World world(GetParam(), seed + i);
    for (int round = 0; round < 60; ++round) {
      world.act();
      ASSERT_FALSE(HasFatalFailure()) << "round " << round;
    }
    world.check_bytes();
    world.end_all();
    if (!world.parks()) continue;
    EXPECT_GT(world.returned_rows(), 0u);
    EXPECT_GE(world.parked_rows(), world.returned_rows());
  }
}

INSTANTIATE_TEST_SUITE_P(ParkedIndex, OfPolicy, ::testing::ValuesIn(kPolicies));

TEST(ParkedIndex, OnlyTilesThatMakeRoomMoveAndTheLedgerCountsThem) {
  cpu::CpuBackend backend(one_thread());
  const std::vector<Policy> policies = {parse_policy("values")};
  const KvPlan plan = plan_kv(request_for(policies, 1280));
  ASSERT_EQ(plan.layout->tiles, 7);
  const auto pool = testing::shared_pool(backend, plan, policies);
  const Script script(kShape, kContext, 1);
  std::vector<KvSession> sessions;
  for (int i = 0; i < 3; ++i) {
    sessions.emplace_back(pool);
    script.append(sessions.back(), 512);  // two tiles
  }
  EXPECT_EQ(pool->tables().tile_slots().parked(), 0);
  // Three tiles need two more than are free: those of the session that came first.
  sessions.emplace_back(pool);
  script.append(sessions[3], 768);
  EXPECT_EQ(pool->tables().parked_tiles(sessions[0].sequence()), (std::vector<std::int64_t>{0, 1}));
  const KvSession fork = sessions[0].fork();
  script.decode(sessions[0], 1);
  EXPECT_TRUE(pool->tables().parked_tiles(fork.sequence()).empty()) << "shared tiles come back";
  EXPECT_EQ(pool->tables().parked_tiles(sessions[1].sequence()), (std::vector<std::int64_t>{0, 1}));
  const Ledger& ledger = sessions[0].ledger();
  for (int layer = 0; layer < kShape.layers; ++layer) {
    const Traffic two = {2 * 256 * 2, 2 * pool->sparse()->index().tile_bytes(layer)};
    EXPECT_GT(two.bytes, 0u);
    EXPECT_EQ(ledger.total(Phase::decode, layer, Tier::host, Tier::device, Cause::index_swap), two);
    EXPECT_EQ(ledger.total(Phase::decode, layer, Tier::device, Tier::host, Cause::index_swap), two);
  }
}

TEST(ParkedIndex, SessionsWhoseIndexDoesNotFitCannotStepTogether) {
  cpu::CpuBackend backend(one_thread());
  const std::vector<Policy> policies = {parse_policy("sluice")};
  const auto pool =
      testing::shared_pool(backend, plan_kv(request_for(policies, kContext)), policies);
  const Script script(kShape, kContext, 1);
  std::vector<KvSession> sessions;
  std::vector<KvSession*> all;
  for (int i = 0; i < 3; ++i) {
    sessions.emplace_back(pool);
    script.append(sessions.back(), 1000);
  }
  for (KvSession& session : sessions) all.push_back(&session);
  try {
    const KvBatch batch(all);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory);
  }
  for (KvSession& session : sessions) {
    EXPECT_FALSE(session.in_step());
    script.decode(session, 3);
  }
}

TEST(ParkedIndex, APlanCountsTheHostMemory) {
  const std::vector<Policy> policies = {parse_policy("values")};
  const KvPlan whole = plan_kv(request_for(policies, 0));
  const KvPlan parked = plan_kv(request_for(policies, kContext));
  const std::uint64_t tile = whole.layout->tile_bytes();
  const auto fewer = static_cast<std::uint64_t>(whole.layout->tiles - parked.layout->tiles);
  EXPECT_GT(fewer, 0u);
  EXPECT_EQ(whole.index_bytes - parked.index_bytes, fewer * tile);
  EXPECT_EQ(whole.device_bytes - parked.device_bytes, fewer * tile);
  EXPECT_EQ(parked.parked_bytes, (fewer + 1) * tile);
  EXPECT_EQ(parked.host_bytes - whole.host_bytes, parked.parked_bytes);
  EXPECT_EQ(parked.indexed_tokens, kContext);
  // Room for all, or an index in host memory anyway: as if nothing had been said.
  const KvPlan all = plan_kv(request_for(policies, kSequences * kContext));
  EXPECT_EQ(all.parked_bytes, 0u);
  EXPECT_EQ(all.indexed_tokens, 0);
  EXPECT_EQ(all.device_bytes, whole.device_bytes);
  KvRequest in_place = request_for(policies, kContext);
  in_place.device_cap.reset();
  EXPECT_EQ(plan_kv(in_place).parked_bytes, 0u);
}

TEST(ParkedIndex, APlanRefusesTooLittleAndEvictingPrompts) {
  const auto code_of = [](const std::string& policy, std::int64_t indexed) {
    const std::vector<Policy> policies = {parse_policy(policy)};
    try {
      plan_kv(request_for(policies, indexed));
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("`indexed_tokens`"), std::string::npos);
      return std::optional(error.code());
    }
    return std::optional<ErrorCode>();
  };
  EXPECT_EQ(code_of("values", kContext), std::nullopt);
  EXPECT_EQ(code_of("values", kContext - 1), ErrorCode::usage);
  EXPECT_EQ(code_of("values", -1), ErrorCode::usage);
  EXPECT_EQ(code_of("dense", 1), ErrorCode::usage);
  EXPECT_EQ(code_of("sparq prefill=zipvl(0.6,evict)", kContext), ErrorCode::usage);
  EXPECT_EQ(code_of("sparq prefill=zipvl(0.6)", kContext), std::nullopt);
}

}  // namespace
}  // namespace sluice
