// The queue of one file over a disk that does what the test says, when it says so. What chance
// finds is in disk_simulation_test.cc.
#include "io/disk_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "io/sector_buffer.h"
#include "tests/io/test_files.h"

namespace sluice {
namespace {

using testing::expect_error;

constexpr std::size_t kSectors = 4096;

// Notes what it is given and finishes what it is told to.
class ScriptedDisk : public Disk {
 public:
  struct Started {
    DiskAction action;
    std::uint64_t tag;
    std::uint64_t offset;
    std::vector<iovec> buffers;
    std::size_t bytes() const {
      std::size_t sum = 0;
      for (const iovec& buffer : buffers) sum += buffer.iov_len;
      return sum;
    }
  };

  bool start(const DiskOperation& operation) override {
    if (running.size() == room) return false;
    running.push_back({operation.action,
                       operation.tag,
                       operation.offset,
                       {operation.buffers.begin(), operation.buffers.end()}});
    log.push_back(running.back());
    return true;
  }
  std::size_t retire(std::span<DiskResult> results, bool) override {
    std::size_t count = 0;
    for (; count < results.size() && !finished.empty(); ++count) {
      results[count] = finished.front();
      finished.pop_front();
    }
    return count;
  }
  void wake() override {}

  // Finishes the operation that has run longest.
  void finish(std::int64_t result) {
    if (running.empty()) throw std::logic_error("nothing runs");
    finished.push_back({running.front().tag, result});
    running.pop_front();
  }
  void finish_all() {
    while (!running.empty()) finish(static_cast<std::int64_t>(running.front().bytes()));
  }

  std::size_t room = 4096;
  std::deque<Started> running;
  std::vector<Started> log;
  std::deque<DiskResult> finished;
};

// A ticket that ends its queue where a failed test would leave it waiting for ever.
class Ticket {
 public:
  Ticket(std::shared_ptr<DiskBatch> batch, DiskQueue& queue)
      : queue_(&queue), ticket_(std::move(batch)) {}
  Ticket(Ticket&& other) noexcept
      : queue_(std::exchange(other.queue_, nullptr)), ticket_(std::move(other.ticket_)) {}
  Ticket& operator=(Ticket&&) = delete;
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;
  ~Ticket() { abandon(); }

  bool done() const { return ticket_.done(); }
  void wait() {
    abandon();
    ticket_.wait();
  }
  std::vector<DiskFailure> failures() {
    abandon();
    return ticket_.failures();
  }

 private:
  void abandon() {
    if (queue_ != nullptr && !ticket_.done()) {
      queue_->abandon(Error(ErrorCode::internal, "the test left requests behind"));
    }
  }

  DiskQueue* queue_;
  DiskTicket ticket_;
};

class DiskQueueTest : public ::testing::Test {
 protected:
  DiskQueueTest() { make({}); }

  void make(DiskLimits limits) {
    queue_ = std::make_unique<DiskQueue>(disk_, sums_, "dir", limits);
  }

  // One request per sector number, as one batch.
  Ticket add(DiskAction action, DiskPriority priority, const std::vector<std::size_t>& sectors,
             std::size_t count = 1) {
    auto batch = std::make_shared<DiskBatch>(sectors.size());
    for (std::size_t place = 0; place < sectors.size(); ++place) {
      DiskRequest request;
      request.action = action;
      request.priority = priority;
      request.offset = sectors[place] * kSectorBytes;
      request.sector = sectors[place];
      request.data = memory_.sectors(sectors[place], count).data();
      request.bytes = count * kSectorBytes;
      request.batch = batch;
      request.place = place;
      queue_->add(DiskRequest(request));
    }
    return Ticket(std::move(batch), *queue_);
  }
  Ticket read(const std::vector<std::size_t>& sectors) {
    return add(DiskAction::read, DiskPriority::urgent, sectors);
  }
  // So that the zeros in memory pass for what the disk gives.
  void know(std::size_t first, std::size_t count) {
    sums_.set(first, memory_.sectors(first, count));
  }

  void drain() {
    for (int i = 0; i < 100'000 && !queue_->idle(); ++i) {
      queue_->step(false);
      disk_.finish_all();
    }
    ASSERT_TRUE(queue_->idle());
  }

