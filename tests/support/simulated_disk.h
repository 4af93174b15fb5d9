// A disk in memory that finishes operations late, in another order for every seed, and breaks in
// every way that a page store has to survive.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "io/disk.h"
#include "tests/support/random.h"

namespace sluice::testing {

enum class DiskFault : std::uint8_t {
  refused,         // no room for another operation
  stall,           // an operation takes much longer
  again,           // EAGAIN or EINTR
  short_transfer,  // fewer bytes than asked for, maybe none, maybe no whole sectors
  error,           // EIO; a write may have happened in part
  no_space,        // ENOSPC
  // From here on the disk says that all went well.
  lost,     // a write that did not happen
  torn,     // a write that happened in part
  swapped,  // sectors that change places, or a write or read of another place
  stale,    // a read of an earlier version
  flip,     // one bit, on its way or on the disk
  count
};

constexpr std::size_t kDiskFaults = static_cast<std::size_t>(DiskFault::count);

constexpr std::array<const char*, kDiskFaults> kDiskFaultNames = {
    "refused", "stall", "again",   "short", "error", "no space",
    "lost",    "torn",  "swapped", "stale", "flip"};

class SimulatedDisk : public Disk {
 public:
  // `rate`: about how many faults an operation has; every kind with a tenth of it.
  SimulatedDisk(std::size_t sectors, std::uint64_t seed, double rate)
      : random_(seed),
        rate_(rate),
        bytes_(sectors * kSectorBytes),
        earlier_(sectors * kSectorBytes),
        suspect_(sectors) {}

  bool start(const DiskOperation& operation) override {
    if (!running_.empty() && rolls(DiskFault::refused)) return false;
    running_.push_back({operation, {operation.buffers.begin(), operation.buffers.end()}, 0});
    if (rolls(DiskFault::stall)) running_.back().rounds = random_.integer(1, 200);
    return true;
  }

  std::size_t retire(std::span<DiskResult> results, bool wait) override {
    if (wait && running_.empty()) sleep();
    for (Running& one : running_) one.rounds -= one.rounds > 0 ? 1 : 0;
    std::size_t count = 0;
    std::int64_t tries = random_.integer(0, 4);
    while (tries-- > 0 && count < results.size() && !running_.empty()) {
      const auto i = static_cast<std::size_t>(
          random_.integer(0, static_cast<std::int64_t>(running_.size()) - 1));
      if (running_[i].rounds > 0) continue;
      std::swap(running_[i], running_.back());
      const Running one = std::move(running_.back());
      running_.pop_back();
      results[count++] = {one.operation.tag, execute(one)};
    }
    return count;
  }

  void wake() override {
    const std::lock_guard lock(mutex_);
    is_woken_ = true;
    woken_.notify_one();
  }

  // A fault has touched this sector on the disk since it was last written without one, or a request
  // for it since clear_suspicion().
  bool suspect(std::size_t sector) const { return suspect_[sector] != 0; }
  void clear_suspicion(std::size_t sector) { suspect_[sector] &= kOnDisk; }

  const std::array<std::uint64_t, kDiskFaults>& faults() const { return faults_; }

 private:
  void sleep() {
    std::unique_lock lock(mutex_);
    woken_.wait(lock, [&] { return is_woken_; });
    is_woken_ = false;
  }

  static constexpr std::uint8_t kOnDisk = 1;
  static constexpr std::uint8_t kOnTheWay = 2;

  struct Running {
    DiskOperation operation;
    std::vector<iovec> buffers;
    std::int64_t rounds;  // until it may finish
  };

  bool rolls(DiskFault fault) {
    constexpr double kShare = 0.1;
    if (std::uniform_real_distribution<double>()(random_.engine()) >= rate_ * kShare) return false;
    ++faults_[static_cast<std::size_t>(fault)];
    return true;
  }

  std::size_t number(std::size_t below) {
    return static_cast<std::size_t>(random_.integer(0, static_cast<std::int64_t>(below) - 1));
  }

  static std::vector<std::byte> gather(const Running& one) {
    std::vector<std::byte> bytes;
    for (const iovec& buffer : one.buffers) {
      const auto* const data = static_cast<const std::byte*>(buffer.iov_base);
      bytes.insert(bytes.end(), data, data + buffer.iov_len);
    }
    return bytes;
  }

  static void scatter(const Running& one, std::span<const std::byte> bytes) {
    for (const iovec& buffer : one.buffers) {
      const std::size_t part = std::min(buffer.iov_len, bytes.size());
      std::copy_n(bytes.begin(), part, static_cast<std::byte*>(buffer.iov_base));
      bytes = bytes.subspan(part);
    }
  }

  void suspect(std::uint64_t offset, std::size_t bytes, std::uint8_t what) {
    const std::uint64_t end = (offset + bytes + kSectorBytes - 1) / kSectorBytes;
    for (std::uint64_t s = offset / kSectorBytes; s < end; ++s) suspect_[s] |= what;
  }

