// Thread-block clusters: blocks that run at the same time and access each other's shared memory
// (DSMEM), from compute capability 9.0 on. Source: PTX ISA 8, "Cluster of Cooperative Thread
// Arrays".
#pragma once

#include <cstdint>

#include "kernels/runtime/device_math.cuh"

namespace sluice::cuda {

// A block's view of its cluster. An address in another block is named by the same object in this
// block. No block may be accessed before all blocks have begun, or after one may have ended.
class Cluster {
 public:
  int rank = 0;
  int size = 1;

  __device__ Cluster() {
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  }

  // All threads of all blocks arrive and wait in turns: writes before arrive() are visible to
  // threads that have waited.
  __device__ __forceinline__ void arrive() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void sync() const {
    arrive();
    wait();
  }

  // The object in another block at the place of `own` in this one.
  template <typename T>
  __device__ __forceinline__ T* of(T* own, int other) const {
#if __CUDA_ARCH__ >= 900
    std::uint64_t there = 0;
    asm("mapa.u64 %0, %1, %2;"
        : "=l"(there)
        : "l"(reinterpret_cast<std::uint64_t>(own)), "r"(other));
    return reinterpret_cast<T*>(there);
#else
    return own;
#endif
  }

  // Writes `x` in another block where `own` lies in this one, asynchronously. The other block's
  // `barrier` counts the bytes, and its threads see them after barrier_wait_for_cluster(). Cheaper
  // than sync(), which orders all memory.
  __device__ __forceinline__ void send(std::uint32_t* own, int other, std::uint32_t barrier,
                                       std::uint32_t x) const {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
            there(shared_address(own), other)),
        "r"(x), "r"(there(barrier, other))
        : "memory");
#endif
  }
  __device__ __forceinline__ void send(uint2* own, int other, std::uint32_t barrier,
                                       uint2 x) const {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::
            "r"(there(shared_address(own), other)),
        "r"(x.x), "r"(x.y), "r"(there(barrier, other))
        : "memory");
#endif
  }
  __device__ __forceinline__ void send(uint4* own, int other, std::uint32_t barrier,
                                       uint4 x) const {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(there(shared_address(own), other)),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(there(barrier, other))
        : "memory");
#endif
  }

 private:
  __device__ __forceinline__ static std::uint32_t there(std::uint32_t own, int other) {
    std::uint32_t address = own;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(other));
#endif
    return address;
  }
};

}  // namespace sluice::cuda
