// Fetching rows into the ring of tiles. Words are those of decode_work.cuh.
#pragma once

#include "kernels/attention/decode_work.cuh"
#include "kernels/runtime/barriers.cuh"
#include "kernels/runtime/early_launch.cuh"

namespace sluice::cuda {

// A ring of tiles in shared memory: some warps fetch them and others use them. It has `stages`,
// from 2 to kMostStages: kMostStages keep about 100 KB under way, but a device may have room for
// fewer.
template <typename Shape>
class DecodeRing {
 public:
  static constexpr int kMostStages = Shape::kRowBytes <= 256 ? 6 : Shape::kRowBytes <= 384 ? 4 : 3;

  struct Barriers {
    std::uint64_t full[kMostStages];
    std::uint64_t empty[kMostStages];
    // Segments take turns at these: `found` completes when the warps have written a segment's
    // results over its last tile, in stage `found_in`. The stage is free again only once the
    // segment is finished, so at most as many segments as stages are open.
    std::uint64_t found[kMostStages];
    int found_in[kMostStages];
    int resident[kMostStages];  // selected rows of a segment that were on the device
    // The way of the row cache that each row of a tile is to be written into; negative: none. Only
    // if rows are placed.
    std::int32_t ways[kMostStages][Shape::kTileRows];
  };

  // The stage of a tile or segment, and the phase of its barrier: one bit that flips whenever the
  // ring starts over.
  struct Turn {
    int stage = 0;
    std::uint32_t phase = 0;
  };

  // `memory` [stages * kStageBytes] and `barriers` are shared memory.
  __device__ DecodeRing(std::byte* memory, int stages, Barriers& barriers)
      : memory_(memory), stages_(stages), barriers_(barriers) {}

  // One thread does this before all others begin.
  __device__ void init() const {
#pragma unroll
    for (int i = 0; i < kMostStages; ++i) {
      if (i >= stages_) break;
      barrier_init(shared_address(&barriers_.full[i]), Shape::kFetchWarps * kWarp);
      barrier_init(shared_address(&barriers_.empty[i]), Shape::kDecodeWarps);
      barrier_init(shared_address(&barriers_.found[i]), Shape::kDecodeWarps * kWarp);
      barriers_.resident[i] = 0;
    }
    if constexpr (kBulkCopies) barrier_init_fence();
  }

  __device__ std::byte* stage() const { return memory_ + tile_.stage * Shape::kStageBytes; }
  __device__ std::uint32_t full() const { return shared_address(&barriers_.full[tile_.stage]); }
  __device__ std::uint32_t empty() const { return shared_address(&barriers_.empty[tile_.stage]); }
  __device__ void advance() { tile_ = after(tile_); }
  __device__ Turn after(Turn turn) const {
    if (turn.stage + 1 < stages_) return {turn.stage + 1, turn.phase};
    return {0, turn.phase ^ 1u};
  }

  // Waits for the next tile.
  __device__ const std::byte* take() const {
    barrier_wait(full(), tile_.phase);
    return stage();
  }
  // Cache ways of the stage's rows, see Barriers.
  __device__ std::int32_t* ways() const { return barriers_.ways[tile_.stage]; }
  // This warp is done with the tile that take() gave.
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(empty());
    advance();
  }
  // Waits until the next stage may be filled.
  __device__ void wait_empty() const { barrier_wait(empty(), tile_.phase ^ 1u); }

