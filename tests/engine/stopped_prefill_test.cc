// Sparse prefills that are stopped, or left by an exception.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_impl.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/far_backend.h"
#include "tests/support/model_sessions.h"

namespace sluice {
namespace {

using testing::book_tokens;
using testing::config_for;
using testing::continuation;

class StoppedPrefills : public ::testing::TestWithParam<std::string> {};

// Where all rows are at hand, and under a cap that has most of them streamed.
TEST_P(StoppedPrefills, LeaveWhatThereWas) {
  const std::string& device = GetParam();
  if (testing::skips(device)) return;
  std::vector<Engine> engines;
  engines.push_back(Engine::open(config_for(device)));
  if (device == "cpu") {
    EngineConfig capped = config_for();
    capped.device_memory = std::uint64_t{7} << 20;
    engines.push_back(Engine::open(capped));
  }
  const std::vector<TokenId> book = book_tokens(engines.front(), 1000);
  const auto part = [&](std::size_t first, std::size_t count) {
    return std::span<const TokenId>(book).subspan(first, count);
  };
  const auto other = part(700, 200);
  for (Engine& engine : engines) {
    for (const char* const line : {"dense prefill=zipvl(0.9)", "values prefill=zipvl(0.9)",
                                   "sluice prefill=zipvl(0.9,evict)"}) {
      SCOPED_TRACE(line);
      const SessionOptions planned = {600, {engine.policy(line)}, 1};
      std::optional<Session> fresh = engine.new_session(planned);
      fresh->prefill(part(0, 300));
      const std::vector<TokenId> expected = continuation(*fresh, part(300, 200), 5);
      fresh.reset();  // and its share of the cap
      Session session = engine.new_session(planned);
      // In the first prompt, and behind one.
      for (const std::size_t before : {std::size_t{0}, std::size_t{300}}) {
        if (before > 0) session.prefill(part(0, before));
        const std::uint64_t counted = session.ledger().tokens(Phase::prefill);
        for (const int stop : {1, 7}) {
          int calls = 0;
          const auto stops = [&](std::int64_t, std::int64_t) { return ++calls < stop; };
          EXPECT_TRUE(session.prefill(other, stops).empty());
          EXPECT_EQ(session.length(), static_cast<std::int64_t>(before)) << stop;
          EXPECT_EQ(session.ledger().tokens(Phase::prefill), counted) << stop;
          calls = 0;
          const auto throws = [&](std::int64_t, std::int64_t) {
            if (++calls == stop) throw 5;
            return true;
          };
          EXPECT_THROW(session.prefill(other, throws), int);
          EXPECT_EQ(session.length(), static_cast<std::int64_t>(before)) << stop;
        }
        // When all is done but to say so.
        const auto throws_late = [&](std::int64_t done, std::int64_t total) {
          if (done == total) throw 5;
          return true;
        };
        EXPECT_THROW(session.prefill(other, throws_late), int);
        EXPECT_EQ(session.length(), static_cast<std::int64_t>(before));
        session.truncate(0);
        if (before > 0) session.prefill(part(0, before));
      }
      EXPECT_EQ(continuation(session, part(300, 200), 5), expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, StoppedPrefills, ::testing::ValuesIn(testing::devices()),
                         [](const auto& device) { return device.param; });

// Pins as many pieces of host memory as it is told.
class PinningBackend : public testing::FarBackend {
 public:
  PinningBackend(const cpu::CpuOptions& options, std::shared_ptr<int> left)
      : FarBackend(options), left_(std::move(left)) {}

  void register_host(std::byte* data, std::size_t bytes) override {
    if (*left_ == 0) throw Error(ErrorCode::memory, "no more can be pinned");
    --*left_;
    FarBackend::register_host(data, bytes);
  }

 private:
  std::shared_ptr<int> left_;
};

class RefusedPrefills : public ::testing::TestWithParam<std::string> {
 protected:
  RefusedPrefills() : engine_(open(left_)) {}

  static Engine open(const std::shared_ptr<int>& left) {
    EngineConfig config;
    config.model = SLUICE_TEST_DATA "/golden/qwen3";
    config.threads = 1;
    return Engine::Impl::open(config, [&](DType weights) {
      return std::make_unique<PinningBackend>(cpu::CpuOptions{1, DType::f32, weights}, left);
    });
  }
  // Calls `prefill` until nothing is refused any more, which leaves `session` as it is.
  template <typename Prefill>
  int refusals(const Session& session, const Prefill& prefill) {
    const std::int64_t before = session.length();
    int refused = 0;
    for (*left_ = 0; session.length() == before; *left_ = ++refused) {
      try {
        prefill();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::memory) << error.what();
        EXPECT_EQ(session.length(), before);
      }
    }
    *left_ = kMany;
    return refused;
  }

  static constexpr int kMany = 1000;
  std::shared_ptr<int> left_ = std::make_shared<int>(kMany);
  Engine engine_;
};

// Rows get their host layer by layer or block by block, and the machine may refuse any of them.
TEST_P(RefusedPrefills, LeaveWhatThereWas) {
  const SessionOptions planned = {600, {engine_.policy(GetParam())}, 2};
  std::vector<TokenId> tokens(300);
  std::iota(tokens.begin(), tokens.end(), 10);
  const std::span<const TokenId> prompt(tokens);
  std::optional<Session> fresh = engine_.new_session(planned);
  const std::vector<TokenId> expected = continuation(*fresh, prompt, 5);
  fresh.reset();
  Session session = engine_.new_session(planned);
  const std::uint64_t before = engine_.memory().host_bytes;
  EXPECT_GE(refusals(session, [&] { session.prefill(prompt); }), 1);
  session.truncate(0);
  EXPECT_EQ(continuation(session, prompt, 5), expected);
  EXPECT_GT(engine_.memory().host_bytes, before);
}

INSTANTIATE_TEST_SUITE_P(Policies, RefusedPrefills,
                         ::testing::Values("dense prefill=zipvl(0.9)", "dense", "values"),
                         [](const auto& policy) {
                           const std::string& line = policy.param;
                           return line.substr(0, line.find(' ')) +
                                  (line.find("zipvl") == std::string::npos ? "" : "_zipvl");
                         });

}  // namespace
}  // namespace sluice
