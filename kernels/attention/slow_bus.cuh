// A simulated slower bus between host memory and the device, to measure on a server how long decode
// takes on another machine's bus. Compiled into decode.cu alone, and only if the project is
// configured with SLUICE_PRETEND_GPU.
//
// Rows cross it one after the other, at its rate: each waits for all earlier requests, from any
// block. Only rows that decode attention reads from host memory cross it, not rows that are
// written, and not prefill.
#pragma once

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace sluice::cuda {

#ifdef SLUICE_PRETEND_GPU
constexpr bool kBusMayPassForSlower = true;
#else
constexpr bool kBusMayPassForSlower = false;
#endif

struct SlowBus {
  unsigned long long* free_at = nullptr;  // when all requests are done, ns; null: not slower
  float byte_ns = 0.0f;

  SlowBus() = default;
  explicit SlowBus(const Launch& launch) {
    if (!kBusMayPassForSlower || launch.device->bus_rate == 0) return;
    free_at = launch.bus_free_at;
    byte_ns = 1e9f / static_cast<float>(launch.device->bus_rate);
  }
};

// Returns when `bytes` bytes have crossed. One lane.
__device__ __forceinline__ void wait_to_cross(const SlowBus& bus, int bytes) {
  const auto now = [] {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
  };
  const auto cost = static_cast<unsigned long long>(static_cast<float>(bytes) * bus.byte_ns + 0.5f);
  // Starts now if nothing is under way. Hundreds of warps ask at once, so none retries.
  atomicMax(bus.free_at, now());
  const unsigned long long end = atomicAdd(bus.free_at, cost) + cost;
  while (now() < end) __nanosleep(20);
}

}  // namespace sluice::cuda
