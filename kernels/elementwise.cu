#include <algorithm>

#include "kernels/device_math.cuh"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"
#include "kernels/error.h"
#include "kernels/heads.h"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256;
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

// Sum over a block of kThreads; every thread gets it.
__device__ float block_sum(float x) {
  __shared__ float sums[kThreads / kWarp];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (const float part : sums) total += part;
  return total;
}

struct Ids {
  TokenId at[kIds];
};

template <typename T>
__global__ void embed_kernel(const T* table, std::int64_t table_stride,
                             const __grid_constant__ Ids ids, float* y, std::int64_t y_stride,
                             std::int64_t columns) {
  const T* const from = table + ids.at[blockIdx.x] * table_stride;
  for (std::int64_t c = threadIdx.x; c < columns; c += kThreads) {
    y[blockIdx.x * y_stride + c] = to_float(from[c]);
  }
}

template <typename T>
__global__ void rms_norm_kernel(const float* x, std::int64_t x_stride, const float* weight,
                                float epsilon, T* y, std::int64_t y_stride, std::int64_t columns) {
  const float* const from = x + blockIdx.x * x_stride;
  T* const to = y + blockIdx.x * y_stride;
  float squares = 0.0f;
  for (std::int64_t c = threadIdx.x; c < columns; c += kThreads) squares += from[c] * from[c];
  const float factor = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(columns) + epsilon);
  for (std::int64_t c = threadIdx.x; c < columns; c += kThreads) {
    to[c] = from_float<T>(from[c] * factor * weight[c]);
  }
}

struct RopeKernelParams {
  float* x;
  std::int64_t stride;
  std::int64_t vectors;  // tokens * heads
  int heads;
  int head_dim;
  std::int64_t first_position;
  const float* norm_weight;
  float norm_epsilon;
  float inverse_frequency[kFrequencies];
};

// One warp for each head of each token.
__global__ void rope_kernel(const __grid_constant__ RopeKernelParams p) {
  const std::int64_t vector = std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (vector >= p.vectors) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t token = vector / p.heads;
  float* const x = p.x + token * p.stride + vector % p.heads * p.head_dim;
  const int half = p.head_dim / 2;
  float factor = 1.0f;
  if (p.norm_weight != nullptr) {
    float squares = 0.0f;
    for (int c = lane; c < p.head_dim; c += kWarp) squares += x[c] * x[c];
    factor = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(p.head_dim) + p.norm_epsilon);
  }
  const auto position = static_cast<float>(p.first_position + token);
  for (int c = lane; c < half; c += kWarp) {
    float a = x[c];
    float b = x[c + half];
    if (p.norm_weight != nullptr) {
      a *= factor * p.norm_weight[c];
      b *= factor * p.norm_weight[c + half];
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
  const std::int64_t c = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (c >= columns) return;
  const float* const row = gate_up + blockIdx.y * stride;
  const float gate = row[c];
  y[blockIdx.y * y_stride + c] = from_float<T>(gate / (1.0f + expf(-gate)) * row[c + columns]);
}

template <typename From, typename To>
__global__ void cast_kernel(const From* from, std::int64_t from_stride, To* to,
                            std::int64_t to_stride, std::int64_t columns) {
  const std::int64_t c = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (c >= columns) return;
  to[blockIdx.y * to_stride + c] = from_float<To>(to_float(from[blockIdx.y * from_stride + c]));
}

__global__ void bias_kernel(const float* bias, float* y, std::int64_t stride, std::int64_t columns,
                            bool accumulate) {
  const std::int64_t c = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (c >= columns) return;
  float& to = y[blockIdx.y * stride + c];
  to = accumulate ? to + bias[c] : bias[c];
}

template <typename T>
__global__ void append_kernel(const float* k, const float* v, std::int64_t stride, int head_dim,
                              std::int64_t row_bytes, const __grid_constant__ HeadRows rows) {
  const std::int64_t token = blockIdx.x;
  const auto head = static_cast<int>(blockIdx.y);
  const std::int64_t from = token * stride + static_cast<std::int64_t>(head) * head_dim;
  T* const to = reinterpret_cast<T*>(const_cast<std::byte*>(rows[head]) + token * row_bytes);
  for (int c = static_cast<int>(threadIdx.x); c < 2 * head_dim; c += static_cast<int>(blockDim.x)) {
    to[c] = from_float<T>(c < head_dim ? k[from + c] : v[from + c - head_dim]);
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

__global__ void compensate_kernel(const float* alpha, const float* sums, float count, int group,
                                  int head_dim, float* out) {
  const auto query = static_cast<int>(blockIdx.x);
  const float share = alpha[query];
  const float rest = (1.0f - share) / count;
  const float* const from = sums + static_cast<std::int64_t>(query / group) * head_dim;
  float* const to = out + static_cast<std::int64_t>(query) * head_dim;
  for (int c = static_cast<int>(threadIdx.x); c < head_dim; c += static_cast<int>(blockDim.x)) {
    to[c] = share * to[c] + rest * from[c];
  }
}

}  // namespace

void embed(const Matrix& table, std::span<const TokenId> ids, const Matrix& y,
           cudaStream_t stream) {
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
      embed_kernel<T><<<static_cast<unsigned>(count), kThreads, 0, stream>>>(
          static_cast<const T*>(table.data), table.stride, part,
          static_cast<float*>(y.data) + static_cast<std::int64_t>(first) * y.stride, y.stride,
          table.columns);
      require_launch("embed");
    }
  });
}

