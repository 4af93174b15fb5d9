// How many tokens a step of a prompt has where nobody says.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_impl.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/far_backend.h"

namespace sluice {
namespace {

using testing::FarBackend;

constexpr std::int64_t kContext = 400000;

// Of a device with memory of its own, as a GPU has it.
Engine open_engine(std::optional<std::uint64_t> cap, int chunk = 0) {
  EngineConfig config;
  config.model = SLUICE_TEST_DATA "/golden/qwen3";
  config.compute = DType::f32;
  config.device_memory = cap;
  config.host_attention = 0.0;
  config.chunk = chunk;
  return Engine::Impl::open(config, [&](DType weights) {
    return std::make_unique<FarBackend>(
        cpu::CpuOptions{2, DType::f32, weights, cap.value_or(MemoryAccount::kNoCap),
                        MemoryAccount::kNoCap},
        LogitFormat());
  });
}

SessionOptions options_for(const std::string& policy, std::int64_t context = kContext) {
  SessionOptions options;
  options.context = context;
  options.policies = {parse_policy(policy)};
  return options;
}

// A cap under which two thirds of the rows are on the device.
std::uint64_t cap_for(const SessionOptions& options) {
  const Plan all = open_engine(std::nullopt).plan(options);
  EXPECT_EQ(all.kv.chunk, 2048) << "nothing is fetched";
  return all.device_bytes() - all.kv.dense_bytes() / 3;
}

TEST(Chunk, IsLongerWherePromptsFetchRows) {
  const std::pair<const char*, std::int64_t> cases[] = {
      {"select=dense", 4096},
      {"values", 4096},
      {"values prefill=pages(0.5)", 16384},
      {"values cap=none prune=top_p(0.9) prefill=pages(0.5)", 8192},
      {"select=dense prefill=pages(0.5)", 8192},
      {"zipvl", 2048}};
  for (const auto& [policy, chunk] : cases) {
    SCOPED_TRACE(policy);
    const SessionOptions options = options_for(policy);
    const std::uint64_t cap = cap_for(options);
    Engine engine = open_engine(cap);
    EXPECT_EQ(engine.plan(options).kv.chunk, chunk);
    EXPECT_EQ(open_engine(cap, 1024).plan(options).kv.chunk, 1024) << "as it was asked for";
    engine.load_weights();
    const Plan plan = engine.plan(options);
    EXPECT_EQ(plan.kv.chunk, chunk);
    const Session session = engine.new_session(options);
    EXPECT_EQ(session.plan().chunk, chunk);
    EXPECT_EQ(engine.memory().device_bytes, plan.device_bytes());
  }
}

// Where longer steps would take much of what the rows have, they are shorter: the sooner, the more
// rows decoding reads.
TEST(Chunk, LeavesTheDeviceToRows) {
  const std::pair<const char*, double> cases[] = {{"select=dense prefill=pages(0.5)", 0.75},
                                                  {"values prefill=pages(0.5)", 0.5}};
  for (const auto& [policy, least] : cases) {
    std::int64_t shorter = 2048;
    for (const std::int64_t context : {120000, 400000, 1000000}) {
      SCOPED_TRACE(policy + (" " + std::to_string(context)));
      const SessionOptions options = options_for(policy, context);
      const std::uint64_t cap = cap_for(options);
      const KvPlan plan = open_engine(cap).plan(options).kv;
      const KvPlan usual = open_engine(cap, 2048).plan(options).kv;
      EXPECT_GT(plan.chunk, shorter);
      EXPECT_GE(static_cast<double>(plan.resident_tokens),
                least * static_cast<double>(usual.resident_tokens));
      shorter = plan.chunk;
    }
  }
}

// Activations are no session's own.
TEST(Chunk, LeavesOthersTheirsUnderACapOfTheSessions) {
  SessionOptions options = options_for("values prefill=pages(0.5)");
  options.device_memory = std::uint64_t{200} << 20;
  const Plan plan = open_engine(std::nullopt).plan(options);
  EXPECT_EQ(plan.kv.chunk, 2048);
  Engine engine = open_engine(plan.device_bytes() + plan.session_device_bytes());
  const Session one = engine.new_session(options);
  const Session other = engine.new_session(options);
  EXPECT_EQ(other.plan().chunk, 2048);
}

TEST(Chunk, IsNoLongerThanTheContext) {
  SessionOptions options = options_for("values prefill=pages(0.5)", 5000);
  options.sequences = 64;
  const Plan all = open_engine(std::nullopt).plan(options);
  const std::uint64_t cap = all.device_bytes() - all.kv.dense_bytes() / 10;
  const Plan plan = open_engine(cap).plan(options);
  EXPECT_EQ(plan.kv.chunk, 5000);
  EXPECT_EQ(plan.activation_bytes, open_engine(cap, 8192).plan(options).activation_bytes);
}

// Fails once, at an allocation of the device's.
class FailingBackend : public FarBackend {
 public:
  FailingBackend(const cpu::CpuOptions& options, const int& left)
      : FarBackend(options), left_(&left) {}

  int allocations() const { return count_; }

 private:
  std::byte* take(Tier tier, std::size_t bytes) override {
    if (tier == Tier::device && *left_ == count_++) throw Error(ErrorCode::memory, "no more");
    return FarBackend::take(tier, bytes);
  }

  const int* left_;
  int count_ = 0;
};

TEST(Chunk, CanBeTriedAgainWhereThereWasNoRoomForActivations) {
  for (int failing = 0; failing < 10; ++failing) {
    SCOPED_TRACE(failing);
    int left = -1;
    EngineConfig config;
    config.model = SLUICE_TEST_DATA "/golden/qwen3";
    config.compute = DType::f32;
    config.host_attention = 0.0;
    FailingBackend* backend = nullptr;
    Engine engine = Engine::Impl::open(config, [&](DType weights) {
      auto made = std::make_unique<FailingBackend>(
          cpu::CpuOptions{2, DType::f32, weights, MemoryAccount::kNoCap, MemoryAccount::kNoCap},
          left);
      backend = made.get();
      return made;
    });
    engine.load_weights();
    const std::uint64_t before = engine.memory().device_bytes;
    left = backend->allocations() + failing;
    testing::expect_error(ErrorCode::memory, "no more", [&] { engine.new_session(300); });
    EXPECT_EQ(engine.memory().device_bytes, before);
    Session session = engine.new_session(300);
    EXPECT_FALSE(session.prefill(std::vector<TokenId>(200, 5)).empty());
  }
}

TEST(Chunk, IsThatOfTheFirstSession) {
  const SessionOptions shorter = options_for("values", 5000);
  const SessionOptions longer = options_for("values");
  const std::uint64_t cap = cap_for(longer);
  Engine engine = open_engine(cap);
  const Session first = engine.new_session(shorter);
  EXPECT_EQ(first.plan().chunk, 2048);
  EXPECT_EQ(engine.plan(longer).kv.chunk, 2048);
}

TEST(Chunk, ChangesAnswersByRounding) {
  constexpr std::int64_t kTokens = 9000;
  std::vector<TokenId> tokens(kTokens);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>(i * i % 380);
  std::vector<std::vector<float>> logits;
  for (const int chunk : {1000, 8192}) {
    Engine engine = open_engine(std::nullopt, chunk);
    Session session = engine.new_session(kTokens);
    const std::span<const float> last = session.prefill(tokens);
    logits.emplace_back(last.begin(), last.end());
  }
  for (std::size_t i = 0; i < logits[0].size(); ++i) {
    EXPECT_NEAR(logits[0][i], logits[1][i], 2e-3) << i;
  }
}

}  // namespace
}  // namespace sluice
