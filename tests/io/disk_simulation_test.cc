// Random requests to a disk that fails in every way, held to a plain copy in memory: every read
// gives the latest bytes or a typed error, errors only where the disk did something wrong, and all
// of it ends. SLUICE_DISK_SIMULATIONS=N runs N seeds, from SLUICE_SEED on. It also
// damages sectors, and every one has to be found; SLUICE_DAMAGED_SECTORS=N reads N of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/disk_queue.h"
#include "io/sector_buffer.h"
#include "tests/support/random.h"
#include "tests/support/simulated_disk.h"

namespace sluice {
namespace {

using testing::DiskFault;
using testing::Random;
using testing::SimulatedDisk;

constexpr std::size_t kRegions = 4;
constexpr std::size_t kSectorsPerRegion = 16;
constexpr std::size_t kSectors = kRegions * kSectorsPerRegion;
constexpr std::size_t kBatches = 120;
constexpr int kMaxSteps = 1'000'000;  // more are a hang

struct Totals {
  std::array<std::uint64_t, testing::kDiskFaults> faults{};
  std::uint64_t reads = 0;    // requests
  std::uint64_t corrupt = 0;  // of these, of sectors that were written
  std::uint64_t failed = 0;   // of these, and writes
};

class Simulation {
 public:
  Simulation(std::uint64_t seed, double rate, Totals& totals)
      : random_(seed),
        disk_(kSectors, seed + 1, rate),
        queue_(disk_, sums_, "simulated", limits()),
        totals_(totals) {}

  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;
  // After a failure tickets must not wait for a queue that nobody steps any more.
  ~Simulation() { queue_.abandon(Error(ErrorCode::io, "simulated: the test failed")); }

  void run() {
    for (std::size_t i = 0; i < kBatches && !::testing::Test::HasFailure(); ++i) {
      begin();
      for (std::int64_t steps = random_.integer(0, 6); steps > 0; --steps) step();
    }
    while (!queue_.idle() && !::testing::Test::HasFailure()) step();
    finish();
    EXPECT_TRUE(running_.empty()) << "a batch that nobody finished";
    EXPECT_EQ(queue_.bytes_in_flight(), 0u);
    for (std::size_t i = 0; i < testing::kDiskFaults; ++i) totals_.faults[i] += disk_.faults()[i];
  }

 private:
  struct Request {
    DiskAction action;
    std::size_t sector;
    std::size_t count;
    std::unique_ptr<SectorBuffer> memory;
  };
  struct Batch {
    std::vector<Request> requests;
    DiskTicket ticket;
  };

  DiskLimits limits() {
    return {.depth = static_cast<std::size_t>(random_.integer(2, 12)),
            .bytes_in_flight = 2 * kMaxOperationBytes};
  }

  void begin() {
    if (random_.integer(0, 40) == 0) forget();
    const bool writes = random_.integer(0, 1) == 0;
    const auto priority =
        random_.integer(0, 1) == 0 ? DiskPriority::urgent : DiskPriority::background;
    std::vector<Request> requests;
    auto sector = static_cast<std::size_t>(random_.integer(0, 8));
    while (sector < kSectors && requests.size() < 12) {
      const auto count =
          std::min<std::size_t>(static_cast<std::size_t>(random_.integer(1, 6)), kSectors - sector);
      if (is_free(sector, count)) requests.push_back(make(writes, sector, count));
      // Often neighbours, so that they are merged.
      sector +=
          count + static_cast<std::size_t>(random_.integer(0, 2) == 0 ? random_.integer(0, 9) : 0);
    }
    submit(std::move(requests), priority);
  }

  // No two requests for a sector at a time, as a cache above promises.
  bool is_free(std::size_t sector, std::size_t count) const {
    return std::none_of(&busy_[sector], &busy_[sector] + count, [](bool busy) { return busy; });
  }