void rms_norm(const RmsNormParams& p, cudaStream_t stream) {
  dispatch(p.y.dtype, [&](auto element) {
    using T = decltype(element);
    rms_norm_kernel<T><<<static_cast<unsigned>(p.x.rows), kThreads, 0, stream>>>(
        static_cast<const float*>(p.x.data), p.x.stride, p.weight, p.epsilon,
        static_cast<T*>(p.y.data), p.y.stride, p.x.columns);
  });
  require_launch("rms_norm");
}

void rope(const RopeParams& p, cudaStream_t stream) {
  check(p.head_dim / 2 <= kFrequencies, "rope: head_dim");
  RopeKernelParams k{};
  k.x = p.x;
  k.stride = p.stride;
  k.vectors = p.tokens * p.heads;
  k.heads = p.heads;
  k.head_dim = p.head_dim;
  k.first_position = p.first_position;
  k.norm_weight = p.norm_weight;
  k.norm_epsilon = p.norm_epsilon;
  std::copy_n(p.inverse_frequency, p.head_dim / 2, k.inverse_frequency);
  rope_kernel<<<blocks_for(k.vectors, kThreads / kWarp), kThreads, 0, stream>>>(k);
  require_launch("rope");
}

void swiglu(const SwigluParams& p, cudaStream_t stream) {
  dispatch(p.y.dtype, [&](auto element) {
    using T = decltype(element);
    const dim3 grid(blocks_for(p.y.columns, kThreads), static_cast<unsigned>(p.y.rows));
    swiglu_kernel<T><<<grid, kThreads, 0, stream>>>(static_cast<const float*>(p.gate_up.data),
                                                    p.gate_up.stride, static_cast<T*>(p.y.data),
                                                    p.y.stride, p.y.columns);
  });
  require_launch("swiglu");
}

void cast(const Matrix& from, const Matrix& to, cudaStream_t stream) {
  check(from.rows == to.rows && from.columns == to.columns, "cast: shapes disagree");
  const dim3 grid(blocks_for(to.columns, kThreads), static_cast<unsigned>(to.rows));
  dispatch(from.dtype, [&](auto source) {
    dispatch(to.dtype, [&](auto target) {
      using From = decltype(source);
      using To = decltype(target);
      cast_kernel<<<grid, kThreads, 0, stream>>>(static_cast<const From*>(from.data), from.stride,
                                                 static_cast<To*>(to.data), to.stride, to.columns);
    });
  });
  require_launch("cast");
}

void add_bias(const float* bias, const Matrix& y, bool accumulate, cudaStream_t stream) {
  const dim3 grid(blocks_for(y.columns, kThreads), static_cast<unsigned>(y.rows));
  bias_kernel<<<grid, kThreads, 0, stream>>>(bias, static_cast<float*>(y.data), y.stride, y.columns,
                                             accumulate);
  require_launch("bias");
}

void append(const AppendParams& p, cudaStream_t stream) {
  std::vector<const std::byte*> heads(p.rows.begin(), p.rows.end());
  const HeadRows rows = head_rows(heads);
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>(p.shape.kv_heads));
  dispatch_rows(p.shape.dtype, [&](auto element) {
    append_kernel<decltype(element)><<<grid, 128, 0, stream>>>(
        p.k, p.v, p.stride, p.shape.head_dim, static_cast<std::int64_t>(p.shape.row_bytes()), rows);
  });
  require_launch("append");
}

void sum_values(const SumValuesParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.shape.kv_heads),
                  blocks_for(p.shape.head_dim, kSumColumns));
  dispatch_rows(p.shape.dtype, [&](auto element) {
    sum_values_kernel<decltype(element)><<<grid, dim3(kSumColumns, kSumRows), 0, stream>>>(
        head_rows(p.rows), head_counts(p.rows), p.shape.head_dim,
        static_cast<std::int64_t>(p.shape.row_bytes()), p.sums, p.subtract);
  });
  require_launch("sum_values");
}

void compensate(const CompensateParams& p, cudaStream_t stream) {
  compensate_kernel<<<static_cast<unsigned>(p.shape.query_heads), 128, 0, stream>>>(
      p.alpha, p.sums, static_cast<float>(p.count), p.shape.group(), p.shape.head_dim, p.out);
  require_launch("compensate");
}

}  // namespace sluice::cuda
