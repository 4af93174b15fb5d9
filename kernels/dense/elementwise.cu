#include <algorithm>

#include "kernels/dense/dense.h"
#include "kernels/dense/rms_norm.cuh"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/early_launch.cuh"
#include "lib/check.h"
#include "lib/rope_turns.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kNormThreads = 1024;
constexpr int kFrequencies = 128;  // half of the largest head_dim

template <typename Body>
void dispatch(DType dtype, const Body& body) {
  if (dtype == DType::f32) return body(0.0f);
  dispatch_rows(dtype, body);
}

unsigned blocks_for(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

template <typename T>
__global__ void embed_kernel(const T* table, std::int64_t rows, std::int64_t table_stride,
                             const TokenId* ids, float* y, std::int64_t y_stride,
                             std::int64_t columns) {
  take_turn();
  const TokenId id = ids[blockIdx.x];
  const T* const from = id >= 0 && id < rows ? table + id * table_stride : nullptr;
  for (std::int64_t c = threadIdx.x; c < columns; c += kThreads) {
    y[blockIdx.x * y_stride + c] = from != nullptr ? to_float(from[c]) : 0.0f;
  }
}

// One block for each row.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kNormThreads)
    rms_norm_kernel(const float* x, std::int64_t x_stride, const float* weight, float epsilon, T* y,
                    std::int64_t y_stride, std::int64_t columns) {
  take_turn();
  normalise<T, kWidth>(x + blockIdx.x * x_stride, weight, epsilon, y + blockIdx.x * y_stride,
                       columns);
}

struct RopeKernelParams {
  float* x;
  std::int64_t stride;
  std::int64_t vectors;  // tokens * heads
  int heads;
  int query_heads;
  int head_dim;
  const BatchToken* batch;  // or null
  std::int64_t first_position;
  const float* query_norm;
  const float* key_norm;
  float norm_epsilon;
  float factor;
  std::uint64_t turn_per_token[kFrequencies];
};

// One warp for each head of each token; a lane has up to kOwn pairs of channels. Angles are
// computed without waiting, because the tokens of a batch stay the same during a step.
template <int kOwn>
__global__ void rope_kernel(const __grid_constant__ RopeKernelParams p) {
  allow_next_kernel();
  const std::int64_t vector = std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (vector >= p.vectors) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t token = vector / p.heads;
  const auto head = static_cast<int>(vector % p.heads);
  const int half = p.head_dim / 2;
  const auto position = static_cast<std::uint64_t>(p.batch != nullptr ? p.batch[token].position
                                                                      : p.first_position + token);
  float sine[kOwn]{};
  float cosine[kOwn]{};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int c = lane + i * kWarp;
    if (c >= half) continue;
    // The same as angle_at(), in half turns.
    const auto turns = static_cast<std::int32_t>((p.turn_per_token[c] * position) >> 32);
    sincospif(static_cast<float>(turns) * 0x1p-31f, &sine[i], &cosine[i]);
    sine[i] *= p.factor;
    cosine[i] *= p.factor;
  }
  wait_for_kernel_before();
  float* const x = p.x + token * p.stride + static_cast<std::int64_t>(head) * p.head_dim;
  const float* const norm = head < p.query_heads ? p.query_norm : p.key_norm;
  float a[kOwn]{};
  float b[kOwn]{};
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int c = lane + i * kWarp;
    if (c >= half) continue;
    a[i] = x[c];
    b[i] = x[c + half];
    squares += a[i] * a[i] + b[i] * b[i];
  }
  float factor = 1.0f;
  if (norm != nullptr) {
    factor = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(p.head_dim) + p.norm_epsilon);
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int c = lane + i * kWarp;
    if (c >= half) continue;
    if (norm != nullptr) {
      a[i] *= factor * norm[c];
      b[i] *= factor * norm[c + half];
    }
    x[c] = a[i] * cosine[i] - b[i] * sine[i];
    x[c + half] = b[i] * cosine[i] + a[i] * sine[i];
  }
}

template <typename T>
__global__ void swiglu_kernel(const float* gate_up, std::int64_t stride, T* y,
                              std::int64_t y_stride, std::int64_t columns) {
  take_turn();
  const std::int64_t c = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (c >= columns) return;
  const float* const row = gate_up + blockIdx.y * stride;
  y[blockIdx.y * y_stride + c] = from_float<T>(swiglu_of(row[c], row[c + columns]));
}

template <typename From, typename To>
__global__ void cast_kernel(const From* from, std::int64_t from_stride, To* to,
                            std::int64_t to_stride, std::int64_t columns) {
  take_turn();
  const std::int64_t c = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (c >= columns) return;
  to[blockIdx.y * to_stride + c] = from_float<To>(to_float(from[blockIdx.y * from_stride + c]));
}

// One thread per element, in the order of the dense array.
template <typename From>
__global__ void read_heads_kernel(const __grid_constant__ ReadHeadsParams p) {
  take_turn();
  const HeadArray& from = p.from;
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= from.tokens * from.heads * from.head_dim) return;
  const std::int64_t vector = i / from.head_dim;
  const std::int64_t first =
      vector / from.heads * from.token_stride + vector % from.heads * from.head_stride;
  const float value =
      to_float(static_cast<const From*>(from.data)[first + i % from.head_dim]) * p.factor;
  const bool fits = fabsf(value) < p.limit;
  p.to[i] = fits ? value : 0.0f;
  if (!fits) p.bad[vector] = 1;
}

