// What a plan accepts runs to its end under its caps, and plans no more than it takes: for every
// policy the smallest caps that are accepted, one byte less, and a run to the context's last token
// under an allocator that enforces them. SLUICE_PLAN_CONTEXT in the environment walks to contexts
// of so many tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine_impl.h"
#include "offload/backends.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/far_backend.h"
#include "tests/support/random.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::expect_error;
using testing::FarBackend;
using testing::OnDisk;

constexpr std::int64_t kVocabulary = 384;  // of golden/qwen3
constexpr std::uint64_t kPlenty = std::uint64_t{64} << 20;

// One of every kind of part that a plan counts. The model has three layers.
const char* const kPolicies[] = {
    "dense",
    "streaming",
    "sluice",
    "values",
    "quantized",
    "sparq",
    "twilight",
    "quest",
    "tidaldecode anchors=2",
    "tidaldecode anchors=2 correct=16",
    "select=int4 bits=2 prune=top_p(0.9) cap=200 dense=0 anchors=1",
    "values bits=3 1:bits=2 2:bits=4",
    "compact 1:bits=1",
    "select=int4 prune=top_k(64) compensate=values(bits=3,pages=0.5)",
    "zipvl",
    "select=dense prefill=zipvl(0.9,evict)",
    "sluice prefill=zipvl(0.9)",
    "quantized prefill=zipvl(0.9)",
    "values prefill=pages(0.9)",
    "select=dense prefill=pages(0.8)",
};

// Where weights and activations are: in host memory, or on the device as on a GPU; there with the
// host attending to part of the rows in host memory.
enum class Computes { near, far, shared };

struct Caps {
  std::optional<std::uint64_t> device;
  std::optional<std::uint64_t> host;
};

std::uint64_t scratch_of(Computes computes) {
  return computes != Computes::near ? FarBackend::kScratchBytes : 0;
}

Engine open_engine(Computes computes, const Caps& caps,
                   const std::optional<WeightFormat>& weights = std::nullopt,
                   const std::optional<DiskConfig>& disk = std::nullopt) {
  EngineConfig config;
  config.disk = disk;
  config.model = SLUICE_TEST_DATA "/golden/qwen3";
  config.chunk = 192;
  config.threads = 1;
  config.compute = DType::f32;
  config.weights = weights;
  config.device_memory = caps.device;
  config.host_memory = caps.host;
  if (computes == Computes::near) return Engine::open(config);
  config.host_attention = computes == Computes::shared ? 0.5 : 0.0;
  return Engine::Impl::open(config, [&](DType stored) {
    return std::make_unique<FarBackend>(
        cpu::CpuOptions{1, DType::f32, stored, caps.device.value_or(MemoryAccount::kNoCap),
                        caps.host.value_or(MemoryAccount::kNoCap)},
        LogitFormat(), computes != Computes::shared);
  });
}

// The least cap that the refusal of a plan names. One byte less is refused, too. `refused`: a cap
// under which an engine can be opened.
std::uint64_t named(std::uint64_t refused, const std::function<void(std::uint64_t cap)>& plan) {
  const std::string before = "at least ";
  std::uint64_t least = 0;
  try {
    plan(refused);
    ADD_FAILURE() << refused << " bytes were accepted";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.code(), ErrorCode::memory) << message;
    EXPECT_THAT(message, ::testing::HasSubstr(before));
    least = std::stoull("0" + message.substr(message.find(before) + before.size()));
  }
  expect_error(ErrorCode::memory, before + std::to_string(least) + "B", [&] { plan(least - 1); });
  return least;
}

// Of the device, then of the host beside it.
Caps least_caps(const Caps& refused, const std::function<void(const Caps& caps)>& plan) {
  Caps caps;
  caps.device = named(*refused.device, [&](std::uint64_t cap) { plan({cap, std::nullopt}); });
  caps.host = named(*refused.host, [&](std::uint64_t cap) { plan({caps.device, cap}); });
  return caps;
}

Caps least_caps(Computes computes, const SessionOptions& options) {
  return least_caps({scratch_of(computes), 1},
                    [&](const Caps& caps) { open_engine(computes, caps).plan(options); });
}

// By bisection.
std::uint64_t least_accepted(const std::function<void(std::uint64_t cap)>& plan) {
  std::uint64_t refused = 0;
  std::uint64_t accepted = kPlenty;
  while (accepted - refused > 1) {
    const std::uint64_t middle = refused + (accepted - refused) / 2;
    try {
      plan(middle);
      accepted = middle;
    } catch (const Error&) {
      refused = middle;
    }
  }
  return accepted;
}

