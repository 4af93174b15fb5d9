// Every backend's choice of a prompt's important tokens against its definition, and tokens that are
// packed and unpacked.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "tests/support/backends.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::Device;
using testing::download;
using testing::NamedBackend;
using testing::Random;
using testing::upload;

// ZipVL keeps the newest tokens in any case; Sluice's blocks are its own.
constexpr std::int64_t kNewest = 64;
constexpr std::int64_t kBlock = 512;

struct Case {
  std::int64_t first = 0;
  std::int64_t end = 0;
  double tau = 1.0;
  std::vector<float> sums;
  std::vector<std::int64_t> probes;

  std::int64_t tokens() const { return end - first; }
};

struct Choice {
  std::vector<std::uint8_t> listed;
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> seen;
  std::int32_t bad = -1;

  friend bool operator==(const Choice&, const Choice&) = default;
};

enum class Kind { weights, equal, zero, ties, one };

std::vector<float> sums_of(Random& random, Kind kind, std::int64_t count) {
  std::vector<float> sums = random.normal(count, 3.0f);
  for (float& x : sums) {
    if (kind == Kind::weights || kind == Kind::one) x = std::exp(x);
    if (kind == Kind::equal) x = 0.25f;
    if (kind == Kind::zero) x = 0.0f;
    if (kind == Kind::ties) x = std::floor(std::abs(x));
  }
  if (kind == Kind::one) sums[static_cast<std::size_t>(random.integer(0, count - 1))] = 1e9f;
  return sums;
}

Case random_case(Random& random, Kind kind, std::int64_t first, std::int64_t tokens, double tau) {
  Case c;
  c.first = first;
  c.end = first + tokens;
  c.tau = tau;
  c.sums = sums_of(random, kind, c.end);
  // Those of earlier tokens are nobody's business.
  std::fill_n(c.sums.begin(), first, std::nanf(""));
  std::set<std::int64_t> probes = {c.end - 1};
  for (int i = 0; i < 127; ++i) probes.insert(random.integer(first, c.end - 1));
  c.probes.assign(probes.begin(), probes.end());
  return c;
}

// Tokens in the order of their means, equal ones by age.
std::vector<std::size_t> order_of(const Case& c) {
  std::vector<float> means;
  for (std::int64_t t = c.first; t < c.end; ++t) {
    const auto sees = std::count_if(c.probes.begin(), c.probes.end(),
                                    [&](std::int64_t probe) { return probe >= t; });
    means.push_back(c.sums[static_cast<std::size_t>(t)] / static_cast<float>(sees));
  }
  std::vector<std::size_t> order(means.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return means[a] > means[b]; });
  return order;
}

// How many tokens may carry the share: more than one answer only where rounding decides.
std::set<std::size_t> counts_of(const Case& c) {
  std::vector<double> sums(c.sums.begin() + c.first, c.sums.end());
  if (c.tau >= 1.0) return {sums.size()};
  std::sort(sums.begin(), sums.end(), std::greater<>());
  const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
  const double slack = 1e-12 * total;
  std::set<std::size_t> counts;
  double before = -std::numeric_limits<double>::infinity();
  double carried = 0.0;
  for (std::size_t count = 0; count <= sums.size(); ++count) {
    if (before < c.tau * total + slack && carried >= c.tau * total - slack) counts.insert(count);
    before = carried;
    if (count < sums.size()) carried += sums[count];
    // Exactly nothing is wanted, so that nothing is enough.
    if (c.tau * total == 0.0) return {0};
  }
  return counts;
}

std::vector<std::uint8_t> listed_of(const Case& c, const std::vector<std::size_t>& order,
                                    std::size_t count) {
  std::vector<std::uint8_t> listed(static_cast<std::size_t>(c.end));
  for (std::int64_t t = 0; t < c.end; ++t) {
    const bool is_newest = t >= std::max(c.first, c.end - kNewest);
    listed[static_cast<std::size_t>(t)] = t < c.first || is_newest ? 1 : 0;
  }
  for (std::size_t i = 0; i < count; ++i) listed[static_cast<std::size_t>(c.first) + order[i]] = 1;
  return listed;
}

