#include "io/disk_mode.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

#include "io/pool_disk.h"
#include "io/sector_buffer.h"
#include "io/sector_sums.h"
#include "io/uring_disk.h"

namespace sluice {
namespace {

// Enough to keep a consumer's NVMe drive busy with 4 KiB reads at about 80 us each.
constexpr std::size_t kPoolThreads = 32;
constexpr std::size_t kTestSectors = 16;

// Sectors of random bytes, so that what an earlier file left on the disk does not look right.
void fill(std::span<std::byte> bytes) {
  std::mt19937_64 random(std::random_device{}());
  for (std::size_t i = 0; i < bytes.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, sizeof word);
  }
}

DiskTicket move_sectors(DiskQueue& queue, DiskAction action, SectorBuffer& buffer,
                        std::span<const std::size_t> order) {
  auto batch = std::make_shared<DiskBatch>(order.size());
  for (std::size_t place = 0; place < order.size(); ++place) {
    const std::size_t sector = order[place];
    DiskRequest request;
    request.action = action;
    request.offset = sector * kSectorBytes;
    request.sector = sector;
    request.data = buffer.sectors(sector, 1).data();
    request.bytes = kSectorBytes;
    request.batch = batch;
    request.place = place;
    queue.add(std::move(request));
  }
  DiskTicket ticket(std::move(batch));
  while (!queue.idle()) queue.step(true);
  return ticket;
}

// Throws Error if what is written does not come back.
void try_mode(const SpillFile& file, DiskAccess access, const DiskLimits& limits) {
  const std::size_t sectors = std::min<std::size_t>(kTestSectors, file.size() / kSectorBytes);
  const std::unique_ptr<Disk> disk = factory_of(access)(file, limits, {});
  SectorSums sums(1, sectors, 0);
  DiskQueue queue(*disk, sums, file.directory().string(), limits);
  SectorBuffer written(sectors * kSectorBytes);
  fill(written.span());
  sums.set(0, written.span());
  std::vector<std::size_t> order(sectors);
  for (std::size_t i = 0; i < sectors; ++i) order[i] = i;
  // Odd sectors, then even ones: no two are merged.
  std::stable_partition(order.begin(), order.end(), [](std::size_t i) { return i % 2 == 1; });
  move_sectors(queue, DiskAction::write, written, order).wait();
  std::sort(order.begin(), order.end());
  SectorBuffer read(sectors * kSectorBytes);
  move_sectors(queue, DiskAction::read, read, order).wait();
  if (std::ranges::equal(read.span(), written.span())) return;
  throw Error(ErrorCode::io, file.directory().string() +
                                 ": other bytes come back than were written; check the disk");
}

struct Candidate {
  DiskAccess access;
  bool direct;
  const char* name;
};

constexpr std::array kCandidates = {
    Candidate{DiskAccess::uring, true, "io_uring, O_DIRECT"},
    Candidate{DiskAccess::pool, true, "pread pool, O_DIRECT"},
    Candidate{DiskAccess::pool, false, "pread pool, page cache"},
};

}  // namespace

DiskFactory factory_of(DiskAccess access) {
  if (access == DiskAccess::uring) {
    return [](const SpillFile& file, const DiskLimits& limits,
              std::span<const std::span<std::byte>> arenas) {
      return make_uring_disk(file.descriptor(), limits.depth, arenas);
    };
  }
  return [](const SpillFile& file, const DiskLimits& limits,
            std::span<const std::span<std::byte>>) -> std::unique_ptr<Disk> {
    return std::make_unique<PoolDisk>(file.descriptor(), limits.depth,
                                      std::min(kPoolThreads, limits.depth));
  };
}

DiskMode choose_disk_mode(SpillFile& file, DiskAccess wanted, const DiskLimits& limits) {
  std::string refusals;
  for (const Candidate& candidate : kCandidates) {
    if (wanted != DiskAccess::automatic && wanted != candidate.access) continue;
    try {
      if (!file.set_direct(candidate.direct)) {
        throw Error(ErrorCode::unsupported, "the file system refuses O_DIRECT");
      }
      try_mode(file, candidate.access, limits);
      std::string line = file.directory().string();
      line.append(" (").append(file.file_system()).append("): ").append(candidate.name);
      if (!refusals.empty()) line.append(" (not ").append(refusals).append(")");
      return {candidate.access, candidate.direct, line};
    } catch (const Error& error) {
      if (!refusals.empty()) refusals += "; ";
      refusals.append(candidate.name).append(": ").append(error.what());
    }
  }
  throw Error(wanted == DiskAccess::uring ? ErrorCode::unsupported : ErrorCode::io,
              file.directory().string() + ": spilled rows cannot be written and read: " + refusals);
}

}  // namespace sluice
