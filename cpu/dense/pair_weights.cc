#include "cpu/dense/pair_weights.h"

#if !defined(__x86_64__)

namespace sluice::cpu {

MultiplyPairs pair_multiplier() { return nullptr; }

}  // namespace sluice::cpu

#else

#include <cstddef>
#include <cstring>

#include "cpu/runtime/intrinsics.h"

namespace sluice::cpu {
namespace {

constexpr std::size_t kBlock = 64;  // outputs
constexpr std::size_t kLanes = 16;
constexpr std::size_t kVectors = kBlock / kLanes;

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16")

inline __m512bh twice_of(const std::uint16_t* pair) {
  std::int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
}

// A block of outputs of kTokens tokens: all sums are in registers, and a weight is loaded once.
template <std::size_t kTokens>
inline void multiply_block(const PairProduct& p, const std::uint16_t* weights,
                           const std::uint16_t* x, std::size_t output, float* y) {
  const auto inputs = static_cast<std::size_t>(p.inputs);
  __m512 sums[kTokens][kVectors];
  for (auto& of : sums) {
    for (__m512& sum : of) sum = _mm512_setzero_ps();
  }
  for (std::size_t i = 0; i < inputs; i += 2, weights += 2 * kBlock) {
    __m512bh words[kVectors];
#pragma GCC unroll 4
    for (std::size_t v = 0; v < kVectors; ++v) {
      words[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights + v * 2 * kLanes));
    }
#pragma GCC unroll 4
    for (std::size_t t = 0; t < kTokens; ++t) {
      const __m512bh pair = twice_of(x + t * inputs + i);
#pragma GCC unroll 4
      for (std::size_t v = 0; v < kVectors; ++v) {
        sums[t][v] = _mm512_dpbf16_ps(sums[t][v], words[v], pair);
      }
    }
  }
  for (std::size_t t = 0; t < kTokens; ++t) {
    float* const to = y + t * static_cast<std::size_t>(p.y_stride) + output;
#pragma GCC unroll 4
    for (std::size_t v = 0; v < kVectors; ++v) {
      __m512 sum = sums[t][v];
      if (p.bias != nullptr) {
        sum = _mm512_add_ps(sum, _mm512_loadu_ps(p.bias + output + v * kLanes));
      }
      if (p.accumulate) sum = _mm512_add_ps(sum, _mm512_loadu_ps(to + v * kLanes));
      _mm512_storeu_ps(to + v * kLanes, sum);
    }
  }
}

// A block of weights stays in the L2 cache while all tokens use it.
void multiply(const PairProduct& p) {
  const auto inputs = static_cast<std::size_t>(p.inputs);
  const auto outputs = static_cast<std::size_t>(p.outputs);
  const auto tokens = static_cast<std::size_t>(p.tokens);
  const auto stride = static_cast<std::size_t>(p.y_stride);
  for (std::size_t output = 0; output < outputs; output += kBlock) {
    const std::uint16_t* const weights = p.weights + output * inputs;
    std::size_t t = 0;
    for (; t + 4 <= tokens; t += 4) {
      multiply_block<4>(p, weights, p.x + t * inputs, output, p.y + t * stride);
    }
    for (; t + 2 <= tokens; t += 2) {
      multiply_block<2>(p, weights, p.x + t * inputs, output, p.y + t * stride);
    }
    if (t < tokens) multiply_block<1>(p, weights, p.x + t * inputs, output, p.y + t * stride);
  }
}

#pragma GCC pop_options

bool has_avx512_bf16() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

}  // namespace

MultiplyPairs pair_multiplier() {
  static const bool available = has_avx512_bf16();
  return available ? multiply : nullptr;
}

}  // namespace sluice::cpu

#endif
