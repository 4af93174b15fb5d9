#include <algorithm>

#include "kernels/dense/dense.h"
#include "kernels/dense/rms_norm.cuh"
#include "kernels/runtime/barriers.cuh"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/early_launch.cuh"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

// Warps stream their own rows, chunk by chunk, through rings in shared memory. One block per
// multiprocessor, because more than 100 KiB must be in flight on each to saturate an H200's memory.
constexpr int kMostWarps = 16;
constexpr int kLeastWarps = 4;  // fewer are not worth it
constexpr int kChunkBytes = 4096;
constexpr int kMostStages = 3;
constexpr int kUnitBytes = 16;  // per lane at a time

struct GemvKernelParams {
  const std::byte* weight;  // [rows, row_bytes]
  const std::byte* x;       // [row_bytes]; f32 if it is cast or normalised first
  bool is_cast;
  const float* norm;  // [inputs] or null
  float epsilon;
  const float* bias;
  void* y;               // f32, or the weights' dtype after swiglu
  std::int64_t outputs;  // after swiglu, which halves the number of rows
  int row_bytes;
  bool accumulate;
  bool swiglu;
};

// Outputs [first, last) are this warp's. Neighbouring warps of the grid are in different blocks, so
// that few outputs occupy many multiprocessors.
struct Share {
  std::int64_t first;
  std::int64_t last;

  __device__ explicit Share(std::int64_t outputs) {
    const std::int64_t warps = std::int64_t{gridDim.x} * (blockDim.x / kWarp);
    const std::int64_t self = threadIdx.x / kWarp * std::int64_t{gridDim.x} + blockIdx.x;
    first = outputs * self / warps;
    last = outputs * (self + 1) / warps;
  }
};

// Ring of the chunks of a warp's rows, row by row; with swiglu, an output's gate row, then its up
// row. Only the last chunk of a row is shorter.
template <int kStages>
class Ring {
 public:
  __device__ Ring(const GemvKernelParams& p, const Share& share, std::byte* stages,
                  std::uint64_t* barriers)
      : p_(p), share_(share), stages_(stages), barriers_(barriers) {
    rows_ = static_cast<int>(share.last - share.first) * (p.swiglu ? 2 : 1);
    next_ = begin_of(0);
    if constexpr (kBulkCopies) {
      if (lane() == 0) {
        for (int i = 0; i < kStages; ++i) barrier_init(shared_address(&barriers[i]), 1);
        barrier_init_fence();
      }
      __syncwarp();
    }
    for (int i = 0; i < kStages - 1; ++i) fetch(i);
  }

  // Waits for the next chunk.
  __device__ const std::byte* take() {
    if constexpr (kBulkCopies) {
      barrier_wait(shared_address(&barriers_[stage_]), phases_ >> stage_ & 1u);
      phases_ ^= 1u << stage_;
    } else {
      copy_async_wait<kStages - 2>();
      __syncwarp();
    }
    return stages_ + stage_ * kChunkBytes;
  }
  // Frees the stage of the chunk that take() gave.
  __device__ void release() {
    __syncwarp();
    fetch(stage_ == 0 ? kStages - 1 : stage_ - 1);
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  // Start of this warp's row `i`.
  __device__ const std::byte* begin_of(int i) const {
    const std::int64_t row =
        p_.swiglu ? share_.first + i / 2 + i % 2 * p_.outputs : share_.first + i;
    return p_.weight + row * p_.row_bytes;
  }
  __device__ void fetch(int stage) {
    if (row_ < rows_) {
      const int bytes = min(kChunkBytes, p_.row_bytes - at_);
      copy(stage, bytes);
      next_ += bytes;
      at_ += bytes;
      if (at_ == p_.row_bytes) {
        at_ = 0;
        next_ = begin_of(++row_);
      }
    }
    if constexpr (!kBulkCopies) copy_async_commit();
  }
  __device__ void copy(int stage, int bytes) const {
    std::byte* const to = stages_ + stage * kChunkBytes;
    if constexpr (kBulkCopies) {
      if (lane() != 0) return;
      const std::uint32_t barrier = shared_address(&barriers_[stage]);
      barrier_expect(barrier, static_cast<std::uint32_t>(bytes));
      copy_bulk(to, next_, static_cast<std::uint32_t>(bytes), barrier);
    } else {
      for (int i = lane() * kUnitBytes; i < bytes; i += kWarp * kUnitBytes) {
        copy_async_or_zero(to + i, next_ + i, true);
      }
    }
  }

  const GemvKernelParams& p_;
  const Share& share_;
  std::byte* stages_;
  std::uint64_t* barriers_;
  int rows_;               // of this warp
  int row_ = 0;            // of the next chunk
  int at_ = 0;             // offset of the next chunk in its row
  const std::byte* next_;  // the next chunk
  int stage_ = 0;
  std::uint32_t phases_ = 0;  // phases of the barriers, one bit each
};

template <typename T>
struct Unit {
  T at[kUnitBytes / sizeof(T)];
};

// A lane's sums: several, so that a product need not wait for the one before.
struct Sums {
  static constexpr int kCount = 4;
  float at[kCount] = {};

