// Estimates of the device against fp64 sums over what the index says.
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <limits>

#include "tests/kernels/has_device.h"
#include "tests/kernels/scan/estimate_cases.h"

namespace sluice::cuda {
namespace {

using estimates::Prepared;
using estimates::Problem;
using testing::Random;

void expect_close(const Problem& p, std::uint64_t seed) {
  SCOPED_TRACE(testing::seed_message(seed));
  SCOPED_TRACE(::testing::PrintToString(p));
  Prepared setup(p, seed);
  setup.run();
  setup.check();
}

constexpr Selector kMethods[] = {Selector::exact, Selector::int4, Selector::sparq, Selector::quest};

TEST(CudaEstimate, EveryShape) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(1);
  for (const Selector method : kMethods) {
    for (const int head_dim : {32, 64, 80, 96, 128, 256, 2, 20, 54, 200}) {
      for (const int group : {1, 4, 7, 8, 12, 16}) {
        Problem p;
        p.method = method;
        p.head_dim = head_dim;
        p.group = group;
        p.channels = head_dim / 3 + 1;
        for (const int bits : {4, 3, 2, 1}) {
          ++seed;
          if (bits == 1 && (method != Selector::int4 || head_dim % 16 != 0)) continue;
          p.bits = bits;
          p.rotated = method == Selector::int4;
          p.dtype = seed % 2 == 0 ? DType::bf16 : DType::f16;
          expect_close(p, seed);
        }
      }
    }
  }
}

TEST(CudaEstimate, EveryNumberOfChannels) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(1000);
  for (const int channels : {1, 8, 15, 16, 17, 32, 33, 48, 64, 100, 127, 128, 500}) {
    for (const int bits : {4, 3, 2}) {
      Problem p;
      p.method = Selector::sparq;
      p.channels = channels;
      p.bits = bits;
      p.q_ties = channels % 2 == 0;
      expect_close(p, ++seed);
    }
  }
}

TEST(CudaEstimate, Candidates) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(2000);
  for (const Selector method : {Selector::exact, Selector::int4}) {
    for (const int apart : {1, 2, 20, 200, 2000}) {
      for (const int group : {1, 5, 16}) {
        Problem p;
        p.method = method;
        p.group = group;
        p.lengths = {1280 + 37, 100, 129, 1280};
        p.twice = group == 5;
        p.apart = apart;
        p.head_dim = group == 5 ? 54 : 64;
        for (const int bits : {4, 3, 2, 1}) {
          p.skip_newest = ++seed % 5 < 2;
          if (bits == 1 && (method != Selector::int4 || group == 5)) continue;
          p.bits = bits;
          p.rotated = method == Selector::int4 && (bits == 1 || seed % 2 == 0);
          expect_close(p, seed);
        }
      }
    }
  }
}

TEST(CudaEstimate, LengthsAndStrides) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(3000);
  for (const Selector method : kMethods) {
    for (const std::int64_t length : {1, 2, 31, 33, 127, 128, 129, 160, 256, 257, 383, 640, 767}) {
      Problem p;
      p.method = method;
      p.lengths = {length};
      p.head_dim = 64;
      p.odd_stride = length % 8;
      p.skip_newest = length % 3 == 0;
      p.bits = 2 + static_cast<int>(++seed % 3);
      p.rotated = method == Selector::int4 && seed % 2 == 0;
      expect_close(p, seed);
    }
  }
}

// Sequences of very different lengths, two tokens of each, in launches for more than they have.
TEST(CudaEstimate, Batches) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(3500);
  for (const Selector method : kMethods) {
    for (const int channels : {16, 60, 100}) {
      for (const int group : {4, 8, 12}) {
        Problem p;
        p.method = method;
        p.channels = channels;
        p.group = group;
        p.lengths = {1, 128, 4000, 129, 2, 256, 385, 1000, 127, 257};
        p.twice = true;
        p.spare = ++seed % 2 == 0 ? 0 : 100'000;
        p.head_dim = channels == 60 ? 64 : 128;
        p.skip_newest = channels == 16;
        for (const int bits : {4, 3, 2}) {
          p.bits = bits;
          expect_close(p, seed);
        }
      }
    }
  }
}

