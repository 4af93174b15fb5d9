// Rates of a disk as a page store uses it: past the page cache where the directory allows it, every
// sector verified.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace sluice {

struct DiskRates {
  std::vector<std::string> descriptions;  // how the directory is read, and why not better
  std::uint64_t bytes = 0;                // written, and read at random
  double written = 0.0;                   // bytes per second, with what makes them durable
  double pages = 0.0;                     // bytes per second, in reads of 64 KiB
  double sectors = 0.0;                   // reads of 4 KiB per second
};

// Writes an unnamed file of `bytes`, rounded up to 16 MiB, to a directory, and reads it in random
// order, half a second for each size, with 128 reads in flight. Throws what PageStore throws.
DiskRates measure_disk(const std::filesystem::path& directory, std::uint64_t bytes);

}  // namespace sluice
