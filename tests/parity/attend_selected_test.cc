// Attention over selected rows and what goes with it, of every backend, against fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <tuple>
#include <vector>

#include "tests/support/attention_parity.h"
#include "tests/support/backends.h"
#include "tests/support/paged_cases.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::AttentionCase;
using testing::BatchQueries;
using testing::download;
using testing::NamedBackend;
using testing::newest_case;
using testing::PagedSequences;
using testing::Places;
using testing::Random;
using testing::upload;

// A token of a batch with positions chosen before its page, and what is left for it to attend to:
// the rows chosen, then those of its page.
struct Chosen {
  std::vector<std::vector<std::int32_t>> positions;  // [kv_heads], ascending
  AttentionCase expected;
};

Chosen choose(Random& random, const AttentionCase& c, std::int64_t token, std::int64_t most) {
  const std::int64_t position = c.first_query_position + token;
  const std::int64_t first = position / kPageTokens * kPageTokens;
  const std::size_t bytes = c.shape.row_bytes();
  Chosen chosen;
  chosen.expected = c;
  chosen.expected.tokens = 1;
  chosen.expected.first_query_position = position;
  const auto q = c.q.begin() + token * c.shape.query_heads * c.shape.head_dim;
  chosen.expected.q.assign(q, q + std::int64_t{c.shape.query_heads} * c.shape.head_dim);
  for (std::size_t head = 0; head < c.rows.size(); ++head) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(first));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random.engine());
    // The first head has the most, others few or none.
    const std::int64_t wanted = head == 0 ? most : random.integer(0, most / 4);
    all.resize(static_cast<std::size_t>(std::min(first, wanted)));
    std::sort(all.begin(), all.end());
    std::vector<std::byte>& rows = chosen.expected.rows[head];
    rows.clear();
    const auto add = [&](std::int64_t row) {
      const std::byte* const from = &c.rows[head][static_cast<std::size_t>(row) * bytes];
      rows.insert(rows.end(), from, from + bytes);
    };
    for (const std::int32_t at : all) add(at);
    for (std::int64_t at = first; at <= position; ++at) add(at);
    chosen.positions.push_back(std::move(all));
  }
  return chosen;
}

// The rows of a token's own page alone.
AttentionCase own_page(const Chosen& chosen) {
  AttentionCase own = chosen.expected;
  for (std::size_t head = 0; head < own.rows.size(); ++head) {
    const auto selected = chosen.positions[head].size() * own.shape.row_bytes();
    own.rows[head].erase(own.rows[head].begin(),
                         own.rows[head].begin() + static_cast<std::ptrdiff_t>(selected));
  }
  return own;
}

