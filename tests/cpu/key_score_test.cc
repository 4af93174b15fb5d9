// The inner loop of scans over tiles.
#include "cpu/scan/key_score.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cpu/scan/key_index.h"
#include "cpu/scan/key_score_simd.h"
#include "sluice/half.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using sluice::testing::Random;

// A page of random codes, and channels of it.
struct Page {
  Page(Random& random, const std::vector<float>& q) {
    d = static_cast<int>(q.size());
    bits = static_cast<int>(random.integer(1, 4));
    codes.resize(static_cast<std::size_t>(kTilePages * d * kPageTokens * bits / 8));
    for (std::byte& b : codes) b = static_cast<std::byte>(random.integer(0, 255));
    for (auto* const halves : {&scales, &zeros}) {
      for (const float x : random.normal(d)) halves->push_back(float_to_f16(x));
    }
    const bool all = random.integer(0, 2) == 0;
    channels = all ? cpu::all_channels(d)
                   : cpu::largest_channels(q.data(), 1, d, static_cast<int>(random.integer(1, d)));
    number = random.integer(0, 1);
  }
  cpu::PageScan scan() {
    return {{codes.data(), scales.data(), zeros.data(), number}, bits, &channels, codes.data()};
  }

  int d = 0;
  int bits = 4;
  std::vector<std::byte> codes;
  std::vector<std::uint16_t> scales;
  std::vector<std::uint16_t> zeros;
  cpu::ChannelList channels;
  std::int64_t number = 0;
};

// `bits` bits of a token, of a channel's that lie together.
int bits_of(const std::byte* codes, int bits, std::size_t token) {
  const auto bytes = static_cast<std::size_t>(kPageTokens * bits / 8);
  const int shift = bits * static_cast<int>(token / bytes);
  return std::to_integer<int>(codes[token % bytes]) >> shift & ((1 << bits) - 1);
}

// The logit of a token by the definition of KeyTiles.
double exact_logit(const Page& page, const std::vector<float>& q, std::size_t token) {
  const auto bytes = static_cast<std::size_t>(kPageTokens * page.bits / 8);
  double sum = 0.0;
  for (int i = 0; i < page.channels.count; ++i) {
    const std::size_t c = page.channels.index[static_cast<std::size_t>(i)];
    const std::byte* const of_channel =
        &page.codes[KeyTiles::place_of(page.bits, page.number, c) * bytes];
    const int code = page.bits == 3
                         ? bits_of(of_channel, 2, token) + 4 * bits_of(of_channel + 32, 1, token)
                         : bits_of(of_channel, page.bits, token);
    sum += static_cast<double>(q[c]) * (static_cast<double>(f16_to_float(page.zeros[c])) +
                                        static_cast<double>(f16_to_float(page.scales[c])) * code);
  }
  return sum;
}

class PageScorers : public ::testing::TestWithParam<int> {
 protected:
  const cpu::PageScorer* scorer() const {
    return GetParam() == 0 ? cpu::avx2_scorer() : cpu::avx512_scorer();
  }
  const std::uint64_t seed_ = testing::seed(15);
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
  Random random_{seed_};
};

// Integer sums leave no room for rounding: the same bits from every instruction set.
TEST_P(PageScorers, AddUpAsThePortableOneDoes) {
  if (scorer() == nullptr) GTEST_SKIP() << "this processor has no such instructions";
  for (int round = 0; round < 200; ++round) {
    const auto bunch = static_cast<std::size_t>(random_.integer(1, cpu::kMaxBunch));
    Page page(random_, random_.normal(random_.integer(1, 128) * 2));
    std::vector<cpu::PageQuery> folded(bunch);
    std::vector<std::vector<float>> a(bunch, std::vector<float>(kPageTokens));
    auto b = a;
    std::vector<float*> to_a;
    std::vector<float*> to_b;
    for (std::size_t h = 0; h < bunch; ++h) {
      // The largest, too, all of one sign: sums of products must not saturate.
      const bool largest = random_.integer(0, 3) == 0;
      folded[h].weights = {};
      for (int i = 0; i < page.channels.count; ++i) {
        folded[h].weights[static_cast<std::size_t>(i)] =
            static_cast<std::int8_t>(largest ? 127 : random_.integer(-127, 127));
      }
      folded[h].factor = 0.01f;
      folded[h].offset = random_.normal(1)[0];
      to_a.push_back(a[h].data());
      to_b.push_back(b[h].data());
    }
    scorer()->score(page.scan(), folded, to_a);
    cpu::portable_scorer().score(page.scan(), folded, to_b);
    ASSERT_EQ(a, b) << "round " << round;
  }
}

