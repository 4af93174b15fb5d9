// What select() may answer, from its definition in fp64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/select/cases.h"

namespace sluice::cuda {

constexpr double kMargin = 3e-5;  // of shares: fp32 sums and the rounding of masses
constexpr double kEqual = 1e-5;   // of summed weights: fp32 sums

// Softmax weights in fp64 and what follows from them for one KV head.
struct Truth {
  std::vector<std::vector<double>> weights;  // [group][total]
  std::vector<double> sums;                  // [emit]
  std::vector<double> lse;                   // [group]
  bool bad = false;
};

inline Truth truth_of(const Case& c, int head) {
  Truth truth;
  const std::int64_t total = c.total(head);
  const int group = c.shape.group();
  truth.sums.resize(static_cast<std::size_t>(c.emit(head)));
  for (int g = 0; g < group; ++g) {
    std::vector<double> w;
    double highest = -std::numeric_limits<double>::infinity();
    for (std::int64_t i = 0; i < total; ++i) {
      w.push_back(logit_of(c, head, g, i));
      if (!(w.back() < std::numeric_limits<double>::infinity())) truth.bad = true;
      highest = std::max(highest, w.back());
    }
    if (total > 0 && !(highest > -std::numeric_limits<double>::infinity())) truth.bad = true;
    double sum = 0.0;
    for (double& x : w) sum += x = std::exp(x - highest);
    for (double& x : w) x /= sum;
    truth.lse.push_back(highest + std::log(sum));
    for (std::size_t i = 0; i < truth.sums.size(); ++i) truth.sums[i] += w[i];
    truth.weights.push_back(std::move(w));
  }
  return truth;
}

// What one query head keeps whatever it chooses, and what it chooses from.
struct Choice {
  struct Entry {
    double logit;
    double weight;
  };
  double given = 0.0;          // weight
  std::vector<Entry> entries;  // the heaviest first
};

// Nearly all of these tests' time goes by here, so that what is sorted lies side by side.
inline Choice choice_of(const Case& c, const Truth& truth, int head, int g) {
  Choice choice;
  const std::int64_t emit = c.emit(head);
  for (std::int64_t i = 0; i < c.total(head); ++i) {
    const double weight = truth.weights[static_cast<std::size_t>(g)][static_cast<std::size_t>(i)];
    if (i >= emit || c.is_forced(head, i)) {
      choice.given += weight;
    } else if (weight > 0.0) {
      choice.entries.push_back({logit_of(c, head, g, i), weight});
    }
  }
  std::sort(choice.entries.begin(), choice.entries.end(),
            [](const auto& a, const auto& b) { return a.logit > b.logit; });
  return choice;
}

// The lightest logit that is needed in order to keep the share p; +Inf if none.
inline double lightest_needed(const Choice& choice, double p) {
  p -= choice.given;
  double lightest = std::numeric_limits<double>::infinity();
  for (const Choice::Entry& entry : choice.entries) {
    if (p <= 0.0) break;
    lightest = entry.logit;
    p -= entry.weight;
  }
  return lightest;
}

using Flags = std::vector<std::uint8_t>;

// What top_p must keep and what it may, as flags per entry, the always kept included.
inline void bounds_of_top_p(const Case& c, const Truth& truth, int head, Flags& must, Flags& may) {
  const std::int64_t emit = c.emit(head);
  must.assign(static_cast<std::size_t>(emit), 0);
  may = must;
  for (int g = 0; g < c.shape.group(); ++g) {
    const double p = static_cast<double>(c.p);
    const Choice choice = choice_of(c, truth, head, g);
    const double high = lightest_needed(choice, p - kMargin);
    const double low = std::floor(lightest_needed(choice, p + kMargin) * 128.0) / 128.0;
    for (std::int64_t i = 0; i < emit; ++i) {
      const double x = logit_of(c, head, g, i);
      const auto at = static_cast<std::size_t>(i);
      if (x >= high || c.is_forced(head, i)) must[at] = 1;
      if (x >= low || must[at] != 0) may[at] = 1;
      if (c.p >= 1.0f) may[at] = 1;
    }
  }
}

inline std::vector<std::int64_t> kept_entries(const Case& c, const Answer& a, int head) {
  std::vector<std::int64_t> entries;
  std::int64_t i = 0;
  for (const std::int32_t at : a.positions[static_cast<std::size_t>(head)]) {
    while (i < c.emit(head) && c.position(head, i) < at) ++i;
    EXPECT_TRUE(i < c.emit(head) && c.position(head, i) == at) << "position " << at;
    entries.push_back(i++);
  }
  return entries;
}

// Among the entries in `may`, `count` of the heaviest are kept, and all that are always kept.
inline void expect_heaviest(const Case& c, const Truth& truth, int head, const Flags& may,
                            const Flags& kept, std::int64_t count) {
  std::int64_t forced = 0;
  std::int64_t allowed = 0;
  std::int64_t found = 0;
  double lightest = std::numeric_limits<double>::infinity();
  double heaviest = -1.0;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const auto entry = static_cast<std::int64_t>(i);
    forced += c.is_forced(head, entry) ? 1 : 0;
    allowed += may[i];
    found += kept[i];
    if (c.is_forced(head, entry)) {
      EXPECT_EQ(kept[i], 1) << i;
      continue;
    }
    if (kept[i] != 0) lightest = std::min(lightest, truth.sums[i]);
    if (kept[i] == 0 && may[i] != 0) heaviest = std::max(heaviest, truth.sums[i]);
  }
  EXPECT_EQ(found, std::min(allowed, std::max(count, forced)));
  EXPECT_GE(lightest, heaviest * (1.0 - kEqual) - 1e-37);
}

