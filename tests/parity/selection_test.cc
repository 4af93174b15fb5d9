// select() of every backend against its definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cpu/cpu_queue.h"
#include "tests/support/backends.h"
#include "tests/support/cpu_digest.h"
#include "tests/support/random.h"
#include "tests/support/selection_cases.h"

namespace sluice {
namespace {

using sluice::testing::NamedBackend;
using sluice::testing::Random;
using sluice::testing::SelectAnswer;
using sluice::testing::SelectCase;

// Tokens of different sequences, some of which have two.
std::vector<BatchToken> random_tokens(Random& random, std::int64_t context) {
  const auto places = std::to_array<std::int64_t>({0, 126, 127, 128, 129, 255, 256});
  std::vector<BatchToken> tokens;
  const std::int64_t count = random.integer(1, 4);
  for (std::int32_t sequence = 0; std::ssize(tokens) < count; ++sequence) {
    std::int64_t at = random.integer(0, context - 1);
    if (random.integer(0, 3) == 0) at = places[static_cast<std::size_t>(random.integer(0, 6))];
    at = std::min(at, context - 1);
    tokens.push_back({sequence, static_cast<std::int32_t>(at)});
    if (at + 1 < context && random.integer(0, 2) == 0) {
      tokens.push_back({sequence, static_cast<std::int32_t>(at + 1)});
    }
  }
  // Sequences may stand anywhere in the tables.
  for (BatchToken& token : tokens) token.sequence = 4 - token.sequence;
  return tokens;
}

Quota random_quota(Random& random, std::int64_t context) {
  if (random.integer(0, 9) == 0) return Quota::nothing();
  Quota quota;
  switch (random.integer(0, 3)) {
    case 0:
      quota.share.divisor = random.integer(1, 20);
      quota.least.tokens = random.integer(0, 20);
      quota.extra = random.integer(0, 5);
      break;
    case 1:
      quota.share.divisor = 16;
      quota.least.divisor = random.integer(0, 9);
      break;
    default:
      quota.share.tokens = random.integer(1, context);
  }
  return quota;
}

std::vector<std::int32_t> random_list(Random& random, std::int64_t below) {
  std::vector<std::int32_t> list;
  for (std::int64_t at = random.integer(0, 3); at < below; at += random.integer(1, 3)) {
    list.push_back(static_cast<std::int32_t>(at));
  }
  return list;
}

SelectCase random_case(Random& random, std::int64_t context) {
  SelectCase c;
  const auto groups = std::to_array({1, 2, 3, 4, 8});
  const int kv_heads = static_cast<int>(random.integer(1, 3));
  const int group = groups[static_cast<std::size_t>(random.integer(0, 4))];
  c.shape = {1, kv_heads * group, kv_heads, 64, DType::bf16};
  c.context = context;
  c.tokens = random_tokens(random, context);
  c.skip_newest = random.integer(0, 3) == 0;
  if (random.integer(0, 3) == 0) {
    for (int head = 0; head < c.heads(); ++head) {
      c.candidates.push_back(random_list(random, c.token(head).page_first()));
    }
  }
  c.columns = context + kPageTokens;
  c.logits = random.normal(c.rows() * c.columns, 3.0f);
  for (float& logit : c.logits) {
    if (random.integer(0, 49) == 0) logit = -std::numeric_limits<float>::infinity();
  }
  for (int row = 0; row < c.rows(); ++row) {
    const auto first = c.logits.begin() + row * c.columns;
    const std::int64_t total = c.total(row / group);
    // Not all of a row may be -inf, and nobody looks beyond its end.
    if (total > 0) first[random.integer(0, total - 1)] = 9.0f;
    std::fill(first + total, first + c.columns, std::nanf(""));
  }
  c.prune = random.integer(0, 1) == 1 ? Pruner::top_p : Pruner::top_k;
  c.k = random_quota(random, context);
  c.p = static_cast<float>(random.integer(1, 100)) / 100.0f;
  if (random.integer(0, 1) == 0) c.cap = random_quota(random, context);
  if (random.integer(0, 1) == 1) c.sinks = random.integer(0, 300);
  if (random.integer(0, 1) == 1) c.recent = random.integer(1, 300);
  // Half the time, besides what is always kept, as few as there are pages.
  if (random.integer(0, 1) == 0) {
    c.k = {{1, 0}, {}, c.sinks + c.recent + random.integer(0, context / kPageTokens)};
  }
  if (random.integer(0, 1) == 1) {
    for (int row = 0; row < c.rows(); ++row) {
      c.share.push_back(0.125f * static_cast<float>(1 + row % 8));
    }
  }
  return c;
}

double share_of(const SelectCase& c, int row) {
  return c.share.empty() ? 1.0 : static_cast<double>(c.share[static_cast<std::size_t>(row)]);
}

class Select : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override { backend_ = testing::make_or_skip(GetParam()); }

