#include "cpu/key_score_simd.h"

#if !defined(__x86_64__)

#include "lib/check.h"

namespace sluice::cpu {

bool vnni_available() { return false; }

void fold_query_vnni(const float*, float, const PageScan&, PageQuery&) {
  check(false, "this processor has no AVX-512 VNNI");
}

void score_page_vnni(const PageScan&, std::span<const PageQuery>, std::span<float* const>) {
  check(false, "this processor has no AVX-512 VNNI");
}

}  // namespace sluice::cpu

#else

#include <algorithm>
#include <array>

#include "cpu/intrinsics.h"

namespace sluice::cpu {
namespace {

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")

constexpr std::size_t kLanes = 16;
constexpr std::size_t kHalfPage = 64;

// Codes of 64 tokens of one channel, a byte each: tokens [64 * half, 64 * half + 64).
template <int kBits>
inline __m512i load_codes(const std::byte* channel, int half) {
  if constexpr (kBits == 4) {
    const __m512i packed = _mm512_loadu_si512(channel);
    const __m512i shifted = half == 0 ? packed : _mm512_srli_epi16(packed, 4);
    return _mm512_and_si512(shifted, _mm512_set1_epi8(15));
  } else {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(channel));
    const __m256i low = half == 0 ? packed : _mm256_srli_epi16(packed, 4);
    const __m256i high = _mm256_srli_epi16(low, 2);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    return _mm512_and_si512(both, _mm512_set1_epi8(3));
  }
}

// Four channels of 64 tokens, interleaved so that each 32-bit lane holds one token's four codes.
// Lane 4 * b + i of vector j is token 16 * b + 4 * j + i.
struct Quads {
  __m512i v[4];
};

inline Quads interleave(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab_low = _mm512_unpacklo_epi8(a, b);
  const __m512i ab_high = _mm512_unpackhi_epi8(a, b);
  const __m512i cd_low = _mm512_unpacklo_epi8(c, d);
  const __m512i cd_high = _mm512_unpackhi_epi8(c, d);
  return {{_mm512_unpacklo_epi16(ab_low, cd_low), _mm512_unpackhi_epi16(ab_low, cd_low),
           _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)}};
}

// Undoes the order that interleave() leaves: a transpose of 4 x 4 blocks of 128 bits.
inline Quads in_order(const Quads& q) {
  const __m512i a = _mm512_shuffle_i32x4(q.v[0], q.v[1], 0x44);
  const __m512i b = _mm512_shuffle_i32x4(q.v[0], q.v[1], 0xee);
  const __m512i c = _mm512_shuffle_i32x4(q.v[2], q.v[3], 0x44);
  const __m512i d = _mm512_shuffle_i32x4(q.v[2], q.v[3], 0xee);
  return {{_mm512_shuffle_i32x4(a, c, 0x88), _mm512_shuffle_i32x4(a, c, 0xdd),
           _mm512_shuffle_i32x4(b, d, 0x88), _mm512_shuffle_i32x4(b, d, 0xdd)}};
}

template <int kBits, int kQueries>
void score_half(const PageScan& scan, const PageQuery* folded, int half, float* const* logits) {
  constexpr std::size_t kBytes = kPageTokens * kBits / 8;
  __m512i sums[kQueries][4];
  for (auto& query : sums)
    for (__m512i& sum : query) sum = _mm512_setzero_si512();
  const auto& index = scan.channels->index;
  const auto count = static_cast<std::size_t>(scan.channels->count);
  for (std::size_t i = 0; i < count; i += 4) {
    // Past the last channel the weights are zero, so any codes will do.
    const auto codes = [&](std::size_t at) {
      const std::size_t channel = index[at < count ? at : count - 1];
      return load_codes<kBits>(scan.page.codes + channel * kBytes, half);
    };
    const Quads quads = interleave(codes(i), codes(i + 1), codes(i + 2), codes(i + 3));
    for (int h = 0; h < kQueries; ++h) {
      std::int32_t four;
      __builtin_memcpy(&four, &folded[h].weights[i], sizeof four);
      const __m512i weights = _mm512_set1_epi32(four);
      for (int j = 0; j < 4; ++j) {
        sums[h][j] = _mm512_dpbusd_epi32(sums[h][j], quads.v[j], weights);
      }
    }
  }
  for (int h = 0; h < kQueries; ++h) {
    const Quads ordered = in_order({{sums[h][0], sums[h][1], sums[h][2], sums[h][3]}});
    const __m512 factor = _mm512_set1_ps(folded[h].factor);
    const __m512 offset = _mm512_set1_ps(folded[h].offset);
    float* const to = logits[h] + static_cast<std::size_t>(half) * kHalfPage;
    for (std::size_t j = 0; j < 4; ++j) {
      _mm512_storeu_ps(to + j * kLanes,
                       _mm512_fmadd_ps(_mm512_cvtepi32_ps(ordered.v[j]), factor, offset));
    }
  }
}

