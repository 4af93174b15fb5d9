// Value tiles of the CPU and of its reference, by their definition.
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cpu/reference/values.h"
#include "cpu/runtime/threads.h"
#include "cpu/values/values.h"
#include "lib/backend/kv_ops.h"
#include "sluice/errors.h"
#include "tests/support/cpu_digest.h"
#include "tests/support/elements.h"
#include "tests/support/fitted_halves.h"
#include "tests/support/partial_cases.h"
#include "tests/support/value_cases.h"

namespace sluice {
namespace {

using testing::Random;
using testing::ValueCase;
using testing::ValueProblem;

// The operations of one implementation.
struct Implementation {
  std::string name;
  std::function<void(const BuildValuesParams&)> build;
  std::function<void(const BuildValuesBatchParams&)> build_batch;
  std::function<void(const AttendTilesParams&)> attend;
  std::function<void(const MergePartialsParams&)> merge;
  double weight_error = 0.0;  // of the heaviest of a page
};

cpu::Threads& threads() {
  static cpu::Threads of_tests(2);
  return of_tests;
}

// 16 bits, whose rounding adds up over a page at random.
constexpr double kWeightError = 1e-4;

void attend_by_digest(AttendTilesParams p) {
  std::vector<std::byte> digest;
  if (!p.weighed) {
    digest = testing::digest_pages(p.shape, p.batch, p.logits);
    testing::weigh_levels(p.shape, p.batch, p.logits, p.estimated_lse);
  }
  cpu::attend_tiles(p, threads());
}

std::vector<Implementation> implementations() {
  return {{"reference", cpu::reference::build_values, cpu::reference::build_values_batch,
           [](const AttendTilesParams& p) { cpu::reference::attend_tiles(p); },
           cpu::reference::merge_partials},
          {"simd", [](const BuildValuesParams& p) { cpu::build_values(p, threads()); },
           [](const BuildValuesBatchParams& p) { cpu::build_values_batch(p, threads()); },
           [](const AttendTilesParams& p) { cpu::attend_tiles(p, threads()); }, cpu::merge_partials,
           kWeightError},
          {"simd_by_digest", [](const BuildValuesParams& p) { cpu::build_values(p, threads()); },
           [](const BuildValuesBatchParams& p) { cpu::build_values_batch(p, threads()); },
           attend_by_digest, cpu::merge_partials, kWeightError}};
}

class ValueTilesTest : public ::testing::TestWithParam<Implementation> {};

void expect_answer(const Implementation& by, const testing::ValueAnswer& wanted,
                   const ValueProblem& problem) {
  testing::expect_answer(wanted, problem.out, problem.lse, problem.pages_read,
                         testing::tolerance_of(problem.of(), by.weight_error));
}

void expect_right(const Implementation& by, const ValueCase& c, std::uint64_t seed) {
  SCOPED_TRACE(testing::seed_message(seed) + " " + c.name());
  ValueProblem problem(c, seed);
  const testing::ValueAnswer wanted = testing::answer_of(problem);
  by.attend(problem.params());
  expect_answer(by, wanted, problem);
}

TEST_P(ValueTilesTest, AttendLikeTheDefinition) {
  std::uint64_t seed = testing::seed(1);
  for (const ValueCase& c : testing::value_cases()) expect_right(GetParam(), c, ++seed);
}

TEST(ValueTiles, AttendLikeTheDefinitionByEveryInstructionSet) {
  for (const std::int64_t target : {HWY_AVX3_DL, HWY_AVX3, HWY_AVX2, HWY_SCALAR}) {
    if (target != HWY_SCALAR && (hwy::SupportedTargets() & target) == 0) continue;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    std::uint64_t seed = testing::seed(200);
    for (const int bits : {1, 2, 3, 4}) {
      for (const int head_dim : {20, 128}) {
        expect_right(implementations()[1], {head_dim, 3, bits}, ++seed);
      }
      ValueCase of_components{80, 3, bits};
      of_components.half = true;
      expect_right(implementations()[1], of_components, ++seed);
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

TEST_P(ValueTilesTest, TakeWeightsInPlaceOfLogits) {
  const std::uint64_t seed = testing::seed(2);
  SCOPED_TRACE(testing::seed_message(seed));
  ValueProblem problem(ValueCase{}, seed);
  const testing::ValueAnswer wanted = testing::answer_of(problem);
  AttendTilesParams p = problem.params();
  p.weighed = true;
  for (std::size_t i = 0; i < problem.logits.size(); ++i) {
    const std::size_t query = i / static_cast<std::size_t>(problem.stride);
    problem.logits[i] = std::exp(problem.logits[i] - problem.estimated_lse[query]);
  }
  GetParam().attend(p);
  expect_answer(GetParam(), wanted, problem);
}

TEST_P(ValueTilesTest, LeaveOutHeadsWhoseSelectionIsBad) {
  const std::uint64_t seed = testing::seed(3);
  SCOPED_TRACE(testing::seed_message(seed));
  for (const bool merge : {false, true}) {
    ValueCase c;
    c.merge = merge;
    ValueProblem problem(c, seed);
    const testing::ValueAnswer wanted = testing::spoil_head(problem, 7);
    EXPECT_EQ(std::isinf(wanted.lse[7 * 4]), !merge);
    GetParam().attend(problem.params());
    expect_answer(GetParam(), wanted, problem);
  }
}

TEST_P(ValueTilesTest, ReadFewerPagesForSmallerShares) {
  const std::uint64_t seed = testing::seed(4);
  SCOPED_TRACE(testing::seed_message(seed));
  std::vector<std::int32_t> last;
  for (const float share : {0.3f, 0.6f, 0.9f, 1.0f}) {
    ValueCase c{64, 4, 2, share, {12800}, 16, 1};
    ValueProblem problem(c, seed);
    GetParam().attend(problem.params());
    if (!last.empty()) {
      EXPECT_GT(problem.pages_read[0], last[0]);
    }
    last = problem.pages_read;
  }
  EXPECT_EQ(last[0], 100);
}

TEST_P(ValueTilesTest, MergePartialsOfAnySize) {
  const std::uint64_t seed = testing::seed(5);
  SCOPED_TRACE(testing::seed_message(seed));
  const testing::PartialsCase c(20, seed);
  std::vector<float> out = c.old;
  std::vector<float> lse = c.old_lse;
  GetParam().merge(
      {c.rows(), c.head_dim, c.from.data(), c.from_lse.data(), out.data(), lse.data()});
  testing::expect_merged(c, out, lse);
}

// The products of values, [kv_heads, tokens, head_dim], with the vectors of bases.
std::vector<float> components_of(const std::vector<float>& values, const std::vector<float>& bases,
                                 std::size_t head_dim) {
  std::vector<float> components;
  const std::size_t of_head = values.size() / 2;  // two KV heads
  for (std::size_t at = 0; at < values.size(); at += head_dim) {
    const std::size_t first = at / of_head * bases.size() / 2;
    for (std::size_t i = 0; i < head_dim / 2; ++i) {
      double sum = 0.0;
      for (std::size_t c = 0; c < head_dim; ++c) {
        sum += static_cast<double>(values[at + c]) *
               static_cast<double>(bases[first + i * head_dim + c]);
      }
      components.push_back(static_cast<float>(sum));
    }
  }
  return components;
}

// Rows of a sequence's whole pages and the tiles that are built of them.
class Built {
 public:
  // `half`: tiles hold half the components of values.
  Built(int head_dim, int bits, const RowFormat& format, std::int64_t pages, std::uint64_t seed,
        float deviation = 1.0f, bool half = false)
      : shape_{1, 2, 2, head_dim, format}, pages_(pages) {
    Random random(seed);
    values = random.normal(2 * pages * kPageTokens * head_dim, deviation);
    if (half) bases = testing::random_bases(random, 2, head_dim);
    encode(format);
    view_.tiles = {bits, nullptr, (pages + 1) / 2 + 1};
    tiles.assign(view_.tiles.bytes(2, channels()), std::byte{0x5a});
    for (std::int64_t i = 0; i < (pages + 1) / 2; ++i) {
      table.push_back(static_cast<std::int32_t>((pages + 1) / 2 - i));
    }
    bad.assign(2, 0);
  }

  // Writes `values` to the rows, and rounds them as rows do.
  void encode(const RowFormat& format) {
    const int head_dim = shape_.head_dim;
    rows.resize(static_cast<std::size_t>(2 * count()) * shape_.row_bytes());
    for (std::int64_t row = 0; row < 2 * count(); ++row) {
      const auto at = values.begin() + row * head_dim;
      const std::vector<float> value(at, at + head_dim);
      std::ranges::copy(testing::encoded_row(value, value, format),
                        &rows[static_cast<std::size_t>(row) * shape_.row_bytes()]);
      std::ranges::copy(testing::rounded_value(value, format), at);
    }
    const auto d = static_cast<std::size_t>(head_dim);
    numbers = bases.empty() ? values : components_of(values, bases, d);
  }

  void build(const Implementation& by) {
    std::vector<RowSpan> spans;
    for (std::size_t head = 0; head < 2; ++head) spans.push_back({rows_of(head), count()});
    by.build({shape_, view(), 0, 0, pages_, spans, bad.data()});
  }
  // By a token for each page that completes it, and others that complete none.
  void build_batch(const Implementation& by) {
    std::vector<PageSlots> slots;
    for (std::int32_t page = 0; page < pages_; ++page) slots.push_back({PageSlots::kNone, page});
    PagedRows paged;
    paged.host = rows.data();
    paged.host_stride = static_cast<std::int64_t>(shape_.row_bytes()) * count();
    paged.pages = slots.data();
    paged.table_stride = pages_;
    std::vector<BatchToken> batch;
    for (std::int32_t page = 0; page < pages_; ++page) {
      batch.push_back({0, page * kPageTokens + 126});
      batch.push_back({0, page * kPageTokens + 127});
    }
    by.build_batch({shape_, view(), {batch.data(), std::ssize(batch), count()}, paged, bad.data()});
  }

  std::int64_t count() const { return pages_ * kPageTokens; }
  std::byte* rows_of(std::size_t head) {
    return &rows[head * static_cast<std::size_t>(count()) * shape_.row_bytes()];
  }
  ValueTilesView view() {
    view_.tiles.pages = tiles.data();
    view_.tiles.basis = bases.empty() ? nullptr : bases.data();
    view_.slots = table.data();
    view_.table_stride = std::ssize(table);
    return view_;
  }
  const KvShape& shape() const { return shape_; }
  int channels() const { return bases.empty() ? shape_.head_dim : shape_.head_dim / 2; }
  // A channel of what tiles hold.
  float value(std::int64_t head, std::int64_t token, int channel) const {
    return numbers[static_cast<std::size_t>((head * count() + token) * channels() + channel)];
  }
  double coded(std::int64_t head, std::int64_t token, int channel) {
    const std::int64_t page = token / kPageTokens;
    const std::byte* const bytes =
        view().tiles.page(shape_.head_dim, head, view_.slot(0, page), page);
    return testing::value_in_page(bytes, view_.tiles.bits, channels(),
                                  static_cast<int>(token % kPageTokens), channel);
  }

  std::vector<float> values;   // [kv_heads, tokens, head_dim]
  std::vector<float> numbers;  // [kv_heads, tokens, channels()]
  std::vector<float> bases;    // empty, or [kv_heads, channels(), head_dim]
  std::vector<std::byte> rows;
  std::vector<std::byte> tiles;
  std::vector<std::int32_t> table;
  std::vector<std::int32_t> bad;

 private:
  KvShape shape_;
  std::int64_t pages_;
  ValueTilesView view_;
};

// How much of the range the codes of so many bits are to span.
double kept_of(int bits) { return bits == 2 ? 0.75 : bits == 3 ? 0.9 : 0.95; }

// Every value becomes the nearest of 2^bits evenly spaced ones in the middle of the range.
void expect_nearest(Built& built, int bits) {
  const int d = built.channels();
  for (std::int64_t at = 0; at < 2 * built.count() / kPageTokens * d; ++at) {
    const std::int64_t head = at / d % 2;
    const std::int64_t first = at / d / 2 * kPageTokens;
    const auto c = static_cast<int>(at % d);
    double low = HUGE_VAL;
    double high = -HUGE_VAL;
    for (std::int64_t t = first; t < first + kPageTokens; ++t) {
      low = std::min(low, static_cast<double>(built.value(head, t, c)));
      high = std::max(high, static_cast<double>(built.value(head, t, c)));
    }
    const double range = (high - low) * kept_of(bits);
    const double middle = (high + low) / 2;
    const double step = range / ((1 << bits) - 1);
    for (std::int64_t t = first; t < first + kPageTokens; ++t) {
      const auto value = static_cast<double>(built.value(head, t, c));
      const double inside = std::clamp(value, middle - range / 2, middle + range / 2);
      // Zero and scale are rounded to f16.
      ASSERT_NEAR(built.coded(head, t, c), inside, step * 0.502 + range * 2e-3)
          << "channel " << c << " token " << t;
    }
  }
}

void expect_fitted(Built& built) {
  const int d = built.channels();
  for (std::int64_t at = 0; at < 2 * built.count() / kPageTokens * d; ++at) {
    const std::int64_t first = at / d / 2 * kPageTokens;
    const auto c = static_cast<int>(at % d);
    std::vector<double> values;
    std::vector<double> coded;
    for (std::int64_t t = first; t < first + kPageTokens; ++t) {
      values.push_back(static_cast<double>(built.value(at / d % 2, t, c)));
      coded.push_back(built.coded(at / d % 2, t, c));
    }
    ASSERT_NO_FATAL_FAILURE(testing::expect_halves(values, coded)) << "channel " << c;
  }
}

TEST_P(ValueTilesTest, HoldTheNearestCodes) {
  std::uint64_t seed = testing::seed(10);
  for (const int bits : {1, 2, 3, 4}) {
    for (const int head_dim : {4, 64, 80, 256}) {
      for (const RowFormat& format :
           {RowFormat(DType::bf16), RowFormat(DType::f16), RowFormat(DType::f32),
            RowFormat(RowCode::int8), RowFormat(RowCode::k8v4)}) {
        if (!format.fits(head_dim)) continue;
        SCOPED_TRACE(testing::seed_message(++seed) + " bits " + std::to_string(bits));
        Built built(head_dim, bits, format, 3, seed);
        built.build(GetParam());
        bits == 1 ? expect_fitted(built) : expect_nearest(built, bits);
        EXPECT_EQ(built.bad, std::vector<std::int32_t>(2));
        Built by_steps(head_dim, bits, format, 3, seed);
        by_steps.build_batch(GetParam());
        EXPECT_TRUE(built.tiles == by_steps.tiles);
      }
    }
  }
}

TEST_P(ValueTilesTest, HoldTheNearestCodesOfComponents) {
  std::uint64_t seed = testing::seed(30);
  for (const int bits : {1, 2, 3, 4}) {
    for (const int head_dim : {8, 64, 80, 96, 128, 256}) {
      for (const RowFormat& format : {RowFormat(DType::bf16), RowFormat(DType::f32)}) {
        SCOPED_TRACE(testing::seed_message(++seed) + " bits " + std::to_string(bits));
        Built built(head_dim, bits, format, 3, seed, 1.0f, true);
        built.build(GetParam());
        bits == 1 ? expect_fitted(built) : expect_nearest(built, bits);
        EXPECT_EQ(built.bad, std::vector<std::int32_t>(2));
        Built by_steps(head_dim, bits, format, 3, seed, 1.0f, true);
        by_steps.build_batch(GetParam());
        EXPECT_TRUE(built.tiles == by_steps.tiles);
      }
    }
  }
}

// Pages whose values are all equal have components without a range. A huge value has only numbers,
// and what no number holds is reported.
TEST_P(ValueTilesTest, TakeComponentsWithoutARangeAndHugeOnes) {
  for (const float huge : {0.375f, 3e38f, std::numeric_limits<float>::infinity()}) {
    SCOPED_TRACE(huge);
    Built built(64, 2, DType::f32, 2, testing::seed(62), 1.0f, true);
    std::fill(built.values.begin(), built.values.end(), 0.375f);
    built.values[static_cast<std::size_t>((built.count() + 130) * 64 + 5)] = huge;
    built.encode(DType::f32);
    built.build(GetParam());
    EXPECT_EQ(built.bad, (std::vector<std::int32_t>{0, std::isinf(huge) ? 1 : 0}));
    for (std::int64_t t = 0; t < kPageTokens; ++t) {
      for (int c = 0; c < 32; ++c) {
        const auto number = static_cast<double>(built.value(1, t, c));
        ASSERT_NEAR(built.coded(1, t, c), number, 1e-3 * std::fabs(number) + 1e-6);
        if (!std::isinf(huge)) {
          ASSERT_TRUE(std::isfinite(built.coded(1, t + kPageTokens, c)));
        }
      }
    }
  }
}

// Values that lie in the basis beside their mean lose only the codes' rounding: the mean is kept
// although the basis does not hold it.
TEST_P(ValueTilesTest, KeepTheMeanThatComponentsDoNotHold) {
  const std::uint64_t seed = testing::seed(75);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  Built built(64, 4, DType::f32, 8, seed, 1.0f, true);
  const std::vector<float> mean = random.normal(64, 3.0f);
  const std::vector<float> within = random.normal(2 * built.count() * 32);
  std::vector<float> sums(128, 0.0f);
  for (std::size_t row = 0; row < built.values.size() / 64; ++row) {
    const std::size_t head = row / static_cast<std::size_t>(built.count());
    for (std::size_t c = 0; c < 64; ++c) {
      float x = mean[c];
      for (std::size_t i = 0; i < 32; ++i) {
        x += within[row * 32 + i] * built.bases[(head * 32 + i) * 64 + c];
      }
      built.values[row * 64 + c] = x;
      sums[head * 64 + c] += x;
    }
  }
  built.encode(DType::f32);
  built.build(GetParam());
  ValueProblem problem({64, 1, 4, 1.0f, {1023}, 0, 2}, seed);
  // The token's own page is not attended here; sums are of all tokens.
  problem.tokens = {{0, 1023}};
  problem.sums = sums;
  AttendTilesParams p = problem.params();
  p.values = built.view();
  const std::vector<float> logits = problem.logits;
  GetParam().attend(p);
  for (std::size_t head = 0; head < 2; ++head) {
    std::vector<double> exact(64, 0.0);
    double all = 0.0;
    for (std::size_t t = 0; t < 7 * kPageTokens; ++t) {
      const double weight =
          std::exp(static_cast<double>(logits[head * static_cast<std::size_t>(problem.stride) + t] -
                                       problem.estimated_lse[head]));
      all += weight;
      for (std::size_t c = 0; c < 64; ++c) {
        const std::size_t row = head * static_cast<std::size_t>(built.count()) + t;
        exact[c] += weight * static_cast<double>(built.values[row * 64 + c]);
      }
    }
    for (std::size_t c = 0; c < 64; ++c) {
      EXPECT_NEAR(static_cast<double>(problem.out[head * 64 + c]), exact[c] / all, 0.15) << c;
    }
  }
}

TEST_P(ValueTilesTest, AreTheSameBitByBitAsTheReferences) {
  std::uint64_t seed = testing::seed(50);
  for (const int bits : {1, 2, 3, 4}) {
    for (const float deviation : {0.0f, 1e-8f, 1e-4f, 1.0f, 1e4f, 1e30f}) {
      SCOPED_TRACE(testing::seed_message(++seed) + " bits " + std::to_string(bits));
      Built built(64, bits, DType::bf16, 2, seed, deviation);
      Built reference(64, bits, DType::bf16, 2, seed, deviation);
      built.build(GetParam());
      reference.build(implementations()[0]);
      EXPECT_TRUE(built.tiles == reference.tiles) << deviation;
    }
  }
}

// Values without a range are held exactly; a channel with one huge value has only numbers,
// and leaves the others alone.
TEST_P(ValueTilesTest, TakeValuesWithoutARangeAndHugeOnes) {
  for (const int bits : {1, 2, 3, 4}) {
    SCOPED_TRACE("bits " + std::to_string(bits));
    Built built(64, bits, DType::f32, 2, testing::seed(61), 0.0f);
    const auto row = static_cast<std::int64_t>(built.shape().row_bytes());
    for (std::int64_t t = 0; t < built.count(); ++t) {
      const float values[2] = {0.375f, t == 130 ? 3e38f : 1.0f};
      std::memcpy(built.rows_of(1) + t * row + 64 * 4, values, sizeof values);
    }
    built.build(GetParam());
    EXPECT_EQ(built.bad, std::vector<std::int32_t>(2));
    for (std::int64_t t = 0; t < built.count(); ++t) {
      ASSERT_EQ(built.coded(1, t, 0), 0.375);
      ASSERT_TRUE(std::isfinite(built.coded(1, t, 1)));
      ASSERT_EQ(built.coded(1, t, 2), 0.0);
    }
    ASSERT_EQ(built.coded(1, 0, 1), 1.0);
    ASSERT_GT(built.coded(1, 130, 1), 6e4);
  }
}

TEST_P(ValueTilesTest, ReportValuesThatAreNoNumbers) {
  for (const float strange :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    Built built(64, 2, DType::f32, 2, testing::seed(60));
    const auto row = static_cast<std::int64_t>(built.shape().row_bytes());
    // Head 1, page 1, token 127, channel 63; a key of head 0, which is no value.
    std::memcpy(built.rows_of(1) + 255 * row + 127 * 4, &strange, 4);
    std::memcpy(built.rows_of(0) + 3 * row, &strange, 4);
    built.build(GetParam());
    EXPECT_EQ(built.bad, (std::vector<std::int32_t>{0, 1}));
    const ValueTilesView view = built.view();
    const std::byte* const page = view.tiles.page(64, 1, view.slot(0, 1), 1);
    const std::size_t bytes = view.tiles.page_bytes(64);
    EXPECT_EQ(std::vector<std::byte>(page, page + bytes),
              std::vector<std::byte>(bytes, std::byte{0x5a}));
  }
}

// Attention to tokens that are nowhere else: close to exact attention, the closer the more bits.
TEST_P(ValueTilesTest, ComeCloserToExactAttentionWithMoreBits) {
  const std::uint64_t seed = testing::seed(70);
  SCOPED_TRACE(testing::seed_message(seed));
  double last = 0.5;
  for (const int bits : {1, 2, 3, 4}) {
    Built built(64, bits, DType::bf16, 8, seed);
    built.build(GetParam());
    ValueProblem problem({64, 1, bits, 1.0f, {1024}, 0, 2}, seed);
    AttendTilesParams p = problem.params();
    p.values = built.view();
    const std::vector<float> logits = problem.logits;
    GetParam().attend(p);
    double error = 0.0;
    for (int head = 0; head < 2; ++head) {
      std::vector<double> exact(64, 0.0);
      for (std::int64_t t = 0; t < 1024; ++t) {
        const auto at = static_cast<std::size_t>(head * problem.stride + t);
        const double weight =
            std::exp(static_cast<double>(logits[at]) -
                     static_cast<double>(problem.estimated_lse[static_cast<std::size_t>(head)]));
        for (int c = 0; c < 64; ++c) {
          exact[static_cast<std::size_t>(c)] +=
              weight * static_cast<double>(built.value(head, t, c));
        }
      }
      for (std::size_t c = 0; c < 64; ++c) {
        const auto got = static_cast<double>(problem.out[static_cast<std::size_t>(head) * 64 + c]);
        error += (got - exact[c]) * (got - exact[c]) / 128;
      }
    }
    EXPECT_LT(error, last * 0.5) << bits;
    last = error;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, ValueTilesTest, ::testing::ValuesIn(implementations()),
                         [](const auto& test) { return test.param.name; });

TEST(ValueTiles, TakeAsManyBytesAsTheySay) {
  EXPECT_EQ(ValueTiles::page_bytes(2, 128), 36u * kPageTokens);
  EXPECT_EQ(ValueTiles::page_bytes(3, 128), 52u * kPageTokens);
  EXPECT_EQ(ValueTiles::page_bytes(4, 128), 68u * kPageTokens);
  EXPECT_EQ((ValueTiles{2, nullptr, 5}).bytes(3, 128), 36u * kPageTokens * 2 * 5 * 3);
  const float basis = 0.0f;
  EXPECT_EQ((ValueTiles{2, nullptr, 5, &basis}).bytes(3, 128), 18u * kPageTokens * 2 * 5 * 3);
}

TEST(ValueTiles, RefuseSettingsThatDoNotExist) {
  EXPECT_NO_THROW(check_value_tiles(2, 128, 0.9f));
  EXPECT_NO_THROW(check_value_tiles(4, 80, 1.0f));
  EXPECT_NO_THROW(check_value_tiles(1, 128, 0.9f));
  EXPECT_THROW(check_value_tiles(0, 128, 0.9f), Error);
  EXPECT_THROW(check_value_tiles(5, 128, 0.9f), Error);
  EXPECT_THROW(check_value_tiles(2, 128, 0.0f), Error);
  EXPECT_THROW(check_value_tiles(2, 128, 1.01f), Error);
  EXPECT_THROW(check_value_tiles(2, 128, std::numeric_limits<float>::quiet_NaN()), Error);
  EXPECT_THROW(check_value_tiles(2, 66, 0.9f), Error);
  EXPECT_NO_THROW(check_value_tiles(2, 80, 0.9f, true));
  EXPECT_THROW(check_value_tiles(2, 84, 0.9f, true), Error);
  EXPECT_THROW(check_value_tiles(2, 512, 0.9f), Error);
}

}  // namespace
}  // namespace sluice