  SectorBuffer memory_{kSectors * kSectorBytes};
  SectorSums sums_{1, kSectors, 1};
  ScriptedDisk disk_;
  std::unique_ptr<DiskQueue> queue_;
};

TEST_F(DiskQueueTest, MergesNeighboursOnDiskAndInMemory) {
  know(0, 64);
  Ticket ticket = read({3, 4, 5, 9, 10, 20});
  queue_->step(false);
  ASSERT_EQ(disk_.log.size(), 3u);
  EXPECT_EQ(disk_.log[0].offset, 3 * kSectorBytes);
  EXPECT_EQ(disk_.log[0].bytes(), 3 * kSectorBytes);
  EXPECT_EQ(disk_.log[0].buffers.size(), 1u) << "neighbours in memory share a buffer";
  EXPECT_EQ(disk_.log[1].bytes(), 2 * kSectorBytes);
  EXPECT_EQ(disk_.log[2].bytes(), kSectorBytes);
  EXPECT_FALSE(ticket.done());
  drain();
  EXPECT_TRUE(ticket.done());
  EXPECT_NO_THROW(ticket.wait());
  EXPECT_EQ(queue_->counts().requests, 6u);
  EXPECT_EQ(queue_->counts().operations, 3u);
}

TEST_F(DiskQueueTest, MergesIntoScatteredMemoryUpToTheLimits) {
  know(0, 64);
  auto batch = std::make_shared<DiskBatch>(20);
  for (std::size_t i = 0; i < 20; ++i) {
    DiskRequest request;
    request.offset = request.sector = i;
    request.offset *= kSectorBytes;
    request.data = memory_.sectors(100 + 2 * i, 1).data();
    request.bytes = kSectorBytes;
    request.batch = batch;
    queue_->add(DiskRequest(request));
  }
  Ticket ticket(batch, *queue_);
  queue_->step(false);
  ASSERT_EQ(disk_.log.size(), 2u);
  EXPECT_EQ(disk_.log[0].buffers.size(), kMaxBuffers);
  EXPECT_EQ(disk_.log[1].buffers.size(), 20 - kMaxBuffers);
  EXPECT_EQ(disk_.log[1].offset, kMaxBuffers * kSectorBytes);
  drain();

  std::vector<std::size_t> many(100);
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = i;
  know(0, 100);
  Ticket large = read(many);
  disk_.log.clear();
  queue_->step(false);
  EXPECT_EQ(disk_.log.size(), 2u);
  EXPECT_EQ(disk_.log[0].bytes(), kMaxOperationBytes);
  drain();
}

TEST_F(DiskQueueTest, NeverMergesReadsWithWrites) {
  know(0, 8);
  Ticket reads = read({0, 1});
  Ticket writes = add(DiskAction::write, DiskPriority::urgent, {2, 3});
  queue_->step(false);
  ASSERT_EQ(disk_.log.size(), 2u);
  EXPECT_EQ(disk_.log[0].action, DiskAction::read);
  EXPECT_EQ(disk_.log[1].action, DiskAction::write);
  drain();
}

TEST_F(DiskQueueTest, ResumesShortTransfersAtTheRightOffset) {
  know(0, 16);
  Ticket ticket = read({0, 1, 2, 3, 4, 5, 6, 7});
  queue_->step(false);
  disk_.finish(3 * kSectorBytes + 1000);
  queue_->step(false);
  queue_->step(false);
  ASSERT_EQ(disk_.log.size(), 2u);
  EXPECT_EQ(disk_.log[1].offset, 3 * kSectorBytes) << "rounded down to a sector";
  EXPECT_EQ(disk_.log[1].bytes(), 5 * kSectorBytes);
  EXPECT_EQ(disk_.log[1].buffers[0].iov_base, memory_.sectors(3, 1).data());
  disk_.finish(0);
  queue_->step(false);
  queue_->step(false);
  EXPECT_EQ(disk_.log.back().offset, 3 * kSectorBytes);
  disk_.finish(5 * kSectorBytes);
  queue_->step(false);
  EXPECT_NO_THROW(ticket.wait());
  EXPECT_EQ(queue_->counts().retries, 2u);
}

TEST_F(DiskQueueTest, ResumesAcrossBuffers) {
  know(0, 4);
  auto batch = std::make_shared<DiskBatch>(3);
  for (std::size_t i = 0; i < 3; ++i) {
    DiskRequest request;
    request.sector = i;
    request.offset = i * kSectorBytes;
    request.data = memory_.sectors(10 * (i + 1), 1).data();
    request.bytes = kSectorBytes;
    request.batch = batch;
    queue_->add(DiskRequest(request));
  }
  Ticket ticket(batch, *queue_);
  queue_->step(false);
  disk_.finish(2 * kSectorBytes);
  queue_->step(false);
  queue_->step(false);
  ASSERT_EQ(disk_.log.back().buffers.size(), 1u);
  EXPECT_EQ(disk_.log.back().buffers[0].iov_base, memory_.sectors(30, 1).data());
  drain();
  EXPECT_NO_THROW(ticket.wait());
}

TEST_F(DiskQueueTest, AFileThatEndsIsAnErrorAndNoLoop) {
  Ticket ticket = read({0});
  for (int i = 0; i < 1000 && !queue_->idle(); ++i) {
    queue_->step(false);
    if (!disk_.running.empty()) disk_.finish(0);
  }
  expect_error(ErrorCode::io, "dir: reading 4096 bytes at byte 0 of the spill file failed",
               [&] { ticket.wait(); });
}

TEST_F(DiskQueueTest, TriesAgainWhenInterrupted) {
  know(0, 1);
  Ticket ticket = read({0});
  for (int i = 0; i < 20; ++i) {
    queue_->step(false);
    disk_.finish(i % 2 == 0 ? -EAGAIN : -EINTR);
    queue_->step(false);
  }
  EXPECT_FALSE(ticket.done());
  drain();
  EXPECT_NO_THROW(ticket.wait());
  Ticket never = read({0});
  for (int i = 0; i < 1000 && !queue_->idle(); ++i) {
    queue_->step(false);
    if (!disk_.running.empty()) disk_.finish(-EAGAIN);
  }
  expect_error(ErrorCode::io, "Resource temporarily unavailable", [&] { never.wait(); });
}

TEST_F(DiskQueueTest, ProgressGivesItNewAttempts) {
  know(0, 3);
  Ticket ticket = add(DiskAction::read, DiskPriority::urgent, {0}, 3);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 200; ++i) {
      queue_->step(false);
      disk_.finish(-EAGAIN);
      queue_->step(false);
    }
    queue_->step(false);
    disk_.finish(kSectorBytes);
    queue_->step(false);
  }
  EXPECT_TRUE(ticket.failures().empty());
}

