// Attention over selected rows and what goes with it, of every backend, against fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <tuple>
#include <vector>

#include "tests/support/attention_parity.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::AttentionCase;
using testing::download;
using testing::NamedBackend;
using testing::Random;
using testing::upload;

// Positions chosen among the first rows of a case, and the case that is left of it: the chosen
// rows, then the newest.
struct Chosen {
  std::vector<std::vector<std::int32_t>> positions;  // [kv_heads], ascending
  AttentionCase expected;
};

Chosen choose(Random& random, const AttentionCase& c, std::int64_t among, std::int64_t most,
              std::int64_t newest) {
  Chosen chosen;
  chosen.expected = c;
  const std::size_t bytes = c.shape.row_bytes();
  for (std::size_t head = 0; head < c.rows.size(); ++head) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(among));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random.engine());
    // The first head has the most, the second few or none.
    all.resize(static_cast<std::size_t>(head == 0 ? most : random.integer(0, most / 4)));
    std::sort(all.begin(), all.end());
    std::vector<std::byte>& rows = chosen.expected.rows[head];
    rows.clear();
    const auto add = [&](std::int64_t row) {
      const std::byte* const from = &c.rows[head][static_cast<std::size_t>(row) * bytes];
      rows.insert(rows.end(), from, from + bytes);
    };
    for (const std::int32_t position : all) add(position);
    for (std::int64_t i = 0; i < newest; ++i) add(among + i);
    chosen.positions.push_back(std::move(all));
  }
  return chosen;
}

// A case's rows at home in host memory, the first of them on the device, too, and what is chosen.
class SelectedRun {
 public:
  SelectedRun(Backend& backend, const AttentionCase& c, const Chosen& chosen, std::int64_t resident)
      : backend_(backend), case_(c), resident_(resident) {
    const std::size_t bytes = c.shape.row_bytes();
    const auto heads = static_cast<std::size_t>(c.shape.kv_heads);
    for (const std::vector<std::byte>& rows : c.rows) {
      capacity_ = std::max(capacity_, c.count(static_cast<int>(home_.size())));
      home_.push_back(backend.allocate(Tier::host, rows.size()));
      std::copy(rows.begin(), rows.end(), home_.back().data());
      const auto first = rows.begin();
      const auto end =
          first + static_cast<std::int64_t>(static_cast<std::size_t>(resident) * bytes);
      device_.push_back(upload(backend, std::vector<std::byte>(first, end)));
      all_.push_back(upload(backend, rows));
    }
    std::vector<std::int32_t> positions(heads * static_cast<std::size_t>(capacity_), -1);
    heads_ = backend.allocate(Tier::host, heads * sizeof(HeadSelection));
    for (std::size_t head = 0; head < heads; ++head) {
      const auto& own = chosen.positions[head];
      std::copy(own.begin(), own.end(),
                positions.begin() + static_cast<std::int64_t>(head) * capacity_);
      this->head(head).count = static_cast<std::int32_t>(own.size());
    }
    positions_ = upload(backend, positions);
    q_ = upload(backend, c.q);
    const Tier tier = backend.info().compute_tier;
    const auto queries = static_cast<std::size_t>(c.tokens * c.shape.query_heads);
    const auto d = static_cast<std::size_t>(c.shape.head_dim);
    out_ = backend.allocate(tier, queries * d * sizeof(float));
    lse_ = backend.allocate(tier, queries * sizeof(float));
    arena_ = backend.allocate(tier, heads * kArenaRows * bytes);
  }

  HeadSelection& head(std::size_t head) const {
    return reinterpret_cast<HeadSelection*>(heads_.data())[head];
  }

  // Alpha, and the log-sum-exp of what it is a share of, to which attend() adds the newest, if
  // there is one.
  void start_from(const std::vector<float>& alpha, const std::vector<float>& estimated_lse) {
    alpha_ = upload(backend_, alpha);
    if (!estimated_lse.empty()) estimated_lse_ = upload(backend_, estimated_lse);
  }
  // Sums of so many values, whose mean stands for what alpha lacks.
  void fill_up_with(const std::vector<float>& sums, std::int64_t count) {
    sums_ = upload(backend_, sums);
    summed_ = count;
  }
  std::vector<float> alpha() const { return download<float>(backend_, alpha_); }