  // Half-precision logits come with bins of weight; full ones are sorted.
  double bin() const { return backend_->info().logits.dtype == DType::f16 ? 1.0 / 64 : 0.0; }

  std::unique_ptr<testing::Device> backend_;
};

// fp32 weights are off by a few 2^-24 of the exponential and of the sum's parts.
constexpr double kRounding = 1e-5;

// The entries of a head that were kept.
std::set<std::int64_t> kept_entries(const SelectCase& c, const SelectAnswer& answer, int head) {
  std::set<std::int64_t> entries;
  std::int64_t i = 0;
  for (const std::int32_t at : answer.positions[static_cast<std::size_t>(head)]) {
    while (i < c.emit(head) && c.position(head, i) < at) ++i;
    EXPECT_TRUE(i < c.emit(head) && c.position(head, i) == at) << "position " << at;
    entries.insert(i++);
  }
  return entries;
}

// The fewest entries that one query head needs beside what is always kept, and those whose weight
// is within `bin`, in logits, of the last of them.
std::set<std::int64_t> needed_entries(const SelectCase& c, const double* weights, int head,
                                      double bin) {
  double sum = 0.0;
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < c.total(head); ++i) {
    if (i >= c.emit(head) || c.is_forced(head, i)) {
      sum += weights[i];
    } else {
      order.push_back(i);
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](auto a, auto b) { return weights[a] > weights[b]; });
  std::set<std::int64_t> needed;
  std::size_t i = 0;
  for (; i < order.size() && sum < static_cast<double>(c.p) + kRounding; ++i) {
    needed.insert(order[i]);
    sum += weights[order[i]];
  }
  const double lightest = i > 0 ? weights[order[i - 1]] * std::exp(-bin) : INFINITY;
  for (; i < order.size() && weights[order[i]] >= lightest; ++i) needed.insert(order[i]);
  return needed;
}

// The kept weight of one query head's row, which alpha reports.
double expect_alpha(const SelectCase& c, const SelectAnswer& answer, int row,
                    const std::set<std::int64_t>& kept) {
  const int head = row / c.shape.group();
  double sum = 0.0;
  for (std::int64_t i = 0; i < c.total(head); ++i) {
    if (i < c.emit(head) && !kept.contains(i)) continue;
    sum += answer.weights[static_cast<std::size_t>(row * c.columns + i)];
  }
  if (c.total(head) == 0) sum = 1.0;
  EXPECT_NEAR(answer.alpha[static_cast<std::size_t>(row)], sum * share_of(c, row), 1e-5);
  return sum;
}

// The log-sum-exp of a row follows from its heaviest logit and that one's weight.
void expect_lse(const SelectCase& c, const SelectAnswer& answer, int row) {
  const double lse = static_cast<double>(answer.lse[static_cast<std::size_t>(row)]);
  if (c.total(row / c.shape.group()) == 0) {
    EXPECT_EQ(lse, -std::numeric_limits<double>::infinity());
    return;
  }
  const auto first = answer.weights.begin() + row * c.columns;
  const auto heaviest = std::max_element(first, first + c.columns);
  const auto at = static_cast<std::size_t>(heaviest - answer.weights.begin());
  EXPECT_NEAR(lse, static_cast<double>(answer.logits[at]) - std::log(*heaviest), 2e-5);
}

// Nothing that top_k dropped outweighs, summed over query heads, anything that it kept by choice.
void expect_heaviest(const SelectCase& c, const SelectAnswer& answer, int head,
                     const std::set<std::int64_t>& kept, double bin) {
  double lightest_kept = std::numeric_limits<double>::infinity();
  double heaviest_dropped = 0.0;
  for (std::int64_t i = 0; i < c.emit(head); ++i) {
    if (c.is_forced(head, i)) continue;
    double weight = 0.0;
    for (int g = 0; g < c.shape.group(); ++g) {
      const std::int64_t row = head * c.shape.group() + g;
      weight += answer.weights[static_cast<std::size_t>(row * c.columns + i)];
    }
    if (kept.contains(i)) {
      lightest_kept = std::min(lightest_kept, weight);
    } else {
      heaviest_dropped = std::max(heaviest_dropped, weight);
    }
  }
  EXPECT_GE(lightest_kept * (1 + kRounding), heaviest_dropped * std::exp(-2 * bin));
}

