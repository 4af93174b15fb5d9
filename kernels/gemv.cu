#include "kernels/device_math.cuh"
#include "kernels/dispatch.h"
#include "kernels/error.h"
#include "kernels/gemv.h"

namespace sluice::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxTokens = 8;
constexpr int kAhead = 4;  // 16-byte loads of a lane under way at a time

template <typename T>
struct Chunk {
  static constexpr int kCount = 16 / sizeof(T);
  T at[kCount];
};

template <typename T>
__device__ Chunk<T> load_weight(const T* from) {
  const int4 bits = __ldcs(reinterpret_cast<const int4*>(from));
  return *reinterpret_cast<const Chunk<T>*>(&bits);
}

template <typename T>
__device__ Chunk<T> load_input(const T* from) {
  const int4 bits = __ldg(reinterpret_cast<const int4*>(from));
  return *reinterpret_cast<const Chunk<T>*>(&bits);
}

// One warp for each output.
template <typename T, int kTokens>
__global__ void __launch_bounds__(kWarps* kWarp)
    gemv_kernel(const T* weight, const T* x, std::int64_t x_stride, const float* bias, float* y,
                std::int64_t y_stride, std::int64_t outputs, std::int64_t inputs, int tokens,
                bool accumulate) {
  constexpr int kCount = Chunk<T>::kCount;
  constexpr int kStep = kCount * kWarp;
  const std::int64_t output = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (output >= outputs) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* const row = weight + output * inputs;
  float sums[kTokens] = {};
  for (std::int64_t first = lane * kCount; first < inputs; first += kStep * kAhead) {
    Chunk<T> w[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kStep < inputs) w[i] = load_weight(row + first + i * kStep);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t at = first + i * kStep;
      if (at >= inputs) break;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= tokens) break;
        const Chunk<T> in = load_input(x + t * x_stride + at);
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          sums[t] = fmaf(to_float(w[i].at[c]), to_float(in.at[c]), sums[t]);
        }
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t >= tokens) break;
    float sum = warp_sum(sums[t]);
    if (lane != 0) continue;
    if (bias != nullptr) sum += bias[output];
    float& to = y[t * y_stride + output];
    to = accumulate ? to + sum : sum;
  }
}

template <typename T, int kTokens>
void launch(const GemvParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.y.columns + kWarps - 1) / kWarps);
  gemv_kernel<T, kTokens><<<blocks, kWarps * kWarp, 0, stream>>>(
      static_cast<const T*>(p.weight), static_cast<const T*>(p.x.data), p.x.stride, p.bias,
      static_cast<float*>(p.y.data), p.y.stride, p.y.columns, p.x.columns,
      static_cast<int>(p.x.rows), p.accumulate);
  require_launch("gemv");
}

template <typename T>
void launch_typed(const GemvParams& p, cudaStream_t stream) {
  if (p.x.rows == 1) return launch<T, 1>(p, stream);
  if (p.x.rows <= 4) return launch<T, 4>(p, stream);
  launch<T, kMaxTokens>(p, stream);
}

}  // namespace

bool gemv_supported(const GemvParams& p) {
  const auto whole = [&](std::int64_t elements) {
    return static_cast<std::size_t>(elements) * size_of(p.x.dtype) % 16 == 0;
  };
  return p.x.rows <= kMaxTokens && whole(p.x.columns) && whole(p.x.stride);
}

void gemv(const GemvParams& p, cudaStream_t stream) {
  if (p.x.dtype == DType::f32) return launch_typed<float>(p, stream);
  dispatch_rows(p.x.dtype, [&](auto element) { launch_typed<decltype(element)>(p, stream); });
}

}  // namespace sluice::cuda