TEST_F(DiskQueueTest, ReportsErrorsOfTheRequestsThatHadThem) {
  know(0, 8);
  Ticket ticket = read({0, 1, 2});
  queue_->step(false);
  ASSERT_EQ(disk_.running.size(), 1u);
  disk_.finish(-EIO);
  queue_->step(false);
  queue_->step(false);
  ASSERT_EQ(disk_.running.size(), 3u) << "each by itself";
  disk_.finish(kSectorBytes);
  disk_.finish(-EIO);
  disk_.finish(kSectorBytes);
  queue_->step(false);
  const std::vector<DiskFailure> failures = ticket.failures();
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0].request, 1u);
  expect_error(ErrorCode::io, "at byte 4096 of the spill file failed: Input/output error",
               [&] { ticket.wait(); });
  EXPECT_EQ(queue_->counts().failures, 1u);
}

TEST_F(DiskQueueTest, ADiskThatMovesMoreThanAskedForIsAnError) {
  Ticket ticket = read({0});
  queue_->step(false);
  disk_.finish(2 * kSectorBytes);
  queue_->step(false);
  expect_error(ErrorCode::io, "Protocol error", [&] { ticket.wait(); });
}

TEST_F(DiskQueueTest, CorruptSectorsAreNamed) {
  know(0, 8);
  Ticket ticket = add(DiskAction::read, DiskPriority::urgent, {2}, 4);
  queue_->step(false);
  memory_.span()[4 * kSectorBytes + 17] = std::byte{1};
  disk_.finish(4 * kSectorBytes);
  queue_->step(false);
  expect_error(ErrorCode::corrupt, "dir: the sector at byte 16384 of the spill file",
               [&] { ticket.wait(); });
}

