#include <algorithm>

#include "kernels/device_math.cuh"
#include "kernels/dispatch.h"
#include "kernels/early_launch.cuh"
#include "kernels/elementwise.h"
#include "kernels/heads.h"
#include "kernels/rms_norm.cuh"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kNormThreads = 1024;
constexpr int kIds = 512;          // token ids that are one kernel's arguments
constexpr int kFrequencies = 128;  // half of the largest head_dim

template <typename Body>
void dispatch(DType dtype, const Body& body) {
  if (dtype == DType::f32) return body(0.0f);
  dispatch_rows(dtype, body);
}

unsigned blocks_for(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

struct Ids {
  TokenId at[kIds];
};

// Every kernel of this file is one of a chain of short ones: it lets the next begin and waits for
// the one before, after what it can do without it.
__device__ __forceinline__ void take_turn() {
  allow_next_kernel();
  wait_for_kernel_before();
}

template <typename T>
__global__ void embed_kernel(const T* table, std::int64_t table_stride,
                             const __grid_constant__ Ids ids, float* y, std::int64_t y_stride,
                             std::int64_t columns) {
  take_turn();
  const T* const from = table + ids.at[blockIdx.x] * table_stride;
  for (std::int64_t c = threadIdx.x; c < columns; c += kThreads) {
    y[blockIdx.x * y_stride + c] = to_float(from[c]);
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
  std::int64_t first_position;
  const float* query_norm;
  const float* key_norm;
  float norm_epsilon;
  float inverse_frequency[kFrequencies];
};

// One warp for each head of each token.
__global__ void rope_kernel(const __grid_constant__ RopeKernelParams p) {
  take_turn();
  const std::int64_t vector = std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (vector >= p.vectors) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t token = vector / p.heads;
  const auto head = static_cast<int>(vector % p.heads);
  float* const x = p.x + token * p.stride + static_cast<std::int64_t>(head) * p.head_dim;
  const float* const norm = head < p.query_heads ? p.query_norm : p.key_norm;
  const int half = p.head_dim / 2;
  float factor = 1.0f;
  if (norm != nullptr) {
    float squares = 0.0f;
    for (int c = lane; c < p.head_dim; c += kWarp) squares += x[c] * x[c];
    factor = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(p.head_dim) + p.norm_epsilon);
  }
  const auto position = static_cast<float>(p.first_position + token);
  for (int c = lane; c < half; c += kWarp) {
    float a = x[c];
    float b = x[c + half];
    if (norm != nullptr) {
      a *= factor * norm[c];
      b *= factor * norm[c + half];
    }
    float sine = 0.0f;
    float cosine = 0.0f;
    sincosf(position * p.inverse_frequency[c], &sine, &cosine);
    x[c] = a * cosine - b * sine;
    x[c + half] = b * cosine + a * sine;
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

__global__ void bias_kernel(const float* bias, float* y, std::int64_t stride, std::int64_t columns,
                            bool accumulate) {
  take_turn();
  const std::int64_t c = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (c >= columns) return;
  float& to = y[blockIdx.y * stride + c];
  to = accumulate ? to + bias[c] : bias[c];
}

template <typename T>
__global__ void append_kernel(const float* k, const float* v, std::int64_t stride, int head_dim,
                              std::int64_t row_bytes, const __grid_constant__ HeadRows rows,
                              const __grid_constant__ HeadRows home, bool has_home) {
  take_turn();
  const std::int64_t token = blockIdx.x;
  const auto head = static_cast<int>(blockIdx.y);
  const std::int64_t from = token * stride + static_cast<std::int64_t>(head) * head_dim;
  const auto row_of = [&](const HeadRows& of) {
    return reinterpret_cast<T*>(const_cast<std::byte*>(of[head]) + token * row_bytes);
  };
  T* const to = row_of(rows);
  T* const also = has_home ? row_of(home) : to;
  for (int c = static_cast<int>(threadIdx.x); c < 2 * head_dim; c += static_cast<int>(blockDim.x)) {
    const T element = from_float<T>(c < head_dim ? k[from + c] : v[from + c - head_dim]);
    to[c] = element;
    if (has_home) also[c] = element;
  }
}

// One block per KV head: columns of threads add up every kSumRows-th row, then each other.
constexpr int kSumRows = 8;
constexpr int kSumColumns = 128;

template <typename T>
__global__ void sum_values_kernel(const __grid_constant__ HeadRows rows,
                                  const __grid_constant__ HeadCounts counts, int head_dim,
                                  std::int64_t row_bytes, float* sums, bool subtract) {
  __shared__ float parts[kSumRows][kSumColumns];
  take_turn();
  const auto head = static_cast<int>(blockIdx.x);
  const std::int64_t count = counts[head];
  const auto column = static_cast<int>(threadIdx.x);
  const int channel = static_cast<int>(blockIdx.y) * kSumColumns + column;
  float sum = 0.0f;
  if (channel < head_dim) {
    for (std::int64_t row = threadIdx.y; row < count; row += kSumRows) {
      sum += to_float(reinterpret_cast<const T*>(rows[head] + row * row_bytes)[head_dim + channel]);
    }
  }
  parts[threadIdx.y][column] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || channel >= head_dim) return;
  for (int i = 1; i < kSumRows; ++i) sum += parts[i][column];
  sums[static_cast<std::int64_t>(head) * head_dim + channel] += subtract ? -sum : sum;
}

}  // namespace

void embed(const Matrix& table, std::span<const TokenId> ids, const Matrix& y,
           const Launch& launch) {
  check(y.dtype == DType::f32, "embed: output must be f32");
  dispatch(table.dtype, [&](auto element) {
    using T = decltype(element);
    for (std::size_t first = 0; first < ids.size(); first += kIds) {
      const std::size_t count = std::min<std::size_t>(kIds, ids.size() - first);
      Ids part{};
      for (std::size_t i = 0; i < count; ++i) {
        check(ids[first + i] >= 0 && ids[first + i] < table.rows,
              "embed: token id outside the table");
        part.at[i] = ids[first + i];
      }
      launch_early("embed", embed_kernel<T>, dim3(static_cast<unsigned>(count)), kThreads, 0,
                   launch, static_cast<const T*>(table.data), table.stride, part,
                   static_cast<float*>(y.data) + static_cast<std::int64_t>(first) * y.stride,
                   y.stride, table.columns);
    }
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
  check(p.head_dim / 2 <= kFrequencies, "rope: head_dim");
  RopeKernelParams k{};
  k.x = p.x;
  k.stride = p.stride;
  k.vectors = p.tokens * p.heads();
  k.heads = p.heads();
  k.query_heads = p.query_heads;
  k.head_dim = p.head_dim;
  k.first_position = p.first_position;
  k.query_norm = p.query_norm;
  k.key_norm = p.key_norm;
  k.norm_epsilon = p.norm_epsilon;
  std::copy_n(p.inverse_frequency, p.head_dim / 2, k.inverse_frequency);
  launch_early("rope", rope_kernel, dim3(blocks_for(k.vectors, kThreads / kWarp)), kThreads, 0,
               launch, k);
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

void cast(const Matrix& from, const Matrix& to, const Launch& launch) {
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

void add_bias(const float* bias, const Matrix& y, bool accumulate, const Launch& launch) {
  const dim3 grid(blocks_for(y.columns, kThreads), static_cast<unsigned>(y.rows));
  launch_early("bias", bias_kernel, grid, kThreads, 0, launch, bias, static_cast<float*>(y.data),
               y.stride, y.columns, accumulate);
}

void append(const AppendParams& p, const Launch& launch) {
  const auto rows_of = [](std::span<std::byte* const> heads) {
    return head_rows(std::vector<const std::byte*>(heads.begin(), heads.end()));
  };
  const bool has_home = !p.home.empty();
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>(p.shape.kv_heads));
  dispatch_rows(p.shape.dtype, [&](auto element) {
    launch_early("append", append_kernel<decltype(element)>, grid, 128, 0, launch, p.k, p.v,
                 p.stride, p.shape.head_dim, static_cast<std::int64_t>(p.shape.row_bytes()),
                 rows_of(p.rows), has_home ? rows_of(p.home) : HeadRows{}, has_home);
  });
}

void sum_values(const SumValuesParams& p, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(p.shape.kv_heads),
                  blocks_for(p.shape.head_dim, kSumColumns));
  dispatch_rows(p.shape.dtype, [&](auto element) {
    launch_early("sum_values", sum_values_kernel<decltype(element)>, grid,
                 dim3(kSumColumns, kSumRows), 0, launch, head_rows(p.rows), head_counts(p.rows),
                 p.shape.head_dim, static_cast<std::int64_t>(p.shape.row_bytes()), p.sums,
                 p.subtract);
  });
}

}  // namespace sluice::cuda
