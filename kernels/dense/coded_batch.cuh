// Products of coded weights and 9 to 64 tokens, and of fewer whose inputs exceed shared memory. A
// unit of work is a part of the outputs, kPartRows rows of tiles (coded_tile.h), times the inputs
// of one column of tiles. Units are numbered along a part's columns, then from part to part, and
// every block has equally many of them in a row, so that all multiprocessors end together whatever
// the shape of the matrix.
//
//   teams    of kTeamWarps warps take turns at a block's units. Each warp streams two rows of tiles
//            through a ring, decodes them into fragments once and multiplies them by all tokens on
//            the tensor cores.
//   inputs   of a unit pass through slots in shared memory. Each warp of a team brings those of
//            some tokens, units ahead.
//   sums     of a part are added over the teams of a block in shared memory and, where blocks share
//            a part, in global memory by the block that comes last. Both go in a fixed order.
#pragma once

#include "kernels/dense/coded_product.h"
#include "kernels/dense/coded_ring.cuh"
#include "kernels/dense/coded_weights.cuh"
#include "kernels/runtime/barriers.cuh"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/ticket.cuh"

namespace sluice::cuda {

// A block's units.
struct BlockUnits {
  int first;
  int count;

  __device__ explicit BlockUnits(const CodedProductParams& p)
      : first(static_cast<int>(blockIdx.x) * p.block_units),
        count(min(p.block_units, p.parts * p.columns - first)) {}
};

// A warp's tiles of its team's units.
template <int kTileBytes>
class UnitWalk {
 public:
  // `row` of tiles in a part.
  __device__ UnitWalk(const CodedProductParams& p, const BlockUnits& units, int team, int row)
      : p_(p), left_(units.count - team), row_(row) {
    begin((units.first + team) / p.columns, (units.first + team) % p.columns);
  }

  __device__ int next(const std::byte* (&from)[kWarpTiles]) {
    if (left_ <= 0) return 0;
    from[0] = at_;
    from[1] = at_ + to_second_;
    left_ -= p_.teams;
    column_ += p_.teams;
    at_ += p_.teams * kTileBytes;
    if (column_ >= p_.columns) begin(part_ + column_ / p_.columns, column_ % p_.columns);
    return kTileBytes;
  }

 private:
  // Rows behind the last repeat it; their products are not stored.
  __device__ void begin(int part, int column) {
    static_assert(kWarpTiles == 2);
    part_ = part;
    column_ = column;
    const std::int64_t last = p_.tile_rows - 1;
    const std::int64_t row = std::int64_t{part} * kPartRows + row_;
    at_ = p_.tiles + (min(row, last) * p_.columns + column) * kTileBytes;
    to_second_ = row < last ? std::int64_t{p_.columns} * kTileBytes : 0;
  }

  const CodedProductParams& p_;
  int left_;  // units of the block from the next one on
  int row_;
  const std::byte* at_;
  std::int64_t to_second_;
  int part_;
  int column_;
};

// A token's inputs of a unit in a slot. Of odd tokens the halves of each 128 bytes are exchanged,
// so that the eight lanes that read a group of two tokens find it in different banks.
inline constexpr int kGroupBytes = static_cast<int>(kWeightGroup) * 2;
__device__ __forceinline__ int place_in_token(int token, int byte) {
  return byte ^ token % 2 * kGroupBytes;
}

// Slots for the inputs of a team's units. Every warp of the team brings the inputs of some tokens.
template <int kTokenTiles>
class TeamInputs {
 public:
  static constexpr int kSlotBytes = kTokenTiles * kMmaColumns * kTokenBytes;

  // `barriers` has two for each slot: all inputs are there, and all are read.
  __device__ TeamInputs(const CodedProductParams& p, const BlockUnits& units, int team, int warp,
                        std::byte* slots, std::uint64_t* barriers)
      : p_(p),
        warp_(warp),
        slots_(slots),
        barriers_(shared_address(barriers)),
        column_((units.first + team) % p.columns),
        left_((units.count - team + p.teams - 1) / p.teams) {}

  // By one thread of the team, before the block's barrier.
  __device__ void init() const {
    for (int slot = 0; slot < p_.slots; ++slot) {
      barrier_init(full(slot), kTeamWarps * kWarp);
      barrier_init(empty(slot), kTeamWarps);
    }
  }
  // Requests the inputs of the next unit, once its slot is read.
  __device__ void request() {
    if (left_-- <= 0) return;
    barrier_wait(empty(requested_.slot), requested_.phase ^ 1u);
    copy(slots_ + requested_.slot * kSlotBytes);
    barrier_arrive_after_copies(full(requested_.slot));
    column_ += p_.teams;
    if (column_ >= p_.columns) column_ %= p_.columns;
    requested_.advance(p_.slots);
  }
  // Waits for the next unit's inputs.
  __device__ const std::byte* take() {
    barrier_wait(full(taken_.slot), taken_.phase);
    return slots_ + taken_.slot * kSlotBytes;
  }
  // Frees the slot that take() gave; the warp is done with it.
  __device__ void release() {
    if (threadIdx.x % kWarp == 0) barrier_arrive(empty(taken_.slot));
    taken_.advance(p_.slots);
  }