template <int kBits>
void score_bits(const PageScan& scan, std::span<const PageQuery> folded,
                std::span<float* const> logits) {
  for (int half = 0; half < 2; ++half) {
    switch (folded.size()) {
      case 4:
        score_half<kBits, 4>(scan, folded.data(), half, logits.data());
        break;
      case 3:
        score_half<kBits, 3>(scan, folded.data(), half, logits.data());
        break;
      case 2:
        score_half<kBits, 2>(scan, folded.data(), half, logits.data());
        break;
      default:
        score_half<kBits, 1>(scan, folded.data(), half, logits.data());
    }
  }
}

// The scales (or zeros) of channels [first, first + 16) of the list, as floats.
inline __m512 halves_of(const std::uint16_t* from, const ChannelList& channels, std::size_t first,
                        bool dense) {
  if (dense) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + first)));
  }
  std::array<std::uint16_t, kLanes> picked;
  for (std::size_t i = 0; i < kLanes; ++i) picked[i] = from[channels.index[first + i]];
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(picked.data())));
}

inline __m512 queries_of(const float* q, const ChannelList& channels, std::size_t first,
                         bool dense) {
  if (dense) return _mm512_loadu_ps(q + first);
  const __m128i bytes =
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(channels.index.data() + first));
  return _mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), q, 4);
}

#pragma GCC pop_options

}  // namespace

bool vnni_available() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")

void fold_query_vnni(const float* q, float factor, const PageScan& scan, PageQuery& folded) {
  const ChannelList& channels = *scan.channels;
  const auto count = static_cast<std::size_t>(channels.count);
  // Unused entries of the list are 0, a channel that may be read; their products are masked out.
  const bool dense = count > 0 && channels.index[count - 1] == count - 1 && count % kLanes == 0;
  __m512 products[kMaxHeadDim / kLanes];
  __m512 largest = _mm512_setzero_ps();
  __m512 offset = _mm512_setzero_ps();
  for (std::size_t i = 0; i < count; i += kLanes) {
    const std::size_t rest = std::min(kLanes, count - i);
    const auto mask = static_cast<__mmask16>((1u << rest) - 1);
    const __m512 scaled =
        _mm512_maskz_mul_ps(mask, queries_of(q, channels, i, dense), _mm512_set1_ps(factor));
    const __m512 product = _mm512_mul_ps(scaled, halves_of(scan.page.scales, channels, i, dense));
    products[i / kLanes] = product;
    largest = _mm512_max_ps(largest, _mm512_abs_ps(product));
    offset = _mm512_fmadd_ps(scaled, halves_of(scan.page.zeros, channels, i, dense), offset);
  }
  const float high = _mm512_reduce_max_ps(largest);
  const __m512 inverse = _mm512_set1_ps(high > 0.0f ? 127.0f / high : 0.0f);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(products[i / kLanes], inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(folded.weights.data() + i),
                     _mm512_cvtepi32_epi8(rounded));
  }
  folded.factor = high / 127.0f;
  folded.offset = _mm512_reduce_add_ps(offset);
}

void score_page_vnni(const PageScan& scan, std::span<const PageQuery> folded,
                     std::span<float* const> logits) {
  if (scan.bits == 4) {
    score_bits<4>(scan, folded, logits);
  } else {
    score_bits<2>(scan, folded, logits);
  }
}

}  // namespace sluice::cpu

#endif
