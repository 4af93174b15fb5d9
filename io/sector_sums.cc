#include "io/sector_sums.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <atomic>
#include <string>

#include "lib/check.h"
#include "lib/process_limits.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): neighbouring numbers become unrelated.
constexpr std::uint64_t mix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

std::span<const std::byte, kSectorBytes> nth(std::span<const std::byte> sectors, std::size_t i) {
  return sectors.subspan(i * kSectorBytes).first<kSectorBytes>();
}

}  // namespace

std::uint64_t SavedSums::sum(std::uint64_t file, std::uint64_t sector,
                             std::span<const std::byte, kSectorBytes> bytes) {
  return XXH3_64bits_withSeed(bytes.data(), kSectorBytes, mix(mix(file) ^ sector));
}

std::optional<std::uint64_t> SavedSums::find_mismatch(std::uint64_t first,
                                                      std::span<const std::byte> sectors) const {
  const std::uint64_t count = sectors.size() / kSectorBytes;
  check(first + count <= sums_.size(), "saved sums: outside the file");
  for (std::uint64_t i = 0; i < count; ++i) {
    if (sums_[first + i] != sum(file_, first + i, nth(sectors, i))) return first + i;
  }
  return std::nullopt;
}

SectorSums::SectorSums(std::uint64_t regions, std::uint64_t sectors_per_region, std::uint64_t store)
    : sectors_(regions * sectors_per_region),
      sectors_per_region_(sectors_per_region),
      store_(store) {
  require_memory(memory_bytes(regions, sectors_per_region), Counted::all,
                 "the checksums of spilled rows need", "spill less to disk");
  sums_.reset(static_cast<std::uint64_t*>(std::calloc(sectors_, sizeof(std::uint64_t))));
  if (!sums_) throw Error(ErrorCode::memory, "no memory for the checksums of spilled rows");
  generations_.resize(regions);
}

std::uint64_t SectorSums::memory_bytes(std::uint64_t regions, std::uint64_t sectors_per_region) {
  return regions * sectors_per_region * sizeof(std::uint64_t) + regions * sizeof(std::uint32_t);
}

std::uint64_t SectorSums::sum(std::uint64_t sector,
                              std::span<const std::byte, kSectorBytes> bytes) const {
  // atomic_ref of a const object comes with C++26.
  auto& generation = const_cast<std::uint32_t&>(generations_[sector / sectors_per_region_]);
  const std::uint64_t tenant =
      std::atomic_ref<std::uint32_t>(generation).load(std::memory_order_relaxed);
  const std::uint64_t seed = mix(mix(mix(store_) ^ sector) ^ tenant);
  const std::uint64_t value = XXH3_64bits_withSeed(bytes.data(), kSectorBytes, seed);
  return value != 0 ? value : 1;  // 0 says "never written"
}

void SectorSums::set(std::uint64_t first, std::span<const std::byte> sectors) {
  const std::uint64_t count = sectors.size() / kSectorBytes;
  check(first + count <= sectors_, "sector sums: outside the store");
  for (std::uint64_t i = 0; i < count; ++i) {
    std::atomic_ref<std::uint64_t>(sums_.get()[first + i])
        .store(sum(first + i, nth(sectors, i)), std::memory_order_relaxed);
  }
}

std::optional<std::uint64_t> SectorSums::find_mismatch(std::uint64_t first,
                                                       std::span<const std::byte> sectors) const {
  const std::uint64_t count = sectors.size() / kSectorBytes;
  check(first + count <= sectors_, "sector sums: outside the store");
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t expected =
        std::atomic_ref<std::uint64_t>(sums_.get()[first + i]).load(std::memory_order_relaxed);
    if (expected != sum(first + i, nth(sectors, i))) return first + i;
  }
  return std::nullopt;
}

void SectorSums::forget(std::uint64_t region) {
  check(region < generations_.size(), "sector sums: outside the store");
  std::atomic_ref<std::uint32_t>(generations_[region]).fetch_add(1, std::memory_order_relaxed);
}

}  // namespace sluice
