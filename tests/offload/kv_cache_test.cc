#include "sluice/kv_cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "sluice/errors.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using sluice::testing::Random;

// What a caller with a model of its own does, on the real CPU backend: the same steps at
// different caps, with the attention of every layer kept.
std::vector<float> run(KvCache& cache, std::uint64_t seed) {
  const KvShape shape = cache.plan().shape;
  Random random(seed);
  std::vector<float> all;
  std::int64_t left = cache.plan().context;
  // Lengths do not depend on the plan, so that every cap sees the same numbers.
  for (std::int64_t i = 0; left > 0; ++i) {
    const std::int64_t tokens = std::min<std::int64_t>(left, i % 3 == 0 ? 16 : 1);
    cache.begin_step(tokens == 1 ? Phase::decode : Phase::prefill, tokens);
    for (int layer = 0; layer < shape.layers; ++layer) {
      const auto k = random.normal(tokens * shape.kv_heads * shape.head_dim);
      const auto v = random.normal(tokens * shape.kv_heads * shape.head_dim);
      const auto q = random.normal(tokens * shape.query_heads * shape.head_dim);
      std::vector<float> out(q.size());
      cache.append(layer, k.data(), v.data());
      cache.attend(layer, q.data(), out.data());
      all.insert(all.end(), out.begin(), out.end());
    }
    cache.end_step();
    left -= tokens;
  }
  return all;
}

KvConfig config(DType dtype) {
  KvConfig config;
  config.shape = {2, 8, 2, 64, dtype};
  config.context = 900;
  config.chunk = 16;
  return config;
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = a.size() == b.size() ? 0.0 : INFINITY;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
    largest = std::max(largest, std::abs(double{a[i]} - b[i]));
  }
  return largest;
}

TEST(KvCache, CapsChangeTheBytesMovedAndNotTheAnswer) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    KvConfig in_place = config(dtype);
    KvCache reference(in_place);
    const std::vector<float> expected = run(reference, 5);
    EXPECT_EQ(reference.memory().device_peak, 0u);
    // 4 pages per KV head of one layer, of every layer, and everything.
    const std::uint64_t page = kPageTokens * in_place.shape.row_bytes();
    const std::uint64_t everything = in_place.shape.token_bytes() * 900 + 4096;  // and tables
    for (const std::uint64_t cap : {8 * page, 16 * page, everything}) {
      KvConfig capped = config(dtype);
      capped.device_memory = cap;
      KvCache cache(capped);
      // The parts of a row's attention are merged in another order, which is fp32 rounding; for
      // bf16 rows AMX also rounds the weights of each part to 8 bits.
      EXPECT_LT(largest_difference(run(cache, 5), expected), dtype == DType::f32 ? 1e-5 : 5e-3);
      EXPECT_LE(cache.memory().device_peak, cap);
      EXPECT_GT(cache.memory().device_peak, 0u);
      const std::uint64_t fetched = cache.ledger().crossed(Tier::host, Tier::device).bytes;
      EXPECT_EQ(fetched == 0, cap == everything);
    }
  }
}

TEST(KvCache, CountsItsLength) {
  KvCache cache(config(DType::bf16));
  EXPECT_EQ(cache.length(), 0);
  run(cache, 1);
  EXPECT_EQ(cache.length(), 900);
  EXPECT_THROW(cache.begin_step(Phase::decode, 1), Error);
  EXPECT_GE(cache.memory().host_peak, cache.plan().host_bytes);
}

TEST(KvCache, RefusesAHostCapWhenItIsReached) {
  KvConfig small = config(DType::bf16);
  small.host_memory = 64 << 10;
  KvCache cache(small);
  try {
    run(cache, 1);
    FAIL() << "went past the host cap";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory);
  }
  EXPECT_LE(cache.memory().host_peak, 64u << 10);
}

}  // namespace
}  // namespace sluice