  Request make(bool writes, std::size_t sector, std::size_t count) {
    Request request = {writes ? DiskAction::write : DiskAction::read, sector, count,
                       std::make_unique<SectorBuffer>(count * kSectorBytes)};
    for (std::size_t i = sector; i < sector + count; ++i) {
      busy_[i] = true;
      disk_.clear_suspicion(i);
    }
    if (!writes) return request;
    for (std::size_t i = 0; i < count; ++i) {
      // A few contents come again, as zeros do, so that stale and swapped sectors may be right.
      const auto value = static_cast<std::byte>(random_.integer(0, 255));
      const auto bytes = request.memory->sectors(i, 1);
      std::fill(bytes.begin(), bytes.end(), random_.integer(0, 3) == 0 ? std::byte{0} : value);
      if (random_.integer(0, 1) == 0)
        bytes[static_cast<std::size_t>(random_.integer(0, 4095))] = value;
      written_[sector + i] = true;
    }
    std::ranges::copy(request.memory->span(), model_.sectors(sector, count).begin());
    sums_.set(sector, request.memory->span());
    return request;
  }

  void submit(std::vector<Request> requests, DiskPriority priority) {
    auto batch = std::make_shared<DiskBatch>(requests.size());
    for (std::size_t place = 0; place < requests.size(); ++place) {
      DiskRequest request;
      request.action = requests[place].action;
      request.priority = priority;
      request.offset = requests[place].sector * kSectorBytes;
      request.sector = requests[place].sector;
      request.data = requests[place].memory->span().data();
      request.bytes = requests[place].count * kSectorBytes;
      request.batch = batch;
      request.place = place;
      queue_.add(std::move(request));
    }
    running_.push_back({std::move(requests), DiskTicket(std::move(batch))});
  }

  // Only where nothing is under way.
  void forget() {
    const auto region = static_cast<std::size_t>(random_.integer(0, kRegions - 1));
    if (!is_free(region * kSectorsPerRegion, kSectorsPerRegion)) return;
    sums_.forget(region);
    for (std::size_t i = 0; i < kSectorsPerRegion; ++i)
      written_[region * kSectorsPerRegion + i] = false;
  }

  void step() {
    ASSERT_LT(++steps_, kMaxSteps) << "hangs";
    queue_.step(false);
    ASSERT_LE(queue_.bytes_in_flight(), 2 * kMaxOperationBytes);
    finish();
  }

  void finish() {
    std::erase_if(running_, [&](const Batch& batch) {
      if (!batch.ticket.done()) return false;
      const std::vector<DiskFailure> failures = batch.ticket.failures();
      std::size_t next = 0;
      for (std::size_t place = 0; place < batch.requests.size(); ++place) {
        const bool failed = next < failures.size() && failures[next].request == place;
        check(batch.requests[place], failed ? &failures[next++].error : nullptr);
      }
      EXPECT_EQ(next, failures.size());
      return true;
    });
  }

  void check(const Request& request, const Error* error) {
    const bool reads = request.action == DiskAction::read;
    bool may_fail = false;
    bool was_written = true;
    for (std::size_t i = request.sector; i < request.sector + request.count; ++i) {
      busy_[i] = false;
      may_fail |= disk_.suspect(i);
      was_written &= written_[i];
    }
    totals_.reads += reads ? 1 : 0;
    if (error == nullptr) {
      if (!reads) return;
      EXPECT_TRUE(was_written) << "sector " << request.sector << " came from nowhere";
      const std::span<const std::byte> bytes = request.memory->span();
      EXPECT_EQ(std::memcmp(bytes.data(), model_.sectors(request.sector, request.count).data(),
                            bytes.size()),
                0)
          << "wrong bytes at sector " << request.sector;
      return;
    }
    ++totals_.failed;
    EXPECT_TRUE(may_fail || (reads && !was_written)) << "for no reason: " << error->what();
    EXPECT_NE(std::string(error->what()).find("simulated: "), std::string::npos);
    if (error->code() == ErrorCode::corrupt) {
      EXPECT_TRUE(reads);
      totals_.corrupt += was_written ? 1 : 0;
    } else {
      EXPECT_EQ(error->code(), ErrorCode::io);
    }
  }

