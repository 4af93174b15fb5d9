// Sparse prefills that are stopped, or left by an exception.
#include <gtest/gtest.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/engine.h"
#include "tests/support/backends.h"
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
  if (device == "cuda" && testing::make_or_skip(testing::gpu_backends().front()) == nullptr) return;
  std::vector<Engine> engines;
  engines.push_back(Engine::open(config_for(device)));
  if (device == "cpu") {
    EngineConfig capped = config_for();
    capped.device_memory = std::uint64_t{6} << 20;
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
        for (const int stop : {1, 7}) {
          int calls = 0;
          const auto stops = [&](std::int64_t, std::int64_t) { return ++calls < stop; };
          EXPECT_TRUE(session.prefill(other, stops).empty());
          EXPECT_EQ(session.length(), static_cast<std::int64_t>(before)) << stop;
          calls = 0;
          const auto throws = [&](std::int64_t, std::int64_t) {
            if (++calls == stop) throw 5;
            return true;
          };
          EXPECT_THROW(session.prefill(other, throws), int);
          EXPECT_EQ(session.length(), static_cast<std::int64_t>(before)) << stop;
        }
      }
      EXPECT_EQ(continuation(session, part(300, 200), 5), expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, StoppedPrefills, ::testing::ValuesIn(testing::devices()),
                         [](const auto& device) { return device.param; });

}  // namespace
}  // namespace sluice