TEST_F(DiskQueueTest, UrgentReadsGoFirst) {
  know(0, kSectors);
  make({.depth = 4, .bytes_in_flight = 2 * kMaxOperationBytes});
  std::vector<std::size_t> apart;
  for (std::size_t i = 0; i < 40; ++i) apart.push_back(1000 + 2 * i);
  Ticket late = add(DiskAction::read, DiskPriority::background, apart);
  queue_->step(false);
  EXPECT_EQ(disk_.running.size(), 2u) << "half of the depth is kept for urgent requests";
  Ticket urgent = read({10, 20, 30, 40});
  queue_->step(false);
  ASSERT_EQ(disk_.log.size(), 4u);
  EXPECT_EQ(disk_.log[2].offset, 10 * kSectorBytes);
  EXPECT_EQ(disk_.log[3].offset, 20 * kSectorBytes);
  disk_.finish_all();
  queue_->step(false);
  queue_->step(false);
  EXPECT_EQ(disk_.log[4].offset, 30 * kSectorBytes);
  EXPECT_EQ(disk_.log[5].offset, 40 * kSectorBytes);
  drain();
  EXPECT_TRUE(late.done());
}

TEST_F(DiskQueueTest, TheBackgroundIsNotStarved) {
  know(0, kSectors);
  make({.depth = 2, .bytes_in_flight = 2 * kMaxOperationBytes});
  Ticket late = add(DiskAction::write, DiskPriority::background, {4000});
  std::vector<Ticket> urgent;
  std::size_t rounds = 0;
  while (!late.done() && rounds < 1000) {
    urgent.push_back(read({2 * (rounds % 100)}));
    urgent.push_back(read({2 * (rounds % 100) + 500}));
    ++rounds;
    queue_->step(false);
    disk_.finish_all();
  }
  EXPECT_LT(rounds, 100u);
  drain();
}

TEST_F(DiskQueueTest, BytesInFlightAreCapped) {
  know(0, kSectors);
  const DiskLimits limits = {.depth = 256, .bytes_in_flight = 2 * kMaxOperationBytes};
  make(limits);
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < 100; ++i) places.push_back(40 * i);
  Ticket ticket = add(DiskAction::read, DiskPriority::urgent, places, 32);
  while (!queue_->idle()) {
    queue_->step(false);
    std::size_t bytes = 0;
    for (const auto& operation : disk_.running) bytes += operation.bytes();
    ASSERT_LE(bytes, limits.bytes_in_flight);
    ASSERT_EQ(disk_.running.size(), std::min<std::size_t>(4, disk_.running.size()));
    if (!disk_.running.empty()) disk_.finish(static_cast<std::int64_t>(32 * kSectorBytes));
  }
  EXPECT_NO_THROW(ticket.wait());
}

TEST_F(DiskQueueTest, ADiskWithoutRoomGetsItLater) {
  know(0, 100);
  disk_.room = 1;
  Ticket ticket = read({0, 2, 4, 6, 8});
  for (int i = 0; i < 20 && !queue_->idle(); ++i) {
    queue_->step(false);
    ASSERT_LE(disk_.running.size(), 1u);
    disk_.finish_all();
  }
  EXPECT_NO_THROW(ticket.wait());
  EXPECT_EQ(disk_.log.size(), 5u);
}

TEST_F(DiskQueueTest, AbandonsEverything) {
  disk_.room = 1;
  Ticket ticket = read({0, 2, 4});
  queue_->step(false);
  queue_->abandon(Error(ErrorCode::io, "gone"));
  EXPECT_TRUE(queue_->idle());
  EXPECT_EQ(ticket.failures().size(), 3u);
  expect_error(ErrorCode::io, "gone", [&] { ticket.wait(); });
}

}  // namespace
}  // namespace sluice
