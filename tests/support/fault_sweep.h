// Fails many calls, one at a time, and expects everything else to answer as without a fault.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>
#include <set>
#include <string>

#include "sluice/errors.h"
#include "tests/support/random.h"

namespace sluice::testing {

// Counts calls, and fails the chosen ones. Threads may share it.
class FailingCall {
 public:
  // Call `number` from now on fails, counted from 1.
  void choose(std::int64_t number) { choose_range(number, number); }
  // The same, and all calls after it.
  void choose_from(std::int64_t number) { choose_range(number, kNever); }
  void choose_none() { choose_range(kNever, kNever); }
  // Counts a call, and returns true if it has to fail.
  bool fails() noexcept {
    const std::int64_t call = ++calls_;
    return call >= first_ && call <= last_;
  }
  std::int64_t calls() const { return calls_; }

 private:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  void choose_range(std::int64_t first, std::int64_t last) {
    calls_ = 0;
    last_ = last;
    first_ = first;
  }

  std::atomic<std::int64_t> calls_ = 0;
  std::atomic<std::int64_t> first_ = kNever;  // that fails
  std::atomic<std::int64_t> last_ = kNever;
};

// SLUICE_FAULTS in the environment, or `fallback`.
inline std::int64_t fault_count(std::int64_t fallback) {
  const char* text = std::getenv("SLUICE_FAULTS");
  return text != nullptr ? std::strtoll(text, nullptr, 10) : fallback;
}

struct FaultSweep {
  std::int64_t most = fault_count(20);              // faults, of as many calls as there are
  std::uint64_t seed = 1;                           // chooses the calls
  std::set<ErrorCode> codes = {ErrorCode::memory};  // of what may be thrown
  std::function<void()> check_others = [] {};       // after every fault

  // Calls of `count` to fail: the first and the last, and others at random.
  std::set<std::int64_t> chosen(std::int64_t count) const {
    Random random(seed);
    std::set<std::int64_t> numbers = {1, count};
    const std::int64_t wanted = std::min(most, count);
    while (static_cast<std::int64_t>(numbers.size()) < wanted) {
      numbers.insert(random.integer(1, count));
    }
    return numbers;
  }

  // Each time `work` throws std::bad_alloc or an Error of `codes`, or it answers as without a
  // fault, and so does the next, which has none.
  template <typename Work>
  void run(FailingCall& call, const Work& work) const {
    SCOPED_TRACE(seed_message(seed));
    const auto expected = work();  // also what is allocated only once
    call.choose_none();
    ASSERT_EQ(work(), expected);
    const std::int64_t count = call.calls();
    for (const std::int64_t number : chosen(count)) {
      SCOPED_TRACE("call " + std::to_string(number) + " of " + std::to_string(count));
      call.choose(number);
      try {
        const auto answer = work();
        call.choose_none();
        EXPECT_EQ(answer, expected);
      } catch (const Error& error) {
        call.choose_none();
        EXPECT_TRUE(codes.contains(error.code())) << error.what();
        EXPECT_THAT(error.what(), ::testing::Not(::testing::HasSubstr("\n")));
      } catch (const std::bad_alloc&) {
        call.choose_none();
      }
      check_others();
      EXPECT_EQ(work(), expected);
      if (::testing::Test::HasFailure()) return;
    }
  }
};

}  // namespace sluice::testing