  testing::Partial attend(std::int64_t first_query, std::int64_t newest_first,
                          std::int64_t newest) {
    std::vector<RowSource> sources;
    std::vector<RowSpan> tail;
    for (std::size_t i = 0; i < home_.size(); ++i) {
      sources.push_back({device_[i].data(), resident_, home_[i].data()});
      const auto offset = static_cast<std::size_t>(newest_first) * case_.shape.row_bytes();
      tail.push_back({all_[i].data() + offset, newest});
    }
    AttendSelectedParams p;
    p.q = q_.floats();
    p.tokens = case_.tokens;
    p.q_stride = static_cast<std::int64_t>(case_.shape.query_heads) * case_.shape.head_dim;
    p.first_query = first_query;
    p.shape = case_.shape;
    p.selected = {reinterpret_cast<std::int32_t*>(positions_.data()), capacity_,
                  reinterpret_cast<HeadSelection*>(heads_.data())};
    p.rows = sources;
    if (newest > 0) p.newest = tail;
    p.arena = arena_.data();
    p.arena_rows = kArenaRows;
    p.scale = case_.scale;
    p.out = out_.floats();
    p.lse = lse_.floats();
    if (alpha_.bytes() > 0) p.alpha = alpha_.floats();
    if (estimated_lse_.bytes() > 0) p.estimated_lse = estimated_lse_.floats();
    if (summed_ > 0) p.mean = {sums_.floats(), summed_};
    backend_.attend_selected(p);
    return {download<float>(backend_, out_), download<float>(backend_, lse_)};
  }

 private:
  static constexpr std::int64_t kArenaRows = 96;

  Backend& backend_;
  const AttentionCase& case_;
  std::int64_t resident_;
  std::int64_t capacity_ = 0;
  std::int64_t summed_ = 0;
  std::vector<Buffer> home_, device_, all_;
  Buffer positions_, heads_, q_, out_, lse_, alpha_, estimated_lse_, sums_, arena_;
};

using Shape = std::tuple<DType, int, int>;  // dtype, head_dim, group
using Param = std::tuple<NamedBackend, Shape>;

class AttendSelected : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override { backend_ = testing::make_or_skip(std::get<NamedBackend>(GetParam())); }
  KvShape shape(int kv_heads = 2) const {
    const auto [dtype, head_dim, group] = std::get<Shape>(GetParam());
    return {1, kv_heads * group, kv_heads, head_dim, dtype};
  }
  // CUDA rounds what the suite of dense attention says; the CPU's AMX kernel likewise.
  testing::Rounding rounding(std::int64_t tokens) const {
    const bool half = shape().dtype == DType::f16;
    const double step = half ? testing::kHalfStep : testing::kBf16Step;
    const bool cuda = backend_->info().compute_tier == Tier::device;
    if (cuda && tokens == 1) return {step * step, step * step};
    return cuda || !half ? testing::Rounding{step, step} : testing::Rounding{};
  }

  const std::uint64_t seed_ = testing::seed(31);
  Random random_{seed_};
  std::unique_ptr<Backend> backend_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_P(AttendSelected, OneTokenSeesTheChosenAndTheNewest) {
  for (const std::int64_t most : {0, 1, 64, 500}) {
    for (const std::int64_t resident : {0, 256, 640}) {
      const std::int64_t newest = random_.integer(0, 1) * random_.integer(1, 60);
      SCOPED_TRACE(::testing::Message()
                   << "most " << most << " resident " << resident << " newest " << newest);
      const std::int64_t counts[] = {700, 700};
      AttentionCase c = testing::random_case(random_, shape(), 1, counts);
      Chosen chosen = choose(random_, c, 640, most, newest);
      chosen.expected.first_query_position = 1000;
      SelectedRun run(*backend_, c, chosen, resident);
      testing::expect_parity(chosen.expected, run.attend(1 << 30, 640, newest), rounding(1));
      if (HasFatalFailure()) return;
      for (std::size_t head = 0; head < 2; ++head) {
        const auto& own = chosen.positions[head];
        EXPECT_EQ(run.head(head).resident,
                  std::lower_bound(own.begin(), own.end(), resident) - own.begin());
      }
    }
  }
}

