// Attention in fp64, written from its definition and independent of cpu/ and kernels/. Every
// backend's attend() is compared with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "sluice/half.h"
#include "sluice/row_code.h"
#include "sluice/types.h"

namespace sluice::testing {

// One attention problem in host memory.
struct AttentionCase {
  KvShape shape;
  std::int64_t tokens = 1;
  std::int64_t first_query_position = 0;
  std::int64_t first_row_position = 0;
  float scale = 1.0f;
  std::vector<float> q;                      // [tokens, query_heads, head_dim]
  std::vector<std::vector<std::byte>> rows;  // [kv_heads][count * row_bytes]
  std::vector<std::int32_t> seen;            // [tokens], see AttendParams; empty: causal
  std::int64_t window = 0;                   // see AttendParams

  std::int64_t count(int kv_head) const {
    return static_cast<std::int64_t>(rows[static_cast<std::size_t>(kv_head)].size() /
                                     shape.row_bytes());
  }
  std::int64_t visible(std::int64_t token, int kv_head) const {
    const std::int64_t end =
        seen.empty() ? first_query_position + token + 1 : seen[static_cast<std::size_t>(token)];
    return std::clamp<std::int64_t>(end - first_row_position, 0, count(kv_head));
  }
  // Rows before those that a window shows.
  std::int64_t hidden(std::int64_t token, int kv_head) const {
    if (window == 0) return 0;
    const std::int64_t position = first_query_position + token;
    return std::clamp<std::int64_t>(position - window + 1 - first_row_position, 0,
                                    visible(token, kv_head));
  }
};

// The bytes of a row.
inline const std::byte* row_of(const AttentionCase& c, int kv_head, std::int64_t row) {
  return c.rows[static_cast<std::size_t>(kv_head)].data() +
         static_cast<std::size_t>(row) * c.shape.row_bytes();
}

// The bf16 in the lowest bits of 16 codes.
inline double scale_in(const std::byte* codes) {
  unsigned scale = 0;
  for (int i = 0; i < 16; ++i) scale |= (static_cast<unsigned>(codes[i]) & 1u) << i;
  return bf16_to_float(static_cast<std::uint16_t>(scale));
}

// Element `c` of a key or value in int8, by the definition of sluice/row_code.h.
inline double int8_element(const std::byte* codes, int c) {
  return scale_in(codes) * static_cast<signed char>(codes[c]);
}

// Element `c` of a value in int4 that begins at `value` in a row, by the same definition.
inline double int4_element(const std::byte* value, int c) {
  const auto both = static_cast<int>(value[c / 32 * 16 + c % 16]);
  const int bits = c % 32 < 16 ? both % 16 : both / 16;
  return scale_in(value - 16 * (c / 32 + 1)) * (bits < 8 ? bits : bits - 16);
}

// Element `index` of a row: [0, head_dim) is the key, the rest the value.
inline double row_element(const AttentionCase& c, int kv_head, std::int64_t row, int index) {
  const int d = c.shape.head_dim;
  const std::byte* const first = row_of(c, kv_head, row);
  if (c.shape.rows.code == RowCode::k8v4 && index >= d) return int4_element(first + d, index - d);
  if (c.shape.rows.is_coded()) return int8_element(first + index / d * d, index % d);
  const std::byte* const bytes =
      first + static_cast<std::size_t>(index) * size_of(c.shape.rows.element);
  if (c.shape.rows.element == DType::f32) {
    float value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return c.shape.rows.element == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// Writes a key and a value, as encode_row() codes them where rows are coded;
// tests/lib/row_code_test.cc checks that.
inline void set_row(AttentionCase& c, int kv_head, std::int64_t row, const float* key,
                    const float* value);

// Where rows are coded, this codes the row anew, so other elements may change by rounding.
inline void set_row_element(AttentionCase& c, int kv_head, std::int64_t row, int index,
                            float value) {
  if (c.shape.rows.is_coded()) {
    const int d = c.shape.head_dim;
    std::vector<float> all;
    for (int i = 0; i < 2 * d; ++i) {
      all.push_back(static_cast<float>(row_element(c, kv_head, row, i)));
    }
    all[static_cast<std::size_t>(index)] = value;
    return set_row(c, kv_head, row, all.data(), all.data() + d);
  }
  std::byte* const bytes = c.rows[static_cast<std::size_t>(kv_head)].data() +
                           static_cast<std::size_t>(row) * c.shape.row_bytes() +
                           static_cast<std::size_t>(index) * size_of(c.shape.rows.element);
  if (c.shape.rows.element == DType::f32) {
    std::memcpy(bytes, &value, sizeof value);
    return;
  }
  const std::uint16_t bits =
      c.shape.rows.element == DType::bf16 ? float_to_bf16(value) : float_to_f16(value);
  std::memcpy(bytes, &bits, sizeof bits);
}

inline void set_row(AttentionCase& c, int kv_head, std::int64_t row, const float* key,
                    const float* value) {
  const int d = c.shape.head_dim;
  if (!c.shape.rows.is_coded()) {
    for (int i = 0; i < d; ++i) {
      set_row_element(c, kv_head, row, i, key[i]);
      set_row_element(c, kv_head, row, d + i, value[i]);
    }
    return;
  }
  encode_row(c.shape.rows.code, key, value, d, const_cast<std::byte*>(row_of(c, kv_head, row)));
}

// The answer for one query, and the scales for its error.
struct QueryOracle {
  std::vector<double> out;
  double lse = -std::numeric_limits<double>::infinity();

  std::int64_t visible = 0;
  std::vector<double> magnitude;  // sum of p |v|, per channel: the scale of fp32 sums' errors
  double largest_logit =
      0;  // max over rows with weight of scale * sum |q k|: the scale of logits' errors
  // Deviation of the result, to first order, if every q and every p had an independent relative
  // error of deviation 1. Of out, per channel: sqrt(sum p^2 v^2 (1 + l^2)) with the variance of a
  // row's logit l^2 = scale^2 sum (q k)^2, which takes keys and values for independent. Of lse:
  // scale * sqrt(sum over channels of (q sum p k)^2), exactly; keys with weight resemble q.
  std::vector<double> spread;
  double lse_spread = 0;
};

class AttentionOracle {
 public:
  explicit AttentionOracle(const AttentionCase& c) : case_(c), width_(2 * c.shape.head_dim) {
    for (int head = 0; head < c.shape.kv_heads; ++head) {
      std::vector<double>& rows = rows_.emplace_back();
      for (std::int64_t row = 0; row < c.count(head); ++row) {
        for (int i = 0; i < width_; ++i) rows.push_back(row_element(c, head, row, i));
      }
    }
  }

  QueryOracle query(std::int64_t token, int query_head) const {
    const int kv_head = query_head / case_.shape.group();
    const float* const q =
        case_.q.data() + (token * case_.shape.query_heads + query_head) * case_.shape.head_dim;
    const std::int64_t hidden = case_.hidden(token, kv_head);
    const double* const rows = rows_[static_cast<std::size_t>(kv_head)].data() + hidden * width_;
    QueryOracle result;
    result.visible = case_.visible(token, kv_head) - hidden;
    std::vector<Logit> logits;
    double highest = -std::numeric_limits<double>::infinity();
    for (std::int64_t row = 0; row < result.visible; ++row) {
      logits.push_back(logit_of(q, rows + row * width_));
      highest = std::fmax(highest, logits.back().value);
    }
    result.out.assign(static_cast<std::size_t>(case_.shape.head_dim), 0.0);
    result.magnitude = result.spread = result.out;
    if (logits.empty() || (std::isinf(highest) && highest < 0)) return result;
    double sum = 0;
    for (const Logit& logit : logits) sum += std::exp(logit.value - highest);
    result.lse = highest + std::log(sum);
    average(rows, logits, q, result);
    return result;
  }

 private:
  struct Logit {
    double value = 0;
    double size = 0;      // sum of |terms|
    double variance = 0;  // sum of terms^2
  };

  Logit logit_of(const float* q, const double* k) const {
    Logit logit;
    for (int i = 0; i < case_.shape.head_dim; ++i) {
      const double term = case_.scale * static_cast<double>(q[i]) * k[i];
      logit.value += term;
      logit.size += std::abs(term);
      logit.variance += term * term;
    }
    return logit;
  }

  void average(const double* rows, const std::vector<Logit>& logits, const float* q,
               QueryOracle& result) const {
    const int d = case_.shape.head_dim;
    std::vector<double> mean_key(static_cast<std::size_t>(d));
    for (std::size_t row = 0; row < logits.size(); ++row) {
      const double p = std::exp(logits[row].value - result.lse);
      if (p == 0) continue;
      result.largest_logit = std::max(result.largest_logit, logits[row].size);
      const double* const k = rows + row * static_cast<std::size_t>(width_);
      const double* const v = k + d;
      for (std::size_t i = 0; i < mean_key.size(); ++i) {
        mean_key[i] += p * k[i];
        result.out[i] += p * v[i];
        result.magnitude[i] += p * std::abs(v[i]);
        result.spread[i] += p * p * v[i] * v[i] * (1 + logits[row].variance);
      }
    }
    for (double& spread : result.spread) spread = std::sqrt(spread);
    for (std::size_t i = 0; i < mean_key.size(); ++i) {
      result.lse_spread = std::hypot(result.lse_spread, case_.scale * q[i] * mean_key[i]);
    }
  }

  const AttentionCase& case_;
  int width_;
  std::vector<std::vector<double>> rows_;  // [kv_heads][count, 2 * head_dim]
};

}  // namespace sluice::testing
