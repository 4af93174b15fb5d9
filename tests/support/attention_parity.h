// The tolerance of the parity suite: what an implementation's rounding allows, and no more.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/attention_cases.h"

namespace sluice::testing {

// How an implementation rounds.
struct Rounding {
  bool bf16_queries = false;  // q is rounded to bf16 before the product with K
  bool bf16_weights = false;  // softmax weights are rounded to bf16 before the product with V
};

struct Tolerance {
  double lse = 0;
  std::vector<double> out;  // [head_dim]
};

// fp32: a logit is a sum of head_dim terms, an exponential has a relative error of its logit's
// absolute one, and a sum over n rows drifts by about sqrt(n) roundings; 2^-24 each.
// bf16: every query element or weight is off by 2^-8 at most and by 0.85 * 2^-9 in the mean square,
// independently, so errors add up as the oracle's spreads say; seven deviations, since the spread
// of out is an estimate and a test run looks at a million numbers. The approximated exponential
// (2^-13) is common to weights and their sum, and shows in the log-sum-exp alone.
inline Tolerance tolerance_of(const QueryOracle& oracle, const Rounding& rounding) {
  constexpr double kFloat = 0x1p-24;
  constexpr double kBf16 = 7 * 0.85 * 0x1p-9;
  const double fp32 =
      kFloat * (32 + 4 * std::sqrt(static_cast<double>(oracle.visible)) + 8 * oracle.largest_logit);
  const bool bf16 = rounding.bf16_queries || rounding.bf16_weights;
  Tolerance tolerance;
  tolerance.lse = fp32 + kFloat * 8 * std::abs(oracle.lse);
  if (rounding.bf16_queries) tolerance.lse += kBf16 * oracle.lse_spread;
  if (rounding.bf16_weights) tolerance.lse += 0x1p-13;
  for (std::size_t c = 0; c < oracle.out.size(); ++c) {
    tolerance.out.push_back(fp32 * oracle.magnitude[c] + (bf16 ? kBf16 * oracle.spread[c] : 0));
  }
  return tolerance;
}

inline bool close(double actual, double expected, double tolerance) {
  if (std::isnan(expected)) return std::isnan(actual);
  if (std::isinf(expected)) return actual == expected;
  return std::abs(actual - expected) <= tolerance;
}

// Compares every query of a partial with the oracle; stops at the first that is off.
inline void expect_parity(const AttentionCase& c, const Partial& actual, const Rounding& rounding) {
  const AttentionOracle oracle(c);
  for (std::int64_t token = 0; token < c.tokens; ++token) {
    for (int head = 0; head < c.shape.query_heads; ++head) {
      const auto index = static_cast<std::size_t>(token * c.shape.query_heads + head);
      const QueryOracle expected = oracle.query(token, head);
      const Tolerance tolerance = tolerance_of(expected, rounding);
      ASSERT_TRUE(close(actual.lse[index], expected.lse, tolerance.lse))
          << "token " << token << " head " << head << " lse " << actual.lse[index] << " expected "
          << expected.lse << " +- " << tolerance.lse;
      for (std::size_t i = 0; i < expected.out.size(); ++i) {
        const float value = actual.out[index * expected.out.size() + i];
        ASSERT_TRUE(close(value, expected.out[i], tolerance.out[i]))
            << "token " << token << " head " << head << " channel " << i << ": " << value
            << " expected " << expected.out[i] << " +- " << tolerance.out[i];
      }
    }
  }
}

}  // namespace sluice::testing