  // This warp has written its results for a segment over the tile that take() gave.
  __device__ void hand_over(Turn segment) {
    reuse_memory();
    if (threadIdx.x == 0) barriers_.found_in[segment.stage] = tile_.stage;
    barrier_arrive(found(segment));
    advance();
  }
  // Waits for all warps' results for a segment.
  __device__ std::byte* take_found(Turn segment) const {
    barrier_wait(found(segment), segment.phase);
    return memory_ + barriers_.found_in[segment.stage] * Shape::kStageBytes;
  }
  // Counts `rows` more of a segment's selected rows as resident on the device, before they arrive.
  __device__ void add_resident(Turn segment, int rows) const {
    atomicAdd(&barriers_.resident[segment.stage], rows);
  }
  // Returns and clears the number of resident rows; one warp calls it, after take_found().
  __device__ int take_resident(Turn segment) const {
    int& resident = barriers_.resident[segment.stage];
    const int rows = resident;
    __syncwarp();
    if (threadIdx.x % kWarp == 0) resident = 0;
    return rows;
  }
  // This warp is done with what take_found() gave.
  __device__ void release_found(Turn segment) const {
    const int stage = barriers_.found_in[segment.stage];
    reuse_memory();
    __syncwarp();
    // The finishing warps together arrive kDecodeWarps times, like the warps that take tiles.
    if (threadIdx.x % kWarp < Shape::kDecodeWarps / Shape::kFinishWarps) {
      barrier_arrive(shared_address(&barriers_.empty[stage]));
    }
  }

 private:
  // Orders this thread's earlier accesses to a stage's memory before bulk copies into it.
  __device__ static void reuse_memory() {
    if constexpr (kBulkCopies) shared_write_fence();
  }
  __device__ std::uint32_t found(Turn segment) const {
    return shared_address(&barriers_.found[segment.stage]);
  }

  std::byte* memory_;
  int stages_;
  Barriers& barriers_;
  Turn tile_;
};

// Lookups by each fetching lane for its rows of the tiles to come. Pages are looked up kAhead tiles
// before their rows are requested, and positions kAhead tiles before that, because memory that is
// busy with rows answers late. If rows are placed, their places are looked up instead of their
// pages.
template <typename Shape>
struct DecodeLookups {
  static constexpr int kMostStages = DecodeRing<Shape>::kMostStages;
  static constexpr unsigned kAhead = kMostStages < 4 ? 4 : 8;
  static_assert(kMostStages < static_cast<int>(kAhead),
                "tiles that are under way would delay what is looked up");

  std::int32_t positions[2 * kAhead][Shape::kTileRows];
  int2 pages[kAhead][Shape::kTileRows];  // PageSlots or PlacedRow
};

// One warp's part of fetching all tiles that a block works on. With the first tile of a segment
// come its queries. `kSelects` is p.selects(), a constant so that neither kind pays for the other:
// with short rows, and with rows found by position, this warp's instructions are the bottleneck.
template <typename Shape, bool kSelects>
class DecodeFetch {
  using Ring = DecodeRing<Shape>;
  using Lookups = DecodeLookups<Shape>;
  using Work = DecodeWork<Shape>;
  using Segment = DecodeSegment<Shape>;
  static constexpr unsigned kAhead = Lookups::kAhead;

 public:
  // `lookups` is shared memory.
  __device__ DecodeFetch(const DecodeKernelParams& p, const Work& work, const Ring& ring,
                         Lookups& lookups)
      : p_(p),
        work_(work),
        ring_(ring),
        lookups_(lookups),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        first_row_((static_cast<int>(threadIdx.x) / kWarp - Shape::kDecodeWarps) *
                   Shape::kFetchRows) {}

  // The whole warp calls it. Step i requests the positions of tile i, the pages of tile i - kAhead
  // and the rows of tile i - 2 kAhead.
  __device__ void run() {
    Tile tile = tile_of(work_.first(), {});
    if (!tile.segment.exists()) return;
    Tile paged = tile;
    Tile listed = tile;
    int resident = 0;  // of this lane's selected rows of a segment
#pragma unroll 1
    for (unsigned step = kSelects ? 0 : kAhead;; ++step) {
      copy_async_wait<kAhead - 1>();
      if (step >= 2 * kAhead) {
        if (!tile.segment.exists()) return;
        // The kernel before may write queries and rows, but not pages. With a selection, this
        // kernel has already waited for it.
        if (!kSelects && step == 2 * kAhead) wait_for_kernel_before();
        // Before the wait for a free stage, so that nothing but the requests comes after it.
        const std::byte* const from = find(tile, step, resident);
        ring_.wait_empty();
        if (tile.number + 1 == tile.segment.last) report(tile, resident);
        tell_ways(tile, step);
        if constexpr (kBusMayPassForSlower) cross_bus(tile, step);
        if constexpr (kBulkCopies) {
          fetch_bulk(tile, from);
        } else {
          fetch_chunks(tile, from);
        }
        ring_.advance();
        advance(tile);
      }
      if (step >= kAhead) look_up_pages(paged, step);
      if constexpr (kSelects) look_up_positions(listed, step);
      copy_async_commit();
      if (step < 2 * kAhead) pass_over(step, step < kAhead ? listed : paged);
    }
  }

