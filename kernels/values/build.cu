// Builds pages of value tiles, one block per page and KV head. A thread holds two neighbouring
// channels of 32 tokens, whose codes fill whole words. With a basis these are products of the
// values, which the block brings to shared memory a few channels at a time.
#include <type_traits>

#include "kernels/runtime/code_fit.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/whole_pages.cuh"
#include "kernels/values/tile.cuh"
#include "kernels/values/values.h"
#include "lib/backend.h"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kParts = kPageTokens / kThreadTokens;
constexpr int kMaxThreads = kParts * kMaxHeadDim / 2;
constexpr int kMaxComponents = kMaxHeadDim / 2;
constexpr int kMaxProductThreads = kParts * kMaxComponents / 2;
template <int kBits>
constexpr bool kFitted = ValueTiles::fitted(kBits);

template <typename Pages>
struct BuildArgs {
  Pages pages;
  TilePool to;
  std::int64_t row_bytes;     // bytes from row to row
  std::int64_t value_offset;  // of V in a row
  std::int32_t* bad;          // reported [sequences, kv_heads]
  int head_dim;
  int channels;        // of a page
  const float* basis;  // ValueTiles::basis
  float margin;        // ValueTiles::margin()
  float step;          // ValueTiles::step()
};

// Zero and scale of one channel, as stored and as used to quantise values; rounded at every step,
// like the CPU's.
template <int kBits>
struct Quantiser {
  __half scale;
  __half zero;
  float base;
  float inverse;

  __device__ Quantiser(float low, float high, float margin, float step) {
    const float out = __fsub_rn(__fmul_rn(high, margin), __fmul_rn(low, margin));
    zero = __float2half_rn(clamp_to_half(__fadd_rn(low, out)));
    scale = __float2half_rn(clamp_to_half(__fsub_rn(__fmul_rn(high, step), __fmul_rn(low, step))));
    base = __half2float(zero);
    const float own = __half2float(scale);
    inverse = own > 0.0f ? __fdiv_rn(1.0f, own) : 0.0f;
  }

  __device__ std::uint32_t operator()(float value) const {
    constexpr auto kLargest = static_cast<float>((1 << kBits) - 1);
    return code_of(value, base, inverse, kLargest) & ((1u << kBits) - 1u);
  }
};

// Packs a thread's words of one channel; value(k) is the value of its token k.
template <int kBits, typename Value>
__device__ __forceinline__ void pack(const Quantiser<kBits>& quantiser, const Value& value,
                                     std::uint32_t (&low)[kLowWords<kBits>], std::uint32_t& high) {
  constexpr std::uint32_t kMask = (1u << kLowCodeBits<kBits>)-1u;
#pragma unroll
  for (int pair = 0; pair < kThreadPairs; ++pair) {
    const std::uint32_t first = quantiser(value(2 * pair));
    const std::uint32_t second = quantiser(value(2 * pair + 1));
    low[pair / kWordPairs<kBits>] |= ((first & kMask) | (second & kMask) << 16)
                                     << low_shift<kBits>(pair);
    if constexpr (kBits == 3) high |= (first >> 2 | second >> 2 << 16) << high_shift(pair);
  }
}

__device__ __forceinline__ void write_halves(std::byte* page, int index, __half low, __half high) {
  reinterpret_cast<__half2*>(page)[index] = __halves2half2(low, high);
}

// Fits scale and zero of a thread's two channels to their codes; value(k) is the pair of values of
// its token k. All threads that have tokens call it.
template <int kBits, int kMaxChannels, typename Value>
__device__ __forceinline__ void fit_scales(Quantiser<kBits> (&quantisers)[2], const Value& value,
                                           int part, int pair) {
  __shared__ DeviceFit fits[kParts][kMaxChannels];
  DeviceFit own[2];
#pragma unroll
  for (int k = 0; k < kThreadTokens; ++k) {
    const float2 both = value(k);
    own[0].add(both.x, quantisers[0](both.x));
    own[1].add(both.y, quantisers[1](both.y));
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) fits[part][2 * pair + c] = own[c];
  __syncthreads();
  if (part != 0) return;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    for (int other = 1; other < kParts; ++other) own[c].add(fits[other][2 * pair + c]);
    own[c].solve(quantisers[c].scale, quantisers[c].zero);
  }
}

// A thread's part of a page: two channels of kThreadTokens tokens. Threads past the channels have
// none.
struct PagePart {
  int part;
  int pair;
  bool works;

  __device__ explicit PagePart(int channels) {
    const auto thread = static_cast<int>(threadIdx.x);
    const int pairs = channels / 2;
    works = thread < kParts * pairs;
    part = works ? thread / pairs : 0;
    pair = works ? thread % pairs : 0;
  }
};

