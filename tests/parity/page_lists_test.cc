// Means of pages, the pages that blocks of queries attend to, and attention to those: every backend
// against what fp64 makes of the definitions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "sluice/half.h"
#include "tests/support/attention_suite.h"

namespace sluice {
namespace {

using testing::AttentionCase;
using testing::AttentionOracle;
using testing::AttentionParityOfShapes;
using testing::Device;
using testing::download;
using testing::NamedBackend;
using testing::Partial;
using testing::Random;
using testing::random_case;
using testing::upload;

KvShape shape_of(int kv_heads, int group, int head_dim, RowFormat rows = DType::bf16) {
  return {.layers = 1,
          .query_heads = kv_heads * group,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .rows = rows};
}

class ListedPages : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override { backend_ = testing::make_or_skip(GetParam()); }

  const std::uint64_t seed_ = testing::seed(20261125);
  Random random_{seed_};
  std::unique_ptr<Device> backend_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

// What choose_pages() is asked, and what it answered.
struct Choice {
  KvShape shape;
  std::int64_t tokens = 0;
  std::int64_t first = 0;
  double share = 0.9;
  std::vector<float> q;              // [tokens, query_heads, head_dim]
  std::vector<std::uint16_t> means;  // [2, kv_heads, pages, head_dim], of the second sequence
  std::int64_t pages = 0;

  std::vector<std::vector<std::int32_t>> lists;  // by KV head, then block
  std::vector<std::uint32_t> listed;

  std::int64_t blocks() const { return PageLists::blocks_of(tokens); }
  std::int64_t before(std::int64_t block) const {
    return (first + block * PageLists::kBlock) / kPageTokens;
  }
  std::int64_t end(std::int64_t block) const {
    const std::int64_t last = std::min(tokens, (block + 1) * PageLists::kBlock) - 1;
    return (first + last) / kPageTokens + 1;
  }
  const std::vector<std::int32_t>& list(int head, std::int64_t block) const {
    return lists[static_cast<std::size_t>(head * blocks() + block)];
  }
};

Choice random_choice(Random& random, const KvShape& shape, std::int64_t first,
                     std::int64_t tokens) {
  Choice c;
  c.shape = shape;
  c.first = first;
  c.tokens = tokens;
  c.pages = (first + tokens) / kPageTokens + random.integer(1, 3);
  c.q = random.normal(tokens * shape.query_heads * shape.head_dim);
  // Queries of a block have something in common, or their mean would say nothing.
  const std::vector<float> common = random.normal(std::int64_t{shape.query_heads} * shape.head_dim);
  for (std::size_t i = 0; i < c.q.size(); ++i) c.q[i] += common[i % common.size()];
  for (const float x : random.normal(2 * shape.kv_heads * c.pages * shape.head_dim)) {
    c.means.push_back(float_to_bf16(2 * x));
  }
  return c;
}

void choose(Device& backend, Choice& c) {
  const Tier tier = backend.info().compute_tier;
  const Buffer q = upload(backend, c.q);
  const Buffer means = upload(backend, c.means);
  const auto entries = static_cast<std::size_t>(c.shape.kv_heads * c.blocks());
  const std::vector<std::int32_t> stale(entries * static_cast<std::size_t>(c.pages), -7);
  const Buffer pages = upload(backend, stale);
  const Buffer counts = backend.allocate(tier, entries * sizeof(std::int32_t));
  const Buffer listed =
      upload(backend,
             std::vector<std::uint32_t>(static_cast<std::size_t>(c.shape.kv_heads * c.pages), 77));
  ChoosePagesParams p;
  p.q = q.floats();
  p.tokens = c.tokens;
  p.q_stride = std::int64_t{c.shape.query_heads} * c.shape.head_dim;
  p.first = c.first;
  p.sequence = 1;
  p.shape = c.shape;
  p.scale = 1.0f / std::sqrt(static_cast<float>(c.shape.head_dim));
  p.share = c.share;
  p.means = {reinterpret_cast<std::uint16_t*>(means.data()), c.pages};
  p.lists = {reinterpret_cast<std::int32_t*>(pages.data()),
             reinterpret_cast<std::int32_t*>(counts.data()), c.blocks(), c.pages};
  p.listed = reinterpret_cast<std::uint32_t*>(listed.data());
  backend.queue->run(p);
  const auto all = download<std::int32_t>(backend, pages);
  const auto many = download<std::int32_t>(backend, counts);
  c.listed = download<std::uint32_t>(backend, listed);
  c.lists.clear();
  for (std::size_t entry = 0; entry < entries; ++entry) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(entry) * c.pages;
    c.lists.emplace_back(begin, begin + many[entry]);
  }
}

// The summed softmax weights of the pages before a block.
std::vector<double> weights_of(const Choice& c, int head, std::int64_t block) {
  const std::int64_t d = c.shape.head_dim;
  std::vector<double> weights(static_cast<std::size_t>(c.before(block)));
  const std::int64_t begin = block * PageLists::kBlock;
  const std::int64_t end = std::min(c.tokens, begin + PageLists::kBlock);
  for (int g = 0; g < c.shape.group() && !weights.empty(); ++g) {
    std::vector<double> mean(static_cast<std::size_t>(d));
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t query = t * c.shape.query_heads + std::int64_t{head} * c.shape.group() + g;
      for (std::int64_t i = 0; i < d; ++i) {
        mean[static_cast<std::size_t>(i)] +=
            c.q[static_cast<std::size_t>(query * d + i)] / static_cast<double>(end - begin);
      }
    }
    std::vector<double> exponentials;
    for (std::int64_t page = 0; page < c.before(block); ++page) {
      const std::int64_t at = ((c.shape.kv_heads + head) * c.pages + page) * d;
      double logit = 0;
      for (std::int64_t i = 0; i < d; ++i) {
        logit += mean[static_cast<std::size_t>(i)] *
                 bf16_to_float(c.means[static_cast<std::size_t>(at + i)]);
      }
      exponentials.push_back(std::exp(logit / std::sqrt(static_cast<double>(d))));
    }
    const double sum = std::accumulate(exponentials.begin(), exponentials.end(), 0.0);
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] += exponentials[i] / sum;
  }
  return weights;
}

