// Gumbel noise by which tokens are drawn: the id with the largest logit / temperature + noise is a
// draw from softmax(logits / temperature) (Gumbel 1954; Maddison, Tarlow and Minka 2014, "A*
// sampling", section 2). The noise of an id depends only on (seed, position, id), so that
// rounding of the logits changes a draw only if it swaps the two best ids. A draw that walks the
// cumulative sum of the weights would move every border behind a changed logit.
//
// Random bits are those of Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random
// numbers: as easy as 1, 2, 3", section 3.3), the same integers on every backend. Noise is computed
// in fp64 by each backend's own log, so that the noise of an id differs by a few units of 2^-53
// between backends.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace sluice {

// The 128 random bits of a counter under a key.
constexpr std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                              std::array<std::uint32_t, 2> key) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t even = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t odd = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(odd >> 32) ^ counter[1] ^ key[0],
               static_cast<std::uint32_t>(odd),
               static_cast<std::uint32_t>(even >> 32) ^ counter[3] ^ key[1],
               static_cast<std::uint32_t>(even)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// Ids that share a counter; id i has word i % kNoiseGroup of group i / kNoiseGroup.
inline constexpr int kNoiseGroup = 4;

// The random bits of a group of ids.
constexpr std::array<std::uint32_t, kNoiseGroup> noise_words(std::uint64_t seed,
                                                             std::uint64_t position,
                                                             std::uint32_t group) {
  return philox(
      {group, static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32), 0},
      {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
}

// The noise of random bits, -log(-log(u)) with u = 1 - (word + 1/2) / 2^32: from -3.14 to 22.9.
// `Real` is double; as a template this can be constexpr, which device code needs.
template <typename Real = double>
constexpr Real gumbel(std::uint32_t word) {
  const Real below_one = (static_cast<Real>(word) + Real{0.5}) * Real{0x1p-32};
  return -std::log(-std::log1p(-below_one));
}

// Upper bound of gumbel() for words with `leading_zeros` zeros, which spares most logarithms:
// -log(1 - x) > x, and x >= 2^-(zeros + 1).
constexpr float gumbel_bound(int leading_zeros) {
  constexpr float kLog2 = 0.69315f;  // rounded up by more than the product is rounded
  return kLog2 * static_cast<float>(leading_zeros + 1);
}

}  // namespace sluice