inline void expect_ties_to_the_older(const Case& c, int head, const Flags& kept,
                                     std::int64_t count) {
  std::vector<std::pair<double, std::int64_t>> order;  // lighter and newer ones are larger
  Flags expected(kept.size(), 0);
  for (std::int64_t i = 0; i < c.emit(head); ++i) {
    if (c.is_forced(head, i)) {
      expected[static_cast<std::size_t>(i)] = 1;
      --count;
    } else {
      order.emplace_back(-logit_of(c, head, 0, i), i);
    }
  }
  std::sort(order.begin(), order.end());
  for (const auto& [lightness, i] : order) {
    if (count-- <= 0) break;
    expected[static_cast<std::size_t>(i)] = 1;
  }
  EXPECT_EQ(kept, expected);
}

inline void expect_sums(const Case& c, const Truth& truth, const Answer& a, int head,
                        const std::vector<std::int64_t>& entries) {
  for (int g = 0; g < c.shape.group(); ++g) {
    const auto& weights = truth.weights[static_cast<std::size_t>(g)];
    double sum = 0.0;
    for (const std::int64_t i : entries) sum += weights[static_cast<std::size_t>(i)];
    for (std::int64_t i = c.emit(head); i < c.total(head); ++i) {
      sum += weights[static_cast<std::size_t>(i)];
    }
    if (c.total(head) == 0) sum = 1.0;
    const auto row = static_cast<std::size_t>(head * c.shape.group() + g);
    const double share = c.share.empty() ? 1.0 : static_cast<double>(c.share[row]);
    EXPECT_NEAR(static_cast<double>(a.alpha[row]), std::min(sum, 1.0) * share, 2e-5)
        << "head " << row;
    // In fp32, of logits that may be tens of thousands.
    const double lse = truth.lse[static_cast<std::size_t>(g)];
    const double error = std::isfinite(lse) ? 2e-5 + 0x1p-22 * std::abs(lse) : 0.0;
    EXPECT_TRUE(static_cast<double>(a.lse[row]) == lse ||
                std::abs(static_cast<double>(a.lse[row]) - lse) <= error)
        << "row " << row << ": " << a.lse[row] << ", not " << lse;
  }
  std::int32_t pages = 0;
  std::int32_t last = -1;
  for (const std::int32_t at : a.positions[static_cast<std::size_t>(head)]) {
    EXPECT_GE(at / kPageTokens, last);
    pages += at / kPageTokens != last ? 1 : 0;
    last = at / kPageTokens;
  }
  EXPECT_EQ(a.heads[static_cast<std::size_t>(head)].pages, pages);
}

