// The statistics of made-up rows, measured.
#include "tools/bench_made_up.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "sluice/errors.h"

namespace sluice::tools {
namespace {

KvShape shape_with(int head_dim) {
  KvShape shape;
  shape.layers = 3;
  shape.query_heads = 4;
  shape.kv_heads = 2;
  shape.head_dim = head_dim;
  return shape;
}

std::vector<float> read(const MadeUpRows& rows, RowPart part, int layer, std::int64_t first,
                        std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count) * rows.token_bytes(part) /
                            sizeof(float));
  rows.read(part, layer, first, count, std::as_writable_bytes(std::span(values)));
  return values;
}

double dot(const float* a, const float* b, int count) {
  double sum = 0.0;
  for (int i = 0; i < count; ++i) sum += double{a[i]} * b[i];
  return sum;
}

// The logits of one query with its own KV head's keys.
struct Logits {
  std::vector<double> of_heavy;
  std::vector<double> of_others;
};

Logits logits_of(const MadeUpRows& rows, std::int64_t tokens, int query_head, std::int64_t step) {
  constexpr int kLayer = 1;
  const KvShape shape = rows.shape();
  const int head = query_head / shape.group();
  const std::vector<float> keys = read(rows, RowPart::k, kLayer, 0, tokens);
  const std::vector<float> queries = read(rows, RowPart::q, kLayer, step, 1);
  const float* const query = queries.data() + query_head * shape.head_dim;
  Logits logits;
  for (std::int64_t token = 0; token < tokens; ++token) {
    const float* const key = keys.data() + (token * shape.kv_heads + head) * shape.head_dim;
    const double logit = dot(query, key, shape.head_dim) / std::sqrt(shape.head_dim);
    const bool heavy = rows.is_heavy(kLayer, head, token, step);
    (heavy ? logits.of_heavy : logits.of_others).push_back(logit);
  }
  return logits;
}

struct Moments {
  double mean = 0.0;
  double deviation = 0.0;
};

Moments moments_of(const std::vector<double>& values) {
  Moments moments;
  for (const double value : values) moments.mean += value / static_cast<double>(values.size());
  for (const double value : values) {
    moments.deviation += std::pow(value - moments.mean, 2) / static_cast<double>(values.size());
  }
  moments.deviation = std::sqrt(moments.deviation);
  return moments;
}

class MadeUp : public ::testing::TestWithParam<int> {};

TEST_P(MadeUp, HasTheStatisticsThatAreAskedFor) {
  constexpr std::int64_t kTokens = 20000;
  MadeUpStatistics statistics;
  statistics.logit_std = 1.5;
  statistics.heavy_share = 0.02;
  statistics.heavy_weight = 0.7;
  const MadeUpRows rows(shape_with(GetParam()), statistics, 7);
  double all = 0.0;
  double heavy = 0.0;
  std::size_t count = 0;
  std::vector<double> others;  // of all queries, whose lengths vary
  for (std::int64_t step = 0; step < 8; ++step) {
    for (const int query_head : {0, 3}) {
      const Logits logits = logits_of(rows, kTokens, query_head, step);
      EXPECT_NEAR(moments_of(logits.of_others).mean, 0.0, 0.1);
      others.insert(others.end(), logits.of_others.begin(), logits.of_others.end());
      EXPECT_NEAR(moments_of(logits.of_heavy).mean, rows.heavy_lead(), 0.5);
      count += logits.of_heavy.size();
      for (const double logit : logits.of_heavy) heavy += std::exp(logit);
      for (const double logit : logits.of_heavy) all += std::exp(logit);
      for (const double logit : logits.of_others) all += std::exp(logit);
    }
  }
  EXPECT_NEAR(moments_of(others).deviation, 1.5, 0.25);
  EXPECT_NEAR(static_cast<double>(count) / (16.0 * kTokens), 0.02, 0.005);
  EXPECT_NEAR(heavy / all, 0.7, 0.05);
}

TEST_P(MadeUp, KeepsTheShareOfHeavyTokensFromStepToStep) {
  constexpr std::int64_t kTokens = 4000;
  MadeUpStatistics statistics;
  statistics.heavy_share = 0.1;
  for (const double persistence : {0.125, 0.5, 0.9, 1.0}) {
    statistics.persistence = persistence;
    const MadeUpRows rows(shape_with(GetParam()), statistics, 5);
    int before = 0;
    int kept = 0;
    for (std::int64_t step = 0; step < 200; ++step) {
      for (std::int64_t token = step % 10; token < kTokens; token += 10) {
        if (!rows.is_heavy(0, 1, token, step)) continue;
        ++before;
        if (rows.is_heavy(0, 1, token, step + 1)) ++kept;
      }
    }
    EXPECT_NEAR(static_cast<double>(kept) / before, persistence, 0.08) << persistence;
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, MadeUp, ::testing::Values(16, 64, 80, 128));

TEST(MadeUpRows, DependOnSeedAndPlaceAlone) {
  const MadeUpRows rows(shape_with(64), {}, 1);
  const std::vector<float> all = read(rows, RowPart::k, 2, 10, 20);
  const std::vector<float> part = read(rows, RowPart::k, 2, 15, 5);
  EXPECT_THAT(part, ::testing::ElementsAreArray(all.data() + std::size_t{5} * 2 * 64, part.size()));
  EXPECT_EQ(read(MadeUpRows(shape_with(64), {}, 1), RowPart::k, 2, 10, 20), all);
  EXPECT_NE(read(MadeUpRows(shape_with(64), {}, 2), RowPart::k, 2, 10, 20), all);
  EXPECT_NE(read(rows, RowPart::k, 1, 10, 20), all);
  EXPECT_NE(read(rows, RowPart::v, 2, 10, 20), all);
}

// Channels of equal size, so that none is easy to code.
TEST(MadeUpRows, SpreadOverAllChannels) {
  constexpr int kDim = 128;
  constexpr std::int64_t kTokens = 2000;
  const std::vector<float> keys =
      read(MadeUpRows(shape_with(kDim), {}, 1), RowPart::k, 0, 0, kTokens);
  for (std::size_t channel = 0; channel < kDim; ++channel) {
    std::vector<double> values;
    for (std::size_t at = channel; at < keys.size(); at += 2 * std::size_t{kDim}) {
      values.push_back(keys[at]);
    }
    EXPECT_NEAR(moments_of(values).deviation, std::sqrt(0.5), 0.1) << channel;
  }
}

TEST(MadeUpStatistics, AreChecked) {
  const auto refused = [](const char* flag, double MadeUpStatistics::*member, double value) {
    MadeUpStatistics statistics;
    validate(statistics);
    statistics.*member = value;
    try {
      validate(statistics);
      ADD_FAILURE() << flag << " " << value;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      EXPECT_THAT(error.what(), ::testing::HasSubstr(flag));
    }
  };
  refused("--logit-std", &MadeUpStatistics::logit_std, -0.1);
  refused("--logit-std", &MadeUpStatistics::logit_std, std::nan(""));
  refused("--heavy-share", &MadeUpStatistics::heavy_share, 0.0);
  refused("--heavy-share", &MadeUpStatistics::heavy_share, 0.126);
  refused("--heavy-weight", &MadeUpStatistics::heavy_weight, 1.0);
  refused("--persistence", &MadeUpStatistics::persistence, 0.1);
  refused("--persistence", &MadeUpStatistics::persistence, 1.1);
}

}  // namespace
}  // namespace sluice::tools
