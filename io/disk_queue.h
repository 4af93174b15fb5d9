// The requests for one file, from queueing to completion, without threads or clocks, so that tests
// run it step by step over a simulated disk.
//
//   add() ── urgent ─────┐ neighbours merged,   ┌─ Disk ─┐  short: the rest again
//        └── background ─┴ bytes in flight ≤ cap┘        └─ retire: EAGAIN, EINTR: again
//                                                                  error: once more, each by itself
//                                                                  read: verify the sectors
//
// Invariants: a request finishes exactly once; bytes in flight never exceed the cap; background
// requests leave half of the depth and of the cap to urgent ones.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "io/disk.h"
#include "io/disk_ticket.h"
#include "io/sector_sums.h"

namespace sluice {

// `urgent`: a step waits for it. `background`: prefetch and write-back.
enum class DiskPriority : std::uint8_t { urgent, background };

inline constexpr std::size_t kMaxBuffers = 16;                // of one operation
inline constexpr std::size_t kMaxOperationBytes = 256 << 10;  // larger ones delay urgent reads

// A part of a request that lies in one file, in one piece.
struct DiskRequest {
  DiskAction action = DiskAction::read;
  DiskPriority priority = DiskPriority::urgent;
  bool alone = false;        // not to be merged: a merged operation that had it failed
  std::uint64_t offset = 0;  // bytes from the start of the file
  std::uint64_t sector = 0;  // the first one's number in SectorSums
  std::byte* data = nullptr;
  std::size_t bytes = 0;  // whole sectors, at most kMaxOperationBytes; 0 for flush
  std::shared_ptr<DiskBatch> batch;
  std::size_t place = 0;  // of the request in the batch
};

struct DiskLimits {
  std::size_t depth = 256;                 // operations in flight; at least 2
  std::size_t bytes_in_flight = 16 << 20;  // at least 2 * kMaxOperationBytes
};

// Counts since the start.
struct DiskCounts {
  std::uint64_t requests = 0;    // finished
  std::uint64_t failures = 0;    // of these
  std::uint64_t operations = 0;  // given to the disk for the first time, after merging
  std::uint64_t retries = 0;     // given to it again
  std::uint64_t read_bytes = 0;  // that arrived, verified or not
  std::uint64_t written_bytes = 0;
};

// For one thread.
class DiskQueue {
 public:
  // `name` and `file` stand in errors. `disk`, `sums` and `watch` outlive the object; `watch`,
  // which may be null, hears of every answer.
  DiskQueue(Disk& disk, const SectorCheck& sums, std::string name, DiskLimits limits,
            DiskWatch* watch = nullptr, std::string file = "the spill file");

  void add(DiskRequest&& request);
  // Gives the disk what it has room for and finishes what it has done; with `wait`, sleeps until
  // something was done or Disk::wake(). Throws what Disk::retire() throws.
  void step(bool wait);
  // Ends all requests with `error`: the disk is gone.
  void abandon(const Error& error);

  // No request is queued or in flight.
  bool idle() const { return urgent_.empty() && background_.empty() && in_flight_ == 0; }
  std::size_t bytes_in_flight() const { return bytes_in_flight_; }
  const DiskCounts& counts() const { return counts_; }

 private:
  struct Operation {
    std::vector<DiskRequest> requests;  // neighbours, by offset; empty: the slot is free
    std::array<iovec, kMaxBuffers> buffers;
    std::size_t first_buffer = 0;  // buffers before it are done
    std::size_t buffer_count = 0;
    std::uint64_t offset = 0;  // of the bytes still to transfer
    std::size_t bytes = 0;
    std::size_t left = 0;
    int attempts = 0;  // without progress
  };

  bool begin_next();
  std::deque<DiskRequest>* next_queue();
  bool fits(const std::deque<DiskRequest>& queue, bool background) const;
  void build(Operation& operation, std::deque<DiskRequest>& queue);
  static void append(Operation& operation, DiskRequest request);
  bool start(std::size_t slot);
  void start_again(std::size_t slot);
  void retire(const DiskResult& result);
  void advance(std::size_t slot, std::size_t bytes);
  void fail(std::size_t slot, int error);
  void complete(std::size_t slot);
  void release(std::size_t slot);
  void finish(DiskRequest& request, const Error* error);
  Error io_error(const DiskRequest& request, int error) const;
  Error corrupt_error(const DiskRequest& request, std::uint64_t sector) const;

  Disk& disk_;
  const SectorCheck& sums_;
  std::string name_;
  DiskWatch* watch_;
  std::string file_;
  DiskLimits limits_;
  std::deque<DiskRequest> urgent_;
  std::deque<DiskRequest> background_;
  std::vector<Operation> operations_;  // [depth]; the place is the disk's tag
  std::vector<std::size_t> free_;
  std::deque<std::size_t> refused_;  // operations that the disk had no room for, or that go again
  std::vector<DiskResult> results_;
  std::size_t in_flight_ = 0;
  std::size_t background_in_flight_ = 0;
  std::size_t bytes_in_flight_ = 0;
  std::size_t background_bytes_ = 0;
  int urgent_run_ = 0;  // urgent operations since the last one in the background
  DiskCounts counts_;
};

}  // namespace sluice
