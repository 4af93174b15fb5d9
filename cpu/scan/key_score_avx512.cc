// Pages of the key index with AVX-512's dot products of bytes (VNNI).
#include "cpu/scan/key_score_simd.h"

#if !defined(__x86_64__)

namespace sluice::cpu {

const PageScorer* avx512_scorer() { return nullptr; }

}  // namespace sluice::cpu

#else

#include <algorithm>
#include <array>

#include "cpu/runtime/intrinsics.h"

namespace sluice::cpu {
namespace {

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")

constexpr std::size_t kLanes = 16;
constexpr std::size_t kHalfPage = 64;

// The codes of one channel: byte b holds token b in its lowest bits and token 64 + b from bit 4 on.
template <int kBits>
inline __m512i load_channel(const std::byte* channel) {
  if constexpr (kBits == 4) {
    return _mm512_loadu_si512(channel);
  } else if constexpr (kBits == 1) {
    // Bit i of byte b is token 16 i + b. Quarter i is rotated right by i bits; bits from
    // neighbouring bytes are masked out later.
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(channel));
    const __m512i turns =
        _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);  // to the right
    return _mm512_rorv_epi32(_mm512_broadcast_i32x4(packed), turns);
  } else {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(channel));
    return _mm512_inserti64x4(_mm512_castsi256_si512(packed), _mm256_srli_epi16(packed, 2), 1);
  }
}

// At 3 bits, bit i of byte b of the last 16 bytes is the highest bit of token 16 i + b. Each
// quarter is rotated by a different number of bits, so that byte 16 i + b has its highest bits at
// bits 2 and 6; bits from neighbouring bytes are masked out.
template <>
inline __m512i load_channel<3>(const std::byte* channel) {
  const __m128i packed =
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(channel + KeyTiles::low_bytes(3)));
  const __m512i turns =
      _mm512_set_epi32(31, 31, 31, 31, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2);  // to the left
  const __m512i highest = _mm512_rolv_epi32(_mm512_broadcast_i32x4(packed), turns);
  return _mm512_or_si512(_mm512_and_si512(load_channel<2>(channel), _mm512_set1_epi8(0x33)),
                         _mm512_and_si512(highest, _mm512_set1_epi8(0x44)));
}

// Four channels, interleaved so that each 32-bit lane holds one token's four bytes. Lane 4 * b + i
// of vector j is token 16 * b + 4 * j + i.
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

// Channels unpacked at a time: few enough that prefetching the next ones overlaps with the dot
// products of these.
constexpr std::size_t kBlockChannels = 16;

// The codes of a block, four channels to a Quads, [half of the page][channels / 4]: unpacked once,
// used by every query.
using Unpacked = std::array<std::array<Quads, kBlockChannels / 4>, 2>;

// Running sums of one half of a page, [queries].
using Sums = std::array<Quads, kMaxBunch>;

template <int kBits>
inline void unpack(const PageScan& scan, std::size_t first, std::size_t end, Unpacked& to) {
  constexpr std::size_t kBytes = TilePage::code_bytes(kBits);
  const __m512i mask = _mm512_set1_epi8((1 << kBits) - 1);
  const auto& index = scan.channels->index;
  const auto count = static_cast<std::size_t>(scan.channels->count);
  const auto channel = [&](std::size_t at) {
    // Past the last channel the weights are zero, so any codes will do.
    const std::size_t place =
        KeyTiles::place_of(kBits, scan.page.page, index[at < count ? at : count - 1]);
    // Channels are too far apart for the hardware prefetcher. The next page is the other one of a
    // tile. At 3 bits a channel may end in another cache line than it begins.
    const std::byte* const next = scan.next + (place ^ 1) * kBytes;
    _mm_prefetch(next, _MM_HINT_T0);
    if (kBits == 3) _mm_prefetch(next + kBytes - 1, _MM_HINT_T0);
    return load_channel<kBits>(scan.page.codes + place * kBytes);
  };
  for (std::size_t i = first; i < end; i += 4) {
    const Quads both = interleave(channel(i), channel(i + 1), channel(i + 2), channel(i + 3));
    for (std::size_t j = 0; j < 4; ++j) {
      to[0][(i - first) / 4].v[j] = _mm512_and_si512(both.v[j], mask);
      to[1][(i - first) / 4].v[j] = _mm512_and_si512(_mm512_srli_epi16(both.v[j], 4), mask);
    }
  }
}