double lightest_of_fewest(std::vector<double> weights, double wanted) {
  std::sort(weights.begin(), weights.end(), std::greater<>());
  double sum = 0;
  for (const double weight : weights) {
    sum += weight;
    if (sum >= wanted) return weight;
  }
  return 0;
}

void expect_definition(const Choice& c, int head, std::int64_t block) {
  SCOPED_TRACE(::testing::Message() << "KV head " << head << " block " << block);
  // Room for fp32's sums on either side of where the list is cut.
  constexpr double kSlack = 1e-4;
  const std::vector<std::int32_t>& list = c.list(head, block);
  const std::vector<double> weights = weights_of(c, head, block);
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  const double most = lightest_of_fewest(weights, total * (c.share - kSlack));
  const double least = lightest_of_fewest(weights, std::min(1.0, c.share + kSlack) * total);
  ASSERT_TRUE(std::is_sorted(list.begin(), list.end()));
  for (std::int64_t page = 0; page < c.end(block); ++page) {
    const auto copies = std::count(list.begin(), list.end(), page);
    ASSERT_LE(copies, 1) << "page " << page;
    const bool always = page == 0 || page + 1 >= c.before(block);
    const double weight = always ? 0 : weights[static_cast<std::size_t>(page)];
    if (always || weight > most * (1 + kSlack)) {
      ASSERT_EQ(copies, 1) << "page " << page << " of weight " << weight;
    } else if (weight < least * (1 - kSlack)) {
      ASSERT_EQ(copies, 0) << "page " << page << " of weight " << weight;
    }
  }
  ASSERT_LT(list.back(), c.end(block));
}