 private:
  static_assert(Shape::kFetchRows <= kWarp && Shape::kFetchRows % Shape::kLotRows == 0);

  struct Tile {
    Segment segment;
    int number = 0;
    typename Ring::Turn turn;  // of the segment
    // Memory of the segment:
    HeadPools pools;
    const PageSlots* pages = nullptr;
    const std::int32_t* positions = nullptr;
    const PlacedRow* places = nullptr;
    int in_turn = 0;  // position minus row index, for rows that are not found by position
  };

  __device__ Tile tile_of(const Segment& s, typename Ring::Turn turn) const {
    Tile tile{s, s.first, turn};
    if (!s.exists()) return tile;
    tile.pools = HeadPools(p_.rows, s.kv_head);
    tile.pages = page_table_of(p_.rows, s.token.sequence);
    if constexpr (kSelects) {
      tile.positions = p_.positions + s.head * p_.capacity;
      if (p_.places != nullptr) tile.places = p_.places + s.head * p_.capacity;
      tile.in_turn = page_first_of(s.token) - s.selected;
    }
    return tile;
  }
  __device__ void advance(Tile& tile) const {
    if (++tile.number < tile.segment.last) return;
    tile = tile_of(work_.after(tile.segment), ring_.after(tile.turn));
  }

  // Skips the steps that would request nothing, once the tiles have run out before the first rows
  // are requested; `asked` is the tile that would be requested next.
  __device__ static void pass_over(unsigned& step, const Tile& asked) {
    if (asked.segment.exists()) return;
    step = (step < kAhead ? kAhead : 2 * kAhead) - 1;
    copy_async_wait<0>();
  }

  // Number of rows of a tile's head that are found by position.
  __device__ static int selected(const Tile& tile) { return kSelects ? tile.segment.selected : 0; }
  // The warp's first row of a tile, counted from the head's first row.
  __device__ int first_row(const Tile& tile) const {
    return tile.number * Shape::kTileRows + first_row_;
  }
  // Number of the warp's rows of a tile that exist.
  __device__ int count(const Tile& tile) const {
    return max(0, min(Shape::kFetchRows, tile.segment.count(tile.number) - first_row_));
  }
  // True if the warp's rows come in lots, because none is found by position: a lot does not
  // straddle pages.
  __device__ bool in_lots(const Tile& tile) const {
    return kBulkCopies && (!kSelects || first_row(tile) >= selected(tile));
  }
  // The row that this lane looks up, of the warp's rows: its own, or the first of its lot. It may
  // not exist.
  __device__ int own_row(const Tile& tile) const {
    return in_lots(tile) ? lane_ * Shape::kLotRows : lane_;
  }
  __device__ bool brings_queries(const Tile& tile) const {
    return first_row_ == 0 && tile.number == tile.segment.first;
  }

  // True if this lane's row of a tile is placed, provided that it exists.
  __device__ bool is_placed(const Tile& tile) const {
    return kSelects && tile.places != nullptr && first_row(tile) + own_row(tile) < selected(tile);
  }

  // Requests the positions of a tile and advances to the next.
  __device__ void look_up_positions(Tile& tile, unsigned step) const {
    if (!tile.segment.exists()) return;
    if (own_row(tile) < count(tile)) {
      std::int32_t& to = lookups_.positions[step % (2 * kAhead)][first_row_ + lane_];
      const int row = first_row(tile) + own_row(tile);
      if (row < selected(tile)) {
        copy_async_word(&to, tile.positions + row);
      } else {
        to = tile.in_turn + row;
      }
    }
    advance(tile);
  }

