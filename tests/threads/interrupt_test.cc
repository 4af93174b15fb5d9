// Ctrl-C, which a thread of its own waits for, and those who look at its flag.
#include "tools/interrupt.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "tests/threads/together.h"

namespace sluice::tools {
namespace {

TEST(Interrupt, IsSeenByAllThreadsAndLoweredByOne) {
  end_on_interrupt();
  keep_on_interrupt();
  flag_interrupt();
  for (int round = 0; round < 5; ++round) {
    testing::together(3, [&](int i) {
      if (i == 0) {
        EXPECT_EQ(::kill(::getpid(), SIGINT), 0);
      }
      while (!interrupted()) std::this_thread::yield();
      take_time();
    });
    int pipe[2];
    ASSERT_EQ(::pipe(pipe), 0);
    EXPECT_FALSE(wait_for_input(pipe[0]));
    lower_interrupt();
    ASSERT_EQ(::write(pipe[1], "x", 1), 1);
    EXPECT_TRUE(wait_for_input(pipe[0]));
    for (const int end : pipe) ::close(end);
  }
}

}  // namespace
}  // namespace sluice::tools
