// Rates of a disk as a page store uses it: past the page cache where the directory allows it, every
// sector verified.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "io/page_store.h"

namespace sluice {

struct DiskRates {
  std::vector<std::string> descriptions;  // how the directory is read, and why not better
  std::uint64_t bytes = 0;                // written, and read at random
  double written = 0.0;                   // bytes per second, with what makes them durable
  double pages = 0.0;                     // bytes per second, in reads of 64 KiB
  double sectors = 0.0;                   // reads of 4 KiB per second
};

inline constexpr std::uint64_t kFillBytes = 16 << 20;

// Fills `memory`, at least kFillBytes, with numbers that no disk compresses, and the first `bytes`
// of a store, a multiple of kFillBytes, with the first of them. Returns the seconds that the store
// took, with what makes the bytes durable.
double fill_store(PageStore& store, std::uint64_t bytes, std::span<std::byte> memory);

struct RandomReads {
  double count = 0.0;
  double seconds = 0.0;
};
// Reads `size` bytes at a time from the first `bytes` of a store for `seconds`, in random order, to
// `memory`. About `depth` reads are in flight, in up to 16 batches, because a cache asks for many
// rows at a time. `memory` holds at least as many.
RandomReads read_at_random(PageStore& store, std::uint64_t bytes, std::size_t size,
                           std::size_t depth, double seconds, std::span<std::byte> memory);

// Writes an unnamed file of `bytes`, rounded up to 16 MiB, to a directory, and reads it in random
// order, half a second for each size, with 128 reads in flight. Throws what PageStore throws.
DiskRates measure_disk(const std::filesystem::path& directory, std::uint64_t bytes);

}  // namespace sluice