  // The position of this lane's row of a tile whose positions were requested at step `asked`.
  __device__ std::int32_t position(const Tile& tile, unsigned asked) const {
    if constexpr (!kSelects) {
      return position_beside(tile.segment.gap, first_row(tile) + own_row(tile));
    }
    return lookups_.positions[asked % (2 * kAhead)][first_row_ + lane_];
  }

  // Requests the pages of a tile and advances to the next.
  __device__ void look_up_pages(Tile& tile, unsigned step) const {
    if (!tile.segment.exists()) return;
    if (own_row(tile) < count(tile)) {
      int2& to = lookups_.pages[step % kAhead][first_row_ + lane_];
      if (is_placed(tile)) {
        copy_async_place(&to, tile.places + first_row(tile) + own_row(tile));
      } else {
        copy_async_page(&to, tile.pages + page_of(position(tile, step - kAhead)));
      }
    }
    advance(tile);
  }

  // The address of this lane's row of a tile, or of the queries if the row does not exist, because
  // the address must be readable. `resident` counts selected rows that are on the device.
  __device__ const std::byte* find(const Tile& tile, unsigned step, int& resident) const {
    if (own_row(tile) >= count(tile)) return reinterpret_cast<const std::byte*>(p_.q);
    const int2 found = lookups_.pages[step % kAhead][first_row_ + lane_];
    if (is_placed(tile)) return find_placed(tile, {found.x, found.y}, resident);
    const PageSlots page{found.x, found.y};
    if (first_row(tile) + own_row(tile) < selected(tile) && is_on_device(page)) ++resident;
    return tile.pools.row_of(page, position(tile, step - 2 * kAhead), Shape::kRowBytes);
  }

  __device__ const std::byte* find_placed(const Tile& tile, const PlacedRow& row,
                                          int& resident) const {
    const bool cached = row.place == PlacedRow::kCached;
    const bool there = row.place == PlacedRow::kDevice;
    if (cached || there) ++resident;
    const std::byte* const first = cached  ? p_.cache + tile.segment.kv_head * p_.cache_stride
                                   : there ? tile.pools.device
                                           : tile.pools.host;
    return first + std::int64_t{row.number} * Shape::kRowBytes;
  }

  // Returns when the warp's rows of a tile have crossed the simulated slower bus.
  __device__ void cross_bus(const Tile& tile, unsigned step) const {
    if (p_.slow_bus.free_at == nullptr) return;
    const int own = own_row(tile);
    const int existing = count(tile);
    int rows = 0;
    if (own < existing) {
      const int2 found = lookups_.pages[step % kAhead][first_row_ + lane_];
      const bool is_near = is_placed(tile)
                               ? found.y == PlacedRow::kDevice || found.y == PlacedRow::kCached
                               : is_on_device({found.x, found.y});
      if (!is_near) rows = in_lots(tile) ? min(Shape::kLotRows, existing - own) : 1;
    }
    const int bytes = __reduce_add_sync(kAllLanes, rows) * Shape::kRowBytes;
    if (lane_ == 0 && bytes > 0) wait_to_cross(p_.slow_bus, bytes);
    __syncwarp();
  }

  // Tells the warps that use the tile the cache way of this lane's row, before the row arrives.
  __device__ void tell_ways(const Tile& tile, unsigned step) const {
    if (!kSelects || p_.places == nullptr || lane_ >= Shape::kFetchRows) return;
    std::int32_t way = -1;
    // Rows in lots are never placed.
    if (is_placed(tile) && lane_ < count(tile)) {
      way = lookups_.pages[step % kAhead][first_row_ + lane_].y;
    }
    ring_.ways()[first_row_ + lane_] = way;
    __threadfence_block();
  }

