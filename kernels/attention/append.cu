#include "kernels/attention/attention.h"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/heads.h"
#include "kernels/runtime/rows.cuh"

namespace sluice::cuda {
namespace {

constexpr int kAppendThreads = 128;

// Sizes of numbers as bits, and the scale of those that are not finite: see lib/row_code.cc.
constexpr std::uint32_t kInfinityBits = 0x7f800000u;
constexpr std::uint32_t kLeastCoded = 27u << 23;  // 2^-100
constexpr std::uint32_t kNanScale = 0x7fc0u;
constexpr std::uint32_t kMostInt4Scale = 0x7df8u;

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x) % kWarp; }

// Rounds |x| < 2^22 to the nearest integer, ties to even.
__device__ __forceinline__ float nearest_integer(float x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
  return __fsub_rn(__fadd_rn(x, kRounder), kRounder);
}

// Codes a key or value as encode_row() in lib/row_code.cc does, to the bit. A warp works on it.
template <typename T>
struct Coder;

template <>
struct Coder<Int8Code> {
  std::uint32_t bits;  // of the scale
  float scale;
  float inverse;

  __device__ Coder(const float* from, int head_dim) {
    std::uint32_t largest = 0;  // |x| as bits, ordered as the numbers are, NaN above all
    for (int c = lane_of_warp(); c < head_dim; c += kWarp) {
      largest = max(largest, __float_as_uint(from[c]) & 0x7fffffffu);
    }
    largest = __reduce_max_sync(kAllLanes, largest);
    const float exact = __fdiv_rn(__uint_as_float(largest), 127.0f);
    bits = largest >= kInfinityBits ? kNanScale
           : largest < kLeastCoded  ? 0u
                                    : (__float_as_uint(exact) + 0xffffu) >> 16;
    scale = __uint_as_float(bits << 16);
    inverse = scale > 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
  }

  // The code of channel c; if it `carries` a bit, with that of `word` in its lowest.
  __device__ int code(float x, int c, bool carries, std::uint32_t word) const {
    const int bit = static_cast<int>(word >> c % kScaleCodes & 1u);
    if (!(scale > 0.0f)) return carries ? bit : 0;
    const float wanted = __fmul_rn(x, inverse);
    const float nearest = nearest_integer(wanted);
    int code = static_cast<int>(nearest);
    if (!carries) return code;
    if ((code & 1) != bit) code += wanted >= nearest ? 1 : -1;
    return code > 127 ? code - 2 : code;
  }

  // Calls body(c, four codes) for this lane's channels [c, c + 4). The first 16 carry the scale,
  // and the last those of `groups` groups of a value in int4; lane 4 g has that of group g in
  // `scales`.
  template <typename Body>
  __device__ __forceinline__ void for_codes(const float* from, int head_dim, const Body& body,
                                            std::uint32_t scales = 0, int groups = 0) const {
#pragma unroll 1
    for (int first = 0; first < head_dim; first += 4 * kWarp) {
      const int c = first + lane_of_warp() * 4;
      const int group = (head_dim - 1 - c) / kScaleCodes;
      const bool has_group = c < head_dim && group < groups;
      const std::uint32_t other = __shfl_sync(kAllLanes, scales, has_group ? 4 * group : 0);
      if (c >= head_dim) continue;
      const bool carries = c < kScaleCodes || has_group;
      const std::uint32_t word = c < kScaleCodes ? bits : other;
      const auto at = [&](int i) { return code(from[c + i], c + i, carries, word); };
      body(c, make_char4(at(0), at(1), at(2), at(3)));
    }
  }

  // Calls put(offset, word) for this lane's words of codes.
  template <typename Put>
  __device__ __forceinline__ void for_words(const float* from, int head_dim, const Put& put,
                                            std::uint32_t scales = 0, int groups = 0) const {
    const auto body = [&](int c, char4 codes) {
      put(c, *reinterpret_cast<const std::uint32_t*>(&codes));
    };
    for_codes(from, head_dim, body, scales, groups);
  }
  // Calls take(c, element) for this lane's channels.
  template <typename Take>
  __device__ __forceinline__ void for_elements(const float* from, int head_dim,
                                               const Take& take) const {
    for_codes(from, head_dim, [&](int c, char4 codes) {
      take(c, scale * codes.x);
      take(c + 1, scale * codes.y);
      take(c + 2, scale * codes.z);
      take(c + 3, scale * codes.w);
    });
  }
};