inline __m512i weights_of(const PageQuery& query, std::size_t channel) {
  std::int32_t four;
  __builtin_memcpy(&four, &query.weights[channel], sizeof four);
  return _mm512_set1_epi32(four);
}

inline void write_logits(const Quads& sums, const PageQuery& query, float* to) {
  const Quads ordered = in_order(sums);
  const __m512 factor = _mm512_set1_ps(query.factor);
  const __m512 offset = _mm512_set1_ps(query.offset);
  for (std::size_t j = 0; j < 4; ++j) {
    _mm512_storeu_ps(to + j * kLanes,
                     _mm512_fmadd_ps(_mm512_cvtepi32_ps(ordered.v[j]), factor, offset));
  }
}

// Two queries at a time: eight sums hide the latency of the dot products.
inline void add_two(const Quads* codes, std::size_t first, std::size_t end, const PageQuery& x,
                    const PageQuery& y, Quads& to_x, Quads& to_y) {
  __m512i x0 = to_x.v[0];
  __m512i x1 = to_x.v[1];
  __m512i x2 = to_x.v[2];
  __m512i x3 = to_x.v[3];
  __m512i y0 = to_y.v[0];
  __m512i y1 = to_y.v[1];
  __m512i y2 = to_y.v[2];
  __m512i y3 = to_y.v[3];
  for (std::size_t i = first; i < end; i += 4) {
    const Quads& q = codes[(i - first) / 4];
    const __m512i wx = weights_of(x, i);
    const __m512i wy = weights_of(y, i);
    x0 = _mm512_dpbusd_epi32(x0, q.v[0], wx);
    x1 = _mm512_dpbusd_epi32(x1, q.v[1], wx);
    x2 = _mm512_dpbusd_epi32(x2, q.v[2], wx);
    x3 = _mm512_dpbusd_epi32(x3, q.v[3], wx);
    y0 = _mm512_dpbusd_epi32(y0, q.v[0], wy);
    y1 = _mm512_dpbusd_epi32(y1, q.v[1], wy);
    y2 = _mm512_dpbusd_epi32(y2, q.v[2], wy);
    y3 = _mm512_dpbusd_epi32(y3, q.v[3], wy);
  }
  to_x = {{x0, x1, x2, x3}};
  to_y = {{y0, y1, y2, y3}};
}

inline void add_one(const Quads* codes, std::size_t first, std::size_t end, const PageQuery& x,
                    Quads& to) {
  Quads sums = to;
  for (std::size_t i = first; i < end; i += 4) {
    const __m512i weights = weights_of(x, i);
    for (int j = 0; j < 4; ++j) {
      sums.v[j] = _mm512_dpbusd_epi32(sums.v[j], codes[(i - first) / 4].v[j], weights);
    }
  }
  to = sums;
}