// More tiles than a GPU has workers, most of which serve parts of several heads.
TEST_P(AttendSelected, ManyHeadsOfDifferentCounts) {
  constexpr int kHeads = 60;
  const std::vector<std::int64_t> counts(kHeads, 700);
  const AttentionCase c = testing::random_case(random_, shape(kHeads), 1, counts);
  Chosen chosen = choose(random_, c, 630, random_.integer(500, 600), 70);
  chosen.expected.first_query_position = 2000;
  SelectedRun run(*backend_, c, chosen, 400);
  testing::expect_parity(chosen.expected, run.attend(1 << 30, 630, 70), rounding(1));
  for (std::size_t head = 0; head < kHeads; ++head) {
    const auto& own = chosen.positions[head];
    ASSERT_EQ(run.head(head).resident, std::lower_bound(own.begin(), own.end(), 400) - own.begin())
        << head;
  }
}

// Few heads go whole to one worker of a GPU, many are shared.
TEST_P(AttendSelected, AlphaTakesInTheNewest) {
  for (const int heads : {2, 60}) {
    for (const std::int64_t newest : {1, 70}) {
      SCOPED_TRACE(::testing::Message() << heads << " heads, newest " << newest);
      const std::vector<std::int64_t> counts(static_cast<std::size_t>(heads), 700);
      const AttentionCase c = testing::random_case(random_, shape(heads), 1, counts);
      const Chosen chosen = choose(random_, c, 600, 300, newest);
      const Chosen newest_alone = choose(random_, c, 600, 0, newest);
      AttentionCase expected = newest_alone.expected;
      expected.first_query_position = 1000;
      const testing::AttentionOracle oracle(expected);
      SelectedRun run(*backend_, c, chosen, 300);
      std::vector<float> before;
      std::vector<float> estimated_lse;
      for (int query = 0; query < c.shape.query_heads; ++query) {
        before.push_back(static_cast<float>(random_.integer(0, 100)) / 100.0f);
        // Sometimes one of the two is all that counts.
        const auto apart = static_cast<double>(random_.integer(-5, 5) * (query % 4 == 0 ? 40 : 1));
        estimated_lse.push_back(static_cast<float>(oracle.query(0, query).lse + apart));
      }
      run.start_from(before, estimated_lse);
      run.attend(1 << 30, 600, newest);
      const std::vector<float> after = run.alpha();
      for (std::size_t query = 0; query < after.size(); ++query) {
        const testing::QueryOracle truth = oracle.query(0, static_cast<int>(query));
        const double share =
            1.0 / (1.0 + std::exp(static_cast<double>(estimated_lse[query]) - truth.lse));
        const double alpha = static_cast<double>(before[query]);
        // A share is off by at most a quarter of what the log-sum-exp is.
        ASSERT_NEAR(after[query], alpha + (1.0 - alpha) * share,
                    testing::tolerance_of(truth, rounding(1)).lse + 1e-6)
            << "query head " << query;
      }
    }
  }
}

TEST_P(AttendSelected, ManyTokensSeeOneMoreEach) {
  for (const std::int64_t resident : {0, 300}) {
    const std::int64_t counts[] = {700, 700};
    AttentionCase c = testing::random_case(random_, shape(), 33, counts);
    Chosen chosen = choose(random_, c, 700, 260, 0);
    // As prompts have it, the same positions for all heads.
    chosen.positions[1] = chosen.positions[0];
    const std::size_t bytes = c.shape.row_bytes();
    chosen.expected.rows[1].clear();
    for (const std::int32_t position : chosen.positions[1]) {
      const std::byte* const from = &c.rows[1][static_cast<std::size_t>(position) * bytes];
      chosen.expected.rows[1].insert(chosen.expected.rows[1].end(), from, from + bytes);
    }
    chosen.expected.first_query_position = 220;
    SelectedRun run(*backend_, c, chosen, resident);
    testing::expect_parity(chosen.expected, run.attend(220, 0, 0), rounding(33));
    if (HasFatalFailure()) return;
    EXPECT_EQ(run.head(1).resident,
              std::lower_bound(chosen.positions[1].begin(), chosen.positions[1].end(), resident) -
                  chosen.positions[1].begin());
  }
}