// Writes a page from the threads' channels, or reports it. `strange`: a number was NaN or Inf.
template <int kBits, int kMaxChannels, typename Pages, typename Pair>
__device__ __forceinline__ void write_page(const BuildArgs<Pages>& a, const WholePage& page,
                                           std::int64_t place, const PagePart& own,
                                           const Pair (&values)[kThreadTokens], bool strange) {
  __shared__ PairRange<Pair> ranges[kParts][kMaxChannels / 2];
  const auto head = static_cast<int>(blockIdx.y);
  const auto [part, pair, works] = own;
  PairRange<Pair> all{values[0], values[0]};
#pragma unroll
  for (int k = 0; k < kThreadTokens; ++k) all.include({values[k], values[k]});
  if (works) ranges[part][pair] = all;
  if (__syncthreads_or(strange) != 0) {
    if (threadIdx.x == 0) a.bad[page.sequence * gridDim.y + head] = 1;
    return;
  }
  if (!works) return;
  for (int other = 0; other < kParts; ++other) all.include(ranges[other][pair]);
  const float2 low = floats_of(all.low);
  const float2 high = floats_of(all.high);
  Quantiser<kBits> quantisers[2] = {{low.x, high.x, a.margin, a.step},
                                    {low.y, high.y, a.margin, a.step}};
  if constexpr (kFitted<kBits>) {
    // Codes stay those of the range: base and inverse are not changed.
    fit_scales<kBits, kMaxChannels>(
        quantisers, [&](int k) { return floats_of(values[k]); }, part, pair);
  }
  const int pairs = a.channels / 2;
  std::byte* const to = a.to.at(head, place);
  if (part == 0) {
    write_halves(to, pair, quantisers[0].scale, quantisers[1].scale);
    write_halves(to, pairs + pair, quantisers[0].zero, quantisers[1].zero);
  }
  std::uint32_t lows[2][kLowWords<kBits>] = {};
  std::uint32_t highs[2] = {};
  pack<kBits>(
      quantisers[0], [&](int k) { return floats_of(values[k]).x; }, lows[0], highs[0]);
  pack<kBits>(
      quantisers[1], [&](int k) { return floats_of(values[k]).y; }, lows[1], highs[1]);
  auto* const words = reinterpret_cast<uint2*>(to + 4 * a.channels) + pair;
#pragma unroll
  for (int i = 0; i < kLowWords<kBits>; ++i) {
    words[(part * kLowWords<kBits> + i) * pairs] = make_uint2(lows[0][i], lows[1][i]);
  }
  if constexpr (kBits == 3) {
    words[(kParts * kLowWords<kBits> + part) * pairs] = make_uint2(highs[0], highs[1]);
  }
}

// Returns true if the block has a page to build. Blocks without wait for the kernel before, too:
// rule 2 of early_launch.cuh.
template <typename Pages>
__device__ __forceinline__ bool find_page(const BuildArgs<Pages>& a, WholePage& page,
                                          std::int64_t& place) {
  const bool has_page = a.pages.find(static_cast<int>(blockIdx.y), a.row_bytes, page);
  if (has_page) {
    place = TilePool::place_of(a.to.slot_of(page.sequence, page.number), page.number);
  }
  wait_for_kernel_before();
  allow_next_kernel();
  return has_page;
}

template <typename T, int kBits, typename Pages>
__global__ void __launch_bounds__(kMaxThreads)
    build_kernel(const __grid_constant__ BuildArgs<Pages> a) {
  using Pair = PairOf<T>;
  WholePage page;
  std::int64_t place = 0;
  if (!find_page(a, page, place)) return;
  const PagePart own(a.channels);
  Pair values[kThreadTokens];
#pragma unroll
  for (int k = 0; k < kThreadTokens; ++k) {
    const std::byte* const row = page.rows + (own.part * kThreadTokens + k) * a.row_bytes;
    values[k] = load_pair(T(), row + a.value_offset, own.pair);
  }
  const Pair zeros{};
  Pair strange = zeros;
#pragma unroll
  for (int k = 0; k < kThreadTokens; ++k) note_strange(values[k], zeros, strange);
  write_page<kBits, kMaxHeadDim>(a, page, place, own, values, is_strange(strange));
}

// Channels [first, first + kSlice) of a page's values, and of the basis.
struct ValueSlice {
  static constexpr int kSlice = 16;
  static constexpr int kTokenStride = kPageTokens + 4;      // rows stay aligned to 16 bytes
  static constexpr int kVectorStride = kMaxComponents + 2;  // and to 8
  float4 values[kSlice * kTokenStride / 4];                 // [kSlice, kTokenStride]
  float2 vectors[kSlice * kVectorStride / 2];               // [kSlice, kVectorStride]

