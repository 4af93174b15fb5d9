// One checksum per sector of a store, kept in memory: the disk cannot change both a sector and its
// sum. XXH3-64 (https://github.com/Cyan4973/xxHash), seeded with the store's number, the sector's
// place and the generation of its region, so that a sector of another store, another place or an
// earlier tenant of the region does not pass. An earlier version of a sector does not pass because
// the sum in memory is that of the latest write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "io/disk.h"

namespace sluice {

// What sectors that were read are held to. Several threads may ask at the same time.
class SectorCheck {
 public:
  SectorCheck() = default;
  SectorCheck(const SectorCheck&) = delete;
  SectorCheck& operator=(const SectorCheck&) = delete;
  virtual ~SectorCheck() = default;

  // Returns the first sector, from number `first` on, that has other bytes than it should; none if
  // all are right.
  virtual std::optional<std::uint64_t> find_mismatch(std::uint64_t first,
                                                     std::span<const std::byte> sectors) const = 0;
};

// Sums of a file that was written before, kept with it. Seeded with the file's number and the
// sector's place.
class SavedSums : public SectorCheck {
 public:
  SavedSums(std::uint64_t file, std::vector<std::uint64_t> sums)
      : file_(file), sums_(std::move(sums)) {}

  static std::uint64_t sum(std::uint64_t file, std::uint64_t sector,
                           std::span<const std::byte, kSectorBytes> bytes);
  std::optional<std::uint64_t> find_mismatch(std::uint64_t first,
                                             std::span<const std::byte> sectors) const override;
  std::uint64_t sectors() const { return sums_.size(); }

 private:
  std::uint64_t file_;
  std::vector<std::uint64_t> sums_;
};

// Several threads may use different sectors at the same time. Two that use the same sector get a
// mismatch at worst.
class SectorSums : public SectorCheck {
 public:
  // `regions` and `sectors_per_region` are at least 1. Throws Error{memory} if the process may not
  // have memory_bytes().
  SectorSums(std::uint64_t regions, std::uint64_t sectors_per_region, std::uint64_t store);

  // Bytes of the sums once every sector has been written.
  static std::uint64_t memory_bytes(std::uint64_t regions, std::uint64_t sectors_per_region);

  // Notes the bytes of whole sectors from `first` on as the latest.
  void set(std::uint64_t first, std::span<const std::byte> sectors);

  // Returns the first sector whose bytes are not the latest; none if all are. A sector that was
  // never written, or not since its region was forgotten, matches nothing.
  std::optional<std::uint64_t> find_mismatch(std::uint64_t first,
                                             std::span<const std::byte> sectors) const override;

  // The checksum of 4096 bytes as that sector of this store, never 0.
  std::uint64_t sum(std::uint64_t sector, std::span<const std::byte, kSectorBytes> bytes) const;

  // Starts a new generation of the region: all that was written to it becomes unreadable.
  void forget(std::uint64_t region);

 private:
  struct Free {
    void operator()(std::uint64_t* sums) const { std::free(sums); }
  };

  std::uint64_t sectors_;
  std::uint64_t sectors_per_region_;
  std::uint64_t store_;
  // [sectors_], 0 until written. Zero pages of calloc() cost nothing until then.
  std::unique_ptr<std::uint64_t, Free> sums_;
  std::vector<std::uint32_t> generations_;  // [regions]
};

}  // namespace sluice