template <int kBits>
void score_bits(const PageScan& scan, std::span<const PageQuery> folded,
                std::span<float* const> logits) {
  alignas(64) Unpacked codes;
  alignas(64) std::array<Sums, 2> sums{};
  const auto count = static_cast<std::size_t>(scan.channels->count);
  for (std::size_t first = 0; first < count; first += kBlockChannels) {
    const std::size_t end = std::min(count, first + kBlockChannels);
    unpack<kBits>(scan, first, end, codes);
    for (std::size_t half = 0; half < 2; ++half) {
      const Quads* const part = codes[half].data();
      Sums& to = sums[half];
      std::size_t h = 0;
      for (; h + 2 <= folded.size(); h += 2) {
        add_two(part, first, end, folded[h], folded[h + 1], to[h], to[h + 1]);
      }
      if (h < folded.size()) add_one(part, first, end, folded[h], to[h]);
    }
  }
  for (std::size_t half = 0; half < 2; ++half) {
    for (std::size_t h = 0; h < folded.size(); ++h) {
      write_logits(sums[half][h], folded[h], logits[h] + half * kHalfPage);
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

// Up to kMaxBunch queries side by side: they share the conversions of scales and zeros, and the
// latencies of their sums overlap.
template <int kQueries>
void fold_bunch(const float* q, std::int64_t stride, const float* factors, const PageScan& scan,
                PageQuery* folded) {
  const ChannelList& channels = *scan.channels;
  const auto count = static_cast<std::size_t>(channels.count);
  // Unused entries of the list are readable channels; their products are masked out.
  const bool dense = count > 0 && channels.index[count - 1] == count - 1 && count % kLanes == 0;
  __m512 products[kQueries][kMaxHeadDim / kLanes];
  __m512 largest[kQueries];
  __m512 offset[kQueries];
  for (int h = 0; h < kQueries; ++h) largest[h] = offset[h] = _mm512_setzero_ps();
  for (std::size_t i = 0; i < count; i += kLanes) {
    const std::size_t rest = std::min(kLanes, count - i);
    const auto mask = static_cast<__mmask16>((1u << rest) - 1);
    const __m512 scales =
        _mm512_maskz_mov_ps(mask, halves_of(scan.page.scales, channels, i, dense));
    const __m512 zeros = _mm512_maskz_mov_ps(mask, halves_of(scan.page.zeros, channels, i, dense));
    for (int h = 0; h < kQueries; ++h) {
      const __m512 x = queries_of(q + h * stride, channels, i, dense);
      const __m512 product = _mm512_mul_ps(x, scales);
      products[h][i / kLanes] = product;
      largest[h] = _mm512_max_ps(largest[h], _mm512_abs_ps(product));
      offset[h] = _mm512_fmadd_ps(x, zeros, offset[h]);
    }
  }
  for (int h = 0; h < kQueries; ++h) {
    const float high = _mm512_reduce_max_ps(largest[h]);
    const __m512 inverse = _mm512_set1_ps(high > 0.0f ? 127.0f / high : 0.0f);
    const __m512 step = _mm512_set1_ps(high / 127.0f);
    __m512 lost = _mm512_setzero_ps();
    for (std::size_t i = 0; i < count; i += kLanes) {
      const __m512 product = products[h][i / kLanes];
      const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(product, inverse));
      lost = _mm512_add_ps(lost, _mm512_fnmadd_ps(_mm512_cvtepi32_ps(rounded), step, product));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(folded[h].weights.data() + i),
                       _mm512_cvtepi32_epi8(rounded));
    }
    folded[h].factor = high / 127.0f * factors[h];
    folded[h].offset =
        (_mm512_reduce_add_ps(offset[h]) + middle_code(scan.bits) * _mm512_reduce_add_ps(lost)) *
        factors[h];
  }
}

void fold(const float* q, std::int64_t stride, std::span<const float> factors, const PageScan& scan,
          PageQuery* folded) {
  switch (factors.size()) {
    case 4:
      return fold_bunch<4>(q, stride, factors.data(), scan, folded);
    case 3:
      return fold_bunch<3>(q, stride, factors.data(), scan, folded);
    case 2:
      return fold_bunch<2>(q, stride, factors.data(), scan, folded);
    default:
      return fold_bunch<1>(q, stride, factors.data(), scan, folded);
  }
}

void score(const PageScan& scan, std::span<const PageQuery> folded,
           std::span<float* const> logits) {
  if (scan.bits == 4) {
    score_bits<4>(scan, folded, logits);
  } else if (scan.bits == 3) {
    score_bits<3>(scan, folded, logits);
  } else if (scan.bits == 2) {
    score_bits<2>(scan, folded, logits);
  } else {
    score_bits<1>(scan, folded, logits);
  }
}

#pragma GCC pop_options

}  // namespace

const PageScorer* avx512_scorer() {
  static constexpr PageScorer kScorer = {"AVX-512 VNNI", fold, score};
  const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
  return runs ? &kScorer : nullptr;
}

}  // namespace sluice::cpu

#endif