void expect_planned(const Engine& engine, const Plan& plan) {
  const MemoryUse memory = engine.memory();
  EXPECT_EQ(memory.device_peak, plan.device_bytes());
  EXPECT_EQ(memory.host_peak, std::max(plan.host_bytes(), plan.loading_peak_bytes));
}

std::vector<TokenId> some_tokens(std::int64_t count, std::uint64_t seed) {
  testing::Random random(seed);
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  for (TokenId& token : tokens) token = static_cast<TokenId>(random.integer(0, kVocabulary - 1));
  return tokens;
}

// Two prompts, tokens that are known after each, and single ones, to the context's last.
void run_to_the_end(Session& session, std::span<const TokenId> tokens) {
  const std::size_t half = tokens.size() / 2;
  session.prefill(tokens.first(half));
  session.decode_known(tokens.subspan(half, 5), [](std::size_t, std::span<const float>) {});
  const std::size_t rest = tokens.size() - half - 5;
  session.prefill(tokens.subspan(half + 5, rest - 20));
  for (const TokenId token : tokens.last(20)) session.decode(token);
}

SessionOptions options_for(const std::string& policy, std::int64_t context) {
  SessionOptions options;
  options.context = context;
  options.policies = {parse_policy(policy)};
  return options;
}

class Plans : public ::testing::TestWithParam<std::tuple<Computes, const char*>> {
 protected:
  const Computes computes_ = std::get<0>(GetParam());
  const std::string policy_ = std::get<1>(GetParam());
  const std::uint64_t seed_ = testing::seed(7);
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, policy_ + " " + testing::seed_message(seed_)};

  std::vector<std::int64_t> contexts() const {
    const char* const longest = std::getenv("SLUICE_PLAN_CONTEXT");
    if (longest != nullptr) return {std::strtoll(longest, nullptr, 10)};
    return {300, 2500};
  }
};

TEST_P(Plans, HoldAtTheLeastCapsThatTheyAccept) {
  for (const std::int64_t context : contexts()) {
    SCOPED_TRACE(std::to_string(context) + " tokens");
    const SessionOptions options = options_for(policy_, context);
    const Caps caps = least_caps(computes_, options);
    Engine engine = open_engine(computes_, caps);
    const Plan plan = engine.plan(options);
    // A model that is there already changes nothing.
    if (context == contexts().back()) engine.load_weights();
    Session session = engine.new_session(options);
    run_to_the_end(session, some_tokens(context, seed_));
    EXPECT_EQ(session.length(), context);
    expect_planned(engine, plan);
  }
}

TEST_P(Plans, HoldBetweenTheLeastCapAndRoomForAll) {
  const SessionOptions options = options_for(policy_, contexts().front() + 500);
  const std::uint64_t least = *least_caps(computes_, options).device;
  const std::uint64_t all = open_engine(computes_, {kPlenty, {}}).plan(options).device_bytes();
  const std::vector<TokenId> tokens = some_tokens(options.context, seed_);
  testing::Random random(seed_);
  for (int i = 0; i < 3; ++i) {
    const auto cap = static_cast<std::uint64_t>(
        random.integer(static_cast<std::int64_t>(least), static_cast<std::int64_t>(all)));
    SCOPED_TRACE("cap " + std::to_string(cap));
    Engine engine = open_engine(computes_, {cap, {}});
    engine.load_weights();
    const Plan plan = engine.plan(options);
    Session session = engine.new_session(options);
    run_to_the_end(session, tokens);
    expect_planned(engine, plan);
  }
}

TEST(CodedWeights, HoldAtTheLeastCapsThatTheyAccept) {
  const SessionOptions options = options_for("sluice", 300);
  for (const Computes computes : {Computes::near, Computes::far, Computes::shared}) {
    for (const WeightFormat format : {WeightCode::int8, WeightCode::int4}) {
      SCOPED_TRACE(to_string(format));
      const Caps caps = least_caps({scratch_of(computes), 1}, [&](const Caps& wanted) {
        open_engine(computes, wanted, format).plan(options);
      });
      Engine engine = open_engine(computes, caps, format);
      const Plan plan = engine.plan(options);
      EXPECT_LT(plan.weight_bytes, open_engine(computes, {}).plan(options).weight_bytes);
      Session session = engine.new_session(options);
      run_to_the_end(session, some_tokens(options.context, testing::seed(8)));
      expect_planned(engine, plan);
    }
  }
}

// What refusals name is what bisection finds.
TEST(LeastCaps, AreTheLeastThatAreAccepted) {
  for (const Computes computes : {Computes::far, Computes::shared}) {
    for (const char* const policy : kPolicies) {
      SCOPED_TRACE(policy);
      const SessionOptions options = options_for(policy, 300);
      const Caps caps = least_caps(computes, options);
      EXPECT_EQ(caps.device, least_accepted([&](std::uint64_t cap) {
                  open_engine(computes, {cap, std::nullopt}).plan(options);
                }));
      EXPECT_EQ(caps.host, least_accepted([&](std::uint64_t cap) {
                  open_engine(computes, {caps.device, cap}).plan(options);
                }));
    }
  }
}

