// A count of the rows and bytes of decode steps that does not use the ledger, to hold the ledger to
// it.
//
//   auto counter = std::make_shared<sluice::TrafficCounter>();
//   config.counter = counter;  // of an EngineConfig or a KvConfig
//   ...
//   counter->start();
//   session.decode(token);
//   const sluice::CountedTraffic counted = counter->take();  // equals the step's ledger entries
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "sluice/ledger.h"
#include "sluice/types.h"

namespace sluice {

// Rows in host memory that one attention on a device read for a KV head of a token: one entry per
// head, also without any.
struct MissedRows {
  int operation = 0;                    // number of the attention since the last take()
  std::int32_t sequence = 0;            // row in the page tables
  int head = 0;                         // KV head
  std::vector<std::int32_t> positions;  // ascending
};

struct CountedTraffic {
  // From one tier to another or in place, and why; without entries of 0 rows.
  std::map<std::tuple<Tier, Tier, Cause>, Traffic> moved;
  // Bytes of copies between host memory and the device that move no rows, which the ledger leaves
  // out: page tables, tokens, and reports of what was selected.
  std::uint64_t beside = 0;
  std::vector<MissedRows> missed;  // with TrafficCounter::keep_missed()
};

// Counts what every operation of a decode step reads and writes, from the operation's parameters
// and the page tables, selected positions and places in the backend's memory, as the operation
// found them. A row's tier is that of the buffer in which its address lies, whatever a table calls
// it. So a ledger that forgets an operation, counts a row twice or in the wrong tier, or predicts
// instead of counting, disagrees. Bytes that a kernel reads beyond its parameters are not seen.
//
// Counted are the causes append, write_back, hit and miss, and index_read of keys in host memory
// that the backend itself reads for a device. Not counted are the key index, value tiles, evictions
// and disks; rows to which the CPU attends beside a GPU; and steps of prompts.
//
// Any number of threads may use one.
class TrafficCounter {
 public:
  // From start() to stop() every operation is waited for, and no step is replayed from a recording,
  // so steps take longer. Answers stay the same.
  void start() { counts_ = true; }
  void stop() { counts_ = false; }
  bool counts() const { return counts_; }

  // From now on keeps which rows were missed, 4 bytes for each.
  void keep_missed() { keeps_missed_ = true; }
  bool keeps_missed() const { return keeps_missed_; }

  // What was counted since the last call.
  CountedTraffic take();

  // Called by queues.
  void add(Tier from, Tier to, Cause cause, Traffic traffic);
  void add_beside(std::uint64_t bytes);
  // Of one attention; its `operation` is set here.
  void add_missed(std::vector<MissedRows> rows);

 private:
  std::atomic<bool> counts_ = false;
  std::atomic<bool> keeps_missed_ = false;
  std::mutex mutex_;
  CountedTraffic counted_;
  int operations_ = 0;
};

// One line that says how a ledger's entries of some steps differ from what was counted in these
// steps, or nothing if they agree. Entries that are not counted are left out. `sees_keys`: the
// backend reads all keys that are estimated; false for a scorer of one's own, which reads them
// itself.
std::string difference(const CountedTraffic& counted, std::span<const LedgerEntry> recorded,
                       bool sees_keys = true);

}  // namespace sluice
