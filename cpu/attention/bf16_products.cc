#include "cpu/attention/bf16_products.h"

#if !defined(__x86_64__)

namespace sluice::cpu {

const Bf16Products* amx_products() { return nullptr; }
const Bf16Products* avx512_products() { return nullptr; }

}  // namespace sluice::cpu

#else

#include <cstring>

#include "cpu/runtime/intrinsics.h"

namespace sluice::cpu {
namespace {

constexpr std::size_t kSide = kTileSide;
constexpr std::size_t kDepth = kTileDepth;
constexpr std::size_t kRowTiles = kBf16Rows / kDepth;

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

// Stores four tiles of sums: 32 rows of K, or channels of V, for both columns.
void store_sums(float* left, float* right) {
  _tile_stored(0, left, 64);
  _tile_stored(1, right, 64);
  _tile_stored(2, left + kSide * kSide, 64);
  _tile_stored(3, right + kSide * kSide, 64);
}

void amx_keys(const KeyProduct& p) {
  const std::size_t column = kSide * p.head_dim;
  const auto stride = p.stride * sizeof(std::uint16_t);
  order_tile_memory();
  for (std::size_t r = 0; r < p.rows; r += kDepth) {
    const std::uint16_t* const low = p.k + r * p.stride;
    const std::uint16_t* const high = low + kSide * p.stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::size_t c = 0; c < p.head_dim; c += kDepth) {
      _tile_loadd(4, low + c, stride);
      _tile_loadd(6, p.q + c * kSide, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, p.q + column + c * kSide, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, high + c, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    store_sums(p.scores + r * kSide, p.scores + (r + kBf16Rows) * kSide);
  }
  order_tile_memory();
}

void amx_values(const ValueProduct& p) {
  order_tile_memory();
  for (std::size_t c = 0; c < p.head_dim; c += 2 * kSide) {
    float* const left = p.values + c * kSide;
    float* const right = left + p.head_dim * kSide;
    _tile_loadd(0, left, 64);
    _tile_loadd(1, right, 64);
    _tile_loadd(2, left + kSide * kSide, 64);
    _tile_loadd(3, right + kSide * kSide, 64);
    const std::uint16_t* const low = p.values_t + c / kSide * kRowTiles * kTileElements;
    for (std::size_t r = 0; r < p.rows; r += kDepth) {
      const std::uint16_t* const v = low + r / kDepth * kTileElements;
      const std::uint16_t* const weights = p.weights + r / kDepth * kTileElements;
      _tile_loadd(4, v, 64);
      _tile_loadd(6, weights, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + kRowTiles * kTileElements, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, v + kRowTiles * kTileElements, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    store_sums(left, right);
  }
  order_tile_memory();
}

#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

// Rows of K, or channels of V, whose sums for both columns are in registers: enough to hide the
// latency of a dot product.
constexpr std::size_t kSums = 8;

struct Sums {
  __m512 left[kSums];
  __m512 right[kSums];
};

inline __m512bh pair_of(const std::uint16_t* from) {
  std::int32_t both;
  std::memcpy(&both, from, sizeof both);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
}

inline __m512bh load_pairs(const std::uint16_t* from) {
  return reinterpret_cast<__m512bh>(_mm512_load_si512(from));
}

// Adds the products of kSums items, `stride` elements apart, with both columns over `pairs` pairs.
inline void add_pairs(const std::uint16_t* items, std::size_t stride, const std::uint16_t* left,
                      const std::uint16_t* right, std::size_t pairs, Sums& sums) {
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    const __m512bh to_left = load_pairs(left + pair * kDepth);
    const __m512bh to_right = load_pairs(right + pair * kDepth);
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kSums; ++i) {
      const __m512bh item = pair_of(items + i * stride + 2 * pair);
      sums.left[i] = _mm512_dpbf16_ps(sums.left[i], to_left, item);
      sums.right[i] = _mm512_dpbf16_ps(sums.right[i], to_right, item);
    }
  }
}

void avx512_keys(const KeyProduct& p) {
  for (std::size_t r = 0; r < p.rows; r += kSums) {
    Sums sums;
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kSums; ++i) sums.left[i] = sums.right[i] = _mm512_setzero_ps();
    add_pairs(p.k + r * p.stride, p.stride, p.q, p.q + kSide * p.head_dim, p.head_dim / 2, sums);
    float* const left = p.scores + r * kSide;
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kSums; ++i) {
      _mm512_store_ps(left + i * kSide, sums.left[i]);
      _mm512_store_ps(left + (i + kBf16Rows) * kSide, sums.right[i]);
    }
  }
}

void avx512_values(const ValueProduct& p) {
  for (std::size_t c = 0; c < p.head_dim; c += kSums) {
    float* const left = p.values + c * kSide;
    float* const right = left + p.head_dim * kSide;
    const std::uint16_t* const channels =
        p.values_t + c / kSide * kRowTiles * kTileElements + c % kSide * kDepth;
    Sums sums;
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kSums; ++i) {
      sums.left[i] = _mm512_load_ps(left + i * kSide);
      sums.right[i] = _mm512_load_ps(right + i * kSide);
    }
    for (std::size_t r = 0; r < p.rows; r += kDepth) {
      const std::uint16_t* const weights = p.weights + r * kSide;
      add_pairs(channels + r / kDepth * kTileElements, kDepth, weights, weights + kBf16Rows * kSide,
                kDepth / 2, sums);
    }
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kSums; ++i) {
      _mm512_store_ps(left + i * kSide, sums.left[i]);
      _mm512_store_ps(right + i * kSide, sums.right[i]);
    }
  }
}

#pragma GCC pop_options

bool has_avx512_bf16() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

const Bf16Products* amx_products() {
  static constexpr Bf16Products kProducts = {true, amx_keys, amx_values};
  return amx_available() ? &kProducts : nullptr;
}

const Bf16Products* avx512_products() {
  static constexpr Bf16Products kProducts = {false, avx512_keys, avx512_values};
  static const bool available = has_avx512_bf16();
  return available ? &kProducts : nullptr;
}

}  // namespace sluice::cpu

#endif
