// Scans of the key index. The inner loop multiplies 8-bit query weights with codes of up to 4 bits
// and adds in 32-bit integers, so that sums are the same in any order and on any instruction set.
#include "cpu/scan/key_score.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "cpu/scan/key_score_simd.h"
#include "lib/check.h"
#include "sluice/half.h"

namespace sluice::cpu {
namespace {

// sums += weight * number for every token; numbers have `bits` bits, packed without padding.
void add_bits(const std::byte* codes, int bits, int weight, std::int32_t* sums) {
  const std::size_t bytes = TilePage::code_bytes(bits);
  const int mask = (1 << bits) - 1;
  for (std::size_t part = 0; part * bytes < kPageTokens; ++part) {
    const int shift = static_cast<int>(part) * bits;
    for (std::size_t b = 0; b < bytes; ++b) {
      sums[part * bytes + b] += weight * ((static_cast<int>(codes[b]) >> shift) & mask);
    }
  }
}

// sums += weight * code for every token.
void add_channel(const std::byte* codes, int bits, int weight, std::int32_t* sums) {
  add_bits(codes, KeyTiles::low_bits(bits), weight, sums);
  if (bits == 3) add_bits(codes + KeyTiles::low_bytes(bits), 1, 4 * weight, sums);
}

void fold_query(const float* q, float factor, const PageScan& scan, PageQuery& folded) {
  std::array<float, kMaxHeadDim> products;
  float largest = 0.0f;
  float offset = 0.0f;
  const auto count = static_cast<std::size_t>(scan.channels->count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t c = scan.channels->index[i];
    products[i] = q[c] * f16_to_float(scan.page.scales[c]);
    offset += q[c] * f16_to_float(scan.page.zeros[c]);
    largest = std::max(largest, std::fabs(products[i]));
  }
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  const float step = largest / 127.0f;
  float lost = 0.0f;
  for (std::size_t i = 0; i < count; ++i) {
    folded.weights[i] = static_cast<std::int8_t>(std::lrint(products[i] * inverse));
    lost += products[i] - step * static_cast<float>(folded.weights[i]);
  }
  std::fill(folded.weights.begin() + count, folded.weights.begin() + (count + 3) / 4 * 4,
            std::int8_t{0});
  folded.factor = step * factor;
  folded.offset = (offset + middle_code(scan.bits) * lost) * factor;
}

void fold_portable(const float* q, std::int64_t stride, std::span<const float> factors,
                   const PageScan& scan, PageQuery* folded) {
  for (std::size_t h = 0; h < factors.size(); ++h) {
    fold_query(q + static_cast<std::int64_t>(h) * stride, factors[h], scan, folded[h]);
  }
}

void score_portable(const PageScan& scan, std::span<const PageQuery> folded,
                    std::span<float* const> logits) {
  for (std::size_t h = 0; h < folded.size(); ++h) {
    std::array<std::int32_t, kPageTokens> sums{};
    for (int i = 0; i < scan.channels->count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      add_channel(scan.page.codes_of(scan.channels->index[at], scan.bits), scan.bits,
                  folded[h].weights[at], sums.data());
    }
    for (std::size_t t = 0; t < kPageTokens; ++t) {
      logits[h][t] = std::fma(static_cast<float>(sums[t]), folded[h].factor, folded[h].offset);
    }
  }
}

const PageScorer& scorer() {
  static const PageScorer& best = avx512_scorer() != nullptr ? *avx512_scorer()
                                  : avx2_scorer() != nullptr ? *avx2_scorer()
                                                             : portable_scorer();
  return best;
}

}  // namespace

const PageScorer& portable_scorer() {
  static constexpr PageScorer kScorer = {"portable", fold_portable, score_portable};
  return kScorer;
}

void fold_queries(const float* q, std::int64_t stride, std::span<const float> factors,
                  const PageScan& scan, PageQuery* folded) {
  scorer().fold(q, stride, factors, scan, folded);
}

void score_page(const PageScan& scan, std::span<const PageQuery> folded,
                std::span<float* const> logits) {
  check(folded.size() == logits.size() && folded.size() <= kMaxBunch, "score_page: bunch");
  scorer().score(scan, folded, logits);
}

}  // namespace sluice::cpu
