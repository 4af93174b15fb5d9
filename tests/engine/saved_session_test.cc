// Sessions that are saved and loaded go on as if they had not been.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/cpu_backend.h"
#include "engine/engine_impl.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/expect.h"
#include "tests/support/far_backend.h"
#include "tests/support/model_sessions.h"
#include "tests/support/saved_sessions.h"
#include "tests/support/small_sessions.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::config_of;
using testing::copy_of;
using testing::expect_error;
using testing::go_on;
using testing::kMore;
using testing::kSaved;
using testing::options_for;
using testing::random_tokens;
using testing::rows_files;
using testing::SavedSessions;
using testing::tightly;

struct Setting {
  std::string policy;
  bool capped = false;
  bool on_disk = false;
  RowFormat rows = DType::bf16;
  bool far = false;  // activations in memory of the device's own, as on a GPU
};

void PrintTo(const Setting& s, std::ostream* out) {
  *out << s.policy << (s.capped ? ", capped" : "") << (s.on_disk ? ", on disk" : "") << ", "
       << to_string(s.rows) << (s.far ? ", on a far device" : "");
}

class SavedSessionsUnder : public SavedSessions, public ::testing::WithParamInterface<Setting> {
 protected:
  std::optional<Engine> open() const {
    EngineConfig config = config_of(model_);
    config.kv_dtype = GetParam().rows;
    if (GetParam().on_disk) {
      const auto disk = testing::disk_directory();
      if (!disk) return std::nullopt;
      config.disk = DiskConfig{{*disk}, {}};
    }
    if (!GetParam().far) return Engine::open(config);
    config.host_attention = 0.0;
    return Engine::Impl::open(config, [](DType weights) {
      const cpu::CpuOptions options = {1, DType::f32, weights, MemoryAccount::kNoCap,
                                       MemoryAccount::kNoCap};
      return std::make_unique<testing::FarBackend>(options);
    });
  }
};

