// Values as components of a basis, and back; see ValueTiles, in SIMD.
#pragma once

#include <vector>

namespace sluice::cpu {

// A KV head's basis.
struct Basis {
  const float* vectors = nullptr;  // [channels(), head_dim]
  int head_dim = 0;

  int channels() const { return head_dim / 2; }
};

// The products of a page's values, [kPageTokens, head_dim], with the basis:
// [kPageTokens, channels].
std::vector<float> projected(const Basis& basis, const std::vector<float>& values);

// Replaces `sums`, [channels], by B^T (sums - read * B values), [head_dim], B the basis and
// `values` [head_dim].
void unproject(const Basis& basis, const float* values, float read, float* sums);

}  // namespace sluice::cpu