void expect_definition(const Choice& c) {
  for (int head = 0; head < c.shape.kv_heads; ++head) {
    std::vector<std::uint32_t> listed(static_cast<std::size_t>(c.pages));
    for (std::int64_t block = 0; block < c.blocks(); ++block) {
      expect_definition(c, head, block);
      if (::testing::Test::HasFatalFailure()) return;
      for (const std::int32_t page : c.list(head, block)) {
        ++listed[static_cast<std::size_t>(page)];
      }
    }
    const auto of_head = std::span(c.listed).subspan(static_cast<std::size_t>(head * c.pages),
                                                     static_cast<std::size_t>(c.pages));
    ASSERT_TRUE(std::equal(listed.begin(), listed.end(), of_head.begin())) << "KV head " << head;
  }
}

TEST_P(ListedPages, AreOfTheFewestPagesWithTheShare) {
  for (const int head_dim : {32, 64, 80, 128, 256}) {
    for (const int group : {1, 3, 4, 8}) {
      const std::int64_t tokens = random_.integer(1, 400);
      const std::int64_t first = random_.integer(0, 200) * 100;
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " group " << group
                                        << " tokens " << tokens << " after " << first);
      Choice c = random_choice(random_, shape_of(2, group, head_dim), first, tokens);
      for (const double share : {0.3, 0.9, 0.99, 1.0}) {
        c.share = share;
        choose(*backend_, c);
        expect_definition(c);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// More pages than a thread block looks at in one go.
TEST_P(ListedPages, OfLongPrompts) {
  Choice c = random_choice(random_, shape_of(1, 2, 64), 150 * 1000, 200);
  choose(*backend_, c);
  expect_definition(c);
}

TEST_P(ListedPages, HoldAllPagesOfEqualWeight) {
  Choice c = random_choice(random_, shape_of(1, 2, 64), 40 * kPageTokens, 128);
  std::fill(c.means.begin(), c.means.end(), float_to_bf16(0.5f));
  choose(*backend_, c);
  EXPECT_EQ(c.list(0, 0).size(), 41u);
}

TEST_P(ListedPages, HoldAllPagesWhereAWeightIsNoNumber) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Choice c = random_choice(random_, shape_of(2, 2, 64), 40 * kPageTokens, 200);
    const std::int64_t key = (c.shape.kv_heads * c.pages + 17) * 64 + 5;  // of KV head 0
    c.means[static_cast<std::size_t>(key)] = float_to_bf16(bad);
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      for (int h = 0; h < 4; ++h) c.q[static_cast<std::size_t>((t * 4 + h) * 64 + 5)] = 1.0f;
    }
    choose(*backend_, c);
    EXPECT_EQ(c.list(0, 0).size(), 41u);
    EXPECT_EQ(c.list(0, 1).size(), 42u);
    EXPECT_LT(c.list(1, 0).size(), 41u);
  }
}

TEST_P(ListedPages, AreTheSameEveryTime) {
  Choice c = random_choice(random_, shape_of(2, 4, 128), 30000, 512);
  choose(*backend_, c);
  const Choice first = c;
  choose(*backend_, c);
  EXPECT_EQ(c.lists, first.lists);
}