  template <typename T, typename Pages>
  __device__ __forceinline__ void load(T, const BuildArgs<Pages>& a, const WholePage& page,
                                       int first, float2& strange) {
    auto* const to_values = reinterpret_cast<float*>(values);
    auto* const to_vectors = reinterpret_cast<float*>(vectors);
    const auto thread = static_cast<int>(threadIdx.x);
    const auto threads = static_cast<int>(blockDim.x);
    const int count = min(kSlice, a.head_dim - first);
    for (int i = thread; i < kSlice / 2 * kPageTokens; i += threads) {
      const int token = i / (kSlice / 2);
      const int pair = i % (kSlice / 2);
      if (2 * pair >= count) continue;
      const std::byte* const value = page.rows + token * a.row_bytes + a.value_offset;
      const float2 both = floats_of(load_pair(T(), value, first / 2 + pair));
      note_strange(both, make_float2(0.0f, 0.0f), strange);
      to_values[2 * pair * kTokenStride + token] = both.x;
      to_values[(2 * pair + 1) * kTokenStride + token] = both.y;
    }
    const float* const basis = a.basis + std::int64_t{blockIdx.y} * a.channels * a.head_dim + first;
    for (int i = thread; i < kSlice * a.channels; i += threads) {
      const int channel = i % kSlice;
      if (channel >= count) continue;
      to_vectors[channel * kVectorStride + i / kSlice] = basis[i / kSlice * a.head_dim + channel];
    }
  }

  // Adds the products of the first `count` channels with two vectors, for kThreadTokens tokens.
  __device__ __forceinline__ void add(const PagePart& own, int count,
                                      float2 (&sums)[kThreadTokens]) const {
#pragma unroll 1
    for (int channel = 0; channel < count; ++channel) {
      const float2 x = vectors[channel * (kVectorStride / 2) + own.pair];
      const float4* const tokens =
          values + channel * (kTokenStride / 4) + own.part * (kThreadTokens / 4);
#pragma unroll
      for (int k = 0; k < kThreadTokens / 4; ++k) {
        const float4 four = tokens[k];
        const float of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          sums[4 * k + t].x = fmaf(of[t], x.x, sums[4 * k + t].x);
          sums[4 * k + t].y = fmaf(of[t], x.y, sums[4 * k + t].y);
        }
      }
    }
  }
};

template <typename T, int kBits, typename Pages>
__global__ void __launch_bounds__(kMaxProductThreads)
    build_components(const __grid_constant__ BuildArgs<Pages> a) {
  __shared__ ValueSlice slice;
  WholePage page;
  std::int64_t place = 0;
  if (!find_page(a, page, place)) return;
  const PagePart own(a.channels);
  float2 strange = make_float2(0.0f, 0.0f);
  float2 sums[kThreadTokens] = {};
#pragma unroll 1
  for (int first = 0; first < a.head_dim; first += ValueSlice::kSlice) {
    slice.load(T(), a, page, first, strange);
    __syncthreads();
    slice.add(own, min(ValueSlice::kSlice, a.head_dim - first), sums);
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < kThreadTokens; ++k) {
    note_strange(sums[k], make_float2(0.0f, 0.0f), strange);
  }
  write_page<kBits, kMaxComponents>(a, page, place, own, sums, is_strange(strange));
}

// Builds `blocks` pages of every KV head.
template <typename Pages>
void build(const char* what, const KvShape& shape, const ValueTilesView& values, const Pages& pages,
           std::int64_t blocks, std::int32_t* bad, const Launch& launch) {
  const int d = shape.head_dim;
  const int channels = values.tiles.channels(d);
  check(d > 0 && channels % 4 == 0 && d <= kMaxHeadDim, "build_values: head_dim");
  if (blocks == 0) return;
  BuildArgs<Pages> a{};
  a.pages = pages;
  a.to = TilePool(values, d);
  a.row_bytes = static_cast<std::int64_t>(shape.row_bytes());
  a.value_offset = static_cast<std::int64_t>(shape.value_offset());
  a.bad = bad;
  a.head_dim = d;
  a.channels = channels;
  a.basis = values.tiles.basis;
  a.margin = ValueTiles::margin(values.tiles.bits);
  a.step = ValueTiles::step(values.tiles.bits);
  const int threads = (kParts * channels / 2 + kWarp - 1) / kWarp * kWarp;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(shape.kv_heads));
  dispatch_value(shape.rows.value(), [&](auto row) {
    const auto start = [&](auto kernel) {
      launch_early(what, kernel, grid, static_cast<unsigned>(threads), 0, launch, a);
    };
    const auto start_bits = [&](auto bits) {
      constexpr int kBits = decltype(bits)::value;
      if (a.basis != nullptr) return start(build_components<decltype(row), kBits, Pages>);
      start(build_kernel<decltype(row), kBits, Pages>);
    };
    switch (values.tiles.bits) {
      case 1:
        return start_bits(std::integral_constant<int, 1>());
      case 2:
        return start_bits(std::integral_constant<int, 2>());
      case 3:
        return start_bits(std::integral_constant<int, 3>());
      case 4:
        return start_bits(std::integral_constant<int, 4>());
      default:
        check(false, "build_values: bits");
    }
  });
}

}  // namespace

void build_values(const BuildValuesParams& p, const Launch& launch) {
  const PageRun pages = {head_rows(p.rows), p.sequence, p.first_page};
  build("build_values", p.shape, p.values, pages, p.pages, p.bad, launch);
}

void build_values_batch(const BuildValuesBatchParams& p, const Launch& launch) {
  const PagesOfBatch pages = {p.batch.tokens, p.rows};
  build("build_values_batch", p.shape, p.values, pages, p.batch.count, p.bad, launch);
}

}  // namespace sluice::cuda