// Checks an answer of top_p or top_k for one KV head of a token against what its own weights say.
// `bin`: how far apart, in logits, weights may be that are kept or dropped together.
void expect_choice(const SelectCase& c, const SelectAnswer& answer, int head, double bin) {
  const HeadSelection& result = answer.heads[static_cast<std::size_t>(head)];
  ASSERT_EQ(result.bad, 0);
  const std::set<std::int64_t> kept = kept_entries(c, answer, head);
  ASSERT_EQ(std::ssize(kept), result.count);
  const std::int64_t tokens = c.token(head).count();
  std::int64_t forced = 0;
  for (std::int64_t i = 0; i < c.emit(head); ++i) {
    forced += c.is_forced(head, i) ? 1 : 0;
    EXPECT_TRUE(kept.contains(i) || !c.is_forced(head, i)) << i;
  }
  std::set<std::int64_t> pages;
  for (const std::int64_t i : kept) pages.insert(c.position(head, i) / kPageTokens);
  EXPECT_EQ(std::ssize(pages), result.pages);
  std::set<std::int64_t> needed;  // by at least one query head
  for (int g = 0; g < c.shape.group(); ++g) {
    const int row = head * c.shape.group() + g;
    SCOPED_TRACE("row " + std::to_string(row));
    expect_lse(c, answer, row);
    const double sum = expect_alpha(c, answer, row, kept);
    if (c.prune == Pruner::top_p && result.cut == 0) {
      EXPECT_GE(sum, static_cast<double>(c.p) * (1 - kRounding));
      needed.merge(needed_entries(c, answer.weights.data() + row * c.columns, head, bin));
    }
  }
  if (c.prune == Pruner::top_k) {
    EXPECT_EQ(result.count, std::min(c.emit(head), std::max(c.k.of(tokens), forced)));
    expect_heaviest(c, answer, head, kept, bin);
  } else if (result.cut != 0) {
    EXPECT_EQ(result.count, std::max(c.cap.of(tokens), forced));
  } else {
    EXPECT_LE(result.count, std::max(c.cap.of(tokens), forced));
    for (const std::int64_t i : kept) {
      EXPECT_TRUE(c.is_forced(head, i) || needed.contains(i)) << "kept without need: " << i;
    }
  }
}

void expect_choices(const SelectCase& c, const SelectAnswer& answer, double bin) {
  for (int head = 0; head < c.heads(); ++head) {
    SCOPED_TRACE("head " + std::to_string(head) + " at " + std::to_string(c.token(head).position));
    expect_choice(c, answer, head, bin);
  }
}

TEST_P(Select, KeepsWhatItsDefinitionSays) {
  const std::uint64_t seed = testing::seed(3);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 120; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const SelectCase c = random_case(random, random.integer(1, round % 10 < 4 ? 5000 : 600));
    expect_choices(c, testing::select(*backend_, c), bin());
    if (HasFailure()) return;
  }
}

TEST_P(Select, GivesEveryTokenWhatItGetsAlone) {
  const std::uint64_t seed = testing::seed(7);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const SelectCase c = random_case(random, random.integer(1, 1500));
    const SelectAnswer all = testing::select(*backend_, c);
    for (int token = 0; token < static_cast<int>(std::ssize(c.tokens)); ++token) {
      const SelectAnswer own = testing::select(*backend_, c.alone(token));
      for (int head = 0; head < c.shape.kv_heads; ++head) {
        const auto at =
            static_cast<std::size_t>(token) * static_cast<std::size_t>(c.shape.kv_heads) +
            static_cast<std::size_t>(head);
        EXPECT_EQ(all.positions[at], own.positions[static_cast<std::size_t>(head)]);
      }
      for (int row = 0; row < c.shape.query_heads; ++row) {
        const auto at =
            static_cast<std::size_t>(token) * static_cast<std::size_t>(c.shape.query_heads) +
            static_cast<std::size_t>(row);
        EXPECT_EQ(all.alpha[at], own.alpha[static_cast<std::size_t>(row)]);
        EXPECT_EQ(all.lse[at], own.lse[static_cast<std::size_t>(row)]);
      }
    }
    if (HasFailure()) return;
  }
}