TEST_P(ListedPages, MeansAreOfWholePages) {
  std::vector<KvShape> shapes;
  for (const int head_dim : {32, 80, 128, 256}) {
    shapes.push_back(shape_of(2, 1, head_dim, DType::f16));
    for (const RowCode code : backend_->info().row_codes) {
      shapes.push_back(shape_of(2, 1, head_dim, code));
    }
  }
  for (const KvShape& shape : shapes) {
    const int head_dim = shape.head_dim;
    const AttentionCase c = random_case(random_, shape, 1, 3 * kPageTokens);
    std::vector<std::byte> rows = c.rows[0];
    rows.insert(rows.end(), c.rows[1].begin(), c.rows[1].end());
    const Buffer uploaded = upload(*backend_, rows);
    constexpr std::int64_t kPages = 6;
    const std::vector<std::uint16_t> before(static_cast<std::size_t>(2 * 2 * kPages * head_dim), 7);
    const Buffer means = upload(*backend_, before);
    PageMeansParams p;
    p.shape = shape;
    p.pages.count = 3;
    p.pages.run_sequence = 1;
    p.pages.first = 2;
    p.pages.run_rows = uploaded.data();
    p.pages.head_stride = static_cast<std::int64_t>(c.rows[0].size());
    p.to = {reinterpret_cast<std::uint16_t*>(means.data()), kPages};
    backend_->queue->run(p);
    const auto after = download<std::uint16_t>(*backend_, means);
    for (std::size_t i = 0; i < after.size(); ++i) {
      const auto channel = static_cast<std::int64_t>(i) % head_dim;
      const std::int64_t page = static_cast<std::int64_t>(i) / head_dim % kPages;
      const auto head = static_cast<int>(static_cast<std::int64_t>(i) / head_dim / kPages % 2);
      const bool written = i >= after.size() / 2 && page >= 2 && page < 5;
      if (!written) {
        ASSERT_EQ(after[i], 7) << i;
        continue;
      }
      double mean = 0;
      for (std::int64_t r = 0; r < kPageTokens; ++r) {
        mean +=
            testing::row_element(c, head, (page - 2) * kPageTokens + r, static_cast<int>(channel)) /
            kPageTokens;
      }
      ASSERT_NEAR(bf16_to_float(after[i]), mean, std::abs(mean) * 0x1p-8 + 1e-6) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ListedPages, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

// Attention to listed pages is that to their rows, one block of queries and KV head after the
// other.
class ListedAttention {
 public:
  ListedAttention(Random& random, Device& backend, const AttentionCase& c) : c_(c) {
    const std::int64_t pages = (c.first_query_position + c.tokens - 1) / kPageTokens + 1;
    blocks_ = PageLists::blocks_of(c.tokens);
    for (int head = 0; head < c.shape.kv_heads; ++head) {
      for (std::int64_t block = 0; block < blocks_; ++block) {
        std::vector<std::int32_t>& list = lists_.emplace_back();
        const std::int64_t own = (c.first_query_position + block * PageLists::kBlock) / kPageTokens;
        const std::int64_t last =
            std::min(c.tokens, (block + 1) * PageLists::kBlock) - 1 + c.first_query_position;
        for (std::int64_t page = 0; page * kPageTokens <= last; ++page) {
          if (page >= own || random.integer(0, 2) == 0) {
            list.push_back(static_cast<std::int32_t>(page));
          }
        }
      }
    }
    std::vector<std::int32_t> all(lists_.size() * static_cast<std::size_t>(pages), -7);
    std::vector<std::int32_t> counts;
    for (std::size_t i = 0; i < lists_.size(); ++i) {
      std::copy(lists_[i].begin(), lists_[i].end(),
                all.begin() + static_cast<std::ptrdiff_t>(i) * pages);
      counts.push_back(static_cast<std::int32_t>(lists_[i].size()));
    }
    pages_ = upload(backend, all);
    counts_ = upload(backend, counts);
    view_ = {reinterpret_cast<std::int32_t*>(pages_.data()),
             reinterpret_cast<std::int32_t*>(counts_.data()), blocks_, pages};
  }

  const PageLists& lists() const { return view_; }

  // What a block of a KV head sees, as a case of its own.
  AttentionCase part(int head, std::int64_t block) const {
    AttentionCase part;
    part.shape = c_.shape;
    part.shape.kv_heads = 1;
    part.shape.query_heads = c_.shape.group();
    part.scale = c_.scale;
    const std::int64_t begin = block * PageLists::kBlock;
    part.tokens = std::min(PageLists::kBlock, c_.tokens - begin);
    std::vector<std::int64_t> positions;
    std::vector<std::byte>& rows = part.rows.emplace_back();
    for (const std::int32_t page : lists_[static_cast<std::size_t>(head * blocks_ + block)]) {
      for (std::int64_t r = 0; r < kPageTokens; ++r) {
        const std::int64_t row = page * kPageTokens + r;
        if (row >= c_.count(head)) continue;
        const auto from = c_.rows[static_cast<std::size_t>(head)].begin() +
                          row * static_cast<std::ptrdiff_t>(c_.shape.row_bytes());
        rows.insert(rows.end(), from, from + static_cast<std::ptrdiff_t>(c_.shape.row_bytes()));
        positions.push_back(row);
      }
    }
    const std::int64_t width = std::int64_t{part.shape.query_heads} * c_.shape.head_dim;
    for (std::int64_t t = 0; t < part.tokens; ++t) {
      const std::int64_t position = c_.first_query_position + begin + t;
      part.seen.push_back(static_cast<std::int32_t>(
          std::upper_bound(positions.begin(), positions.end(), position) - positions.begin()));
      const auto q = c_.q.begin() + ((begin + t) * c_.shape.kv_heads + head) * width;
      part.q.insert(part.q.end(), q, q + width);
    }
    return part;
  }

  Partial part_of(const Partial& all, int head, std::int64_t block) const {
    Partial part;
    const std::int64_t begin = block * PageLists::kBlock;
    const std::int64_t group = c_.shape.group();
    for (std::int64_t t = begin; t < std::min(c_.tokens, begin + PageLists::kBlock); ++t) {
      const auto first = (t * c_.shape.kv_heads + head) * group;
      part.lse.insert(part.lse.end(), all.lse.begin() + first, all.lse.begin() + first + group);
      part.out.insert(part.out.end(), all.out.begin() + first * c_.shape.head_dim,
                      all.out.begin() + (first + group) * c_.shape.head_dim);
    }
    return part;
  }

  std::int64_t blocks() const { return blocks_; }

 private:
  const AttentionCase& c_;
  std::int64_t blocks_ = 0;
  std::vector<std::vector<std::int32_t>> lists_;  // by KV head, then block
  Buffer pages_;
  Buffer counts_;
  PageLists view_;
};

TEST_P(AttentionParityOfShapes, AttendsToListedPages) {
  for (const int group : {1, 4, 3}) {
    const std::int64_t tokens = random_.integer(1, 300);
    const std::int64_t before = random_.integer(0, 900);
    SCOPED_TRACE(::testing::Message()
                 << "group " << group << " tokens " << tokens << " rows before " << before);
    AttentionCase c = random_case(random_, shape(2, group), tokens, before + tokens);
    c.first_query_position = before;
    const ListedAttention listed(random_, *backend_, c);
    testing::AttentionRun run(*backend_, c);
    run.listed = listed.lists();
    const bool in_parts = random_.integer(0, 1) == 1;
    for (std::int64_t at = 0; at < before + tokens;) {
      const std::int64_t end =
          in_parts ? at + kPageTokens * random_.integer(1, 5) : before + tokens;
      run.attend({at, end}, at > 0);
      at = end;
    }
    const Partial all = run.result();
    for (int head = 0; head < 2; ++head) {
      for (std::int64_t block = 0; block < listed.blocks(); ++block) {
        SCOPED_TRACE(::testing::Message() << "KV head " << head << " block " << block);
        testing::expect_parity(listed.part(head, block), listed.part_of(all, head, block),
                               rounding());
        if (HasFatalFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, AttentionParityOfShapes, ::testing::ValuesIn(testing::all_shapes()),
                         testing::parameter_name);

}  // namespace
}  // namespace sluice
