// Pages of the key index with AVX2's products of unsigned and signed bytes.
#include "cpu/scan/key_score_simd.h"

#if !defined(__x86_64__)

namespace sluice::cpu {

const PageScorer* avx2_scorer() { return nullptr; }

}  // namespace sluice::cpu

#else

#include <algorithm>
#include <array>
#include <cmath>

#include "cpu/runtime/intrinsics.h"

namespace sluice::cpu {
namespace {

#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma")

constexpr std::size_t kLanes = 8;
constexpr std::size_t kGroupTokens = 32;
constexpr std::size_t kGroups = kPageTokens / kGroupTokens;
// Two products of a code and a weight are at most 3810, so eight pairs of channels fit 16 bits.
constexpr std::size_t kBlockChannels = 16;

// Codes of every channel on the list, plus one with weight zero to make their number even.
using ChannelCodes = std::array<const std::byte*, kMaxHeadDim + 1>;

template <int kBits>
ChannelCodes find_codes(const PageScan& scan) {
  constexpr std::size_t kBytes = TilePage::code_bytes(kBits);
  ChannelCodes codes;
  const auto count = static_cast<std::size_t>(scan.channels->count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t place = KeyTiles::place_of(kBits, scan.page.page, scan.channels->index[i]);
    codes[i] = scan.page.codes + place * kBytes;
    // Channels are too far apart for the hardware prefetcher. The next page is the other one of a
    // tile. At 3 bits a channel may end in another cache line than it begins.
    const std::byte* const next = scan.next + (place ^ 1) * kBytes;
    _mm_prefetch(next, _MM_HINT_T0);
    if (kBits == 3) _mm_prefetch(next + kBytes - 1, _MM_HINT_T0);
  }
  codes[count] = codes[count - 1];
  return codes;
}

// `code` for each of 32 tokens whose bit is set, in one byte each. Token 16 i + b of the page has
// bit i of byte b.
__m256i load_bits(const std::byte* bits, std::size_t group, char code) {
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bits));
  const auto first = static_cast<char>(1u << (2 * group));
  const auto second = static_cast<char>(2u << (2 * group));
  const __m256i wanted = _mm256_set_m128i(_mm_set1_epi8(second), _mm_set1_epi8(first));
  const __m256i found = _mm256_and_si256(_mm256_broadcastsi128_si256(packed), wanted);
  return _mm256_and_si256(_mm256_cmpeq_epi8(found, wanted), _mm256_set1_epi8(code));
}

// Codes of 32 tokens, one byte each. The codes of a group (at 3 bits the lower two bits) are in the
// bytes from `place` on, from bit `shift` up.
template <int kBits>
__m256i load_group(const std::byte* channel, std::size_t group) {
  if constexpr (kBits == 1) return load_bits(channel, group, 1);
  constexpr int kLow = KeyTiles::low_bits(kBits);
  const std::size_t place = kLow == 4 ? group % 2 * kGroupTokens : 0;
  const int shift = static_cast<int>(kLow == 4 ? group / 2 * 4 : group * 2);
  const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(channel + place));
  const __m256i low = _mm256_and_si256(_mm256_srl_epi16(packed, _mm_cvtsi32_si128(shift)),
                                       _mm256_set1_epi8((1 << kLow) - 1));
  if constexpr (kBits != 3) return low;
  return _mm256_or_si256(low, load_bits(channel + KeyTiles::low_bytes(3), group, 4));
}

// The weights of two neighbouring channels of the list.
__m256i pair_of(const PageQuery& query, std::size_t channel) {
  std::int16_t pair;
  __builtin_memcpy(&pair, &query.weights[channel], sizeof pair);
  return _mm256_set1_epi16(pair);
}

// Sums of 32 tokens, in order.
struct GroupSums {
  __m256i v[4];
};

// Adds a block of channels to the sums of every query. Codes of two channels are interleaved in
// each half of a register: tokens 0 to 7 and 16 to 23 in `low`, the others in `high`.
template <int kBits, int kQueries>
void add_block(const ChannelCodes& codes, std::size_t group, std::size_t first, std::size_t end,
               const PageQuery* folded, GroupSums* sums) {
  __m256i low[kQueries];
  __m256i high[kQueries];
  for (int h = 0; h < kQueries; ++h) low[h] = high[h] = _mm256_setzero_si256();
  for (std::size_t i = first; i < end; i += 2) {
    const __m256i a = load_group<kBits>(codes[i], group);
    const __m256i b = load_group<kBits>(codes[i + 1], group);
    const __m256i pairs_low = _mm256_unpacklo_epi8(a, b);
    const __m256i pairs_high = _mm256_unpackhi_epi8(a, b);
    for (int h = 0; h < kQueries; ++h) {
      const __m256i weights = pair_of(folded[h], i);
      low[h] = _mm256_add_epi16(low[h], _mm256_maddubs_epi16(pairs_low, weights));
      high[h] = _mm256_add_epi16(high[h], _mm256_maddubs_epi16(pairs_high, weights));
    }
  }
  const auto add = [](__m256i& to, __m128i words) {
    to = _mm256_add_epi32(to, _mm256_cvtepi16_epi32(words));
  };
  for (int h = 0; h < kQueries; ++h) {
    add(sums[h].v[0], _mm256_castsi256_si128(low[h]));
    add(sums[h].v[1], _mm256_castsi256_si128(high[h]));
    add(sums[h].v[2], _mm256_extracti128_si256(low[h], 1));
    add(sums[h].v[3], _mm256_extracti128_si256(high[h], 1));
  }
}

