#include "cpu/runtime/threads.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "sluice/errors.h"

namespace sluice::cpu {
namespace {

TEST(Threads, RunsEveryTaskOnce) {
  Threads threads(4);
  EXPECT_EQ(threads.count(), 4);
  std::atomic<int> sum = 0;
  threads.for_each(100, [&](std::int64_t task) { sum += static_cast<int>(task); });
  EXPECT_EQ(sum, 4950);
}

TEST(Threads, RunsTasksOnceHoweverManyThereAre) {
  for (const int count : {1, 2, 5}) {
    Threads threads(count);
    for (const int tasks : {1, 2, 3, 5, 6, 7, 64, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      threads.for_each(tasks, [&](std::int64_t task) { ++runs[static_cast<std::size_t>(task)]; });
      for (const std::atomic<int>& of : runs) EXPECT_EQ(of, 1) << count << " " << tasks;
    }
  }
}

TEST(Threads, RethrowAndGoOn) {
  Threads threads(3);
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(threads.for_each(50,
                                  [&](std::int64_t task) {
                                    if (task == round * 2) throw std::runtime_error("enough");
                                  }),
                 std::runtime_error);
    std::atomic<int> sum = 0;
    threads.for_each(50, [&](std::int64_t) { ++sum; });
    EXPECT_EQ(sum, 50);
  }
}

// A task of a loop may run a loop of its own.
TEST(Threads, LoopsMayBeNested) {
  Threads threads(3);
  std::atomic<int> sum = 0;
  threads.for_each(7, [&](std::int64_t) { threads.for_each(9, [&](std::int64_t) { ++sum; }); });
  EXPECT_EQ(sum, 63);
}

// In a process that may have one thread: prints the error, exits with 5 if it is the right one.
[[noreturn]] void ask_for_eight() {
  const rlimit one = {1, 1};
  // The limit does not hold for the superuser.
  constexpr uid_t kNobody = 65534;
  if (::setrlimit(RLIMIT_NPROC, &one) != 0 || (::getuid() == 0 && ::setuid(kNobody) != 0)) {
    std::exit(1);
  }
  try {
    const Threads threads(8);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s", error.what());
    std::exit(error.code() == ErrorCode::unsupported ? 5 : 1);
  }
  std::exit(0);
}

TEST(ThreadsDeathTest, ThatTheSystemDeniesAreAnError) {
  EXPECT_EXIT(ask_for_eight(), ::testing::ExitedWithCode(5),
              "of 8 threads the system gives this process 1 .*lower `threads`");
}

}  // namespace
}  // namespace sluice::cpu