// The same of host memory above a disk, for a device tier of its own and one in host memory.
TEST_F(OnDisk, RefusalsNameTheLeastHostMemory) {
  for (const char* const policy : {"dense", "values", "twilight", "compact prefill=pages(0.9)"}) {
    const SessionOptions options = options_for(policy, 24000);
    for (const auto& [computes, device] :
         {std::pair{Computes::far, std::optional(kPlenty / 4)},
          std::pair{Computes::near, std::optional<std::uint64_t>()}}) {
      SCOPED_TRACE(::testing::Message() << policy << ", device " << device.value_or(0));
      const auto plan = [&](std::uint64_t cap) {
        open_engine(computes, {device, cap}, std::nullopt, DiskConfig{{parent_}, {}}).plan(options);
      };
      EXPECT_EQ(named(1, plan), least_accepted(plan));
    }
  }
}

// The first of two sessions has not begun when the second takes all that is left.
TEST_P(Plans, HoldBesideEachOther) {
  const std::int64_t context = contexts().front() + 200;
  SessionOptions first = options_for(policy_, context);
  const SessionOptions second = options_for("sluice", context);
  first.device_memory = named(0, [&](std::uint64_t cap) {
    SessionOptions capped = first;
    capped.device_memory = cap;
    open_engine(computes_, {kPlenty, {}}).plan(capped);
  });
  const Caps of_first = least_caps(computes_, first);
  const Caps caps = least_caps(of_first, [&](const Caps& wanted) {
    Engine engine = open_engine(computes_, wanted);
    const Session one = engine.new_session(first);
    engine.plan(second);
  });

  Engine engine = open_engine(computes_, caps);
  Session one = engine.new_session(first);
  Session other = engine.new_session(second);
  for (Session* session : {&other, &one}) run_to_the_end(*session, some_tokens(context, seed_));
  EXPECT_EQ(engine.memory().device_peak, *caps.device);
  EXPECT_EQ(engine.memory().host_peak, *caps.host);
}

// Forks of one prompt, which take steps together up to the context's last token.
TEST_P(Plans, HoldForForks) {
  constexpr std::size_t kForks = 3;
  SessionOptions options = options_for(policy_, contexts().front() + 7);
  const std::int64_t prompt = options.context - 40;
  options.sequences = kForks + 1;
  // A correction writes what forks shared once more for each.
  const std::int64_t corrected = options.policies.front().correct;
  options.tokens = prompt + options.sequences * (40 + corrected);
  const Caps caps = least_caps(computes_, options);
  Engine engine = open_engine(computes_, caps);
  const Plan plan = engine.plan(options);
  std::vector<Session> sessions;
  sessions.push_back(engine.new_session(options));
  const std::vector<TokenId> tokens = some_tokens(options.context, seed_);
  sessions.front().prefill(std::span(tokens).first(static_cast<std::size_t>(prompt)));
  for (std::size_t i = 0; i < kForks; ++i) sessions.push_back(sessions.front().fork());
  for (std::int64_t at = prompt; at < options.context; ++at) {
    std::vector<StepToken> step;
    for (std::size_t i = 0; i < sessions.size(); ++i) {
      const auto token = static_cast<TokenId>((at + static_cast<std::int64_t>(i)) % kVocabulary);
      step.push_back({&sessions[i], token});
    }
    for (const StepResult& result : engine.step(step)) ASSERT_FALSE(result.error);
  }
  for (const Session& session : sessions) EXPECT_EQ(session.length(), options.context);
  EXPECT_EQ(engine.memory().device_peak, plan.device_bytes());
  EXPECT_LE(engine.memory().host_peak, std::max(plan.host_bytes(), plan.loading_peak_bytes));
}

std::string name_of(const ::testing::TestParamInfo<Plans::ParamType>& info) {
  const Computes computes = std::get<0>(info.param);
  const std::string name = computes == Computes::near  ? "near"
                           : computes == Computes::far ? "far"
                                                       : "shared";
  return name + "_" + std::to_string(info.index % std::size(kPolicies));
}

INSTANTIATE_TEST_SUITE_P(Policies, Plans,
                         ::testing::Combine(::testing::Values(Computes::near, Computes::far,
                                                              Computes::shared),
                                            ::testing::ValuesIn(kPolicies)),
                         name_of);

}  // namespace
}  // namespace sluice
