// How a spill file is read and written: found out by doing it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/disk.h"
#include "io/disk_queue.h"
#include "io/spill_file.h"

namespace sluice {

enum class DiskAccess : std::uint8_t { automatic, uring, pool };

struct DiskMode {
  DiskAccess access = DiskAccess::pool;  // never automatic
  bool direct = false;                   // O_DIRECT: not through the page cache
  // One line: "DIR (ext4): io_uring, O_DIRECT", and why anything better was not taken.
  std::string description;
};

// Creates the disk of a file; called on the thread that will use it.
using DiskFactory = std::function<std::unique_ptr<Disk>(
    const SpillFile& file, const DiskLimits& limits, std::span<const std::span<std::byte>> arenas)>;

DiskFactory factory_of(DiskAccess access);

// Takes the first that works of io_uring with O_DIRECT, a pool of threads with O_DIRECT and a pool
// with the page cache, unless `wanted` names one. Each is tried on the file: 16 sectors are written
// in random order, read back as one and compared. Leaves the file in that mode.
// Throws Error{unsupported} if what is `wanted` does not work, Error{io} if nothing does.
DiskMode choose_disk_mode(SpillFile& file, DiskAccess wanted, const DiskLimits& limits);

}  // namespace sluice
