// Finds the last of several blocks to finish its part.
#pragma once

#include <cstdint>

namespace sluice::cuda {

// Counts this block in; one thread calls it. Returns true for the last of `count` blocks, which
// sees all writes that the others made before the block barrier that precedes this call.
__device__ __forceinline__ bool takes_last_ticket(std::uint32_t* tickets, std::int32_t count) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(tickets)
               : "memory");
  return before + 1 == static_cast<std::uint32_t>(count);
}

}  // namespace sluice::cuda