// More tokens than a launch takes.
TEST(CudaEstimate, ManyTokens) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(3600);
  for (const Selector method : kMethods) {
    Problem p;
    p.method = method;
    p.head_dim = 32;
    p.channels = 8;
    p.group = 2;
    p.lengths.clear();
    Random random(++seed);
    for (int i = 0; i < 90; ++i) p.lengths.push_back(random.integer(1, i % 10 == 0 ? 1500 : 300));
    p.twice = true;
    expect_close(p, seed);
  }
}

// Scratch for a few KV heads only, fewer than a token has.
TEST(CudaEstimate, LittleScratch) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(3700);
  for (const std::size_t scratch : {17'000, 60'000}) {
    for (const Selector method : kMethods) {
      for (const int apart : {0, 9}) {
        if (apart > 0 && (method == Selector::quest || method == Selector::sparq)) continue;
        Problem p;
        p.method = method;
        p.kv_heads = 5;
        p.lengths = {300, 129, 700, 1};
        p.twice = true;
        p.apart = apart;
        p.scratch = scratch;
        expect_close(p, ++seed);
      }
    }
  }
}

TEST(CudaEstimate, ManyHeadsAndLargeGroups) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(4000);
  for (const Selector method : kMethods) {
    Problem many;
    many.method = method;
    many.head_dim = 32;
    many.channels = 8;
    many.group = 1;
    many.kv_heads = 700;
    expect_close(many, ++seed);
    Problem large;
    large.method = method;
    large.head_dim = 64;
    large.group = 40;
    expect_close(large, ++seed);
  }
}

// So many that warps take some of their pages as they go.
TEST(CudaEstimate, ManyPages) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(4500);
  for (const Selector method : {Selector::int4, Selector::sparq}) {
    Problem p;
    p.method = method;
    p.head_dim = 16;
    p.channels = 8;
    p.group = 1;
    p.kv_heads = 3;
    p.lengths = {7500 * kPageTokens + 37};
    for (const int bits : {4, 3, 1}) {
      if (bits == 1 && method != Selector::int4) continue;
      p.bits = bits;
      p.rotated = bits == 1;
      expect_close(p, ++seed);
    }
  }
}

TEST(CudaEstimate, LargeQueriesAreClampedAndSmallOnesKept) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(5000);
  for (const Selector method : kMethods) {
    for (const float deviation : {1e-30f, 1e-3f, 3e3f, 1e20f}) {
      Problem p;
      p.method = method;
      p.q_deviation = deviation;
      p.bits = 2 + static_cast<int>(++seed % 3);
      expect_close(p, seed);
    }
  }
}

TEST(CudaEstimate, NotANumberStaysNone) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  for (const Selector method : kMethods) {
    for (const float strange :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      Problem p;
      p.method = method;
      Prepared setup(p, testing::seed(6000));
      setup.q()[128 + 77] = strange;  // query head 1
      setup.run();
      for (std::int64_t i = 0; i < std::ssize(setup.positions(1)); ++i) {
        ASSERT_TRUE(std::isnan(f16_to_float(setup.logit(1, i)))) << i;
        ASSERT_TRUE(std::isfinite(f16_to_float(setup.logit(4, i)))) << i;
      }
    }
  }
}

TEST(CudaEstimate, ZeroQueriesGiveZeros) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  for (const Selector method : kMethods) {
    Problem p;
    p.method = method;
    p.q_deviation = 0.0f;
    Prepared setup(p, testing::seed(7000));
    setup.run();
    for (std::int64_t i = 0; i < std::ssize(setup.positions(3)); ++i) {
      ASSERT_EQ(f16_to_float(setup.logit(3, i)), 0.0f) << i;
    }
  }
}

}  // namespace
}  // namespace sluice::cuda
