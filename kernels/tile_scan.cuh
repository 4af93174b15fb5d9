// Queries times quantised keys on tensor cores.
//
// Tokens are the rows of A, channels its inner dimension; both orders are free. A lane takes the
// same bytes of the four channels that it has in a step of 16, so that half2 operands need one
// permutation for two tokens and a mask each: a code in the lowest bits of an f16 is, as a
// subnormal number, 2^-24 times the code, and tensor cores compute with subnormal numbers exactly.
// Codes in higher bits are larger by powers of two, which the epilogue takes back.
#pragma once

#include "kernels/tile_scan_copy.cuh"
#include "lib/selection.h"

namespace sluice::cuda {

// Sums of one page. At 4 bits tile m has tokens 8 r + m in row r = lane / 4 and those 64 after in
// row r + 8; at 2 bits tile 2 k + s has tokens 64 s + 4 r + k, and those 32 after.
template <int kColumns>
struct PageSums {
  float codes[8][kColumns][4];
  float zeros[kColumns][4];  // every row the same
};

// The codes at `mask` of byte `b` of two channels' words, as halves.
__device__ __forceinline__ std::uint32_t bytes_of(std::uint32_t first, std::uint32_t second,
                                                  unsigned b) {
  return __byte_perm(first, second, b | b << 4 | (b + 4) << 8 | (b + 4) << 12);
}

// Rows of A out of byte `b` of the words of a lane's four channels.
template <int kBits, int kColumns>
__device__ __forceinline__ void multiply_byte(const std::uint32_t (&words)[4], unsigned b, int tile,
                                              const uint2 (&weights)[kColumns],
                                              PageSums<kColumns>& sums) {
  constexpr std::uint32_t kMask = kBits == 4 ? 0x000f000fu : 0x00030003u;
  const std::uint32_t first = bytes_of(words[0], words[1], b);
  const std::uint32_t second = bytes_of(words[2], words[3], b);
#pragma unroll
  for (int s = 0; s < (kBits == 4 ? 1 : 2); ++s) {
    const std::uint32_t upper = kMask << (2 * s * kBits);
    const std::uint32_t lower = upper << kBits;
    const std::uint32_t pairs[4] = {first & upper, first & lower, second & upper, second & lower};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      mma(__half(), sums.codes[tile + s][c], pairs, weights[c].x, weights[c].y);
    }
  }
}

__device__ __forceinline__ std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  const __half2 product =
      __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const std::uint32_t*>(&product);
}

// Which halves of words a lane takes its scales from.
template <bool kListed>
__device__ __forceinline__ uint2 selectors_of(const TileScanArgs& a, int head, int step) {
  if (kListed) return __ldg(a.queries.selectors + (head * a.steps + step) * 4 + threadIdx.x % 4);
  const std::uint32_t half = threadIdx.x % 2 == 0 ? 0x5410u : 0x7632u;
  return make_uint2(half, half);
}

// Scales (or zeros) of this lane's four channels of a step, out of four pairs.
template <bool kListed>
__device__ __forceinline__ uint2 load_scales(const std::byte* scales, int step, uint2 selectors) {
  const int place = kListed ? step * 4 + scan_lane() % 4 : step * 2 + scan_lane() % 4 / 2;
  const uint4 words = reinterpret_cast<const uint4*>(scales)[place];
  return make_uint2(__byte_perm(words.x, words.y, selectors.x),
                    __byte_perm(words.z, words.w, selectors.y));
}

// Words of this lane's four channels of a step, with the tokens of row lane / 4: word j has four
// bytes, or at 4 bits eight.
template <int kBits, bool kListed, typename Word>
__device__ __forceinline__ void load_codes(const std::byte* codes, Word (&words)[4]) {
  using Shape = TileShape<kBits, kListed>;
  const int row = scan_lane() / 4;
  const int quad = scan_lane() % 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    int at = channel_of_lane(kListed, quad, j) * Shape::kCodeBytes +
             row * static_cast<int>(sizeof(Word));
    if (kListed) at ^= quad * 32;  // as ListedCopier lays units out
    words[j] = *reinterpret_cast<const Word*>(codes + at);
  }
}