// As StreamingLLM does.
TEST_P(Select, KeepsWhatIsAlwaysKeptWithoutLogits) {
  const std::uint64_t seed = testing::seed(8);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    SelectCase c;
    c.shape = {1, 6, 2, 64, DType::bf16};
    c.context = random.integer(1, round % 8 == 0 ? 20000 : 700);
    c.tokens = random_tokens(random, c.context);
    c.sinks = random.integer(0, 2) == 0 ? std::int64_t{1} << 40 : random.integer(0, 300);
    c.recent = random.integer(0, 400);
    // As a plan has it: room for what is kept, and no more.
    c.capacity = std::max<std::int64_t>(std::min(c.context, c.sinks + c.recent), 1);
    const SelectAnswer answer = testing::select(*backend_, c);
    for (int head = 0; head < c.heads(); ++head) {
      std::vector<std::int32_t> expected;
      for (std::int64_t i = 0; i < c.emit(head); ++i) {
        if (c.is_forced(head, i)) expected.push_back(static_cast<std::int32_t>(i));
      }
      std::set<std::int32_t> pages;
      for (const std::int32_t at : expected) pages.insert(at / kPageTokens);
      const HeadSelection& result = answer.heads[static_cast<std::size_t>(head)];
      EXPECT_EQ(answer.positions[static_cast<std::size_t>(head)], expected);
      EXPECT_EQ(result.cut, 0);
      EXPECT_EQ(result.pages, std::ssize(pages));
      EXPECT_EQ(result.bad, 0);
    }
    for (const float alpha : answer.alpha) EXPECT_EQ(alpha, 1.0f);
    if (HasFailure()) return;
  }
}

TEST_P(Select, ReportsWhatIsNoNumber) {
  for (const float strange : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    SelectCase c;
    c.shape = {1, 4, 2, 64, DType::bf16};
    c.tokens = {{0, 299}, {1, 150}, {2, 10}};
    c.context = c.columns = 300;
    c.k.share.tokens = 10;
    c.logits.assign(3 * 4 * 300, 0.5f);
    c.logits[3 * 300 + 77] = strange;         // of the first token's second KV head
    c.logits[(4 + 1) * 300 + 151] = strange;  // after the second token
    c.logits[(8 + 1) * 300 + 3] = strange;    // of the third token's first KV head
    const SelectAnswer answer = testing::select(*backend_, c);
    for (std::size_t head = 0; head < 6; ++head) {
      const bool is_bad = head == 1 || head == 4;
      EXPECT_EQ(answer.heads[head].bad, is_bad ? 1 : 0) << head;
      EXPECT_EQ(answer.heads[head].count, is_bad || head == 5 ? 0 : 10) << head;
    }
  }
}

// Where the two disagree, the weights are within rounding, or a bin, of the cut.
TEST_P(Select, ChoosesWhatTheReferenceChooses) {
  const std::uint64_t seed = testing::seed(6);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  testing::Device reference(std::make_unique<cpu::ReferenceBackend>());
  std::size_t differing = 0;
  std::size_t positions = 0;
  for (int round = 0; round < 60; ++round) {
    SelectCase c = random_case(random, random.integer(1, 3000));
    const SelectAnswer a = testing::select(*backend_, c);
    c.logits = a.logits;
    const SelectAnswer b = testing::select(reference, c);
    const auto group = static_cast<std::size_t>(c.shape.group());
    for (std::size_t head = 0; head < a.positions.size(); ++head) {
      std::vector<std::int32_t> only;
      std::set_symmetric_difference(a.positions[head].begin(), a.positions[head].end(),
                                    b.positions[head].begin(), b.positions[head].end(),
                                    std::back_inserter(only));
      differing += only.size();
      positions += b.positions[head].size();
      for (std::size_t g = head * group; g < (head + 1) * group && only.empty(); ++g) {
        EXPECT_NEAR(a.alpha[g], b.alpha[g], 2e-4);
      }
    }
  }
  EXPECT_LE(differing, positions / (bin() > 0.0 ? 100 : 5000)) << "of " << positions;
}

// Logits as a scan leaves them, where it digests them.
class DigestedQueue : public cpu::CpuQueue {
 public:
  using CpuQueue::CpuQueue;

  void submit(const Operation& operation) override {
    const auto* const params = params_of<SelectParams>(operation);
    if (params == nullptr) return CpuQueue::submit(operation);
    SelectParams p = *params;
    std::vector<std::byte> digest;
    if (p.logits.data != nullptr && p.candidates == nullptr) {
      digest = testing::digest_pages(p.shape, p.batch, p.logits);
    }
    CpuQueue::submit(Operation(&p));
  }
};

class DigestedBackend : public cpu::CpuBackend {
 public:
  DigestedBackend() : CpuBackend(options()) {}
  std::unique_ptr<Queue> make_queue(const QueueOptions& /*options*/) override {
    return std::make_unique<DigestedQueue>(*this);
  }

 private:
  static cpu::CpuOptions options() {
    cpu::CpuOptions options;
    options.threads = 2;
    return options;
  }
};

std::vector<NamedBackend> backends() {
  std::vector<NamedBackend> all = testing::backends_by_kind();
  all.push_back({"cpu_by_digest", [] { return std::make_unique<DigestedBackend>(); }});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Backends, Select, ::testing::ValuesIn(backends()), testing::name_of);

}  // namespace
}  // namespace sluice
