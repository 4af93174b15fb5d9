// A warp's sums of weight * value over one page of value tiles, by tensor cores.
//
// A product has channels as rows, tokens as inner dimension and up to kTileQueries query heads as
// columns, so that few of its 16 x 8 results go unused. Codes are not shifted: a code in bits s and
// up of an f16 is exactly 2^(s - 24) times the code, so the weights of those tokens are scaled by
// 2^-s relative to the others. Lane l has tokens from 32 (l % 4) on and, of 32 channels, the four
// from 4 (l / 4) on, as rows of two tiles of results.
#pragma once

#include "kernels/values/call.cuh"

namespace sluice::cuda {

inline constexpr int kBlockChannels = 32;
inline constexpr int kBlockResults = 8;  // per lane, 4 m + e: channel 2 m + e / 2, column e % 2

// The largest shift_of(). Weights of unshifted codes are scaled by 2^kTopShift, those of shifted
// ones by less.
template <int kBits>
inline constexpr int kTopShift = (kWordPairs<kBits> / 2 - 1) * kLowCodeBits<kBits>;
// Shift of a pair's codes in a word's lower half; pairs in the upper half are moved there first.
template <int kBits>
__device__ __forceinline__ constexpr int shift_of(int pair) {
  return pair % (kWordPairs<kBits> / 2) * kLowCodeBits<kBits>;
}

// A pair's codes as two f16, times 2^(shift_of() - 24).
template <int kBits>
__device__ __forceinline__ std::uint32_t codes_of(std::uint32_t low, std::uint32_t high, int pair) {
  constexpr std::uint32_t kMask = ((1u << kLowCodeBits<kBits>)-1u) * 0x10001u;
  const bool is_upper = pair % kWordPairs<kBits> >= kWordPairs<kBits> / 2;
  const int shift = shift_of<kBits>(pair);
  std::uint32_t codes = (is_upper ? low >> 8 : low) & kMask << shift;
  if constexpr (kBits == 3) {
    const int by = shift + 2 - high_shift(pair);
    codes |= (by >= 0 ? high << max(by, 0) : high >> max(-by, 0)) & 0x40004u << shift;
  }
  return codes;
}

__device__ __forceinline__ std::uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// A lane's words of its four channels in a block.
template <int kBits>
struct LaneWords {
  uint4 low[kLowWords<kBits>];
  uint4 high;
};

// Loads words from a page in shared memory. Words past the page's channels are arbitrary.
template <int kBits>
__device__ __forceinline__ void load_words(const std::byte* page, int channels, int first,
                                           LaneWords<kBits>& words) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto* const from =
      reinterpret_cast<const uint4*>(page + 4 * channels) + first / 4 + lane / 4;
  const int row = channels / 4;
#pragma unroll
  for (int i = 0; i < kLowWords<kBits>; ++i) {
    words.low[i] = from[(lane % 4 * kLowWords<kBits> + i) * row];
  }
  if constexpr (kBits == 3) words.high = from[(4 * kLowWords<kBits> + lane % 4) * row];
}

// A lane's 32 logits of a page and a bit mask of the selected ones; -Inf if the query head does not
// exist.
struct PageLogits {
  uint4 words[4];
  std::uint32_t taken;

  // `logits` may be null.
  __device__ __forceinline__ PageLogits(const __half* logits, std::uint32_t taken) : taken(taken) {
    constexpr std::uint32_t kNothing = 0xfc00fc00u;  // -Inf twice
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = make_uint4(kNothing, kNothing, kNothing, kNothing);
      if (logits != nullptr) words[i] = __ldcg(reinterpret_cast<const uint4*>(logits) + i);
    }
  }
};

// Weights of the lane's 32 tokens for the query head of its column lane / 4: columns of a product,
// relative to the page's heaviest weight.
struct ColumnWeights {
  std::uint32_t columns[kThreadPairs];
  // Values for the whole page, the same in all lanes of the query head.
  float factor;  // makes weights relative to the row's log-sum-exp
  float sum;     // of all weights
};

