// Builds pages of value tiles, one block per page and KV head. A thread holds two neighbouring
// channels of 32 tokens, whose codes fill whole words.
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
template <int kBits>
constexpr bool kFitted = ValueTiles::fitted(kBits);

template <typename Pages>
struct BuildArgs {
  Pages pages;
  TilePool to;
  std::int64_t row_bytes;  // bytes from row to row
  std::int32_t* bad;       // reported [sequences, kv_heads]
  int head_dim;
  float margin;  // ValueTiles::margin()
  float step;    // ValueTiles::step()
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
template <int kBits, typename Value>
__device__ __forceinline__ void fit_scales(Quantiser<kBits> (&quantisers)[2], const Value& value,
                                           int part, int pair) {
  __shared__ DeviceFit fits[kParts][kMaxHeadDim];
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

// A block builds a page of one KV head, or has nothing to do.
template <typename T, int kBits, typename Pages>
__global__ void __launch_bounds__(kMaxThreads)
    build_kernel(const __grid_constant__ BuildArgs<Pages> a) {
  using Pair = PairOf<T>;
  __shared__ PairRange<Pair> ranges[kParts][kMaxHeadDim / 2];
  const int head = static_cast<int>(blockIdx.y);
  WholePage page;
  const bool has_page = a.pages.find(head, a.row_bytes, page);
  std::int64_t place = 0;
  if (has_page) place = a.to.place_of(page.sequence, page.number);
  // Blocks with nothing to do wait, too: rule 2 of early_launch.cuh.
  wait_for_kernel_before();
  allow_next_kernel();
  if (!has_page) return;

  const int pairs = a.head_dim / 2;
  const auto thread = static_cast<int>(threadIdx.x);
  const bool works = thread < kParts * pairs;
  const int part = works ? thread / pairs : 0;
  const int pair = works ? thread % pairs : 0;
  Pair values[kThreadTokens];
#pragma unroll
  for (int k = 0; k < kThreadTokens; ++k) {
    const std::byte* const row = page.rows + (part * kThreadTokens + k) * a.row_bytes;
    values[k] = load_pair(T(), row + a.head_dim * static_cast<int>(sizeof(T)), pair);
  }
  const Pair zeros{};
  Pair strange = zeros;
  PairRange<Pair> all{values[0], values[0]};
#pragma unroll
  for (int k = 0; k < kThreadTokens; ++k) {
    all.include({values[k], values[k]});
    note_strange(values[k], zeros, strange);
  }
  if (works) ranges[part][pair] = all;
  if (__syncthreads_or(is_strange(strange)) != 0) {
    if (thread == 0) a.bad[page.sequence * gridDim.y + head] = 1;
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
    fit_scales<kBits>(
        quantisers, [&](int k) { return floats_of(values[k]); }, part, pair);
  }
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
  auto* const words = reinterpret_cast<uint2*>(to + 4 * a.head_dim) + pair;
#pragma unroll
  for (int i = 0; i < kLowWords<kBits>; ++i) {
    words[(part * kLowWords<kBits> + i) * pairs] = make_uint2(lows[0][i], lows[1][i]);
  }
  if constexpr (kBits == 3) {
    words[(kParts * kLowWords<kBits> + part) * pairs] = make_uint2(highs[0], highs[1]);
  }
}

// Builds `blocks` pages of every KV head.
template <typename Pages>
void build(const char* what, const KvShape& shape, const ValueTilesView& values, const Pages& pages,
           std::int64_t blocks, std::int32_t* bad, const Launch& launch) {
  const int d = shape.head_dim;
  check(d > 0 && d % 4 == 0 && d <= kMaxHeadDim, "build_values: head_dim");
  if (blocks == 0) return;
  BuildArgs<Pages> a{};
  a.pages = pages;
  a.to = TilePool(values, d);
  a.row_bytes = static_cast<std::int64_t>(shape.row_bytes());
  a.bad = bad;
  a.head_dim = d;
  a.margin = ValueTiles::margin(values.tiles.bits);
  a.step = ValueTiles::step(values.tiles.bits);
  const int threads = (kParts * d / 2 + kWarp - 1) / kWarp * kWarp;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(shape.kv_heads));
  dispatch_rows(shape.rows, [&](auto row) {
    const auto start = [&](auto kernel) {
      launch_early(what, kernel, grid, static_cast<unsigned>(threads), 0, launch, a);
    };
    switch (values.tiles.bits) {
      case 1:
        return start(build_kernel<decltype(row), 1, Pages>);
      case 2:
        return start(build_kernel<decltype(row), 2, Pages>);
      case 3:
        return start(build_kernel<decltype(row), 3, Pages>);
      case 4:
        return start(build_kernel<decltype(row), 4, Pages>);
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
