// The tolerance of the parity suite: exactly what an implementation's rounding allows.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/attention_cases.h"

namespace sluice::testing {

// The rounding of an implementation: the largest relative error of a query element before its
// product with K, and of a softmax weight before its product with V. 0 means fp32, whose error
// always counts.
struct Rounding {
  double queries = 0;
  double weights = 0;
};

inline constexpr double kBf16Step = 0x1p-9;
inline constexpr double kHalfStep = 0x1p-12;

struct Tolerance {
  double lse = 0;
  std::vector<double> out;  // [head_dim]
};

// fp32: a logit is a sum of head_dim terms, an exponential has a relative error equal to its
// logit's absolute error, and a sum over n rows drifts by about sqrt(n) roundings of 2^-24 each.
// Other roundings: every query element or weight is off by at most its step and by 0.85 steps in
// the mean square (generous, because a rounding is uniform within half a unit). The errors are
// independent, so they add up as the oracle's spreads say. The tolerance is seven deviations,
// because the spread of out is an estimate and a test run checks a million numbers. An approximated
// exponential (2^-13) is common to weights and their sum, so it shows only in the log-sum-exp.
inline Tolerance tolerance_of(const QueryOracle& oracle, const Rounding& rounding) {
  constexpr double kFloat = 0x1p-24;
  constexpr double kUnderflow = 0x1p-100;  // weights of rows far below the highest are 0
  constexpr double kDeviations = 7 * 0.85;
  const double fp32 =
      kFloat * (32 + 4 * std::sqrt(static_cast<double>(oracle.visible)) + 8 * oracle.largest_logit);
  const double step = std::max(rounding.queries, rounding.weights);
  Tolerance tolerance;
  tolerance.lse = fp32 + kFloat * 8 * std::abs(oracle.lse);
  tolerance.lse += kDeviations * rounding.queries * oracle.lse_spread;
  tolerance.lse += rounding.weights / 16;
  for (std::size_t c = 0; c < oracle.out.size(); ++c) {
    tolerance.out.push_back(kUnderflow + fp32 * oracle.magnitude[c] +
                            kDeviations * step * oracle.spread[c]);
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

// Expects finite results whose log-sum-exp is within `step` of the largest logit.
inline void expect_near_lse(const AttentionCase& c, const Partial& actual, double step) {
  const AttentionOracle oracle(c);
  for (std::int64_t token = 0; token < c.tokens; ++token) {
    for (int head = 0; head < c.shape.query_heads; ++head) {
      const auto index = static_cast<std::size_t>(token * c.shape.query_heads + head);
      const QueryOracle expected = oracle.query(token, head);
      ASSERT_NEAR(actual.lse[index], expected.lse, step * expected.largest_logit)
          << "token " << token << " head " << head;
      for (std::size_t i = 0; i < expected.out.size(); ++i) {
        ASSERT_TRUE(std::isfinite(actual.out[index * expected.out.size() + i]));
      }
    }
  }
}

}  // namespace sluice::testing