 private:
  // Goes round the slots.
  struct Turn {
    int slot = 0;
    std::uint32_t phase = 0;

    __device__ void advance(int slots) {
      if (++slot < slots) return;
      slot = 0;
      phase ^= 1u;
    }
  };

  static constexpr int kBarrierBytes = sizeof(std::uint64_t);
  __device__ std::uint32_t full(int slot) const { return barriers_ + 2 * slot * kBarrierBytes; }
  __device__ std::uint32_t empty(int slot) const { return full(slot) + kBarrierBytes; }

  // Inputs behind the last are zero; tokens behind the last repeat it, and their products are not
  // stored.
  __device__ void copy(std::byte* to) const {
    constexpr int kLanes = kTileInputs / 8;  // of a token
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int input = column_ * kTileInputs + lane % kLanes * 8;
    const bool is_there = input < p_.inputs;
    const std::byte* const from = p_.x + (is_there ? std::int64_t{input} * 2 : 0);
    const auto stride = static_cast<std::uint32_t>(p_.x_stride);
    const int first = warp_ * kMmaColumns + lane / kLanes;
    // All tokens of a lane are even, or all are odd.
    to += first * kTokenBytes + place_in_token(lane / kLanes, lane % kLanes * 16);
#pragma unroll
    for (int n = 0; n < kTokenTiles; n += kTeamWarps) {
      if (n + warp_ >= kTokenTiles) break;
#pragma unroll
      for (int i = 0; i < kMmaColumns; i += kWarp / kLanes) {
        const int token = n * kMmaColumns + i;
        const auto row = static_cast<std::uint32_t>(min(first + token, p_.tokens - 1));
        copy_async_or_zero(to + token * kTokenBytes, from + std::uint64_t{row} * stride, is_there);
      }
    }
  }

  const CodedProductParams& p_;
  int warp_;  // of the team
  std::byte* slots_;
  std::uint32_t barriers_;
  int column_;  // of the next request
  int left_;    // units
  Turn requested_;
  Turn taken_;
};

// Sums of a warp, in the layout of mma's d.
template <int kTokenTiles>
using WarpSums = float[kWarpTiles][kTokenTiles][4];

// acc += a group of a warp's tiles times its inputs, from the first byte that the lane reads on.
// Products that follow each other add to different sums.
template <typename T, int kTokenTiles>
__device__ __forceinline__ void multiply_group(const Fragments (&weights)[kWarpTiles],
                                               const std::byte* inputs,
                                               WarpSums<kTokenTiles>& acc) {
  uint4 x[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    x[n] = *reinterpret_cast<const uint4*>(inputs + n * kMmaColumns * kTokenBytes);
  }
#pragma unroll
  for (int i = 0; i < kTokenTiles * kWarpTiles; ++i) {
    const int m = i % kWarpTiles;
    const int n = i / kWarpTiles;
    mma(T(), acc[m][n], weights[m][0], x[n].x, x[n].y);
  }
#pragma unroll
  for (int i = 0; i < kTokenTiles * kWarpTiles; ++i) {
    const int m = i % kWarpTiles;
    const int n = i / kWarpTiles;
    mma(T(), acc[m][n], weights[m][1], x[n].z, x[n].w);
  }
}

// acc += a warp's tiles times a unit's inputs. Weights are decoded a group ahead.
template <WeightCode kCode, typename T, int kTokenTiles>
__device__ __forceinline__ void multiply_unit(const std::byte* tiles, const std::byte* inputs,
                                              std::uint32_t pairs, WarpSums<kTokenTiles>& acc) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::byte* const own = inputs + lane / 4 * kTokenBytes + lane % 4 * 16;
  Fragments weights[2][kWarpTiles];
  const auto decode = [&](int group) {
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m) {
      load_weights<kCode, T>(tiles + m * CodedTile<kCode>::kBytes, group, pairs,
                             weights[group % 2][m]);
    }
  };
  decode(0);
#pragma unroll
  for (int group = 0; group < kTileGroups; ++group) {
    if (group + 1 < kTileGroups) decode(group + 1);
    multiply_group<T, kTokenTiles>(weights[group % 2],
                                   own + place_in_token(lane / 4, group * kGroupBytes), acc);
  }
}

