#include "cpu/threads.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

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
