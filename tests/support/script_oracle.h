// Attention of a script's tokens in fp64, over the rows that a token may see.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "sluice/half.h"
#include "tests/support/script.h"

namespace sluice::testing {

// Returns true if a token may attend to a row; called only for rows up to the token's own.
using Sees = std::function<bool(std::int64_t token, std::int64_t row)>;

// The value that a row of this dtype stores.
inline double stored(const KvShape& shape, float x) {
  return static_cast<double>(shape.rows.element == DType::f32 ? x
                                                              : bf16_to_float(float_to_bf16(x)));
}

inline std::vector<double> attention_of(const Script& script, std::size_t layer, std::int64_t token,
                                        int head, const Sees& sees) {
  const KvShape& shape = script.shape();
  const int d = shape.head_dim;
  const int kv_head = head / shape.group();
  const float* const q = script.q(layer, token) + head * d;
  std::vector<double> out(static_cast<std::size_t>(d));
  double total = 0.0;
  for (std::int64_t row = 0; row <= token; ++row) {
    if (!sees(token, row)) continue;
    const float* const k = script.k(layer, row) + kv_head * d;
    const float* const v = script.v(layer, row) + kv_head * d;
    double logit = 0.0;
    for (int c = 0; c < d; ++c) logit += static_cast<double>(q[c]) * stored(shape, k[c]);
    const double weight = std::exp(logit / std::sqrt(d));
    total += weight;
    for (int c = 0; c < d; ++c) out[static_cast<std::size_t>(c)] += weight * stored(shape, v[c]);
  }
  for (double& x : out) x = total > 0.0 ? x / total : 0.0;
  return out;
}

}  // namespace sluice::testing