  // Stores bytes; whole sectors keep their earlier version.
  void put(std::uint64_t offset, std::span<const std::byte> bytes) {
    for (std::size_t done = 0; done < bytes.size(); done += kSectorBytes) {
      const std::size_t part = std::min(kSectorBytes, bytes.size() - done);
      const std::uint64_t sector = (offset + done) / kSectorBytes * kSectorBytes;
      std::copy_n(&bytes_[sector], kSectorBytes, &earlier_[sector]);
      std::copy_n(&bytes[done], part, &bytes_[offset + done]);
    }
  }

  std::int64_t execute(const Running& one) {
    if (one.operation.action == DiskAction::flush) return rolls(DiskFault::error) ? -EIO : 0;
    std::vector<std::byte> bytes = gather(one);
    if (rolls(DiskFault::again)) return number(2) == 0 ? -EAGAIN : -EINTR;
    const bool writes = one.operation.action == DiskAction::write;
    if (rolls(DiskFault::error)) return fail(one, bytes, writes);
    if (writes && rolls(DiskFault::no_space)) {
      suspect(one.operation.offset, bytes.size(), kOnDisk);
      return -ENOSPC;
    }
    if (rolls(DiskFault::short_transfer)) bytes.resize(number(bytes.size()));
    if (writes) return write(one.operation.offset, bytes);
    read(one, bytes);
    return static_cast<std::int64_t>(bytes.size());
  }

  std::int64_t fail(const Running& one, std::span<const std::byte> bytes, bool writes) {
    const std::uint64_t offset = one.operation.offset;
    suspect(offset, bytes.size(), writes ? kOnDisk : kOnTheWay);
    if (writes && number(2) == 0) put(offset, bytes.first(number(bytes.size())));
    return -EIO;
  }

  std::int64_t write(std::uint64_t offset, std::span<const std::byte> bytes) {
    const auto size = static_cast<std::int64_t>(bytes.size());
    if (bytes.empty()) return 0;
    if (rolls(DiskFault::lost)) {
      suspect(offset, bytes.size(), kOnDisk);
      return size;
    }
    if (rolls(DiskFault::torn)) {
      suspect(offset, bytes.size(), kOnDisk);
      put(offset, bytes.first(number(bytes.size())));
      return size;
    }
    const std::size_t sectors = bytes.size() / kSectorBytes;
    if (sectors > 0 && rolls(DiskFault::swapped)) {
      misplace(offset, bytes, sectors);
      return size;
    }
    put(offset, bytes);
    for (std::size_t i = 0; i < sectors; ++i) {
      suspect_[offset / kSectorBytes + i] &= static_cast<std::uint8_t>(~kOnDisk);
    }
    if (rolls(DiskFault::flip)) {
      suspect(offset, bytes.size(), kOnDisk);
      flip(std::span(bytes_).subspan(offset, bytes.size()));
    }
    return size;
  }

  // Writes to another place and overwrites its sectors.
  void misplace(std::uint64_t offset, std::span<const std::byte> bytes, std::size_t sectors) {
    const std::uint64_t other = number(suspect_.size() - sectors + 1) * kSectorBytes;
    suspect(offset, bytes.size(), kOnDisk);
    suspect(other, sectors * kSectorBytes, kOnDisk);
    put(other, bytes.first(sectors * kSectorBytes));
  }

  void read(const Running& one, std::span<std::byte> bytes) {
    const std::uint64_t offset = one.operation.offset;
    std::copy_n(bytes_.begin() + static_cast<std::ptrdiff_t>(offset), bytes.size(), bytes.begin());
    const std::size_t sectors = bytes.size() / kSectorBytes;
    if (sectors > 0) {
      const std::size_t place = number(sectors);
      const std::size_t sector = offset / kSectorBytes + place;
      const auto target = bytes.subspan(place * kSectorBytes, kSectorBytes);
      const auto give = [&](const std::vector<std::byte>& from, std::size_t other) {
        suspect_[sector] |= kOnTheWay;
        std::copy_n(&from[other * kSectorBytes], kSectorBytes, target.begin());
      };
      if (rolls(DiskFault::swapped)) give(bytes_, number(suspect_.size()));
      if (rolls(DiskFault::stale)) give(earlier_, sector);
    }
    if (!bytes.empty() && rolls(DiskFault::flip)) {
      suspect(offset, bytes.size(), kOnTheWay);
      flip(bytes);
    }
    scatter(one, bytes);
  }

  void flip(std::span<std::byte> bytes) {
    bytes[number(bytes.size())] ^= std::byte{1} << static_cast<int>(number(8));
  }

  Random random_;
  double rate_;
  std::vector<std::byte> bytes_;
  std::vector<std::byte> earlier_;     // every sector as it was before its last write
  std::vector<std::uint8_t> suspect_;  // [sectors]
  std::vector<Running> running_;
  std::array<std::uint64_t, kDiskFaults> faults_{};
  std::mutex mutex_;
  std::condition_variable woken_;
  bool is_woken_ = false;
};

}  // namespace sluice::testing