TEST_P(AttendSelected, SumsOfValuesGrowAndShrink) {
  const std::int64_t counts[] = {300, 300};
  const AttentionCase c = testing::random_case(random_, shape(), 1, counts);
  const int d = shape().head_dim;
  std::vector<Buffer> rows;
  std::vector<RowSpan> spans;
  for (const std::vector<std::byte>& bytes : c.rows) {
    rows.push_back(upload(*backend_, bytes));
    spans.push_back({rows.back().data(), 300});
  }
  const Buffer sums = backend_->allocate(backend_->info().compute_tier,
                                         static_cast<std::size_t>(2 * d) * sizeof(float));
  backend_->sum_values({shape(), spans, sums.floats(), false});
  for (RowSpan& span : spans) span.count = 100;
  backend_->sum_values({shape(), spans, sums.floats(), true});
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

// Few rows are attended by one worker of a GPU, more are shared.
TEST_P(AttendSelected, MeanValuesStandForTheRest) {
  for (const std::int64_t most : {0, 20, 400}) {
    for (const bool apart : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "most " << most << " newest apart " << apart);
      const std::int64_t counts[] = {700, 700};
      const AttentionCase c = testing::random_case(random_, shape(), 1, counts);
      const Chosen chosen = choose(random_, c, 640, most, 30);
      const int queries = shape().query_heads;
      const int d = shape().head_dim;
      const std::vector<float> alpha = random_.normal(queries, 0.2f);
      const std::vector<float> sums = random_.normal(2 * d);
      SelectedRun run(*backend_, c, chosen, 256);
      const std::vector<float> before = run.attend(1 << 30, 640, 30).out;
      run.start_from(alpha, apart ? random_.normal(queries) : std::vector<float>());
      run.fill_up_with(sums, 200);
      const std::vector<float> after = run.attend(1 << 30, 640, 30).out;
      const std::vector<float> share = run.alpha();
      if (!apart) {
        EXPECT_EQ(share, alpha);
      }
      for (std::size_t i = 0; i < after.size(); ++i) {
        const std::size_t query = i / static_cast<std::size_t>(d);
        const std::size_t head = query / static_cast<std::size_t>(shape().group());
        const std::size_t channel = i % static_cast<std::size_t>(d);
        const double mean = sums[head * static_cast<std::size_t>(d) + channel] / 200.0;
        const double a = share[query];
        ASSERT_NEAR(after[i], a * before[i] + (1 - a) * mean, 1e-5) << "query " << query;
      }
    }
  }
}

TEST_P(AttendSelected, ColumnSumsAreTheProbesWeights) {
  const std::int64_t counts[] = {400, 400};
  AttentionCase c = testing::random_case(random_, shape(), 5, counts);
  const std::vector<std::int64_t> probes = {3, 130, 255, 380, 399};
  std::vector<std::uint8_t> eligible(400, 1);
  for (int i = 0; i < 60; ++i) eligible[static_cast<std::size_t>(random_.integer(4, 399))] = 0;
  const Buffer q = upload(*backend_, c.q);
  const Buffer mask = upload(*backend_, eligible);
  std::vector<Buffer> rows;
  std::vector<RowSpan> spans;
  for (const std::vector<std::byte>& bytes : c.rows) {
    rows.push_back(upload(*backend_, bytes));
    spans.push_back({rows.back().data(), 400});
  }
  const Buffer sums = backend_->allocate(Tier::host, 400 * sizeof(float));
  backend_->column_sums({q.floats(), probes, shape(), spans,
                         reinterpret_cast<const std::uint8_t*>(mask.data()), sums.floats()});
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
        weights.push_back(eligible[static_cast<std::size_t>(t)] == 0 ? 0.0 : std::exp(logit));
        total += weights.back();
      }
      for (std::size_t t = 0; t < weights.size(); ++t) expected[t] += weights[t] / total;
    }
  }
  // Weights of at most 1 each from queries rounded to the rows' dtype.
  const double step = shape().dtype == DType::f16 ? testing::kHalfStep : testing::kBf16Step;
  for (std::size_t t = 0; t < expected.size(); ++t) {
    ASSERT_NEAR(sums.floats()[t], expected[t], 7 * step * expected[t] + 1e-5) << t;
  }
}

std::string name_of(const ::testing::TestParamInfo<Param>& info) {
  const auto [dtype, head_dim, group] = std::get<Shape>(info.param);
  return std::get<NamedBackend>(info.param).name + "_" + std::string(to_string(dtype)) + "_d" +
         std::to_string(head_dim) + "_g" + std::to_string(group);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttendSelected,
    ::testing::Combine(::testing::ValuesIn(testing::backends_by_kind()),
                       ::testing::Values(Shape{DType::bf16, 128, 4}, Shape{DType::f16, 64, 1},
                                         Shape{DType::bf16, 80, 8}, Shape{DType::f16, 256, 2},
                                         Shape{DType::bf16, 96, 16}, Shape{DType::bf16, 32, 3})),
    name_of);

}  // namespace
}  // namespace sluice