// Replaces logits of selected tokens by -Inf.
__device__ __forceinline__ std::uint32_t without(std::uint32_t pair, std::uint32_t taken) {
  if ((taken & 1u) != 0) pair = (pair & 0xffff0000u) | 0xfc00u;
  if ((taken & 2u) != 0) pair = (pair & 0xffffu) | 0xfc000000u;
  return pair;
}

template <int kBits>
__device__ __forceinline__ ColumnWeights weigh_page(const PageLogits& logits, float norm) {
  ColumnWeights w;
#pragma unroll
  for (int i = 0; i < kThreadPairs; ++i) w.columns[i] = word_of(logits.words[i / 4], i % 4);
  if (logits.taken != 0) {
#pragma unroll
    for (int i = 0; i < kThreadPairs; ++i) {
      w.columns[i] = without(w.columns[i], logits.taken >> (2 * i));
    }
  }
  __half2 most = as_half2(w.columns[0]);
#pragma unroll
  for (int i = 1; i < kThreadPairs; ++i) most = __hmax2(most, as_half2(w.columns[i]));
  float highest = larger_of(most);
  highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
  highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
  const float base = highest > -INFINITY ? highest * kLog2E : 0.0f;
  w.sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreadPairs; ++i) {
    const auto up = static_cast<float>(kTopShift<kBits> - shift_of<kBits>(i));
    const float2 x = __half22float2(as_half2(w.columns[i]));
    const float first = exp2_fast(fmaf(x.x, kLog2E, up - base));
    const float second = exp2_fast(fmaf(x.y, kLog2E, up - base));
    w.sum = fmaf(first + second,
                 1.0f / static_cast<float>(1 << (kTopShift<kBits> - shift_of<kBits>(i))), w.sum);
    w.columns[i] = pack(__half(), first, second);
  }
  w.sum += __shfl_xor_sync(kAllLanes, w.sum, 1);
  w.sum += __shfl_xor_sync(kAllLanes, w.sum, 2);
  w.factor = highest > -INFINITY ? exp2_fast(base - norm) : 0.0f;
  return w;
}

// Factors of the sums of codes and of the zeros, for the lane's two columns of results.
struct ColumnFactors {
  float codes[2];
  float zeros[2];

  __device__ __forceinline__ ColumnFactors(const ColumnWeights& w, float unit) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = (lane % 4 * 2 + i) * 4;
      codes[i] = __shfl_sync(kAllLanes, w.factor, from) * unit;
      zeros[i] = __shfl_sync(kAllLanes, w.factor * w.sum, from);
    }
  }
};

// Adds weight * value of a block of channels to its results.
template <int kBits>
__device__ __forceinline__ void add_block(const std::byte* page, int channels, int first,
                                          const ColumnWeights& w, const ColumnFactors& factors,
                                          float (&results)[kBlockResults]) {
  LaneWords<kBits> words;
  load_words(page, channels, first, words);
  float sums[2][4] = {};
#pragma unroll
  for (int i = 0; i < kThreadPairs; i += 2) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const auto codes = [&](int row, int pair) {
        const int channel = 2 * m + row;
        const std::uint32_t high = kBits == 3 ? word_of(words.high, channel) : 0u;
        return codes_of<kBits>(word_of(words.low[pair / kWordPairs<kBits>], channel), high, pair);
      };
      const std::uint32_t a[4] = {codes(0, i), codes(1, i), codes(0, i + 1), codes(1, i + 1)};
      mma(__half(), sums[m], a, w.columns[i], w.columns[i + 1]);
    }
  }
  const int channel = first + static_cast<int>(threadIdx.x) % kWarp / 4 * 4;
  const auto* const scaling = reinterpret_cast<const __half*>(page) + channel;
  const uint2 scales = *reinterpret_cast<const uint2*>(scaling);
  const uint2 zeros = *reinterpret_cast<const uint2*>(scaling + channels);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float2 scale = __half22float2(as_half2(m == 0 ? scales.x : scales.y));
    const float2 zero = __half22float2(as_half2(m == 0 ? zeros.x : zeros.y));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& result = results[4 * m + e];
      result = fmaf(e < 2 ? scale.x : scale.y, factors.codes[e % 2] * sums[m][e], result);
      result = fmaf(e < 2 ? zero.x : zero.y, factors.zeros[e % 2], result);
    }
  }
}

}  // namespace sluice::cuda