class ChooseTokens : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override { backend_ = testing::make_or_skip(GetParam()); }

  Choice run(const Case& c) {
    const auto end = static_cast<std::size_t>(c.end);
    const Tier tier = backend_->info().compute_tier;
    const Buffer sums = upload(*backend_, c.sums);
    const Buffer listed = upload(*backend_, std::vector<std::uint8_t>(end, 7));
    const Buffer positions = upload(*backend_, std::vector<std::int32_t>(end, -1));
    const Buffer seen = backend_->allocate(tier, (end - c.first) * sizeof(std::int32_t));
    const Buffer bad = backend_->allocate(Tier::host, sizeof(std::int32_t));
    ChooseTokensParams p;
    p.sums = sums.floats();
    p.first = c.first;
    p.end = c.end;
    p.probes = c.probes;
    p.tau = c.tau;
    p.listed = reinterpret_cast<std::uint8_t*>(listed.data());
    p.positions = reinterpret_cast<std::int32_t*>(positions.data());
    p.seen = reinterpret_cast<std::int32_t*>(seen.data());
    p.bad = reinterpret_cast<std::int32_t*>(bad.data());
    backend_->queue->run(p);
    return {download<std::uint8_t>(*backend_, listed), download<std::int32_t>(*backend_, positions),
            download<std::int32_t>(*backend_, seen),
            *reinterpret_cast<const std::int32_t*>(bad.data())};
  }

  void check(const Case& c) {
    SCOPED_TRACE("first " + std::to_string(c.first) + " end " + std::to_string(c.end) + " tau " +
                 std::to_string(c.tau));
    const Choice choice = run(c);
    EXPECT_EQ(choice.bad, 0);
    const std::vector<std::size_t> order = order_of(c);
    const std::set<std::size_t> counts = counts_of(c);
    EXPECT_FALSE(counts.empty());
    EXPECT_TRUE(
        std::any_of(counts.begin(), counts.end(),
                    [&](std::size_t count) { return listed_of(c, order, count) == choice.listed; }))
        << "the list of none of the " << counts.size() << " right counts, of which one is "
        << *counts.begin();
    std::vector<std::int32_t> positions;
    std::vector<std::int32_t> before;
    for (std::int32_t t = 0; t < c.end; ++t) {
      before.push_back(static_cast<std::int32_t>(positions.size()));
      if (choice.listed[static_cast<std::size_t>(t)] != 0) positions.push_back(t);
    }
    positions.resize(choice.positions.size(), -1);
    EXPECT_EQ(choice.positions, positions);
    for (std::int64_t t = c.first; t < c.end; ++t) {
      const std::int64_t block = std::max(c.first, t / kBlock * kBlock);
      ASSERT_EQ(choice.seen[static_cast<std::size_t>(t - c.first)],
                before[static_cast<std::size_t>(block)])
          << t;
    }
  }

  const std::uint64_t seed_ = testing::seed(20250711);
  Random random_{seed_};
  std::unique_ptr<Device> backend_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_P(ChooseTokens, FollowsItsDefinition) {
  for (const Kind kind : {Kind::weights, Kind::equal, Kind::zero, Kind::ties, Kind::one}) {
    for (const double tau : {0.0, 1e-6, 0.3, 0.9, 0.999, 1.0}) {
      for (const std::int64_t tokens : {1, 63, 65, 500, 3000}) {
        const std::int64_t first = random_.integer(0, 2) == 0 ? 0 : random_.integer(1, 1000);
        check(random_case(random_, kind, first, tokens, tau));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(ChooseTokens, OfLongPrompts) {
  for (const double tau : {0.5, 0.97}) {
    check(random_case(random_, Kind::weights, random_.integer(0, 5000), 150'000, tau));
  }
  check(random_case(random_, Kind::ties, 0, 32'768, 0.8));
}

TEST_P(ChooseTokens, IsTheSameEveryTime) {
  const Case c = random_case(random_, Kind::weights, 10, 20'000, 0.9);
  const Choice choice = run(c);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(run(c), choice);
}

TEST_P(ChooseTokens, SaysWhereASumIsNone) {
  for (const float value : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    for (const double tau : {0.9, 1.0}) {
      Case c = random_case(random_, Kind::weights, 300, 700, tau);
      c.sums[static_cast<std::size_t>(random_.integer(300, 999))] = value;
      EXPECT_EQ(run(c).bad, 1);
    }
  }
  check(random_case(random_, Kind::weights, 300, 700, 0.9));
}

TEST_P(ChooseTokens, PacksTokensAndUnpacksThem) {
  const std::int64_t tokens = 300;
  const std::int64_t first = 1000;
  for (const std::int64_t width : {1, 96, 520}) {
    const std::int64_t stride = width + random_.integer(0, 40);
    const std::vector<float> piece = random_.normal(tokens * stride);
    std::vector<std::int32_t> positions;
    for (std::int32_t t = 0; t < tokens; ++t) {
      if (random_.integer(0, 2) == 0) positions.push_back(static_cast<std::int32_t>(first) + t);
    }
    const auto count = static_cast<std::int64_t>(positions.size());
    const Buffer from = upload(*backend_, piece);
    const Buffer where = upload(*backend_, positions);
    const auto* const at = reinterpret_cast<const std::int32_t*>(where.data());
    const Buffer packed =
        upload(*backend_, std::vector<float>(static_cast<std::size_t>(count * width), -1.0f));
    const Buffer back =
        upload(*backend_, std::vector<float>(static_cast<std::size_t>(tokens * width), -2.0f));
    backend_->queue->run(
        PackTokensParams{at, count, first, width, from.floats(), stride, packed.floats()});
    // The first half clears the piece, the second adds to it.
    const std::int64_t half = count / 2;
    backend_->queue->run(
        UnpackTokensParams{at, half, first, tokens, width, packed.floats(), back.floats(), true});
    backend_->queue->run(UnpackTokensParams{at + half, count - half, first, tokens, width,
                                            packed.floats() + half * width, back.floats(), false});
    std::vector<float> expected(static_cast<std::size_t>(tokens * width));
    for (const std::int32_t position : positions) {
      const std::int64_t t = position - first;
      std::copy_n(piece.begin() + t * stride, width, expected.begin() + t * width);
    }
    EXPECT_EQ(download<float>(*backend_, back), expected);
    backend_->queue->run(
        UnpackTokensParams{nullptr, 0, first, tokens, width, nullptr, back.floats(), true});
    EXPECT_EQ(download<float>(*backend_, back), std::vector<float>(expected.size()));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ChooseTokens, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

}  // namespace
}  // namespace sluice