TEST_P(SavedSessionsUnder, GoOnAsIfTheyHadNeverEnded) {
  std::optional<Engine> engine = open();
  if (!engine) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
  const bool forks = GetParam().policy.find("zipvl") == std::string::npos;
  SessionOptions options = options_for(*engine, GetParam().policy, forks ? 2 : 1);
  if (GetParam().capped) options = tightly(*engine, options, GetParam().on_disk);
  const std::vector<TokenId> tokens = random_tokens(kSaved, 2);
  const std::vector<TokenId> more = random_tokens(kMore, 3);
  std::vector<std::vector<float>> expected;
  {
    Session session = engine->new_session(options);
    ASSERT_EQ(session.plan().on_disk, GetParam().on_disk);
    if (GetParam().capped) {
      ASSERT_LT(session.plan().resident_tokens, kSaved);
    }
    session.prefill(std::span(tokens).first(kSaved - 30));
    session.decode_known(std::span(tokens).last(30), {});
    session.save(directory(), "a note");
    expected = go_on(session, more);
  }
  const SavedSession saved = engine->saved_session(directory());
  EXPECT_EQ(saved.tokens, tokens);
  EXPECT_EQ(saved.note, "a note");

  Session loaded = engine->load_session(directory(), options);
  EXPECT_EQ(loaded.length(), kSaved);
  EXPECT_TRUE(std::ranges::equal(loaded.tokens(), tokens));
  // No token was computed and no row attended, scored or estimated. Resident pages come from disk.
  const Ledger& ledger = loaded.ledger();
  for (const Phase phase : {Phase::prefill, Phase::decode, Phase::correction}) {
    EXPECT_EQ(ledger.tokens(phase), 0u);
    for (const Tier from : {Tier::device, Tier::host, Tier::disk}) {
      for (const Tier to : {Tier::device, Tier::host, Tier::disk}) {
        for (const Cause cause : {Cause::hit, Cause::miss, Cause::index_read, Cause::value_read}) {
          const bool is_resident = GetParam().on_disk && cause == Cause::miss && from != to;
          if (is_resident) continue;
          EXPECT_EQ(ledger.total(phase, from, to, cause), Traffic()) << to_string(cause);
        }
      }
    }
  }
  std::optional<Session> fork;
  if (forks) fork = loaded.fork();
  EXPECT_EQ(go_on(loaded, more), expected);
  if (fork) {
    EXPECT_EQ(go_on(*fork, more), expected) << "a fork of a loaded session";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Settings, SavedSessionsUnder,
    ::testing::Values(Setting{"dense"}, Setting{"values"}, Setting{"sparq"},
                      Setting{"tidaldecode dense=0 anchors=1 correct=16"}, Setting{"quest"},
                      Setting{"dense prefill=pages(0.5)"}, Setting{"dense prefill=zipvl(0.9)"},
                      Setting{"dense", true}, Setting{"values", true}, Setting{"sparq", true},
                      Setting{"dense", true, true}, Setting{"values", true, true},
                      Setting{"sparq", true, true}, Setting{"values", false, false, DType::f32},
                      Setting{"compact"}, Setting{"compact", true, true},
                      Setting{"compact", true, true, DType::bf16, true},
                      Setting{"dense", false, false, DType::f16},
                      Setting{"dense", true, false, DType::bf16, true},
                      Setting{"values", true, false, DType::f32, true},
                      Setting{"sparq", true, true, DType::bf16, true},
                      Setting{"dense", false, false, RowCode::int8},
                      Setting{"values", true, false, RowCode::int8},
                      Setting{"sparq", true, true, RowCode::int8},
                      Setting{"values", true, false, RowCode::int8, true},
                      Setting{"values", true, true, RowCode::k8v4},
                      Setting{"dense", true, false, RowCode::k8v4, true}));

class SavedSessionsOn : public SavedSessions,
                        public ::testing::WithParamInterface<
                            std::tuple<std::string, std::pair<std::string, RowFormat>>> {};

TEST_P(SavedSessionsOn, EveryDeviceGoOn) {
  const auto& [device, kind] = GetParam();
  const auto& [policy, rows] = kind;
  if (testing::skips(device)) return;
  EngineConfig config = testing::config_for(device);
  config.kv_dtype = rows;
  Engine engine = Engine::open(config);
  const std::vector<TokenId> book = testing::book_tokens(engine, 1500);
  SessionOptions options = options_for(engine, policy);
  options.context = 2000;
  Session session = engine.new_session(options);
  session.prefill(std::span(book).first(1400));
  session.save(directory());
  Session loaded = engine.load_session(directory(), options);
  // A GPU may sum in another order where other rows are resident.
  const double tolerance = device == "cpu" ? 0.0 : 0.3;
  for (const TokenId token : std::span(book).subspan(1400, 20)) {
    const std::vector<float> expected = copy_of(session.decode(token));
    EXPECT_LE(testing::largest_difference(copy_of(loaded.decode(token)), expected), tolerance);
  }
}

std::string name_of_device(const ::testing::TestParamInfo<SavedSessionsOn::ParamType>& info) {
  const auto& [device, kind] = info.param;
  return device + "_" + kind.first + "_" + to_string(kind.second);
}

INSTANTIATE_TEST_SUITE_P(Devices, SavedSessionsOn,
                         ::testing::Combine(::testing::ValuesIn(testing::devices()),
                                            ::testing::Values(std::pair("dense", DType::bf16),
                                                              std::pair("values", DType::bf16),
                                                              std::pair("compact", DType::bf16),
                                                              std::pair("values", RowCode::int8),
                                                              std::pair("values", RowCode::k8v4))),
                         name_of_device);

TEST_F(SavedSessions, LoadUnderAnotherPolicyAndCap) {
  EngineConfig config = config_of(model_);
  Engine engine = Engine::open(config);
  save(engine);
  config.chunk = 48;  // pages are loaded in parts
  Engine other = Engine::open(config);
  const std::vector<TokenId> more = random_tokens(kMore, 3);
  for (const std::string policy : {"values", "dense"}) {
    const SessionOptions options = tightly(other, options_for(other, policy), false);
    Session fresh = other.new_session(options);
    fresh.prefill(random_tokens(kSaved, 1));
    Session loaded = other.load_session(directory(), options);
    std::vector<float> all, expected;
    for (const auto& logits : go_on(loaded, more))
      all.insert(all.end(), logits.begin(), logits.end());
    for (const auto& logits : go_on(fresh, more)) {
      expected.insert(expected.end(), logits.begin(), logits.end());
    }
    // Chunks of another length round rows differently.
    EXPECT_LT(testing::largest_difference(all, expected), 0.1) << policy;
  }
}

// Several of them, and one a second time.
TEST_F(SavedSessions, LoadIntoOneMemory) {
  Engine engine = Engine::open(config_of(model_));
  SessionOptions options = options_for(engine, "values", 5);
  options.loads = true;
  const std::vector<TokenId> more = random_tokens(kMore, 3);
  std::vector<std::vector<std::vector<float>>> expected;
  for (const std::uint64_t seed : {1, 2}) {
    Session session = engine.new_session(options);
    session.prefill(random_tokens(kSaved, seed));
    session.save(temp_.path() / std::to_string(seed));
    expected.push_back(go_on(session, more));
  }
  EngineConfig config = config_of(model_);
  config.host_memory = engine.plan(options).host_bytes();
  Engine capped = Engine::open(config);
  Session root = capped.new_session(options);
  std::vector<Session> sessions;
  for (const std::uint64_t seed : {2, 1, 2}) {
    sessions.push_back(root.sibling());
    sessions.back().load(temp_.path() / std::to_string(seed));
    EXPECT_EQ(sessions.back().length(), kSaved);
    EXPECT_EQ(go_on(sessions.back(), more), expected[seed - 1]);
  }
  EXPECT_LE(capped.memory().host_peak, *config.host_memory);
  expect_error(ErrorCode::usage, "a session with tokens",
               [&] { sessions.front().load(temp_.path() / "1"); });
  EXPECT_EQ(sessions.front().length(), kSaved + kMore);
  Session last = root.sibling();
  expect_error(ErrorCode::not_found, "check the path", [&] { last.load(temp_.path() / "3"); });
  options.context = kSaved - 1;
  Session small = engine.new_session(options);
  expect_error(ErrorCode::prompt, "raise `context`", [&] { small.load(temp_.path() / "1"); });
}

TEST_F(SavedSessions, LogitsAfterTheLastTokenComeFromDecodingItAgain) {
  Engine engine = Engine::open(config_of(model_));
  const std::vector<TokenId> tokens = random_tokens(kSaved, 1);
  Session session = engine.new_session(options_for(engine, "dense"));
  session.prefill(std::span(tokens).first(kSaved - 1));
  const std::vector<float> expected = copy_of(session.decode(tokens.back()));
  session.save(directory());
  Session loaded = engine.load_session(directory(), options_for(engine, "dense"));
  loaded.truncate(loaded.length() - 1);
  EXPECT_EQ(copy_of(loaded.decode(tokens.back())), expected);
}

// Sizes at which the last page is empty, whole or has one token.
TEST_F(SavedSessions, OfEveryLengthAroundAPage) {
  Engine engine = Engine::open(config_of(model_));
  const std::vector<TokenId> more = random_tokens(3, 3);
  for (const int length : {1, 127, 128, 129, 256}) {
    const SessionOptions options = options_for(engine, "values");
    Session session = engine.new_session(options);
    session.prefill(random_tokens(static_cast<std::size_t>(length), 5));
    session.save(directory());
    Session loaded = engine.load_session(directory(), options);
    EXPECT_EQ(go_on(loaded, more), go_on(session, more)) << length;
    EXPECT_EQ(rows_files(directory()).size(), 1u);
  }
}

// A session that was truncated and decoded in between has the rows of its newest tokens.
TEST_F(SavedSessions, KeepWhatTheyBecameLast) {
  Engine engine = Engine::open(config_of(model_));
  const SessionOptions options = options_for(engine, "values", 3);
  Session session = engine.new_session(options);
  session.prefill(random_tokens(400, 1));
  Session fork = session.fork();
  session.truncate(256);
  session.prefill(random_tokens(10, 8));
  fork.decode(7);
  fork.save(directory());
  const std::vector<TokenId> more = random_tokens(kMore, 3);
  Session loaded = engine.load_session(directory(), options);
  EXPECT_EQ(loaded.length(), 401);
  EXPECT_EQ(go_on(loaded, more), go_on(fork, more));
  session.save(directory());
  Session again = engine.load_session(directory(), options);
  EXPECT_EQ(again.length(), 266);
  EXPECT_EQ(go_on(again, more), go_on(session, more));
}

// The device's cap leaves nothing for the buffers that loading takes.
TEST_F(SavedSessions, LoadWithinTheCapOnHostMemoryOrNotAtAll) {
  EngineConfig config = config_of(model_);
  Engine engine = Engine::open(config);
  save(engine);
  const SessionOptions options = options_for(engine, "values");
  config.host_memory = engine.plan(options).host_bytes();
  Engine exact = Engine::open(config);
  exact.plan(options);
  expect_error(ErrorCode::memory, "host_memory", [&] { exact.load_session(directory(), options); });
  *config.host_memory += std::uint64_t{64} << 10;
  Engine roomy = Engine::open(config);
  Session loaded = roomy.load_session(directory(), options);
  EXPECT_LE(roomy.memory().host_peak, *config.host_memory);
}

}  // namespace
}  // namespace sluice