// A lane has a word of a value in int4: four channels of the first half of group lane / 4, and the
// same of the second half.
template <>
struct Coder<Int4Pair> {
  static_assert(kWarp / 4 * kInt4Group >= 256, "a warp has all words");
  std::uint32_t bits;  // of the scale of the lane's group
  float scale;
  float inverse;

  __device__ Coder(const float* from, int head_dim) {
    std::uint32_t farthest = 0;  // |x| as bits, then one bit for positive numbers
    for_channels(head_dim, [&](int c, int /*i*/) {
      const std::uint32_t x = __float_as_uint(from[c]);
      farthest = max(farthest, x << 1 | (x >> 31 ^ 1u));
    });
    farthest = max(farthest, __shfl_xor_sync(kAllLanes, farthest, 1));
    farthest = max(farthest, __shfl_xor_sync(kAllLanes, farthest, 2));
    const std::uint32_t size = farthest >> 1;
    const std::uint32_t eighth = size - (3u << 23);
    const std::uint32_t rounded = (eighth + (1u << 18)) >> 19 << 3;
    bits = size >= kInfinityBits ? kNanScale
           : size < kLeastCoded  ? 0u
                                 : min(rounded, kMostInt4Scale) | (farthest & 1u) << 15;
    scale = __uint_as_float(bits << 16);
    inverse = scale != 0.0f && size < kInfinityBits ? __fdiv_rn(1.0f, scale) : 0.0f;
  }

  __device__ int code(float x) const {
    if (inverse == 0.0f) return 0;
    return static_cast<int>(fminf(fmaxf(nearest_integer(__fmul_rn(x, inverse)), -8.0f), 7.0f));
  }

  // Calls put(offset, word) for this lane's word of codes.
  template <typename Put>
  __device__ __forceinline__ void for_words(const float* from, int head_dim, const Put& put) const {
    std::uint32_t word = 0;
    for_channels(head_dim, [&](int c, int i) {
      word |= static_cast<std::uint32_t>(code(from[c]) & 15) << (i % 4 * 8 + i / 4 * 4);
    });
    if (lane_of_warp() < part_bytes<Int4Pair>(head_dim) / 4) put(4 * lane_of_warp(), word);
  }
  // Calls take(c, element) for this lane's channels.
  template <typename Take>
  __device__ __forceinline__ void for_elements(const float* from, int head_dim,
                                               const Take& take) const {
    for_channels(head_dim,
                 [&](int c, int /*i*/) { take(c, scale * static_cast<float>(code(from[c]))); });
  }

 private:
  // Calls body(c, i) for this lane's channels c; i / 4 is the half of the group.
  template <typename Body>
  __device__ __forceinline__ static void for_channels(int head_dim, const Body& body) {
    const int first = lane_of_warp() / 4 * kInt4Group + lane_of_warp() % 4 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int c = first + i / 4 * (kInt4Group / 2) + i % 4;
      if (c < head_dim) body(c, i);
    }
  }
};

// Codes the key (part 0, a warp's) or the value (part 1, another's) of a row, and calls put(offset,
// word) for this lane's words of the row.
template <typename Rows, typename Put>
__device__ __forceinline__ void code_part(int part, const float* k, const float* v, int head_dim,
                                          const Put& put) {
  if (part == 0) {
    const Coder<typename Rows::Key> coder(k, head_dim);
    if constexpr (kIsInt4<typename Rows::Value>) {
      const Coder<typename Rows::Value> of_value(v, head_dim);
      return coder.for_words(k, head_dim, put, of_value.bits, groups_of(head_dim));
    } else {
      return coder.for_words(k, head_dim, put);
    }
  }
  const Coder<typename Rows::Value> coder(v, head_dim);
  coder.for_words(v, head_dim, [&](int offset, std::uint32_t word) {
    put(part_bytes<typename Rows::Key>(head_dim) + offset, word);
  });
}