__device__ __forceinline__ void add_four(float (&sums)[4], const float4& others) {
  sums[0] += others.x;
  sums[1] += others.y;
  sums[2] += others.z;
  sums[3] += others.w;
}

// Through which the teams of a block hand their sums of a part to the team that finishes it, a tile
// of each warp at a time. The others go on to the next part.
template <int kTokenTiles>
class TeamSums {
 public:
  // `tiles`: how often a tile is handed over in the whole kernel. `shared` has room for a tile of
  // every warp but those of one team.
  __device__ TeamSums(float4* shared, int team, int warp, int teams, int tiles)
      : shared_(shared + warp * kTokenTiles * kWarp),
        team_(team),
        warp_(warp),
        teams_(teams),
        left_(tiles) {}

  // Adds the other teams' sums to those of `to`, in an order that depends on `to` alone.
  __device__ __forceinline__ void add(int to, WarpSums<kTokenTiles>& sums) {
    constexpr int kTeamVectors = kTeamWarps * kTokenTiles * kWarp;
    float4* const at = shared_ + static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m) {
      --left_;
      if (team_ != to) {
        float4* const own = at + (team_ < to ? team_ : team_ - 1) * kTeamVectors;
        if (is_used_) wait(kRead);
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          const float(&from)[4] = sums[m][n];
          own[n * kWarp] = {from[0], from[1], from[2], from[3]};
        }
        arrive(kWritten);
      } else {
        wait(kWritten);
        for (int other = 0; other < teams_ - 1; ++other) {
#pragma unroll
          for (int n = 0; n < kTokenTiles; ++n) {
            add_four(sums[m][n], at[other * kTeamVectors + n * kWarp]);
          }
        }
        if (left_ > 0) arrive(kRead);
      }
      is_used_ = true;
    }
  }

 private:
  // Barriers of the warps that have the same rows; the first of each four.
  static constexpr int kWritten = 1;
  static constexpr int kRead = 1 + kTeamWarps;
  __device__ void wait(int barrier) const {
    asm volatile("bar.sync %0, %1;\n" ::"r"(barrier + warp_), "r"(teams_ * kWarp) : "memory");
  }
  __device__ void arrive(int barrier) const {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier + warp_), "r"(teams_ * kWarp) : "memory");
  }

  float4* shared_;
  int team_;
  int warp_;
  int teams_;
  int left_;
  bool is_used_ = false;
};

// Adds up a warp's sums of a part over the blocks that share it, `first` to `last`, in order.
// Returns false unless this block comes last.
template <int kTokenTiles>
__device__ __forceinline__ bool add_blocks(const CodedProductParams& p, int first, int last,
                                           int warp, WarpSums<kTokenTiles>& sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // A block shares its last part, which it is the first to have, and its first one.
  const auto of_block = [&](int block) {
    const int place = (2 * block + (block == first ? 1 : 0)) * kTeamWarps + warp;
    return reinterpret_cast<float4*>(p.partial) + place * kWarpTiles * kTokenTiles * kWarp + lane;
  };
  float4* const own = of_block(static_cast<int>(blockIdx.x));
#pragma unroll
  for (int i = 0; i < kWarpTiles * kTokenTiles; ++i) {
    const float(&from)[4] = sums[i / kTokenTiles][i % kTokenTiles];
    __stcg(own + i * kWarp, float4{from[0], from[1], from[2], from[3]});
  }
  __syncwarp();
  std::uint32_t* const ticket = &p.tickets[first * kTeamWarps + warp];
  const bool is_last = lane == 0 && takes_last_ticket(ticket, last - first + 1);
  if (!__shfl_sync(kAllLanes, static_cast<int>(is_last), 0)) return false;
#pragma unroll
  for (int i = 0; i < kWarpTiles * kTokenTiles * 4; ++i) {
    sums[i / 4 / kTokenTiles][i / 4 % kTokenTiles][i % 4] = 0.0f;
  }
#pragma unroll 2
  for (int block = first; block <= last; ++block) {
    const float4* const from = of_block(block);
#pragma unroll
    for (int i = 0; i < kWarpTiles * kTokenTiles; ++i) {
      add_four(sums[i / kTokenTiles][i % kTokenTiles], __ldcg(from + i * kWarp));
    }
  }
  if (lane == 0) *ticket = 0;
  return true;
}