// Weights are rounded alike but for the last place of a product that is about halfway.
TEST_P(PageScorers, FoldAsThePortableOneDoes) {
  if (scorer() == nullptr) GTEST_SKIP() << "this processor has no such instructions";
  for (int round = 0; round < 200; ++round) {
    const auto bunch = static_cast<std::size_t>(random_.integer(1, cpu::kMaxBunch));
    const std::int64_t d = random_.integer(1, 128) * 2;
    const std::vector<float> q = random_.normal(static_cast<std::int64_t>(bunch) * d);
    Page page(random_, {q.begin(), q.begin() + d});
    const std::vector<float> factors(bunch, 0.125f);
    std::vector<cpu::PageQuery> a(bunch);
    auto b = a;
    scorer()->fold(q.data(), d, factors, page.scan(), a.data());
    cpu::portable_scorer().fold(q.data(), d, factors, page.scan(), b.data());
    for (std::size_t h = 0; h < bunch; ++h) {
      ASSERT_NEAR(a[h].factor, b[h].factor, 1e-6f * b[h].factor) << "round " << round;
      ASSERT_NEAR(a[h].offset, b[h].offset, 20.0f * b[h].factor) << "round " << round;
      const int padded = (page.channels.count + 3) / 4 * 4;
      for (std::size_t i = 0; i < static_cast<std::size_t>(padded); ++i) {
        ASSERT_NEAR(a[h].weights[i], b[h].weights[i], 1) << "round " << round << " channel " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Instructions, PageScorers, ::testing::Values(0, 1),
                         [](const auto& parameter) {
                           return parameter.param == 0 ? "Avx2" : "Avx512";
                         });

// Logits of folded queries, against fp64.
TEST(FoldQueries, LogitsAreThoseOfTheCodes) {
  const std::uint64_t seed = testing::seed(16);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 100; ++round) {
    const std::int64_t d = random.integer(4, 128) * 2;
    const std::vector<float> q = random.normal(d);
    Page page(random, q);
    const std::vector<float> factors = {1.0f};
    for (const cpu::PageScorer* const scorer :
         {&cpu::portable_scorer(), cpu::avx2_scorer(), cpu::avx512_scorer()}) {
      if (scorer == nullptr) continue;
      cpu::PageQuery folded;
      scorer->fold(q.data(), d, factors, page.scan(), &folded);
      std::vector<float> logits(kPageTokens);
      float* const to = logits.data();
      scorer->score(page.scan(), {&folded, 1}, {&to, 1});
      double squared = 0.0;
      double sum = 0.0;
      for (std::size_t t = 0; t < kPageTokens; ++t) {
        const double error = static_cast<double>(logits[t]) - exact_logit(page, q, t);
        squared += error * error;
        sum += error;
      }
      // Half a step, of the codes' deviations from their middle, from every channel; on average
      // nothing.
      const auto factor = static_cast<double>(folded.factor);
      const double channels = page.channels.count;
      const double spread = page.bits == 4   ? 4.61
                            : page.bits == 3 ? 2.29
                            : page.bits == 2 ? 1.12
                                             : 0.5;
      const double deviation = factor * spread * std::sqrt(channels / 12.0);
      const auto tokens = static_cast<double>(kPageTokens);
      EXPECT_LT(std::sqrt(squared / tokens), 1.6 * deviation + 1e-4)
          << scorer->name << " round " << round;
      EXPECT_LT(std::fabs(sum / tokens), deviation + 1e-4) << scorer->name << " round " << round;
    }
  }
}

}  // namespace
}  // namespace sluice
