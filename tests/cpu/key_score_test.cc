// The inner loop of scans over tiles.
#include "cpu/key_score.h"

#include <gtest/gtest.h>

#include <vector>

#include "cpu/key_index.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using sluice::testing::Random;

// Integer sums leave no room for rounding: the same bits from every instruction set.
TEST(ScorePage, PortableAndSimdAgreeBitForBit) {
  if (!cpu::scores_with_vnni()) GTEST_SKIP() << "this processor has no AVX-512 VNNI";
  const std::uint64_t seed = testing::seed(15);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 200; ++round) {
    const int bits = random.integer(0, 1) == 1 ? 4 : 2;
    const int d = static_cast<int>(random.integer(1, 128)) * 2;
    const int count = static_cast<int>(random.integer(1, d));
    const auto bunch = static_cast<std::size_t>(random.integer(1, cpu::kMaxBunch));
    std::vector<std::byte> codes(static_cast<std::size_t>(kTilePages * d * kPageTokens * bits / 8));
    for (std::byte& b : codes) b = static_cast<std::byte>(random.integer(0, 255));
    const std::vector<float> q = random.normal(d);
    const cpu::ChannelList channels = cpu::largest_channels(q.data(), 1, d, count);
    const std::int64_t page = random.integer(0, 1);
    const cpu::TilePage tile = {codes.data(), nullptr, nullptr, page};
    const cpu::PageScan scan = {tile, bits, &channels, codes.data()};
    std::vector<cpu::PageQuery> folded(bunch);
    std::vector<std::vector<float>> a(bunch, std::vector<float>(kPageTokens));
    auto b = a;
    std::vector<float*> to_a;
    std::vector<float*> to_b;
    for (std::size_t h = 0; h < bunch; ++h) {
      for (int i = 0; i < count; ++i) {
        folded[h].weights[static_cast<std::size_t>(i)] =
            static_cast<std::int8_t>(random.integer(-127, 127));
      }
      folded[h].factor = 0.01f;
      folded[h].offset = random.normal(1)[0];
      to_a.push_back(a[h].data());
      to_b.push_back(b[h].data());
    }
    cpu::score_page(scan, folded, to_a);
    cpu::score_page_portable(scan, folded, to_b);
    ASSERT_EQ(a, b) << "round " << round;
  }
}

}  // namespace
}  // namespace sluice