  __device__ __forceinline__ float total() const { return (at[0] + at[1]) + (at[2] + at[3]); }
};

// Adds this lane's products of a chunk.
template <typename T>
__device__ __forceinline__ void multiply(const std::byte* weights, const std::byte* x, int bytes,
                                         Sums& sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 4
  for (int i = lane * kUnitBytes; i < bytes; i += kWarp * kUnitBytes) {
    const int4 weight_bits = *reinterpret_cast<const int4*>(weights + i);
    const int4 x_bits = *reinterpret_cast<const int4*>(x + i);
    const auto& w = reinterpret_cast<const Unit<T>&>(weight_bits);
    const auto& in = reinterpret_cast<const Unit<T>&>(x_bits);
#pragma unroll
    for (int c = 0; c < kUnitBytes / static_cast<int>(sizeof(T)); ++c) {
      float& sum = sums.at[c % Sums::kCount];
      sum = fmaf(to_float(w.at[c]), to_float(in.at[c]), sum);
    }
  }
}

// Loads the inputs, cast or normalised if the chain asks for it; all threads call it.
template <typename T>
__device__ __forceinline__ void load_inputs(const GemvKernelParams& p, std::byte* to) {
  if (!p.is_cast) {
    for (int i = static_cast<int>(threadIdx.x) * kUnitBytes; i < p.row_bytes;
         i += static_cast<int>(blockDim.x) * kUnitBytes) {
      *reinterpret_cast<int4*>(to + i) = *reinterpret_cast<const int4*>(p.x + i);
    }
    return;
  }
  const auto* const from = reinterpret_cast<const float*>(p.x);
  auto* const x = reinterpret_cast<T*>(to);
  const auto inputs = p.row_bytes / static_cast<int>(sizeof(T));
  if (p.norm != nullptr) return normalise<T, 4>(from, p.norm, p.epsilon, x, inputs);
  for_columns<4>(inputs, [&](std::int64_t c) {
    const auto values = load_columns<4>(from + c);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[c + i] = from_float<T>(values.at[i]);
  });
}

// The product with a row, in every lane.
template <typename T, int kStages>
__device__ __forceinline__ float row_product(Ring<kStages>& ring, const std::byte* x,
                                             int row_bytes) {
  Sums sums;
  for (int at = 0; at < row_bytes; at += kChunkBytes) {
    multiply<T>(ring.take(), x + at, min(kChunkBytes, row_bytes - at), sums);
    ring.release();
  }
  return warp_sum(sums.total());
}

// The first weights are requested before the kernel that computes the inputs is over.
template <typename T, int kStages>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    gemv_kernel(const __grid_constant__ GemvKernelParams p) {
  extern __shared__ __align__(16) std::byte shared[];  // rings, then x
  __shared__ std::uint64_t barriers[kMostWarps][kStages];
  const auto warps = static_cast<int>(blockDim.x) / kWarp;
  const auto warp = static_cast<int>(threadIdx.x) / kWarp;
  const Share share(p.outputs);
  allow_next_kernel();
  Ring<kStages> ring(p, share, shared + warp * kStages * kChunkBytes, barriers[warp]);
  std::byte* const x = shared + warps * kStages * kChunkBytes;
  wait_for_kernel_before();
  load_inputs<T>(p, x);
  __syncthreads();
  for (std::int64_t output = share.first; output < share.last; ++output) {
    float sum = row_product<T>(ring, x, p.row_bytes);
    const float up = p.swiglu ? row_product<T>(ring, x, p.row_bytes) : 0.0f;
    if (threadIdx.x % kWarp != 0) continue;
    if (p.swiglu) {
      static_cast<T*>(p.y)[output] = from_float<T>(swiglu_of(sum, up));
      continue;
    }
    float& y = static_cast<float*>(p.y)[output];
    if (p.bias != nullptr) sum += p.bias[output];
    y = p.accumulate ? y + sum : sum;
  }
}

std::int64_t shared_bytes(std::int64_t row_bytes, int warps, int stages) {
  return std::int64_t{warps} * stages * kChunkBytes + row_bytes;
}

bool fits(std::int64_t row_bytes, int warps, int stages, const DeviceLimits& device) {
  constexpr int kStatic = 1024;  // barriers, and what the system takes
  return shared_bytes(row_bytes, warps, stages) + kStatic <= device.shared_bytes;
}

std::int64_t row_bytes_of(const Matrix& x) {
  return x.columns * static_cast<std::int64_t>(size_of(x.dtype));
}

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

// The source of the inputs.
const Matrix& source_of(const LinearChain& chain) {
  if (chain.norm) return chain.norm->x;
  return chain.cast ? chain.cast->from : chain.linear.x;
}

template <typename T, int kStages>
void launch_stages(const GemvKernelParams& p, int warps, const Launch& launch) {
  const auto kernel = gemv_kernel<T, kStages>;
  const auto shared = static_cast<std::size_t>(shared_bytes(p.row_bytes, warps, kStages));
  const auto blocks = std::min<std::int64_t>(launch.device->multiprocessors, p.outputs);
  launch_early("gemv", kernel, dim3(static_cast<unsigned>(blocks)), dim3(warps * kWarp), shared,
               launch, p);
}

// The number of warps: limited by rows and by shared memory.
template <typename T>
void launch_typed(const GemvKernelParams& p, const Launch& launch) {
  const std::int64_t rows =
      (p.outputs + launch.device->multiprocessors - 1) / launch.device->multiprocessors;
  auto warps = static_cast<int>(std::min<std::int64_t>(kMostWarps, rows));
  if (fits(p.row_bytes, warps, kMostStages, *launch.device)) {
    return launch_stages<T, kMostStages>(p, warps, launch);
  }
  while (!fits(p.row_bytes, warps, 2, *launch.device)) --warps;
  launch_stages<T, 2>(p, warps, launch);
}

}  // namespace

