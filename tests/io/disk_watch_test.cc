#include "io/disk_watch.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/disk_ticket.h"

namespace sluice {
namespace {

constexpr std::chrono::seconds kMost(32);

// Every wait lasts as long as it may, and a test may act in it.
class HookedClock : public DiskClock {
 public:
  bool wait(std::condition_variable& /*changed*/, std::unique_lock<std::mutex>& lock,
            std::chrono::nanoseconds most) override {
    passed += most;
    if (!hook) return true;
    lock.unlock();
    hook();
    lock.lock();
    return true;
  }

  std::chrono::nanoseconds passed{0};
  std::function<void()> hook;
};

struct Watched {
  std::shared_ptr<HookedClock> clock = std::make_shared<HookedClock>();
  std::shared_ptr<DiskWatch> watch =
      std::make_shared<DiskWatch>(DiskPatience{kMost, clock}, "/disk");
};

TEST(DiskWatch, GivesUpAfterItsTimeAndFailsEveryRequest) {
  Watched w;
  const auto batch = std::make_shared<DiskBatch>(5, 3, w.watch);
  const DiskTicket ticket(batch);
  batch->finish_part();
  const std::vector<DiskFailure> failures = ticket.failures();
  EXPECT_EQ(w.clock->passed, kMost);
  ASSERT_EQ(failures.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(failures[i].request, i);
    EXPECT_EQ(failures[i].error.code(), ErrorCode::io);
    EXPECT_NE(std::string(failures[i].error.what()).find("has not answered for 32 s"),
              std::string::npos);
  }
  EXPECT_TRUE(w.watch->is_given_up());
  // Those who wait for others have nothing to wait for.
  const DiskTicket later(std::make_shared<DiskBatch>(1, 1, w.watch));
  EXPECT_THROW(later.wait(), Error);
  EXPECT_EQ(w.clock->passed, kMost);
  // An answer that comes too late changes nothing.
  for (int i = 0; i < 4; ++i) batch->finish_part();
  batch->fail(1, {ErrorCode::corrupt, "late"});
  EXPECT_EQ(ticket.failures().size(), 3u);
  EXPECT_EQ(ticket.failures()[1].error.code(), ErrorCode::io);
}

TEST(DiskWatch, IsPatientWhileAnythingIsAnswered) {
  Watched w;
  const auto batch = std::make_shared<DiskBatch>(1, 1, w.watch);
  const DiskTicket ticket(batch);
  int waits = 0;
  w.clock->hook = [&] {
    ++waits;
    if (waits % 15 == 0) w.watch->answered();
    if (waits == 300) batch->finish_part();
  };
  EXPECT_TRUE(ticket.failures().empty());
  EXPECT_FALSE(w.watch->is_given_up());
  EXPECT_GT(w.clock->passed, 10 * kMost);
}

// A process that was stopped for an hour finds that the clock has passed, once.
TEST(DiskWatch, CountsALongPauseOnce) {
  Watched w;
  const auto batch = std::make_shared<DiskBatch>(1, 1, w.watch);
  const DiskTicket ticket(batch);
  w.clock->hook = [&] {
    w.clock->passed += std::chrono::hours(1);
    batch->finish_part();
  };
  EXPECT_TRUE(ticket.failures().empty());
}

TEST(DiskWatch, ATicketThatIsDroppedGivesUp) {
  Watched w;
  { const DiskTicket dropped(std::make_shared<DiskBatch>(1, 1, w.watch)); }
  EXPECT_TRUE(w.watch->is_given_up());
  EXPECT_EQ(w.clock->passed, kMost);
}

}  // namespace
}  // namespace sluice
