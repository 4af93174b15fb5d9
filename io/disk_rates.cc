#include "io/disk_rates.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <random>

#include "io/sector_buffer.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPageBytes = 64 << 10;
constexpr std::size_t kMostBatches = 16;
constexpr std::size_t kDepth = 128;
constexpr double kSeconds = 0.5;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

double fill_store(PageStore& store, std::uint64_t bytes, std::span<std::byte> memory) {
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i < memory.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::copy_n(reinterpret_cast<const std::byte*>(&word), sizeof(word), &memory[i]);
  }
  std::deque<DiskTicket> tickets;
  const auto start = Clock::now();
  for (std::uint64_t address = 0; address < bytes; address += kFillBytes) {
    tickets.push_back(store.write(std::vector<PageWrite>{{address, memory.first(kFillBytes)}}));
    if (tickets.size() < 2) continue;
    tickets.front().wait();
    tickets.pop_front();
  }
  for (const DiskTicket& ticket : tickets) ticket.wait();
  store.flush().wait();
  return seconds_since(start);
}

RandomReads read_at_random(PageStore& store, std::uint64_t bytes, std::size_t size,
                           std::size_t depth, double seconds, std::span<std::byte> memory) {
  std::mt19937_64 random(2);
  const std::size_t batches = std::min(depth, kMostBatches);
  const std::uint64_t places = bytes / size;
  const std::size_t slots = memory.size() / size;
  std::size_t slot = 0;
  std::deque<DiskTicket> tickets;
  std::vector<PageRead> reads(depth / batches);
  RandomReads done;
  const auto start = Clock::now();
  while ((done.seconds = seconds_since(start)) < seconds) {
    for (PageRead& read : reads) {
      read = {random() % places * size, memory.subspan(slot++ % slots * size, size)};
    }
    if (tickets.size() == batches) {
      tickets.front().wait();
      tickets.pop_front();
      done.count += static_cast<double>(reads.size());
    }
    tickets.push_back(store.read(reads, DiskPriority::urgent));
  }
  for (const DiskTicket& ticket : tickets) ticket.wait();
  return done;
}

DiskRates measure_disk(const std::filesystem::path& directory, std::uint64_t bytes) {
  DiskRates rates;
  rates.bytes = std::max<std::uint64_t>((bytes + kFillBytes - 1) / kFillBytes, 1) * kFillBytes;
  SectorBuffer memory(kFillBytes);
  PageStoreConfig config;
  config.directories = {directory};
  config.regions = rates.bytes / kFillBytes;
  config.region_bytes = kFillBytes;
  config.limits.bytes_in_flight = 32 << 20;
  config.arenas = {memory.span()};
  PageStore store(config);
  rates.descriptions = store.descriptions();
  rates.written = static_cast<double>(rates.bytes) / fill_store(store, rates.bytes, memory.span());
  const auto per_second = [&](std::size_t size) {
    const RandomReads reads =
        read_at_random(store, rates.bytes, size, kDepth, kSeconds, memory.span());
    return reads.count / reads.seconds;
  };
  rates.pages = per_second(kPageBytes) * static_cast<double>(kPageBytes);
  rates.sectors = per_second(kSectorBytes);
  return rates;
}

}  // namespace sluice