template <typename Rows>
__global__ void append_kernel(const float* k, const float* v, std::int64_t stride, int head_dim,
                              std::int64_t row_bytes, const __grid_constant__ HeadRows rows,
                              const __grid_constant__ HeadRows host) {
  take_turn();
  const std::int64_t token = blockIdx.x;
  const auto head = static_cast<int>(blockIdx.y);
  const std::int64_t from = token * stride + static_cast<std::int64_t>(head) * head_dim;
  const auto row_of = [&](const HeadRows& of) {
    return const_cast<std::byte*>(of[head]) + token * row_bytes;
  };
  const bool has_host = host.base != nullptr;
  std::byte* const to = row_of(rows);
  std::byte* const also = has_host ? row_of(host) : to;
  using T = typename Rows::Key;
  if constexpr (kIsCoded<T>) {
    const int part = static_cast<int>(threadIdx.x) / kWarp;
    if (part > 1) return;
    code_part<Rows>(part, k + from, v + from, head_dim, [&](int offset, std::uint32_t word) {
      *reinterpret_cast<std::uint32_t*>(to + offset) = word;
      if (has_host) *reinterpret_cast<std::uint32_t*>(also + offset) = word;
    });
  } else {
    for (int c = static_cast<int>(threadIdx.x); c < 2 * head_dim;
         c += static_cast<int>(blockDim.x)) {
      const T element = from_float<T>(c < head_dim ? k[from + c] : v[from + c - head_dim]);
      reinterpret_cast<T*>(to)[c] = element;
      if (has_host) reinterpret_cast<T*>(also)[c] = element;
    }
  }
}

// One past the last token that follows this one in its sequence.
__device__ __forceinline__ std::int64_t end_of_run(const TokenBatch& batch, std::int64_t token,
                                                   std::int32_t sequence) {
  do ++token;
  while (token < batch.count && batch.tokens[token].sequence == sequence);
  return token;
}

// append_batch() of rows of codes for one KV head of a token. The first warp has the key, the
// second the value and, of all tokens up to `end`, the sums.
template <typename Rows>
__device__ void append_codes(const AppendBatchParams& p, std::int64_t token, std::int64_t end,
                             std::int64_t head, float* sums, std::byte* device, std::byte* host) {
  const int d = p.shape.head_dim;
  const int part = static_cast<int>(threadIdx.x) / kWarp;
  if (part > 1) return;
  const std::int64_t first = token * p.stride + head * d;
  const auto put = [&](std::byte* row, int offset, std::uint32_t word) {
    if (row != nullptr) *reinterpret_cast<std::uint32_t*>(row + offset) = word;
  };
  code_part<Rows>(part, p.k + first, p.v + first, d, [&](int offset, std::uint32_t word) {
    put(device, offset, word);
    put(host, offset, word);
  });
  if (part == 0) return;
  const float* value = p.v + first;
#pragma unroll 1  // mostly one token
  for (std::int64_t t = token; t < end; ++t, value += p.stride) {
    const Coder<typename Rows::Value> coder(value, d);
    coder.for_elements(value, d, [&](int c, float element) {
      sums[c] += element;
      if (p.token_sums == nullptr) return;
      p.token_sums[(t * p.shape.kv_heads + head) * d + c] = sums[c];
    });
  }
}