// One step of 16 channels, step `step` of its chunk.
template <int kBits, bool kListed, int kColumns>
__device__ __forceinline__ void multiply_step(const std::byte* chunk, int step, uint2 selectors,
                                              const uint2 (&queries)[kColumns],
                                              PageSums<kColumns>& sums) {
  using Shape = TileShape<kBits, kListed>;
  const std::byte* const scales = chunk + Shape::kScaleOffset;
  const uint2 scale = load_scales<kListed>(scales, step, selectors);
  const uint2 zero = load_scales<kListed>(scales + Shape::kScaleBytes, step, selectors);
  const std::uint32_t zeros[4] = {zero.x, zero.x, zero.y, zero.y};
  uint2 weights[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    mma(__half(), sums.zeros[c], zeros, queries[c].x, queries[c].y);
    weights[c] =
        make_uint2(multiply_pairs(queries[c].x, scale.x), multiply_pairs(queries[c].y, scale.y));
  }
  const std::byte* const codes = chunk + step * kStepChannels * Shape::kCodeBytes;
  if constexpr (kBits == 4) {
    uint2 words[4];
    load_codes<kBits, kListed>(codes, words);
    const std::uint32_t near[4] = {words[0].x, words[1].x, words[2].x, words[3].x};
    const std::uint32_t far[4] = {words[0].y, words[1].y, words[2].y, words[3].y};
#pragma unroll
    for (unsigned b = 0; b < 4; ++b) {
      multiply_byte<kBits>(near, b, static_cast<int>(b), weights, sums);
    }
#pragma unroll
    for (unsigned b = 0; b < 4; ++b) {
      multiply_byte<kBits>(far, b, static_cast<int>(b) + 4, weights, sums);
    }
  } else {
    std::uint32_t words[4];
    load_codes<kBits, kListed>(codes, words);
#pragma unroll
    for (unsigned b = 0; b < 4; ++b) {
      multiply_byte<kBits>(words, b, static_cast<int>(b) * 2, weights, sums);
    }
  }
}

// Two logits as f16, finite ones clamped to its range.
__device__ __forceinline__ std::uint32_t pack_logits(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Calls store(column, token, words, count) with runs of consecutive logits of this lane: `count`
// words of two. 4 bits: runs of 8, 2 bits: of 4.
template <int kBits, int kColumns, typename Store>
__device__ __forceinline__ void for_runs(const PageSums<kColumns>& sums, const float* factors,
                                         int query_count, const Store& store) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row = lane / 4;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int column = c * 8 + lane % 4 * 2 + side;
      if (column >= query_count) continue;
      const float factor = factors[column];
      const float zero = sums.zeros[c][side] * factor;
#pragma unroll
      for (int run = 0; run < 8 / kBits; ++run) {
        // Codes of run `run` sit kBits * run bits high.
        const float scale = factor * static_cast<float>(1 << (24 - kBits * run));
        std::uint32_t words[kBits];
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
          const auto logit = [&](int k) {
            const int tile = kBits == 4 ? k : k * 2 + run / 2;
            return fmaf(sums.codes[tile][c][run % 2 * 2 + side], scale, zero);
          };
          words[i] = pack_logits(logit(2 * i), logit(2 * i + 1));
        }
        store(column, run * (kPageTokens * kBits / 8) + row * 2 * kBits, words);
      }
    }
  }
}

template <int kWords>
__device__ __forceinline__ void store_words(__half* to, const std::uint32_t (&words)[kWords],
                                            bool aligned) {
  if (!aligned) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const __half2 pair = *reinterpret_cast<const __half2*>(&words[i]);
      to[2 * i] = __low2half(pair);
      to[2 * i + 1] = __high2half(pair);
    }
  } else if constexpr (kWords == 4) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
}

// All logits of a page, to their place.
template <int kBits, int kColumns>
__device__ __forceinline__ void store_page(const PageSums<kColumns>& sums, const TileScanArgs& a,
                                           const PagePlace& at) {
  const std::int64_t query = static_cast<std::int64_t>(at.head) * a.group + a.first_query;
  __half* const logits = a.logits + query * a.stride + std::int64_t{at.page} * kPageTokens;
  for_runs<kBits>(sums, a.queries.factors + at.head * kMaxQueries, a.query_count,
                  [&](int column, int token, const std::uint32_t(&words)[kBits]) {
                    store_words(logits + column * a.stride + token, words, a.aligned);
                  });
}

// The logits of a page's candidates, by way of `staged` [kMaxQueries, kPageTokens].
template <int kBits, int kColumns>
__device__ __forceinline__ void store_candidates(const PageSums<kColumns>& sums,
                                                 const TileScanArgs& a, const PagePlace& at,
                                                 __half* staged) {
  for_runs<kBits>(sums, a.queries.factors + at.head * kMaxQueries, a.query_count,
                  [&](int column, int token, const std::uint32_t(&words)[kBits]) {
                    store_words(staged + column * kPageTokens + token, words, true);
                  });
  __syncwarp();
  const std::int64_t query = static_cast<std::int64_t>(at.head) * a.group + a.first_query;
  const std::int32_t* const positions = a.positions + at.head * a.position_capacity;
  const std::int32_t count = a.queries.counts[at.head];
  const std::int32_t first =
      a.queries.first[static_cast<std::int64_t>(at.head) * a.pages + at.page];
  for (std::int32_t i = first + static_cast<std::int32_t>(threadIdx.x % kWarp); i < count;
       i += kWarp) {
    const std::int32_t position = positions[i];
    if (position / kPageTokens != at.page) break;
    for (int n = 0; n < a.query_count; ++n) {
      a.logits[(query + n) * a.stride + i] = staged[n * kPageTokens + position % kPageTokens];
    }
  }
  __syncwarp();
}

}  // namespace sluice::cuda
