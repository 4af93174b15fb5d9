// Rows on their way to the matrix instructions.
#pragma once

#include "kernels/barriers.cuh"
#include "kernels/decode_work.cuh"

namespace sluice::cuda {

// A ring of tiles in shared memory: some warps fetch them and others use them.
template <int kHeadDim, int kStages>
class DecodeRing {
  using Shape = DecodeShape<kHeadDim>;

 public:
  static constexpr int kBytes = kStages * Shape::kStageBytes;

  struct Barriers {
    std::uint64_t full[kStages];
    std::uint64_t empty[kStages];
    // Of segments, in turns: what was found is in stage `found_in`. Each keeps its stage until it
    // is finished, so that there are never more than there are stages.
    std::uint64_t found[kStages];
    int found_in[kStages];
  };

  // `stages` [kBytes] and `barriers` are shared memory.
  __device__ DecodeRing(std::byte* stages, Barriers& barriers)
      : stages_(stages), barriers_(barriers) {}

  // One thread does this before all others begin.
  __device__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&barriers_.full[i]), Shape::kFetchWarps * kWarp);
      barrier_init(shared_address(&barriers_.empty[i]), kDecodeWarps);
      barrier_init(shared_address(&barriers_.found[i]), kDecodeWarps * kWarp);
    }
    if constexpr (kBulkCopies) barrier_init_fence();
  }

  __device__ std::byte* stage() const { return stages_ + stage_ * Shape::kStageBytes; }
  __device__ std::uint32_t full() const { return shared_address(&barriers_.full[stage_]); }
  __device__ std::uint32_t empty() const { return shared_address(&barriers_.empty[stage_]); }
  __device__ void advance() {
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    if (stage_ == 0) phase_ ^= 1u;
  }

  // The next tile, once it is there.
  __device__ const std::byte* take() const {
    barrier_wait(full(), phase_);
    return stage();
  }
  // This warp is done with the tile that take() gave.
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(empty());
    advance();
  }
  // Until the next stage may be filled.
  __device__ void wait_empty() const { barrier_wait(empty(), phase_ ^ 1u); }

  // This warp has written what it found of segment number `segment` over the tile that take() gave.
  __device__ void hand_over(int segment) {
    reuse_memory();
    if (threadIdx.x == 0) barriers_.found_in[segment % kStages] = stage_;
    barrier_arrive(found(segment));
    advance();
  }
  // What all warps found of segment number `segment`, once it is there.
  __device__ std::byte* take_found(int segment) const {
    barrier_wait(found(segment), static_cast<std::uint32_t>(segment / kStages % 2));
    return stages_ + barriers_.found_in[segment % kStages] * Shape::kStageBytes;
  }
  // This warp is done with what take_found() gave.
  __device__ void release_found(int segment) const {
    const int stage = barriers_.found_in[segment % kStages];
    reuse_memory();
    __syncwarp();
    // As many arrive as there are warps that take tiles.
    if (threadIdx.x % kWarp < kDecodeWarps / Shape::kFinishWarps) {
      barrier_arrive(shared_address(&barriers_.empty[stage]));
    }
  }

 private:
  // Other uses of a stage's memory by this thread are over.
  __device__ static void reuse_memory() {
    if constexpr (kBulkCopies) shared_write_fence();
  }
  __device__ std::uint32_t found(int segment) const {
    return shared_address(&barriers_.found[segment % kStages]);
  }

  std::byte* stages_;
  Barriers& barriers_;
  int stage_ = 0;
  std::uint32_t phase_ = 0;
};

// One warp's part of fetching all tiles that a block works on. With the first tile of a head come
// its queries.
template <int kHeadDim, int kStages>
class DecodeFetch {
  using Shape = DecodeShape<kHeadDim>;
  using Ring = DecodeRing<kHeadDim, kStages>;

 public:
  // Positions are asked for so many tiles before their rows are: memory that is busy with rows
  // answers late.
  static constexpr int kAhead = 8;
  using Positions = std::int32_t[kAhead][kTileRows];

  // `positions` is shared memory.
  __device__ DecodeFetch(const DecodeKernelParams& p, const DecodeWork& work, const Ring& ring,
                         Positions& positions)
      : p_(p),
        work_(work),
        ring_(ring),
        positions_(positions),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        first_row_((static_cast<int>(threadIdx.x) / kWarp - kDecodeWarps) * Shape::kFetchRows) {}

