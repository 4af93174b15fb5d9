#include "lib/memory_account.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "sluice/errors.h"

namespace sluice {
namespace {

TEST(MemoryAccount, HoldsTheCapAndRemembersThePeak) {
  MemoryAccount account(Tier::device, 1000);
  account.charge(600);
  account.charge(400);
  EXPECT_THROW(account.charge(1), Error);
  EXPECT_EQ(account.used(), 1000u) << "a refused charge takes nothing";
  account.release(900);
  EXPECT_EQ(account.used(), 100u);
  EXPECT_EQ(account.peak(), 1000u);
}

TEST(MemoryAccount, RefusalNamesTheFlagAndTheNumbers) {
  MemoryAccount account(Tier::device, 1 << 20);
  try {
    account.charge(2 << 20);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("`device_memory`"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("1.00 MiB"));
  }
}

TEST(MemoryAccount, SumsThatOverflowAreRefused) {
  MemoryAccount account(Tier::host, MemoryAccount::kNoCap - 1);
  account.charge(MemoryAccount::kNoCap - 10);
  EXPECT_THROW(account.charge(100), Error);
}

TEST(MemoryAccount, ThreadsNeverPassTheCapTogether) {
  MemoryAccount account(Tier::device, 100);
  std::atomic<int> refusals{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10000; ++i) {
        try {
          account.charge(60);
          account.release(60);
        } catch (const Error&) {
          ++refusals;  // another thread holds the budget
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(account.used(), 0u);
  EXPECT_EQ(account.peak(), 60u);
}

TEST(MemoryAccountDeathTest, ReleasingMoreThanWasChargedIsABug) {
  MemoryAccount account(Tier::host);
  account.charge(10);
  EXPECT_DEATH(account.release(11), "more memory released");
}

}  // namespace
}  // namespace sluice