__global__ void bias_kernel(const float* bias, float* y, std::int64_t stride, std::int64_t columns,
                            bool accumulate) {
  take_turn();
  const std::int64_t c = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (c >= columns) return;
  float& to = y[blockIdx.y * stride + c];
  to = accumulate ? to + bias[c] : bias[c];
}

}  // namespace

void embed(const EmbedParams& p, const Launch& launch) {
  const Matrix& table = p.table;
  const Matrix& y = p.y;
  check(y.dtype == DType::f32, "embed: output must be f32");
  dispatch(table.dtype, [&](auto element) {
    using T = decltype(element);
    launch_early("embed", embed_kernel<T>, dim3(static_cast<unsigned>(y.rows)), kThreads, 0, launch,
                 static_cast<const T*>(table.data), table.rows, table.stride, p.ids,
                 static_cast<float*>(y.data), y.stride, table.columns);
  });
}

void rms_norm(const RmsNormParams& p, const Launch& launch) {
  const auto wide = [](const void* data, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(data) % sizeof(float4) == 0 && stride % 4 == 0;
  };
  const bool by_four = p.x.columns % 4 == 0 && wide(p.x.data, p.x.stride) && wide(p.weight, 0);
  const unsigned warps = blocks_for(p.x.columns, (by_four ? 4 : 1) * kWarp);
  const unsigned threads = std::clamp(warps * kWarp, 1u * kWarp, 1u * kNormThreads);
  dispatch(p.y.dtype, [&](auto element) {
    using T = decltype(element);
    launch_early("rms_norm", by_four ? rms_norm_kernel<T, 4> : rms_norm_kernel<T, 1>,
                 dim3(static_cast<unsigned>(p.x.rows)), threads, 0, launch,
                 static_cast<const float*>(p.x.data), p.x.stride, p.weight, p.epsilon,
                 static_cast<T*>(p.y.data), p.y.stride, p.x.columns);
  });
}

void rope(const RopeParams& p, const Launch& launch) {
  const int half = p.head_dim / 2;
  check(half <= kFrequencies, "rope: head_dim");
  RopeKernelParams k{};
  k.x = p.x;
  k.stride = p.stride;
  k.vectors = p.tokens * p.heads();
  k.heads = p.heads();
  k.query_heads = p.query_heads;
  k.head_dim = p.head_dim;
  k.batch = p.batch.tokens;
  k.first_position = p.first_position;
  k.query_norm = p.query_norm;
  k.key_norm = p.key_norm;
  k.norm_epsilon = p.norm_epsilon;
  k.factor = p.factor;
  std::transform(p.inverse_frequency, p.inverse_frequency + half, k.turn_per_token, turn_per_token);
  const auto kernel = half <= kWarp       ? rope_kernel<1>
                      : half <= 2 * kWarp ? rope_kernel<2>
                                          : rope_kernel<kFrequencies / kWarp>;
  launch_early("rope", kernel, dim3(blocks_for(k.vectors, kThreads / kWarp)), kThreads, 0, launch,
               k);
}

void swiglu(const SwigluParams& p, const Launch& launch) {
  dispatch(p.y.dtype, [&](auto element) {
    using T = decltype(element);
    const dim3 grid(blocks_for(p.y.columns, kThreads), static_cast<unsigned>(p.y.rows));
    launch_early("swiglu", swiglu_kernel<T>, grid, kThreads, 0, launch,
                 static_cast<const float*>(p.gate_up.data), p.gate_up.stride,
                 static_cast<T*>(p.y.data), p.y.stride, p.y.columns);
  });
}

void cast(const CastParams& p, const Launch& launch) {
  const auto& [from, to] = p;
  check(from.rows == to.rows && from.columns == to.columns, "cast: shapes disagree");
  const dim3 grid(blocks_for(to.columns, kThreads), static_cast<unsigned>(to.rows));
  dispatch(from.dtype, [&](auto source) {
    dispatch(to.dtype, [&](auto target) {
      using From = decltype(source);
      using To = decltype(target);
      launch_early("cast", cast_kernel<From, To>, grid, kThreads, 0, launch,
                   static_cast<const From*>(from.data), from.stride, static_cast<To*>(to.data),
                   to.stride, to.columns);
    });
  });
}

void read_heads(const ReadHeadsParams& p, const Launch& launch) {
  const std::int64_t elements = p.from.tokens * p.from.heads * p.from.head_dim;
  dispatch(p.from.dtype, [&](auto element) {
    launch_early("read_heads", read_heads_kernel<decltype(element)>,
                 dim3(blocks_for(elements, kThreads)), kThreads, 0, launch, p);
  });
}

void add_bias(const float* bias, const Matrix& y, bool accumulate, const Launch& launch) {
  const dim3 grid(blocks_for(y.columns, kThreads), static_cast<unsigned>(y.rows));
  launch_early("bias", bias_kernel, grid, kThreads, 0, launch, bias, static_cast<float*>(y.data),
               y.stride, y.columns, accumulate);
}

}  // namespace sluice::cuda