template <int kTokenTiles>
__device__ __forceinline__ void store_sums(const CodedProductParams& p, int part, int warp,
                                           const WarpSums<kTokenTiles>& sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t row = std::int64_t{part} * kPartRows + warp * kWarpTiles;
#pragma unroll
  for (int i = 0; i < kWarpTiles * 2; ++i) {
    const std::int64_t output = (row + i / 2) * kTileOutputs + lane / 4 + i % 2 * 8;
    if (output >= p.outputs) continue;
    const float bias = p.bias != nullptr ? p.bias[output] : 0.0f;
#pragma unroll
    for (int n = 0; n < kTokenTiles * 2; ++n) {
      const int token = n / 2 * kMmaColumns + lane % 4 * 2 + n % 2;
      if (token >= p.tokens) continue;
      float& y = static_cast<float*>(p.y)[token * p.y_stride + output];
      const float sum = sums[i / 2][n / 2][i % 2 * 2 + n % 2] + bias;
      y = p.accumulate ? y + sum : sum;
    }
  }
}

template <WeightCode kCode, typename T, int kTokenTiles>
__global__ void __launch_bounds__(kMostTeams<kTokenTiles>* kTeamWarps* kWarp, 1)
    batch_kernel(const __grid_constant__ CodedProductParams p) {
  using Tile = CodedTile<kCode>;
  using Walk = UnitWalk<Tile::kBytes>;
  using Ring = TileRing<Walk, kWarpTiles, Tile::kBytes, kBatchStages>;
  using Inputs = TeamInputs<kTokenTiles>;
  constexpr int kTeams = kMostTeams<kTokenTiles>;
  // The table of pairs, rings, slots, and sums of all teams but one.
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint64_t ring_barriers[kTeams * kTeamWarps][kBatchStages];
  __shared__ std::uint64_t slot_barriers[kTeams][2 * kMostSlots];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int team = warp / kTeamWarps;
  const int of_team = warp % kTeamWarps;
  const BlockUnits units(p);
  std::byte* const rings = shared + kPairTableBytes<kCode>;
  std::byte* const slots = rings + p.teams * kTeamWarps * kBatchStages * Ring::kStageBytes;
  auto* const sums = reinterpret_cast<float4*>(slots + p.teams * p.slots * Inputs::kSlotBytes);

  allow_next_kernel();
  Ring ring(Walk(p, units, team, of_team * kWarpTiles),
            rings + warp * kBatchStages * Ring::kStageBytes, ring_barriers[warp]);
  Inputs inputs(p, units, team, of_team, slots + team * p.slots * Inputs::kSlotBytes,
                slot_barriers[team]);
  if (threadIdx.x % (kTeamWarps * kWarp) == 0) inputs.init();
  __syncthreads();
  wait_for_kernel_before();
  for (int i = 0; i + 1 < p.slots; ++i) inputs.request();
  build_pairs<kCode, T>(p, shared);
  __syncthreads();

  const std::uint32_t pairs = shared_address(shared) + static_cast<unsigned>(lane) * 4;
  const int first_part = units.first / p.columns;
  const int parts = (units.first + units.count - 1) / p.columns + 1 - first_part;
  TeamSums<kTokenTiles> team_sums(sums, team, of_team, p.teams, parts * kWarpTiles);
  int unit = team;
  int to = 0;  // the team that finishes the part
  for (int part = first_part; part < first_part + parts; ++part) {
    const int end = min((part + 1) * p.columns - units.first, units.count);
    WarpSums<kTokenTiles> acc = {};
    for (; unit < end; unit += p.teams) {
      inputs.request();
      const std::byte* const tiles = ring.take();
      const std::byte* const slot = inputs.take();
      multiply_unit<kCode, T, kTokenTiles>(tiles, slot, pairs, acc);
      ring.release();
      inputs.release();
    }
    if (p.teams > 1) team_sums.add(to, acc);
    if (team == to) {
      const int first = part * p.columns / p.block_units;
      const int last = ((part + 1) * p.columns - 1) / p.block_units;
      if (first == last || add_blocks<kTokenTiles>(p, first, last, of_team, acc)) {
        store_sums<kTokenTiles>(p, part, of_team, acc);
      }
    }
    to = to + 1 == p.teams ? 0 : to + 1;
  }
}

template <WeightCode kCode>
void launch_batch_kernel(const CodedProductParams& params, DType dtype, const CodedLaunch& shape,
                         const Launch& launch) {
  const auto run = [&](auto kernel) {
    launch_early("coded_gemm", kernel, dim3(static_cast<unsigned>(shape.blocks)),
                 dim3(static_cast<unsigned>(shape.warps * kWarp)), shape.shared_bytes, launch,
                 params);
  };
  dispatch_rows(dtype, [&](auto element) {
    using T = decltype(element);
    dispatch_token_tiles(params.tokens, [&](auto token_tiles) {
      run(batch_kernel<kCode, T, decltype(token_tiles)::value>);
    });
  });
}

}  // namespace sluice::cuda