  // Adds the resident rows of a segment to its count and resets `resident`.
  __device__ void report(const Tile& tile, int& resident) const {
    if (!kSelects || !counts_resident(p_)) return;
    const int rows = __reduce_add_sync(kAllLanes, resident);
    if (lane_ == 0 && rows > 0) ring_.add_resident(tile.turn, rows);
    resident = 0;
  }

  __device__ const float* queries(const Segment& s) const {
    const std::int64_t head = std::int64_t{s.kv_head} * p_.group + blockIdx.y * kBunch;
    return p_.q + s.number * p_.q_stride + head * Shape::kHeadDim;
  }
  __device__ int query_bytes() const {
    const int count = min(kBunch, p_.group - static_cast<int>(blockIdx.y) * kBunch);
    return count * Shape::kHeadDim * static_cast<int>(sizeof(float));
  }

  __device__ void fetch_bulk(const Tile& tile, const std::byte* from) const {
    std::byte* const to = ring_.stage();
    const std::uint32_t full = ring_.full();
    const int existing = count(tile);
    if (existing < Shape::kFetchRows) clear(to, existing);
    if (lane_ == 0) {
      const int bytes = existing * Shape::kRowBytes + (brings_queries(tile) ? query_bytes() : 0);
      barrier_expect(full, static_cast<std::uint32_t>(bytes));
    } else {
      barrier_arrive(full);
    }
    __syncwarp();
    if (lane_ == 0 && brings_queries(tile)) {
      copy_bulk(to + Shape::kTileBytes, queries(tile.segment),
                static_cast<std::uint32_t>(query_bytes()), full);
    }
    const int own = own_row(tile);
    if (own >= existing) return;
    std::byte* const place = to + Shape::place(first_row_ + own);
    // Lanes issue their copies one after the other, which takes longer the more their code differs.
    if (in_lots(tile)) {
      const int rows = min(Shape::kLotRows, existing - own);
      copy_bulk(place, from, static_cast<std::uint32_t>(rows * Shape::kRowBytes), full);
    } else {
      copy_bulk(place, from, Shape::kRowBytes, full);
    }
  }

  // Zeroes the warp's rows from `existing` on: they have no weight, but stale memory may hold NaN.
  __device__ void clear(std::byte* to, int existing) const {
#pragma unroll 1
    for (int row = first_row_ + existing; row < first_row_ + Shape::kFetchRows; ++row) {
      for (int chunk = lane_; chunk < Shape::kRowChunks; chunk += kWarp) {
        *reinterpret_cast<uint4*>(to + Shape::place(row) + chunk * 16) = make_uint4(0, 0, 0, 0);
      }
    }
    shared_write_fence();
  }

  __device__ void fetch_chunks(const Tile& tile, const std::byte* row) const {
    std::byte* const to = ring_.stage();
    const int existing = count(tile);
    const auto own = reinterpret_cast<unsigned long long>(row);
#pragma unroll
    for (int i = 0; i < Shape::kFetchRows * Shape::kRowChunks / kWarp; ++i) {
      const int chunk = lane_ + i * kWarp;
      const int number = chunk / Shape::kRowChunks;
      const int column = chunk % Shape::kRowChunks * 16;
      const auto* const from =
          reinterpret_cast<const std::byte*>(__shfl_sync(kAllLanes, own, number));
      const bool exists = number < existing;
      copy_async_or_zero(to + Shape::place(first_row_ + number) + column,
                         from + (exists ? column : 0), exists);
    }
    if (brings_queries(tile)) {
      const auto* const from = reinterpret_cast<const std::byte*>(queries(tile.segment));
      for (int i = lane_ * 16; i < query_bytes(); i += kWarp * 16) {
        copy_async_or_zero(to + Shape::kTileBytes + i, from + i, true);
      }
    }
    barrier_arrive_after_copies(ring_.full());
  }

  const DecodeKernelParams& p_;
  const Work& work_;
  Ring ring_;
  Lookups& lookups_;
  int lane_;
  int first_row_;  // first row of a tile that this warp fetches
};

}  // namespace sluice::cuda
