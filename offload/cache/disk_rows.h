// Selected rows that lie below the device: copied from pages in host memory, found in a cache of
// rows there, or read from disk by sectors.
//
//   find_rows() ─► places ─► host ─► begin_fetch(): in host memory? else ─► read
//                                              └─► end_fetch(): rows are there ─► places ─► attend
//
// Reads are under way between the two, so that a layer that chose its rows early computes
// meanwhile. The cache works as the one on the device does (lib/backend/row_cache.h): per KV head,
// shared by all layers, sets of 32 ways, a fading count. A row that gets no way is put behind the
// cache, where it stays until the next layer fetches, or the one after it if layers choose early;
// so is a row from a page in host memory, which the cache need not have twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/page_store.h"
#include "lib/backend.h"
#include "lib/backend/row_cache.h"
#include "offload/tiers/disk_pages.h"
#include "sluice/kv_cache.h"
#include "sluice/ledger.h"

namespace sluice {

// The part of a step's tokens whose rows a layer fetches at a time.
struct FetchWave {
  int layer = 0;
  std::int64_t first = 0;  // token of the batch
  std::int64_t tokens = 0;
  PlacedRow* places = nullptr;           // the backend's [tokens, kv_heads, capacity]
  std::int64_t capacity = 0;             // selected rows
  const HeadSelection* heads = nullptr;  // the backend's [tokens, kv_heads]
};

class DiskRows {
 public:
  // Work is issued to `queue`. Throws what Backend::allocate() throws.
  DiskRows(Queue& queue, const KvPlan& plan, DiskPages& pages);
  DiskRows(const DiskRows&) = delete;
  DiskRows& operator=(const DiskRows&) = delete;
  ~DiskRows();

  // Call when a step begins, after its page tables were written.
  void begin_step();
  // Issues the first part of a fetch, which finds its rows and begins to read the missing ones. If
  // layers choose early, the fetches of two neighbouring layers may be under way; else each ends
  // before the next begins. Recorded steps may contain both parts, and parts of different fetches
  // may run at the same time.
  void begin_fetch(const FetchWave& wave);
  // Issues the second part, for the same wave: afterwards a place that is not on the device has the
  // number of a row in rows().
  void end_fetch(const FetchWave& wave);
  // [kv_heads, head_stride() bytes]: rows that fetches found.
  std::byte* rows() const { return rows_.data(); }
  std::int64_t head_stride() const;

  // Rows and bytes that a token of the step read from disk for a layer.
  Traffic read(int layer, std::int64_t token) const;
  // Throws what a read for this token of the step threw.
  void require_read(std::int64_t token) const;

  // Forgets cached rows of these blocks, which are about to be written.
  void forget(std::int64_t first_block, std::int64_t blocks);

 private:
  using Part = void (DiskRows::*)(const FetchWave& wave);
  // The queue runs it in its order. It stays at its address, because recordings refer to it.
  struct Call final : HostCall {
    Call(DiskRows& owner, const FetchWave& fetched, Part of_fetch)
        : rows(&owner), wave(fetched), part(of_fetch) {}
    void run() noexcept override { rows->run(wave, part); }

    DiskRows* rows;
    FetchWave wave;
    Part part;
  };
  struct Calls {
    Call begin;
    Call end;
  };
  // A row to read.
  struct Miss {
    std::uint64_t unit = 0;  // address
    std::size_t offset = 0;  // of the row in its unit
    std::byte* to = nullptr;
    std::int64_t head = 0;
    std::int64_t way = -1;   // of the cache, or -1
    std::int32_t row = 0;    // block * kPageTokens + offset
    std::int64_t token = 0;  // of the step, the first that selected the row
  };
  // A row to copy from a page in host memory.
  struct HostRow {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
  };
  // A token that selected a row after another one had.
  struct Sharer {
    std::int64_t head = 0;
    std::int32_t row = 0;
    std::int64_t token = 0;
  };

  // A fetch that has begun.
  struct Fetch {
    bool is_open = false;      // until it has ended
    std::vector<Miss> misses;  // in the order of their units
    std::vector<HostRow> in_host;
    std::vector<Sharer> sharers;
    std::size_t first = 0;  // misses [first, end) are being read
    std::size_t end = 0;
    std::vector<std::size_t> unit_of;  // of these, in the part of units_
    std::optional<DiskTicket> ticket;
  };

  Calls& calls_of(const FetchWave& wave);
  std::size_t half_of(int layer) const { return static_cast<std::size_t>(layer) % fetches_.size(); }
  Fetch& fetch_of(const FetchWave& wave) { return fetches_[half_of(wave.layer)]; }
  PlacedRow* places_of(const FetchWave& wave) const;
  std::size_t place_bytes(const FetchWave& wave) const;
  std::byte* units_of(const FetchWave& wave) const;
  void run(const FetchWave& wave, Part part) noexcept;
  void begin(const FetchWave& wave);
  void end(const FetchWave& wave);
  void give_up(const FetchWave& wave, const Error& error);
  void forget_rows(std::int64_t first_block, std::int64_t blocks);
  void place_all(const FetchWave& wave);
  std::int32_t place(const FetchWave& wave, std::int64_t token, std::int64_t head,
                     std::int32_t row);
  std::int64_t take_spare(const FetchWave& wave, std::int64_t head);
  std::int64_t find_way(std::int64_t head, RowCacheView::Tag tag);
  std::int64_t take_way(std::int64_t head, RowCacheView::Tag tag);
  void begin_read(const FetchWave& wave);
  void end_read(const FetchWave& wave);
  void fail(const Fetch& fetch, const Miss& miss, const Error& error);
  void fail(std::int64_t token, const Error& error);
  Traffic& reads_of(int layer, std::int64_t token);
  std::byte* row_at(std::int64_t head, std::int64_t number) const;
  std::size_t entry(std::int64_t head, std::int64_t way) const {
    return static_cast<std::size_t>(head * view_.ways() + way);
  }

  Queue* queue_;
  DiskPages* pages_;
  KvShape shape_;
  std::int64_t blocks_;
  std::int64_t placed_rows_;  // spare rows per KV head, behind the cached ones
  std::size_t units_at_once_;
  std::mutex mutex_;   // of what begin() and end() of two fetches share, until the step is over
  RowCacheView view_;  // sets, tags and heat of the cache; memory of the host
  Buffer rows_;        // [kv_heads, ways + placed_rows_, row_bytes]
  Buffer tags_;
  Buffer places_;  // [fetches]: of a wave, then its HeadSelections
  Buffer units_;   // [fetches, units_at_once_, unit_bytes], from its first whole sector on
  std::int32_t clock_ = 0;
  // By layer, first token and number of tokens.
  std::map<std::tuple<int, std::int64_t, std::int64_t>, std::unique_ptr<Calls>> calls_;
  // Set by begin():
  std::vector<std::unordered_map<std::int32_t, std::int32_t>> found_;  // [kv_heads], by row
  std::vector<std::int64_t> spare_used_;                               // [kv_heads]
  std::vector<Fetch> fetches_;  // [fetches_at_once()]; the disk writes to units_ until they end
  // One step:
  std::vector<Traffic> reads_;                // [layers, tokens]
  std::vector<std::optional<Error>> errors_;  // [tokens]
};

}  // namespace sluice