// What pages weigh without what is kept of them.
inline void expect_page_weights(const Case& c, const Truth& truth, const Answer& a, int head,
                                const Flags& kept) {
  const int group = c.shape.group();
  const std::int64_t pages = c.emit(head) / kPageTokens;
  std::vector<double> masses(static_cast<std::size_t>(group), 0.0);
  // They are relative to a log-sum-exp in fp32, as expect_sums() has it.
  double error = 1e-4;
  for (const double lse : truth.lse) error = std::max(error, 1e-4 + 0x1p-21 * std::abs(lse));
  for (std::int64_t page = 0; page < pages; ++page) {
    const auto at = static_cast<std::size_t>(head * a.pages + page);
    const uint4 mask = a.masks[at];
    const std::uint32_t words[4] = {mask.x, mask.y, mask.z, mask.w};
    double sum = 0.0;
    for (std::int64_t i = 0; i < kPageTokens; ++i) {
      const auto entry = static_cast<std::size_t>(page * kPageTokens + i);
      ASSERT_EQ(words[i / 32] >> i % 32 & 1u, std::uint32_t{kept[entry]}) << "entry " << entry;
      if (kept[entry] != 0) continue;
      sum += truth.sums[entry];
      for (int g = 0; g < group; ++g) {
        masses[static_cast<std::size_t>(g)] += truth.weights[static_cast<std::size_t>(g)][entry];
      }
    }
    ASSERT_NEAR(static_cast<double>(a.weights[at]), sum, error * sum + 1e-7) << "page " << page;
  }
  const int slices = PageWeights::slices_of(a.pages);
  for (int g = 0; g < group; ++g) {
    double sum = 0.0;
    for (int slice = 0; slice < PageWeights::slices_of(pages); ++slice) {
      sum += static_cast<double>(
          a.masses[static_cast<std::size_t>((head * slices + slice) * group + g)]);
    }
    EXPECT_NEAR(sum, masses[static_cast<std::size_t>(g)], error) << "query head " << g;
  }
}

inline void expect_head(const Case& c, const Answer& a, int head) {
  const HeadSelection& result = a.heads[static_cast<std::size_t>(head)];
  const Truth truth = truth_of(c, head);
  ASSERT_EQ(result.bad, truth.bad ? 1 : 0);
  if (truth.bad) {
    EXPECT_EQ(result.count, 0);
    EXPECT_EQ(result.cut, 0);
    for (int g = 0; g < c.shape.group(); ++g) {
      EXPECT_EQ(a.alpha[static_cast<std::size_t>(head * c.shape.group() + g)], 0.0f);
    }
    return;
  }
  ASSERT_TRUE(result.count >= 0 && result.count <= c.capacity) << result.count;
  const std::vector<std::int64_t> entries = kept_entries(c, a, head);
  if (::testing::Test::HasFailure()) return;
  expect_sums(c, truth, a, head, entries);
  Flags kept(static_cast<std::size_t>(c.emit(head)), 0);
  for (const std::int64_t i : entries) kept[static_cast<std::size_t>(i)] = 1;
  if (!a.masks.empty()) expect_page_weights(c, truth, a, head, kept);
  const std::int64_t keep = keep_of(c, head);
  if (c.prune == Pruner::top_k) {
    EXPECT_EQ(result.cut, 0);
    expect_heaviest(c, truth, head, Flags(kept.size(), 1), kept, keep);
    if (c.shape.group() == 1) expect_ties_to_the_older(c, head, kept, keep);
    return;
  }
  Flags must;
  Flags may;
  bounds_of_top_p(c, truth, head, must, may);
  for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_LE(kept[i], may[i]) << "needless: " << i;
  const auto least = std::count(must.begin(), must.end(), std::uint8_t{1});
  const auto most = std::count(may.begin(), may.end(), std::uint8_t{1});
  if (least > keep) {
    EXPECT_EQ(result.cut, 1);
  }
  if (most <= keep) {
    EXPECT_EQ(result.cut, 0);
  }
  if (result.cut != 0) {
    // What it chose among may be any set between the two.
    for (std::size_t i = 0; i < kept.size(); ++i) must[i] |= kept[i];
    expect_heaviest(c, truth, head, must, kept, keep);
  } else {
    for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_GE(kept[i], must[i]) << "missing: " << i;
  }
}

}  // namespace sluice::cuda
