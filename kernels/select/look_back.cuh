// Where a block's entries go, from the counts of the blocks before it, which it looks up while they
// come in. Blocks wait for those before them: the device starts blocks in their order.
// Source: Merrill and Garland 2016, "Single-pass parallel prefix scan with decoupled look-back".
#pragma once

#include <cstdint>

#include "kernels/select/common.cuh"

namespace sluice::cuda {

// Kept entries and those equal to the cut. While blocks exchange them, in one word with a flag.
struct Counts {
  std::uint32_t above = 0;
  std::uint32_t equal = 0;

  static constexpr std::uint64_t kOwn = std::uint64_t{1} << 62;  // of this chunk
  static constexpr std::uint64_t kAll = std::uint64_t{1} << 63;  // and of all before it

  __device__ std::uint64_t word(std::uint64_t flag) const {
    return flag | static_cast<std::uint64_t>(equal) << 31 | above;
  }
  __device__ static Counts of(std::uint64_t word) {
    return {static_cast<std::uint32_t>(word) & 0x7fffffffu,
            static_cast<std::uint32_t>(word >> 31) & 0x7fffffffu};
  }
};

// By one warp: the counts of all chunks before this one.
__device__ inline Counts look_back(const std::uint64_t* states, std::int32_t chunk) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Counts sum;
  for (std::int32_t last = chunk - 1; last >= 0; last -= kWarp) {
    const std::int32_t at = last - lane;
    std::uint64_t word = Counts::kAll;
    do {
      if (at >= 0) word = *static_cast<const volatile std::uint64_t*>(states + at);
    } while (__any_sync(kAllLanes, word == 0));
    const unsigned whole = __ballot_sync(kAllLanes, (word & Counts::kAll) != 0);
    const int nearest = whole == 0 ? kWarp : __ffs(static_cast<int>(whole)) - 1;
    Counts own = lane <= nearest ? Counts::of(word) : Counts();
    sum.above += __reduce_add_sync(kAllLanes, own.above);
    sum.equal += __reduce_add_sync(kAllLanes, own.equal);
    if (whole != 0) break;
  }
  return sum;
}

// By one warp: publishes this chunk's counts and returns those before it.
__device__ inline Counts exchange(std::uint64_t* states, std::int32_t chunk, const Counts& own) {
  const bool is_first_lane = threadIdx.x % kWarp == 0;
  auto* const state = static_cast<volatile std::uint64_t*>(states + chunk);
  if (is_first_lane && chunk > 0) *state = own.word(Counts::kOwn);
  const Counts before = look_back(states, chunk);
  if (is_first_lane) {
    *state = Counts{before.above + own.above, before.equal + own.equal}.word(Counts::kAll);
  }
  return before;
}

}  // namespace sluice::cuda