// Cases as sequences in a backend, with up to `most` positions chosen for each head of their
// tokens.
class SelectedRun {
 public:
  SelectedRun(testing::Device& backend, Random& random, const std::vector<AttentionCase>& cases,
              std::int64_t most, Places places = Places::either)
      : backend_(backend),
        sequences_(backend, random, cases, places),
        queries_(backend, cases),
        scale_(cases.front().scale) {
    const auto heads = static_cast<std::size_t>(cases.front().shape.kv_heads);
    for (const AttentionCase& c : cases) {
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        chosen_.push_back(choose(random, c, t, most));
      }
    }
    capacity_ = most + 3;
    std::vector<std::int32_t> positions;
    heads_ = backend.allocate(Tier::host, chosen_.size() * heads * sizeof(HeadSelection));
    for (std::size_t token = 0; token < chosen_.size(); ++token) {
      for (std::size_t i = 0; i < heads; ++i) {
        const auto& own = chosen_[token].positions[i];
        positions.insert(positions.end(), own.begin(), own.end());
        positions.resize((token * heads + i + 1) * static_cast<std::size_t>(capacity_), -1);
        head(token * heads + i).count = static_cast<std::int32_t>(own.size());
      }
    }
    positions_ = upload(backend, positions);
    resident_ = backend.allocate(Tier::host, chosen_.size() * heads * sizeof(std::int32_t));
    arena_ =
        backend.allocate(backend.info().compute_tier, heads * static_cast<std::size_t>(kArenaRows) *
                                                          cases.front().shape.row_bytes());
  }

  const std::vector<Chosen>& chosen() const { return chosen_; }
  HeadSelection& head(std::size_t index) const {
    return reinterpret_cast<HeadSelection*>(heads_.data())[index];
  }

  // Alpha, and the log-sum-exp of what it is a share of, to which attend() adds the newest, if
  // there is one.
  void start_from(const std::vector<float>& alpha, const std::vector<float>& estimated_lse) {
    alpha_ = upload(backend_, alpha);
    if (!estimated_lse.empty()) estimated_lse_ = upload(backend_, estimated_lse);
  }
  // Sums of values, whose mean stands for what alpha lacks.
  void fill_up_with(const std::vector<float>& sums) { sums_ = upload(backend_, sums); }
  std::vector<float> alpha() const { return download<float>(backend_, alpha_); }

  // By token.
  std::vector<testing::Partial> attend(std::int64_t arena_rows = kArenaRows) {
    AttendSelectedParams p;
    queries_.put(p);
    p.batch = sequences_.batch();
    p.selected = {reinterpret_cast<std::int32_t*>(positions_.data()), capacity_,
                  reinterpret_cast<HeadSelection*>(heads_.data())};
    p.resident = reinterpret_cast<std::int32_t*>(resident_.data());
    std::fill_n(p.resident, resident_.bytes() / sizeof(std::int32_t), -1);
    p.rows = sequences_.rows();
    p.arena = arena_rows > 0 ? arena_.data() : nullptr;
    p.arena_rows = arena_rows;
    p.scale = scale_;
    if (alpha_.bytes() > 0) p.alpha = alpha_.floats();
    if (estimated_lse_.bytes() > 0) p.estimated_lse = estimated_lse_.floats();
    if (sums_.bytes() > 0) p.value_sums = sums_.floats();
    backend_.queue->run(p);
    return queries_.results_by_token();
  }

  void expect_parity(const std::vector<testing::Partial>& results,
                     const testing::Rounding& rounding) const {
    for (std::size_t token = 0; token < chosen_.size(); ++token) {
      const AttentionCase& expected = chosen_[token].expected;
      SCOPED_TRACE(::testing::Message()
                   << "token " << token << " at " << expected.first_query_position);
      testing::expect_parity(expected, results[token], rounding);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  void expect_resident() const {
    for (std::size_t token = 0; token < chosen_.size(); ++token) {
      const auto& positions = chosen_[token].positions;
      for (std::size_t i = 0; i < positions.size(); ++i) {
        const std::int32_t sequence = sequences_.tokens()[token].sequence;
        const auto resident =
            std::count_if(positions[i].begin(), positions[i].end(),
                          [&](std::int32_t at) { return sequences_.on_device(sequence, at); });
        ASSERT_EQ(
            reinterpret_cast<const std::int32_t*>(resident_.data())[token * positions.size() + i],
            resident)
            << "token " << token << " head " << i;
      }
    }
  }

  // More than a page, so that tokens share it, and less than what is chosen.
  static constexpr std::int64_t kArenaRows = 300;

 private:
  testing::Device& backend_;
  PagedSequences sequences_;
  BatchQueries queries_;
  float scale_;
  std::vector<Chosen> chosen_;  // by token
  std::int64_t capacity_ = 0;
  Buffer positions_, heads_, resident_, alpha_, estimated_lse_, sums_, arena_;
};

using Shape = std::tuple<RowFormat, int, int>;  // of rows, head_dim, group
using Param = std::tuple<NamedBackend, Shape>;

class AttendSelected : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    backend_ = testing::make_or_skip(std::get<NamedBackend>(GetParam()), shape());
  }
  KvShape shape(int kv_heads = 2) const {
    const auto [format, head_dim, group] = std::get<Shape>(GetParam());
    return {1, kv_heads * group, kv_heads, head_dim, format};
  }
  // CUDA rounds what the suite of dense attention says.
  testing::Rounding rounding() const {
    const double step =
        shape().rows.element == DType::f16 ? testing::kHalfStep : testing::kBf16Step;
    if (backend_->info().compute_tier == Tier::device) return {step * step, step * step};
    return {};
  }
  // Tokens of sequences of any length.
  std::vector<AttentionCase> mixed_batch() {
    std::vector<AttentionCase> cases;
    for (const std::int64_t count : {1, 128, 129, 700}) {
      cases.push_back(newest_case(random_, shape(), count));
    }
    cases.push_back(newest_case(random_, shape(), random_.integer(2, 2000)));
    // On either side of a page's border.
    cases.push_back(newest_case(random_, shape(), 386, 4));
    std::shuffle(cases.begin(), cases.end(), random_.engine());
    return cases;
  }

  const std::uint64_t seed_ = testing::seed(31);
  Random random_{seed_};
  std::unique_ptr<testing::Device> backend_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_P(AttendSelected, TokensSeeTheChosenAndTheNewest) {
  for (const std::int64_t most : {0, 1, 64, 500}) {
    for (const Places places : {Places::device, Places::host, Places::both, Places::either}) {
      SCOPED_TRACE(::testing::Message()
                   << "most " << most << " places " << static_cast<int>(places));
      SelectedRun run(*backend_, random_, mixed_batch(), most, places);
      for (const std::int64_t arena_rows : {std::int64_t{0}, std::int64_t{96}, run.kArenaRows}) {
        run.expect_parity(run.attend(arena_rows), rounding());
        if (HasFatalFailure()) return;
        run.expect_resident();
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(AttendSelected, OneToken) {
  for (const std::int64_t count : {1, 127, 128, 129, 640, 700}) {
    for (const std::int64_t most : {0, 3, 200}) {
      SCOPED_TRACE(::testing::Message() << "most " << most << " of " << count);
      SelectedRun run(*backend_, random_, {newest_case(random_, shape(), count)}, most);
      run.expect_parity(run.attend(), rounding());
      if (HasFatalFailure()) return;
      run.expect_resident();
      if (HasFatalFailure()) return;
    }
  }
}

// More tiles than a GPU has workers, most of which serve parts of several heads.
TEST_P(AttendSelected, ManyHeadsOfDifferentCounts) {
  constexpr int kHeads = 30;
  SelectedRun run(*backend_, random_,
                  {newest_case(random_, shape(kHeads), 700),
                   newest_case(random_, shape(kHeads), random_.integer(1, 500))},
                  random_.integer(500, 600));
  run.expect_parity(run.attend(), rounding());
  if (HasFatalFailure()) return;
  run.expect_resident();
}

// Few heads go whole to one worker of a GPU, many are shared.
TEST_P(AttendSelected, AlphaTakesInTheNewest) {
  for (const int heads : {2, 30}) {
    SCOPED_TRACE(::testing::Message() << heads << " heads");
    SelectedRun run(*backend_, random_,
                    {newest_case(random_, shape(heads), 641), newest_case(random_, shape(heads), 5),
                     newest_case(random_, shape(heads), 710)},
                    300);
    const int queries = shape(heads).query_heads;
    std::vector<testing::QueryOracle> newest;
    std::vector<float> before;
    std::vector<float> estimated_lse;
    for (const Chosen& chosen : run.chosen()) {
      const AttentionCase own = own_page(chosen);
      const testing::AttentionOracle oracle(own);
      for (int query = 0; query < queries; ++query) {
        newest.push_back(oracle.query(0, query));
        before.push_back(static_cast<float>(random_.integer(0, 100)) / 100.0f);
        // Sometimes one of the two is all that counts.
        const auto apart = static_cast<double>(random_.integer(-5, 5) * (query % 4 == 0 ? 40 : 1));
        estimated_lse.push_back(static_cast<float>(newest.back().lse + apart));
      }
    }
    // No row but the newest had a logit.
    estimated_lse.front() = -std::numeric_limits<float>::infinity();
    run.start_from(before, estimated_lse);
    run.attend();
    const std::vector<float> after = run.alpha();
    for (std::size_t i = 0; i < after.size(); ++i) {
      const double share =
          1.0 / (1.0 + std::exp(static_cast<double>(estimated_lse[i]) - newest[i].lse));
      const double alpha = static_cast<double>(before[i]);
      // A share is off by at most a quarter of what the log-sum-exp is.
      ASSERT_NEAR(after[i], alpha + (1.0 - alpha) * share,
                  testing::tolerance_of(newest[i], rounding()).lse + 1e-6)
          << "query head " << i;
    }
  }
}

// Few rows are attended by one worker of a GPU, more are shared.
TEST_P(AttendSelected, MeanValuesStandForTheRest) {
  for (const std::int64_t most : {0, 20, 400}) {
    for (const bool apart : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "most " << most << " newest apart " << apart);
      SelectedRun run(*backend_, random_, mixed_batch(), most);
      const auto tokens = static_cast<std::int64_t>(run.chosen().size());
      const int queries = shape().query_heads;
      const int d = shape().head_dim;
      const std::vector<float> alpha = random_.normal(tokens * queries, 0.2f);
      const std::vector<float> sums = random_.normal(tokens * 2 * d, 200.0f);
      const std::vector<testing::Partial> before = run.attend();
      run.start_from(alpha, apart ? random_.normal(tokens * queries) : std::vector<float>());
      run.fill_up_with(sums);
      const std::vector<testing::Partial> after = run.attend();
      const std::vector<float> share = run.alpha();
      if (!apart) {
        EXPECT_EQ(share, alpha);
      }
      for (std::size_t token = 0; token < run.chosen().size(); ++token) {
        const auto count =
            static_cast<double>(run.chosen()[token].expected.first_query_position + 1);
        for (std::size_t i = 0; i < after[token].out.size(); ++i) {
          const std::size_t query = i / static_cast<std::size_t>(d);
          const std::size_t head = token * 2 + query / static_cast<std::size_t>(shape().group());
          const std::size_t channel = i % static_cast<std::size_t>(d);
          const double mean =
              static_cast<double>(sums[head * static_cast<std::size_t>(d) + channel]) / count;
          const double a = share[token * static_cast<std::size_t>(queries) + query];
          ASSERT_NEAR(after[token].out[i], a * before[token].out[i] + (1 - a) * mean,
                      1e-5 + 1e-6 * std::abs(mean))
              << "token " << token << " query " << query;
        }
      }
    }
  }
}

TEST_P(AttendSelected, GathersRowsByPosition) {
  const std::size_t bytes = shape().row_bytes();
  for (const Places places : {Places::device, Places::host, Places::either}) {
    const std::vector<AttentionCase> cases = {newest_case(random_, shape(), 300),
                                              newest_case(random_, shape(), 900)};
    const PagedSequences sequences(*backend_, random_, cases, places);
    std::vector<std::int32_t> positions;
    for (std::int32_t t = 0; t < 900; ++t) {
      if (random_.integer(0, 2) == 0) positions.push_back(t);
    }
    const std::int64_t to_rows = std::ssize(positions) + 7;
    const Buffer at = upload(*backend_, positions);
    const Buffer to = backend_->allocate(backend_->info().compute_tier,
                                         2 * static_cast<std::size_t>(to_rows) * bytes);
    GatherParams p;
    p.shape = shape();
    p.rows = sequences.rows();
    p.sequence = sequences.sequence(1);
    p.positions = reinterpret_cast<const std::int32_t*>(at.data());
    p.count = std::ssize(positions);
    p.to = to.data();
    p.to_rows = to_rows;
    backend_->queue->run(p);
    const std::vector<std::byte> rows = download<std::byte>(*backend_, to);
    std::vector<std::byte> expected(rows.size());
    for (std::size_t head = 0; head < 2; ++head) {
      std::byte* row = expected.data() + head * static_cast<std::size_t>(to_rows) * bytes;
      for (const std::int32_t position : positions) {
        std::memcpy(row, &cases[1].rows[head][static_cast<std::size_t>(position) * bytes], bytes);
        row += bytes;
      }
    }
    EXPECT_TRUE(rows == expected) << "places " << static_cast<int>(places);
  }
}

TEST_P(AttendSelected, SumsOfValuesGrowAndShrink) {
  const AttentionCase c = testing::random_case(random_, shape(), 1, 300);
  const int d = shape().head_dim;
  auto [buffer, spans] = testing::upload_heads(*backend_, c.rows, shape().row_bytes());
  const Buffer sums = backend_->allocate(backend_->info().compute_tier,
                                         static_cast<std::size_t>(2 * d) * sizeof(float));
  backend_->queue->run(SumValuesParams{shape(), spans, sums.floats(), false});
  for (RowSpan& span : spans) span.count = 100;
  backend_->queue->run(SumValuesParams{shape(), spans, sums.floats(), true});
  const std::vector<float> actual = download<float>(*backend_, sums);
  std::size_t i = 0;
  for (int head = 0; head < 2; ++head) {
    for (int channel = 0; channel < d; ++channel) {
      double sum = 0.0;
      for (std::int64_t row = 100; row < 300; ++row) {
        sum += testing::row_element(c, head, row, d + channel);
      }
      // 500 numbers of order 1, added in fp32.
      ASSERT_NEAR(actual[i++], sum, 500 * 0x1p-20);
    }
  }
}

TEST_P(AttendSelected, ColumnSumsAreTheProbesWeights) {
  AttentionCase c = testing::random_case(random_, shape(), 5, 400);
  const std::vector<std::int64_t> probes = {3, 130, 255, 380, 399};
  const Buffer q = upload(*backend_, c.q);
  const testing::UploadedHeads rows = testing::upload_heads(*backend_, c.rows, shape().row_bytes());
  const Buffer sums = backend_->allocate(Tier::host, 400 * sizeof(float));
  backend_->queue->run(ColumnSumsParams{q.floats(), probes, shape(), rows.spans, sums.floats()});
  backend_->synchronize();
  std::vector<double> expected(400);
  for (std::size_t probe = 0; probe < probes.size(); ++probe) {
    for (int head = 0; head < shape().query_heads; ++head) {
      std::vector<double> weights;
      double total = 0.0;
      for (std::int64_t t = 0; t <= probes[probe]; ++t) {
        double logit = 0.0;
        for (int i = 0; i < shape().head_dim; ++i) {
          const auto at =
              (static_cast<int>(probe) * shape().query_heads + head) * shape().head_dim + i;
          logit += c.q[static_cast<std::size_t>(at)] *
                   testing::row_element(c, head / shape().group(), t, i) * c.scale;
        }
        weights.push_back(std::exp(logit));
        total += weights.back();
      }
      for (std::size_t t = 0; t < weights.size(); ++t) expected[t] += weights[t] / total;
    }
  }
  // Weights of at most 1 each from queries rounded to the rows' dtype.
  const double step = shape().rows.element == DType::f16 ? testing::kHalfStep : testing::kBf16Step;
  for (std::size_t t = 0; t < expected.size(); ++t) {
    ASSERT_NEAR(sums.floats()[t], expected[t], 7 * step * expected[t] + 1e-5) << t;
  }
}

std::string name_of(const ::testing::TestParamInfo<Param>& info) {
  const auto [format, head_dim, group] = std::get<Shape>(info.param);
  return std::get<NamedBackend>(info.param).name + "_" + to_string(format) + "_d" +
         std::to_string(head_dim) + "_g" + std::to_string(group);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttendSelected,
    ::testing::Combine(::testing::ValuesIn(testing::backends_by_kind()),
                       ::testing::Values(Shape{DType::bf16, 128, 4}, Shape{DType::f16, 64, 1},
                                         Shape{DType::bf16, 80, 8}, Shape{DType::f16, 256, 2},
                                         Shape{DType::bf16, 96, 16}, Shape{DType::bf16, 32, 3},
                                         Shape{RowCode::int8, 128, 4}, Shape{RowCode::int8, 48, 3},
                                         Shape{RowCode::k8v4, 128, 4}, Shape{RowCode::k8v4, 64, 8},
                                         Shape{RowCode::k8v4, 80, 3}, Shape{RowCode::k8v4, 96, 2},
                                         Shape{RowCode::k8v4, 256, 1},
                                         Shape{RowCode::k8v4, 32, 16})),
    name_of);

}  // namespace
}  // namespace sluice