// One block for each KV head of each token; that of a sequence's first token adds the values of all
// of them to the sums, in order. The rows' addresses are looked up before the preceding kernel is
// over, because tokens and pages stay the same during a step.
template <typename Rows>
__global__ void __launch_bounds__(kAppendThreads)
    append_batch_kernel(const __grid_constant__ AppendBatchParams p, std::int64_t row_bytes) {
  allow_next_kernel();
  const std::int64_t token = blockIdx.x;
  const std::int64_t head = blockIdx.y;
  const BatchToken self = p.batch.tokens[token];
  const bool sums_up =
      p.sums != nullptr && (token == 0 || p.batch.tokens[token - 1].sequence != self.sequence);
  const std::int64_t end = sums_up ? end_of_run(p.batch, token, self.sequence) : token;
  const PageSlots page =
      p.rows.pages[self.sequence * p.rows.table_stride + self.position / kPageTokens];
  const auto row_in = [&](std::byte* pool, std::int64_t stride, std::int64_t slot) {
    const std::int64_t row = slot * kPageTokens + self.position % kPageTokens;
    return pool == nullptr || slot == PageSlots::kNone ? nullptr
                                                       : pool + head * stride + row * row_bytes;
  };
  std::byte* const device = row_in(p.rows.device, p.rows.device_stride, page.device);
  std::byte* const host = row_in(p.rows.host, p.rows.host_stride, page.host);
  wait_for_kernel_before();
  const int d = p.shape.head_dim;
  float* const head_sums = p.sums + (std::int64_t{self.sequence} * p.shape.kv_heads + head) * d;
  using T = typename Rows::Key;
  if constexpr (kIsCoded<T>) {
    append_codes<Rows>(p, token, end, head, head_sums, device, host);
  } else {
    for (int c = static_cast<int>(threadIdx.x); c < d; c += kAppendThreads) {
      const std::int64_t channel = head * d + c;
      float* const sums = head_sums + c;
      float sum = sums_up ? *sums : 0.0f;
      const T key = from_float<T>(p.k[token * p.stride + channel]);
      T value = from_float<T>(p.v[token * p.stride + channel]);
      const auto put = [&](std::byte* row) {
        if (row == nullptr) return;
        reinterpret_cast<T*>(row)[c] = key;
        reinterpret_cast<T*>(row)[d + c] = value;
      };
      put(device);
      put(host);
#pragma unroll 1  // mostly one token
      for (std::int64_t t = token; t < end; ++t) {
        if (t > token) value = from_float<T>(p.v[t * p.stride + channel]);
        sum += to_float(value);
        if (p.token_sums != nullptr) p.token_sums[t * p.shape.kv_heads * d + channel] = sum;
      }
      if (sums_up) *sums = sum;
    }
  }
}

// One block per KV head: each column of threads adds up every kSumRows-th row, then the columns are
// added up.
constexpr int kSumRows = 8;
constexpr int kSumColumns = 128;

template <typename T>
__global__ void sum_values_kernel(const __grid_constant__ HeadRows rows, int head_dim,
                                  std::int64_t row_bytes, std::int64_t value_offset, float* sums,
                                  bool subtract) {
  __shared__ float parts[kSumRows][kSumColumns];
  take_turn();
  const auto head = static_cast<int>(blockIdx.x);
  const auto column = static_cast<int>(threadIdx.x);
  const int channel = static_cast<int>(blockIdx.y) * kSumColumns + column;
  float sum = 0.0f;
  if (channel < head_dim) {
    for (std::int64_t row = threadIdx.y; row < rows.count; row += kSumRows) {
      sum += element_of<T>(rows[head] + row * row_bytes + value_offset, channel);
    }
  }
  parts[threadIdx.y][column] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || channel >= head_dim) return;
  for (int i = 1; i < kSumRows; ++i) sum += parts[i][column];
  sums[static_cast<std::int64_t>(head) * head_dim + channel] += subtract ? -sum : sum;
}

}  // namespace

void append(const AppendParams& p, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>(p.shape.kv_heads));
  dispatch_rows(p.shape.rows, [&](auto types) {
    launch_early("append", append_kernel<decltype(types)>, grid, kAppendThreads, 0, launch, p.k,
                 p.v, p.stride, p.shape.head_dim, static_cast<std::int64_t>(p.shape.row_bytes()),
                 head_rows(p.rows), head_rows(p.host));
  });
}

void append_batch(const AppendBatchParams& p, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(p.batch.count), static_cast<unsigned>(p.shape.kv_heads));
  dispatch_rows(p.shape.rows, [&](auto types) {
    launch_early("append_batch", append_batch_kernel<decltype(types)>, grid, kAppendThreads, 0,
                 launch, p, static_cast<std::int64_t>(p.shape.row_bytes()));
  });
}

void sum_values(const SumValuesParams& p, const Launch& launch) {
  const auto columns = static_cast<unsigned>((p.shape.head_dim + kSumColumns - 1) / kSumColumns);
  const dim3 grid(static_cast<unsigned>(p.shape.kv_heads), columns);
  dispatch_value(p.shape.rows.value(), [&](auto element) {
    launch_early("sum_values", sum_values_kernel<decltype(element)>, grid,
                 dim3(kSumColumns, kSumRows), 0, launch, head_rows(p.rows), p.shape.head_dim,
                 static_cast<std::int64_t>(p.shape.row_bytes()),
                 static_cast<std::int64_t>(p.shape.value_offset()), p.sums, p.subtract);
  });
}

}  // namespace sluice::cuda
