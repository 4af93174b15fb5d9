#include "io/disk_rates.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <random>
#include <span>

#include "io/page_store.h"
#include "io/sector_buffer.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kRegionBytes = 16 << 20;
constexpr std::size_t kPageBytes = 64 << 10;
constexpr std::size_t kBatches = 8;  // in flight
constexpr std::size_t kInBatch = 16;
constexpr double kSeconds = 0.5;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Bytes per second.
double write_all(PageStore& store, std::uint64_t bytes, std::span<std::byte> memory) {
  std::deque<DiskTicket> tickets;
  const auto start = Clock::now();
  for (std::uint64_t address = 0; address < bytes; address += kRegionBytes) {
    tickets.push_back(store.write(std::vector<PageWrite>{{address, memory}}));
    if (tickets.size() < 2) continue;
    tickets.front().wait();
    tickets.pop_front();
  }
  for (const DiskTicket& ticket : tickets) ticket.wait();
  store.flush().wait();
  return static_cast<double>(bytes) / seconds_since(start);
}

// Reads per second.
double read_some(PageStore& store, std::uint64_t bytes, std::size_t size,
                 std::span<std::byte> memory) {
  std::mt19937_64 random(1);
  const std::uint64_t places = bytes / size;
  std::deque<DiskTicket> tickets;
  std::vector<PageRead> reads(kInBatch);
  std::size_t slot = 0;
  double done = 0.0;
  const auto start = Clock::now();
  while (seconds_since(start) < kSeconds) {
    for (PageRead& read : reads) {
      read = {random() % places * size,
              memory.subspan(slot++ % (memory.size() / size) * size, size)};
    }
    tickets.push_back(store.read(reads, DiskPriority::urgent));
    if (tickets.size() < kBatches) continue;
    tickets.front().wait();
    tickets.pop_front();
    done += static_cast<double>(kInBatch);
  }
  const double seconds = seconds_since(start);
  for (const DiskTicket& ticket : tickets) ticket.wait();
  return done / seconds;
}

}  // namespace

DiskRates measure_disk(const std::filesystem::path& directory, std::uint64_t bytes) {
  DiskRates rates;
  rates.bytes =
      std::max<std::uint64_t>((bytes + kRegionBytes - 1) / kRegionBytes, 1) * kRegionBytes;
  SectorBuffer memory(kRegionBytes);
  // Numbers that no disk compresses.
  std::mt19937_64 random(2);
  const std::span<std::byte> all = memory.span();
  for (std::size_t i = 0; i < all.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::copy_n(reinterpret_cast<const std::byte*>(&word), sizeof(word), &all[i]);
  }
  PageStoreConfig config;
  config.directories = {directory};
  config.regions = rates.bytes / kRegionBytes;
  config.region_bytes = kRegionBytes;
  config.limits.bytes_in_flight = 32 << 20;
  config.arenas = {all};
  PageStore store(config);
  rates.descriptions = store.descriptions();
  rates.written = write_all(store, rates.bytes, all);
  rates.pages = read_some(store, rates.bytes, kPageBytes, all) * static_cast<double>(kPageBytes);
  rates.sectors = read_some(store, rates.bytes, kSectorBytes, all);
  return rates;
}

}  // namespace sluice