  Random random_;
  SectorBuffer model_{kSectors * kSectorBytes};
  std::array<bool, kSectors> written_{};
  std::array<bool, kSectors> busy_{};
  SectorSums sums_{kRegions, kSectorsPerRegion, 5};
  SimulatedDisk disk_;
  DiskQueue queue_;
  std::vector<Batch> running_;
  int steps_ = 0;
  Totals& totals_;
};

std::uint64_t number_from(const char* name, std::uint64_t otherwise) {
  const char* const asked = std::getenv(name);
  return asked != nullptr ? std::strtoull(asked, nullptr, 10) : otherwise;
}

TEST(DiskSimulation, EveryReadIsRightOrATypedError) {
  Totals totals;
  const std::uint64_t first = testing::seed(0);
  const std::uint64_t count = number_from("SLUICE_DISK_SIMULATIONS", 200);
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE(testing::seed_message(seed) + " SLUICE_DISK_SIMULATIONS=1");
    // Every fourth seed has no faults, and then nothing may fail.
    constexpr std::array kRates = {0.0, 0.5, 2.0, 4.0};
    Simulation(seed, kRates[seed % kRates.size()], totals).run();
    if (HasFailure()) return;
  }
  std::uint64_t faults = 0;
  for (std::size_t i = 0; i < testing::kDiskFaults; ++i) {
    std::cout << testing::kDiskFaultNames[i] << " " << totals.faults[i] << ", ";
    faults += totals.faults[i];
    if (count >= 100) {
      EXPECT_GT(totals.faults[i], 0u) << testing::kDiskFaultNames[i];
    }
  }
  std::cout << "together " << faults << " faults in " << count << " seeds; " << totals.reads
            << " reads, " << totals.corrupt << " corrupt; " << totals.failed << " errors\n";
}

// A disk that says that all went well and gives back no sector as it was last written, once it is
// told to.
class DamagingDisk : public Disk {
 public:
  static constexpr std::array kKinds = {"flipped", "swapped", "stale"};

  DamagingDisk(std::size_t sectors, std::uint64_t seed)
      : random_(seed),
        sectors_(sectors),
        bytes_(sectors * kSectorBytes),
        earlier_(sectors * kSectorBytes) {}

  bool start(const DiskOperation& operation) override {
    started_.push_back(operation);
    return true;
  }

  std::size_t retire(std::span<DiskResult> results, bool) override {
    std::size_t count = 0;
    while (count < results.size() && !started_.empty()) {
      const DiskOperation& operation = started_.back();
      const iovec& buffer = operation.buffers.front();
      std::byte* const data = static_cast<std::byte*>(buffer.iov_base);
      for (std::size_t at = 0; at < buffer.iov_len; at += kSectorBytes) {
        const std::size_t sector = (operation.offset + at) / kSectorBytes;
        operation.action == DiskAction::write ? put(sector, data + at) : get(sector, data + at);
      }
      results[count++] = {operation.tag, static_cast<std::int64_t>(buffer.iov_len)};
      started_.pop_back();
    }
    return count;
  }

  void wake() override {}

  bool damages = false;
  std::array<std::uint64_t, kKinds.size()> damaged{};

 private:
  void put(std::size_t sector, const std::byte* data) {
    std::memcpy(earlier(sector), now(sector), kSectorBytes);
    std::memcpy(now(sector), data, kSectorBytes);
  }

  void get(std::size_t sector, std::byte* data) {
    if (!damages) return static_cast<void>(std::memcpy(data, now(sector), kSectorBytes));
    const std::uint64_t draw = random_.engine()();
    const std::size_t kind = draw % kKinds.size();
    const std::size_t other = (sector + 1 + (draw >> 8) % (sectors_ - 1)) % sectors_;
    std::memcpy(data,
                kind == 0   ? now(sector)
                : kind == 1 ? now(other)
                            : earlier(sector),
                kSectorBytes);
    const std::uint64_t bit = (draw >> 32) % (8 * kSectorBytes);
    if (kind == 0) data[bit / 8] ^= std::byte{1} << static_cast<int>(bit % 8);
    ++damaged[kind];
  }

