// Small functions that kernels share: conversions, warp-wide operations, asynchronous copies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sluice::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.69314718055994531f;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// silu(gate) * up
__device__ __forceinline__ float swiglu_of(float gate, float up) {
  return gate / (1.0f + expf(-gate)) * up;
}

__device__ __forceinline__ __half2 as_half2(std::uint32_t word) {
  return *reinterpret_cast<const __half2*>(&word);
}

// The larger of two; NaN if either is NaN.
__device__ __forceinline__ float larger_of(__half2 pair) {
  return __half2float(__hmax_nan(__low2half(pair), __high2half(pair)));
}

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  return static_cast<T>(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(kAllLanes, x, lane);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}

// The sum of `x` over the lanes up to this one.
template <typename T>
__device__ __forceinline__ T warp_inclusive(T x) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T below = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += below;
  }
  return x;
}

// The sum of `x` over the threads before this one; `total` over all. `part` is [kWarp] of shared
// memory, free to use on entry and in use until the next barrier.
template <typename T>
__device__ inline T block_exclusive(T x, T* part, T& total) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const T inclusive = warp_inclusive(x);
  if (lane == kWarp - 1) part[warp] = inclusive;
  __syncthreads();
  const T own = lane < warps ? part[lane] : T(0);
  const T scanned = warp_inclusive(own);
  total = __shfl_sync(kAllLanes, scanned, warps - 1);
  const T before = __shfl_sync(kAllLanes, scanned - own, warp);
  return before + inclusive - x;
}

// The number of elements of an ascending list below `bound`, by one warp.
__device__ inline std::int32_t count_below(const std::int32_t* list, std::int32_t count,
                                           std::int64_t bound) {
  if (count == 0 || bound <= 0) return 0;
  if (list[count - 1] < bound) return count;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  std::int32_t low = 0;  // all before are below, none from `high` on is
  std::int32_t high = count;
  while (low < high) {
    const std::int32_t step = (high - low + kWarp - 1) / kWarp;
    const std::int32_t at = low + lane * step;
    const int many = __popc(__ballot_sync(kAllLanes, at < high && list[at] < bound));
    if (many == 0) return low;
    const std::int32_t first = low + (many - 1) * step;
    high = min(high, first + step);
    low = first + 1;
  }
  return low;
}

// Two elements in one register, the first in the low half.
__device__ __forceinline__ std::uint32_t pack(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ std::uint32_t pack(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// d += a b with d [16, 8], a [16, 16], b [16, 8], in fp32: mma.m16n8k16 (PTX ISA 8, "Matrix
// Fragments for mma.m16n8k16"). Lane l holds
//   d[0], d[1]   row l/4, columns 2 (l%4) and the next; d[2], d[3] the same of row l/4 + 8
//   a[0] to a[3] rows l/4, l/4 + 8, l/4, l/4 + 8; inner elements 2 (l%4) and the next, from a[2] on
//                8 further
//   b0, b1       column l/4; inner elements as in a[0] and a[2]
// The inner order is free as long as a and b agree; several kernels use that.
__device__ __forceinline__ void mma(__nv_bfloat16, float (&d)[4], const std::uint32_t (&a)[4],
                                    std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(__half, float (&d)[4], const std::uint32_t (&a)[4],
                                    std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 matrices of 16-bit elements; lane l names row l%8 of matrix l/8.
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// 16 bytes from global (or mapped host) to shared memory, past the L1 cache, if `valid`, else 16
// zeros; `from` must be readable either way.
__device__ __forceinline__ void copy_async_or_zero(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)),
               "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_word(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Bulk copy (TMA), from compute capability 9.0 on: `bytes`, a multiple of 16, from global (or
// mapped host) to shared memory; both sides aligned to 16. One lane issues it and `barrier` counts
// the bytes, see barrier_expect(). The data is used once, so the L2 cache evicts it first.
__device__ __forceinline__ void copy_bulk(std::uint32_t to, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  std::uint64_t once = 0;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(once));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;\n" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(once)
      : "memory");
}
__device__ __forceinline__ void copy_bulk(void* to, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  copy_bulk(shared_address(to), from, bytes, barrier);
}

}  // namespace sluice::cuda