bool gemv_supported(const LinearChain& chain, const DeviceLimits& device) {
  const Matrix& x = chain.linear.x;
  const Matrix& from = source_of(chain);
  if (chain.cast && from.dtype != DType::f32) return false;
  return x.rows == 1 && row_bytes_of(x) % kUnitBytes == 0 && x.columns % 4 == 0 &&
         is_aligned(from.data) && (!chain.norm || is_aligned(chain.norm->weight)) &&
         fits(row_bytes_of(x), kLeastWarps, 2, device);
}

void gemv(const LinearChain& chain, const void* weight, const Launch& launch) {
  const LinearParams& p = chain.linear;
  GemvKernelParams k{};
  k.weight = static_cast<const std::byte*>(weight);
  k.x = static_cast<const std::byte*>(source_of(chain).data);
  k.is_cast = chain.norm || chain.cast;
  if (chain.norm) {
    k.norm = chain.norm->weight;
    k.epsilon = chain.norm->epsilon;
  }
  k.bias = p.bias;
  k.y = p.y.data;
  k.outputs = p.y.columns;
  k.row_bytes = static_cast<int>(row_bytes_of(p.x));
  k.accumulate = p.accumulate;
  k.swiglu = chain.swiglu.has_value();
  if (k.swiglu) {
    check(p.bias == nullptr && !p.accumulate, "gemv: swiglu of a sum");
    check(chain.swiglu->y.dtype == p.x.dtype, "gemv: swiglu in another dtype");
    k.y = chain.swiglu->y.data;
    k.outputs = chain.swiglu->y.columns;
  }
  if (p.x.dtype == DType::f32) return launch_typed<float>(k, launch);
  dispatch_rows(p.x.dtype, [&](auto element) { launch_typed<decltype(element)>(k, launch); });
}

}  // namespace sluice::cuda