  std::byte* now(std::size_t sector) { return &bytes_[sector * kSectorBytes]; }
  std::byte* earlier(std::size_t sector) { return &earlier_[sector * kSectorBytes]; }

  Random random_;
  std::size_t sectors_;
  std::vector<std::byte> bytes_;
  std::vector<std::byte> earlier_;  // every sector as it was before its last write
  std::vector<DiskOperation> started_;
};

// A queue over it, and what was written.
class DamagedReads {
 public:
  explicit DamagedReads(std::uint64_t seed)
      : random_(seed), disk_(kSectors, seed + 1), queue_(disk_, sums_, "simulated", {}) {}

  // New bytes in every sector, different in each.
  void write() {
    for (std::size_t i = 0; i < memory_.span().size(); i += sizeof(std::uint64_t)) {
      const std::uint64_t word = random_.engine()();
      std::memcpy(&memory_.span()[i], &word, sizeof word);
    }
    sums_.set(0, memory_.span());
    EXPECT_TRUE(run(DiskAction::write, 0, 1).empty());
  }

  // Reads every second sector, so that none are merged; returns how many were found damaged.
  std::uint64_t read(std::size_t first) {
    std::uint64_t found = 0;
    for (const DiskFailure& failure : run(DiskAction::read, first, 2)) {
      EXPECT_EQ(failure.error.code(), ErrorCode::corrupt);
      ++found;
    }
    return found;
  }

  DamagingDisk& disk() { return disk_; }

 private:
  std::vector<DiskFailure> run(DiskAction action, std::size_t first, std::size_t step) {
    const std::size_t count = (kSectors - first + step - 1) / step;
    auto batch = std::make_shared<DiskBatch>(count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t sector = first + i * step;
      DiskRequest request;
      request.action = action;
      request.alone = true;
      request.offset = sector * kSectorBytes;
      request.sector = sector;
      request.data = memory_.sectors(sector, 1).data();
      request.bytes = kSectorBytes;
      request.batch = batch;
      request.place = i;
      queue_.add(std::move(request));
    }
    while (!queue_.idle()) queue_.step(false);
    return DiskTicket(std::move(batch)).failures();
  }

  Random random_;
  SectorBuffer memory_{kSectors * kSectorBytes};
  SectorSums sums_{kRegions, kSectorsPerRegion, 5};
  DamagingDisk disk_;
  DiskQueue queue_;
};

TEST(DamagedSectors, AreFoundEveryOne) {
  const std::uint64_t seed = testing::seed(1);
  SCOPED_TRACE(testing::seed_message(seed));
  const std::uint64_t count = number_from("SLUICE_DAMAGED_SECTORS", 20'000);
  DamagedReads reads(seed);
  reads.write();
  std::uint64_t read = 0;
  std::uint64_t found = 0;
  for (std::size_t round = 0; read < count; ++round) {
    reads.disk().damages = false;
    reads.write();
    ASSERT_EQ(reads.read(round % 2), 0u) << "undamaged sectors";
    reads.disk().damages = true;
    for (int i = 0; i < 50; ++i) {
      found += reads.read(static_cast<std::size_t>(i) % 2);
      read += kSectors / 2;
    }
    ASSERT_EQ(found, read);
  }
  std::uint64_t damaged = 0;
  for (std::size_t i = 0; i < DamagingDisk::kKinds.size(); ++i) {
    std::cout << DamagingDisk::kKinds[i] << " " << reads.disk().damaged[i] << ", ";
    damaged += reads.disk().damaged[i];
    EXPECT_GT(reads.disk().damaged[i], 0u);
  }
  std::cout << "together " << damaged << " sectors from seed " << seed << " on; " << found
            << " found\n";
  EXPECT_EQ(damaged, found);
}

}  // namespace
}  // namespace sluice
