// The disk tier: regions of equal size, addressed by bytes, in unnamed files over one or more
// directories. Where something lies is computed, so that no table of pages is needed: a region is
// a linear extent, and stripes of the space of all regions go round the files.
//
//   address = region * region_bytes + position
//   stripe  = address / stripe_bytes        file = stripe % files
//   offset in that file = stripe / files * stripe_bytes + address % stripe_bytes
//
// Every file has a thread and, with io_uring, a ring of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/disk_mode.h"
#include "io/disk_queue.h"
#include "io/disk_ticket.h"
#include "io/disk_watch.h"
#include "io/file.h"
#include "io/sector_sums.h"

namespace sluice {

struct PageStoreConfig {
  std::vector<std::filesystem::path> directories;  // at least one; one file in each
  std::uint64_t regions = 0;                       // one per (layer, KV head)
  std::uint64_t region_bytes = 0;                  // whole sectors
  std::uint64_t stripe_bytes = 64 << 10;  // whole sectors; a page, so that it is read in one go
  DiskLimits limits;                      // of every file
  DiskAccess access = DiskAccess::automatic;
  // Memory that most requests use, sector-aligned: io_uring registers it if it may (see
  // make_uring_disk()). Outlives the store.
  std::vector<std::span<std::byte>> arenas;
  // Instead of `access` and its test; for tests and other devices.
  DiskFactory factory;
  DiskPatience patience;
};

class PageFile;

struct PageRead {
  std::uint64_t address = 0;         // a multiple of kSectorBytes
  std::span<std::byte> destination;  // sector-aligned, whole sectors, inside one region
  // Not null: `address` is that of a byte of this file's sectors, and there are no regions.
  std::shared_ptr<PageFile> file = nullptr;
};

struct PageWrite {
  std::uint64_t address = 0;
  std::span<const std::byte> source;
};

// All functions may be called by any thread at any time; a decode thread and a prefetch thread need
// no lock between them. Memory of a request belongs to the store until its ticket is done, and so
// do its sectors: a read that overlaps an unfinished write, or two such writes, get Error{corrupt}
// or the newer bytes, never others.
//
// If no disk of the store answers for `patience.most` while one is waited for, the store gives up:
// every request that is not done and every later one ends with Error{io}. Memory of requests that
// were not done must then be left to keep(), because the disk may still answer.
class PageStore {
 public:
  // Reserves all files and tests each. Throws what SpillFile::create() and choose_disk_mode()
  // throw, Error{usage} for sizes that make no sense, Error{memory} where memory_bytes() are not
  // left.
  explicit PageStore(const PageStoreConfig& config);
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;
  // Finishes what was asked for, unless the store gave up: then a thread waits for the disk until
  // the process ends.
  ~PageStore();

  // Memory that the store needs for checksums (8 bytes per sector) and its queues, for a plan.
  static std::uint64_t memory_bytes(const PageStoreConfig& config);
  // Bytes that it reserves in every directory.
  static std::uint64_t bytes_per_directory(const PageStoreConfig& config);

  // Every sector is verified against its checksum. Failures: Error{io} if the disk fails,
  // Error{corrupt} if it gives other bytes than were last written, or none were.
  DiskTicket read(std::span<const PageRead> reads, DiskPriority priority);
  DiskTicket write(std::span<const PageWrite> writes,
                   DiskPriority priority = DiskPriority::background);
  // Asks the devices to make durable all writes whose tickets are done.
  DiskTicket flush();
  // Reads pages of a file that was there before, from `first` bytes on (whole sectors), beside the
  // store's own. The file stays open while somebody has the result. Throws Error{io} if threads
  // cannot be started.
  std::shared_ptr<PageFile> open(File file, std::uint64_t first, std::shared_ptr<SavedSums> sums);
  // Makes unreadable what was written to the region: it has a new tenant. None of its requests may
  // be unfinished.
  void forget(std::uint64_t region);

  std::uint64_t address(std::uint64_t region, std::uint64_t position) const {
    return region * region_bytes_ + position;
  }
  // One line per directory: how it is read, and why not better.
  std::vector<std::string> descriptions() const;
  DiskCounts counts() const;  // of all files together
  bool has_given_up() const { return watch_->is_given_up(); }
  // Keeps memory of requests for as long as a disk that was given up may use it.
  void keep(std::shared_ptr<void> memory) { watch_->keep(std::move(memory)); }

 private:
  friend class PageFile;
  class Lane;
  class LaneThread;
  using Parts = std::vector<std::vector<DiskRequest>>;  // [files]
  // Of files that were there before.
  using FileParts = std::map<std::shared_ptr<PageFile>, std::vector<DiskRequest>>;

  void check_request(std::uint64_t address, const std::byte* data, std::size_t bytes) const;
  void split(DiskRequest request, std::uint64_t address, std::size_t bytes, Parts& parts) const;
  static void split_file(DiskRequest request, const PageRead& read, FileParts& parts);
  DiskTicket submit(Parts parts, std::size_t requests, FileParts of_files = {});

  std::uint64_t region_bytes_;
  std::uint64_t total_bytes_;
  std::uint64_t stripe_bytes_;
  std::vector<std::span<std::byte>> arenas_;
  DiskLimits limits_;
  std::shared_ptr<DiskWatch> watch_;
  std::shared_ptr<SectorSums> sums_;
  std::vector<std::unique_ptr<LaneThread>> lanes_;  // [directories]
};

// A file that was there before; see PageStore::open().
class PageFile {
 public:
  PageFile(std::unique_ptr<PageStore::LaneThread> lane, std::uint64_t first,
           std::shared_ptr<SavedSums> sums);
  PageFile(const PageFile&) = delete;
  PageFile& operator=(const PageFile&) = delete;
  ~PageFile();

  std::uint64_t bytes() const;  // of its sectors

 private:
  friend class PageStore;
  std::unique_ptr<PageStore::LaneThread> lane_;
  std::uint64_t first_;
  std::shared_ptr<SavedSums> sums_;
};

}  // namespace sluice
