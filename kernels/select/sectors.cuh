// Reads again only the sectors that may matter.
#pragma once

#include <cstdint>

#include "kernels/select/chain.cuh"

namespace sluice::cuda {

// Called by one warp: queues the sectors of a strip that are to be read, in order, so that
// neighbours are read together. Every lane has two neighbouring sectors; returns the number queued.
__device__ __forceinline__ int queue_sectors(bool first, bool second, std::uint16_t base,
                                             std::uint16_t* queue) {
  const auto lane = static_cast<std::uint32_t>(threadIdx.x) % kWarp;
  const std::uint32_t before = (1u << lane) - 1u;
  const unsigned firsts = __ballot_sync(kAllLanes, first);
  const unsigned seconds = __ballot_sync(kAllLanes, second);
  const auto sector = static_cast<std::uint16_t>(base + 2 * lane);
  const int at = __popc(firsts & before) + __popc(seconds & before);
  if (first) queue[at] = sector;
  if (second) queue[at + (first ? 1 : 0)] = static_cast<std::uint16_t>(sector + 1);
  return __popc(firsts) + __popc(seconds);
}

// Called by one warp: calls body(i) for the halves of the queued sectors, entries i to i + 8
// counted from `first`; two lanes share a sector.
template <typename Body>
__device__ __forceinline__ void visit_sectors(const std::uint16_t* queue, int count,
                                              std::int32_t first, const Body& body) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  for (std::int32_t at = lane / 2; at < count; at += kWarp / 2) {
    body(first + queue[at] * kSector + lane % 2 * 8);
  }
}

}  // namespace sluice::cuda