template <int kBits, int kQueries>
void score_queries(const PageScan& scan, const PageQuery* folded, float* const* logits) {
  const ChannelCodes codes = find_codes<kBits>(scan);
  const auto count = static_cast<std::size_t>(scan.channels->count);
  for (std::size_t group = 0; group < kGroups; ++group) {
    GroupSums sums[kQueries];
    for (GroupSums& of : sums) {
      for (__m256i& v : of.v) v = _mm256_setzero_si256();
    }
    for (std::size_t first = 0; first < count; first += kBlockChannels) {
      const std::size_t end = std::min(count, first + kBlockChannels);
      add_block<kBits, kQueries>(codes, group, first, end, folded, sums);
    }
    for (int h = 0; h < kQueries; ++h) {
      float* const to = logits[h] + group * kGroupTokens;
      for (std::size_t i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * kLanes, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[h].v[i]),
                                                          _mm256_set1_ps(folded[h].factor),
                                                          _mm256_set1_ps(folded[h].offset)));
      }
    }
  }
}

template <int kBits>
void score_bits(const PageScan& scan, std::span<const PageQuery> folded,
                std::span<float* const> logits) {
  switch (folded.size()) {
    case 4:
      return score_queries<kBits, 4>(scan, folded.data(), logits.data());
    case 3:
      return score_queries<kBits, 3>(scan, folded.data(), logits.data());
    case 2:
      return score_queries<kBits, 2>(scan, folded.data(), logits.data());
    default:
      return score_queries<kBits, 1>(scan, folded.data(), logits.data());
  }
}

// One float per channel of the list, zeros up to a multiple of kLanes.
using ChannelFloats = std::array<float, kMaxHeadDim>;

bool lists_all(const ChannelList& channels) {
  const auto count = static_cast<std::size_t>(channels.count);
  return count > 0 && count % kLanes == 0 && channels.index[count - 1] == count - 1;
}

void pick_halves(const std::uint16_t* from, const ChannelList& channels, ChannelFloats& to) {
  const auto count = static_cast<std::size_t>(channels.count);
  std::array<std::uint16_t, kMaxHeadDim> picked;
  if (!lists_all(channels)) {
    for (std::size_t i = 0; i < count; ++i) picked[i] = from[channels.index[i]];
    std::fill(picked.begin() + count, picked.begin() + (count + kLanes - 1) / kLanes * kLanes,
              std::uint16_t{0});
    from = picked.data();
  }
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(&to[i], _mm256_cvtph_ps(halves));
  }
}

const float* pick_floats(const float* from, const ChannelList& channels, ChannelFloats& to) {
  if (lists_all(channels)) return from;
  const auto count = static_cast<std::size_t>(channels.count);
  for (std::size_t i = 0; i < count; ++i) to[i] = from[channels.index[i]];
  std::fill(to.begin() + count, to.begin() + (count + kLanes - 1) / kLanes * kLanes, 0.0f);
  return to.data();
}

float sum_of(__m256 v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

float largest_of(__m256 v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// Stores eight 32-bit integers as 8 bits each.
void store_bytes(std::int8_t* to, __m256i numbers) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
}

void fold_query(const float* x, const ChannelFloats& scales, const ChannelFloats& zeros,
                float factor, const PageScan& scan, PageQuery& folded) {
  const auto count = static_cast<std::size_t>(scan.channels->count);
  ChannelFloats products;
  __m256 largest = _mm256_setzero_ps();
  __m256 offset = _mm256_setzero_ps();
  const __m256 sign = _mm256_set1_ps(-0.0f);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __m256 q = _mm256_loadu_ps(x + i);
    const __m256 product = _mm256_mul_ps(q, _mm256_loadu_ps(&scales[i]));
    _mm256_storeu_ps(&products[i], product);
    largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, product));
    offset = _mm256_fmadd_ps(q, _mm256_loadu_ps(&zeros[i]), offset);
  }
  const float high = largest_of(largest);
  const __m256 inverse = _mm256_set1_ps(high > 0.0f ? 127.0f / high : 0.0f);
  const __m256 step = _mm256_set1_ps(high / 127.0f);
  __m256 lost = _mm256_setzero_ps();
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __m256 product = _mm256_loadu_ps(&products[i]);
    const __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(product, inverse));
    lost = _mm256_add_ps(lost, _mm256_fnmadd_ps(_mm256_cvtepi32_ps(rounded), step, product));
    store_bytes(&folded.weights[i], rounded);
  }
  folded.factor = high / 127.0f * factor;
  folded.offset = (sum_of(offset) + middle_code(scan.bits) * sum_of(lost)) * factor;
}

void fold(const float* q, std::int64_t stride, std::span<const float> factors, const PageScan& scan,
          PageQuery* folded) {
  ChannelFloats scales;
  ChannelFloats zeros;
  ChannelFloats picked;
  pick_halves(scan.page.scales, *scan.channels, scales);
  pick_halves(scan.page.zeros, *scan.channels, zeros);
  for (std::size_t h = 0; h < factors.size(); ++h) {
    const float* const own = q + static_cast<std::int64_t>(h) * stride;
    fold_query(pick_floats(own, *scan.channels, picked), scales, zeros, factors[h], scan,
               folded[h]);
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

const PageScorer* avx2_scorer() {
  static constexpr PageScorer kScorer = {"AVX2", fold, score};
  const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  return runs ? &kScorer : nullptr;
}

}  // namespace sluice::cpu

#endif
