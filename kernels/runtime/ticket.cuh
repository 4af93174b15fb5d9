// Which of several blocks is the last to have done its part.
#pragma once

#include <cstdint>

namespace sluice::cuda {

// By one thread: counts its block in; true for the last of `count` blocks, which sees what all of
// them wrote before the barrier that they passed ahead of this.
__device__ __forceinline__ bool takes_last_ticket(std::uint32_t* tickets, std::int32_t count) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(tickets)
               : "memory");
  return before + 1 == static_cast<std::uint32_t>(count);
}

}  // namespace sluice::cuda