  // The whole warp.
  __device__ void run() {
    static_assert(kStages < kAhead, "tiles that are under way would delay positions");
    Tile tile = first();
    Tile ahead = tile;
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) look_up(ahead, i);
#pragma unroll 1
    for (int slot = 0; tile.segment.exists(); slot = (slot + 1) % kAhead) {
      if (p_.positions != nullptr) copy_async_wait<kAhead - 1>();
      ring_.wait_empty();
      if constexpr (kBulkCopies) {
        fetch_bulk(tile, positions_[slot]);
      } else {
        fetch_chunks(tile, positions_[slot]);
      }
      ring_.advance();
      look_up(ahead, slot);
      advance(tile);
    }
  }

 private:
  static_assert(Shape::kFetchRows <= kWarp && Shape::kFetchRows % Shape::kLotRows == 0);

  struct Tile {
    DecodeSegment segment;
    int number = 0;
  };

  __device__ Tile first() const {
    const DecodeSegment segment = work_.first();
    return {segment, segment.first};
  }
  __device__ void advance(Tile& tile) const {
    if (++tile.number < tile.segment.last) return;
    tile.segment = work_.after(tile.segment);
    tile.number = tile.segment.first;
  }

  // Asks for the positions of a tile, each lane for the one that it needs, and goes to the next.
  __device__ void look_up(Tile& tile, int slot) const {
    if (p_.positions == nullptr) return;
    if (tile.segment.exists()) {
      const std::int32_t* const positions = p_.positions + tile.segment.head * p_.capacity;
      const int row = first_row_ + lane_;
      const int number = tile.number * kTileRows + row;
      if (lane_ < Shape::kFetchRows && number < tile.segment.selected) {
        copy_async_word(&positions_[slot][row], positions + number);
      }
      advance(tile);
    }
    copy_async_commit();
  }

  // Where a head's rows after the selected are, which are all without positions.
  __device__ const std::byte* in_turn(const DecodeSegment& s, int row) const {
    const HeadRows& rows = p_.positions == nullptr ? p_.rows : p_.newest;
    return rows[s.head] + std::int64_t{row - s.selected} * Shape::kRowBytes;
  }

  // Where this lane's row of a tile is.
  __device__ const std::byte* row(const Tile& tile, const std::int32_t* positions) const {
    const DecodeSegment& s = tile.segment;
    const int row = tile.number * kTileRows + first_row_ + lane_;
    if (row >= s.selected) return in_turn(s, row);
    const std::int32_t position = positions[first_row_ + lane_];
    const HeadRows& rows = position < p_.resident[s.head] ? p_.rows : p_.home;
    return rows[s.head] + static_cast<std::int64_t>(position) * Shape::kRowBytes;
  }
  // How many of the warp's rows of a tile exist.
  __device__ int count(const Tile& tile) const {
    return max(0, min(Shape::kFetchRows, tile.segment.count(tile.number) - first_row_));
  }
  __device__ bool brings_queries(const Tile& tile) const {
    return first_row_ == 0 && tile.number == tile.segment.first;
  }

  __device__ const float* queries(const DecodeSegment& s) const {
    const std::int64_t first = static_cast<std::int64_t>(s.head) * p_.group + blockIdx.y * kBunch;
    return p_.q + first * kHeadDim;
  }
  __device__ int query_bytes() const {
    const int count = min(kBunch, p_.group - static_cast<int>(blockIdx.y) * kBunch);
    return count * kHeadDim * static_cast<int>(sizeof(float));
  }

  __device__ void fetch_bulk(const Tile& tile, const std::int32_t* positions) const {
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
    const int first = tile.number * kTileRows + first_row_;
    if (first < tile.segment.selected) {
      if (lane_ >= existing) return;
      copy_bulk(to + Shape::place(first_row_ + lane_), row(tile, positions), Shape::kRowBytes,
                full);
      return;
    }
    const int before = lane_ * Shape::kLotRows;
    if (before >= existing) return;
    const int bytes = min(Shape::kLotRows, existing - before) * Shape::kRowBytes;
    copy_bulk(to + Shape::place(first_row_ + before), in_turn(tile.segment, first + before),
              static_cast<std::uint32_t>(bytes), full);
  }

  // The warp's rows from `existing` on become zero: they have no weight, but what was there may be
  // no number.
  __device__ void clear(std::byte* to, int existing) const {
#pragma unroll 1
    for (int row = first_row_ + existing; row < first_row_ + Shape::kFetchRows; ++row) {
      for (int chunk = lane_; chunk < Shape::kRowChunks; chunk += kWarp) {
        *reinterpret_cast<uint4*>(to + Shape::place(row) + chunk * 16) = make_uint4(0, 0, 0, 0);
      }
    }
    shared_write_fence();
  }

  __device__ void fetch_chunks(const Tile& tile, const std::int32_t* positions) const {
    std::byte* const to = ring_.stage();
    const int existing = count(tile);
    // Something readable for lanes without a row: q is.
    const auto own = reinterpret_cast<unsigned long long>(
        lane_ < existing ? row(tile, positions) : reinterpret_cast<const std::byte*>(p_.q));
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
  const DecodeWork& work_;
  Ring ring_;
  Positions& positions_;
  int lane_;
  int first_row_;  // of a tile, that this warp fetches
};

}  // namespace sluice::cuda
