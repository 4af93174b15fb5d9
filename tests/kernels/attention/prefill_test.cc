// attend_prefill() against the fp64 oracle: both of its kernels, on the device that is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/workspace.h"
#include "sluice/half.h"
#include "tests/kernels/device_data.h"
#include "tests/kernels/has_device.h"
#include "tests/support/attention_cases.h"
#include "tests/support/attention_parity.h"
#include "tests/support/random.h"

namespace sluice::cuda {
namespace {

using testing::AttentionCase;
using testing::AttentionOracle;
using testing::Partial;
using testing::QueryOracle;
using testing::Random;
using testing::random_case;
using testing::Rounding;
using testing::RowRange;
using testing::Tolerance;

constexpr std::size_t kScratch = std::size_t{64} << 20;
constexpr std::int64_t kPoisonedRows = 70;  // after the last row of every head

struct Parameter {
  DType dtype;
  int head_dim;
  bool generic;  // the kernel for every device, also where there is a better one
};

std::ostream& operator<<(std::ostream& out, const Parameter& p) {
  return out << to_string(p.dtype) << ' ' << p.head_dim << (p.generic ? " generic" : " best");
}

std::string name_of(const ::testing::TestParamInfo<Parameter>& info) {
  return std::string(info.param.generic ? "generic_" : "best_") +
         std::string(to_string(info.param.dtype)) + "_d" + std::to_string(info.param.head_dim);
}

std::vector<Parameter> parameters(const std::vector<int>& generic, const std::vector<int>& best) {
  std::vector<Parameter> all;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int head_dim : generic) all.push_back({dtype, head_dim, true});
    for (const int head_dim : best) all.push_back({dtype, head_dim, false});
  }
  return all;
}

// How a case lies in device memory.
struct Placement {
  std::int64_t q_padding = 0;       // floats between tokens
  std::int64_t q_misalignment = 0;  // floats
};

// A case in device memory. Rows after the last of a head are NaN, and so is the output at first.
class DeviceRun {
 public:
  DeviceRun(Workspace& workspace, bool generic, const AttentionCase& c, const Placement& placement)
      : workspace_(workspace), limits_(workspace.device()), case_(c), placement_(placement) {
    if (generic) limits_.capability = std::min(limits_.capability, 80);
    place_rows();
    place_queries();
    const std::size_t queries = static_cast<std::size_t>(c.tokens * c.shape.query_heads);
    out_floats_ = queries * static_cast<std::size_t>(c.shape.head_dim);
    out_ = poisoned(out_floats_ * sizeof(float));
    lse_ = poisoned(queries * sizeof(float));
    lse_floats_ = queries;
    // The workspace's stream does not wait for the default one.
    require(cudaDeviceSynchronize(), "a case");
  }

  void attend(const RowRange& range = {}, bool merge = false) {
    std::vector<RowSpan> spans;
    for (std::size_t head = 0; head < rows_.size(); ++head) {
      const std::int64_t count = case_.count(static_cast<int>(head));
      const std::int64_t begin = std::min(range.begin, count);
      const std::int64_t end = std::min(range.end, count);
      spans.push_back(
          {rows_[head] + static_cast<std::size_t>(begin) * case_.shape.row_bytes(), end - begin});
    }
    AttendParams p;
    p.q = static_cast<const float*>(q_.get()) + placement_.q_misalignment;
    p.tokens = case_.tokens;
    p.q_stride = q_stride();
    p.first_query_position = case_.first_query_position;
    p.shape = case_.shape;
    p.rows = spans;
    p.first_row_position = case_.first_row_position + range.begin;
    p.scale = case_.scale;
    p.out = static_cast<float*>(out_.get());
    p.lse = static_cast<float*>(lse_.get());
    p.merge = merge;
    Launch launch = workspace_.launch();
    launch.device = &limits_;
    attend_prefill(p, launch);
  }

  Partial result() {
    require(cudaStreamSynchronize(workspace_.launch().stream), "attend_prefill");
    Partial partial;
    partial.out.resize(out_floats_);
    partial.lse.resize(lse_floats_);
    require(cudaMemcpy(partial.out.data(), out_.get(), out_floats_ * sizeof(float),
                       cudaMemcpyDeviceToHost),
            "copy");
    require(cudaMemcpy(partial.lse.data(), lse_.get(), lse_floats_ * sizeof(float),
                       cudaMemcpyDeviceToHost),
            "copy");
    return partial;
  }

 private:
  std::int64_t q_stride() const {
    return static_cast<std::int64_t>(case_.shape.query_heads) * case_.shape.head_dim +
           placement_.q_padding;
  }

  DeviceBlock poisoned(std::size_t bytes) {
    DeviceBlock block = make_device_block(bytes);
    require(cudaMemset(block.get(), 0xff, bytes), "memset");
    return block;
  }

  void place_rows() {
    const std::size_t stride =
        static_cast<std::size_t>(case_.count(0) + kPoisonedRows) * case_.shape.row_bytes();
    memory_ = poisoned(stride * case_.rows.size());
    auto* to = static_cast<std::byte*>(memory_.get());
    for (const std::vector<std::byte>& rows : case_.rows) {
      copy_in(to, rows.data(), rows.size());
      rows_.push_back(to);
      to += stride;
    }
  }

  void place_queries() {
    const std::int64_t width =
        static_cast<std::int64_t>(case_.shape.query_heads) * case_.shape.head_dim;
    std::vector<float> q(
        static_cast<std::size_t>(case_.tokens * q_stride() + placement_.q_misalignment),
        std::numeric_limits<float>::quiet_NaN());
    for (std::int64_t token = 0; token < case_.tokens; ++token) {
      std::copy_n(case_.q.begin() + token * width, width,
                  q.begin() + placement_.q_misalignment + token * q_stride());
    }
    q_ = make_device_block(q.size() * sizeof(float));
    copy_in(q_.get(), q.data(), q.size() * sizeof(float));
  }

  Workspace& workspace_;
  DeviceLimits limits_;
  const AttentionCase& case_;
  Placement placement_;
  DeviceBlock memory_;
  std::vector<const std::byte*> rows_;
  DeviceBlock q_;
  DeviceBlock out_;
  DeviceBlock lse_;
  std::size_t out_floats_ = 0;
  std::size_t lse_floats_ = 0;
};

// Queries and weights have the rows' precision; elements of coded rows are rounded to bf16 as well.
Rounding rounding_of(const RowFormat& rows, bool exact_queries) {
  const double step = rows.is_coded()       ? 1.5 * testing::kBf16Step
                      : rows == DType::bf16 ? testing::kBf16Step
                                            : testing::kHalfStep;
  return {exact_queries ? 0 : step, step};
}

// Every `step`-th query of a partial.
void expect_parity(const AttentionCase& c, const Partial& actual, bool exact_queries = false,
                   std::int64_t step = 1) {
  const Rounding rounding = rounding_of(c.shape.rows, exact_queries);
  const AttentionOracle oracle(c);
  const auto width = static_cast<std::size_t>(c.shape.head_dim);
  const std::int64_t queries = c.tokens * c.shape.query_heads;
  for (std::int64_t index = 0; index < queries; index += step) {
    const std::int64_t token = index / c.shape.query_heads;
    const int head = static_cast<int>(index % c.shape.query_heads);
    const QueryOracle expected = oracle.query(token, head);
    const Tolerance tolerance = tolerance_of(expected, rounding);
    const float lse = actual.lse[static_cast<std::size_t>(index)];
    ASSERT_TRUE(testing::close(lse, expected.lse, tolerance.lse))
        << "token " << token << " head " << head << " lse " << lse << " expected " << expected.lse
        << " +- " << tolerance.lse;
    for (std::size_t i = 0; i < width; ++i) {
      const float value = actual.out[static_cast<std::size_t>(index) * width + i];
      ASSERT_TRUE(testing::close(value, expected.out[i], tolerance.out[i]))
          << "token " << token << " head " << head << " channel " << i << ": " << value
          << " expected " << expected.out[i] << " +- " << tolerance.out[i];
    }
  }
}

class PrefillAttention : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "no CUDA device";
    workspace_ = std::make_unique<Workspace>(kScratch);
  }

  KvShape shape(int kv_heads, int group) const {
    return {.layers = 1,
            .query_heads = kv_heads * group,
            .kv_heads = kv_heads,
            .head_dim = GetParam().head_dim,
            .rows = GetParam().dtype};
  }
  DeviceRun run(const AttentionCase& c, const Placement& placement = {}) {
    return DeviceRun(*workspace_, GetParam().generic, c, placement);
  }
  void check(const AttentionCase& c, const Placement& placement = {}, std::int64_t step = 1) {
    DeviceRun on_device = run(c, placement);
    on_device.attend();
    expect_parity(c, on_device.result(), false, step);
  }

  const std::uint64_t seed_ = testing::seed(20250711);
  Random random_{seed_};
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
  std::unique_ptr<Workspace> workspace_;
};

TEST_P(PrefillAttention, ChunksUnderACausalMask) {
  for (const int group : {1, 2, 4, 8, 16, 5, 17}) {
    const std::int64_t tokens = random_.integer(2, 400 / group);
    const std::int64_t before = random_.integer(0, 300);
    SCOPED_TRACE(::testing::Message()
                 << "group " << group << " tokens " << tokens << " rows before " << before);
    AttentionCase c = random_case(random_, shape(2, group), tokens, before + tokens);
    c.first_row_position = random_.integer(0, 1 << 20);
    c.first_query_position = c.first_row_position + before;
    check(c);
    if (HasFatalFailure()) return;
  }
}

TEST_P(PrefillAttention, AnyNumberOfRows) {
  for (const std::int64_t count : {1, 127, 128, 129, 255, 512}) {
    SCOPED_TRACE(::testing::Message() << "rows " << count);
    const std::int64_t tokens = std::min<std::int64_t>(count, 70);
    AttentionCase c = random_case(random_, shape(3, 4), tokens, count);
    c.first_query_position = count - tokens;
    check(c);
    if (HasFatalFailure()) return;
  }
}

TEST_P(PrefillAttention, ManyHeads) {
  AttentionCase c = random_case(random_, shape(300, 2), 3, 150);
  c.first_query_position = 147;
  check(c);
}

TEST_P(PrefillAttention, QueriesOfAnyStrideAndAlignment) {
  AttentionCase c = random_case(random_, shape(2, 3), 40, 200);
  c.first_query_position = 160;
  check(c, {.q_padding = 4});
  check(c, {.q_padding = 3});
  check(c, {.q_misalignment = 1});
}

// More tiles than thread blocks run at once.
TEST_P(PrefillAttention, ManyTiles) {
  AttentionCase c = random_case(random_, shape(4, 4), 3000, 3500);
  c.first_query_position = 500;
  for (float& value : c.q) value *= 3;
  check(c, {}, 197);
}

TEST_P(PrefillAttention, ManyTilesOfManyHeads) {
  AttentionCase c = random_case(random_, shape(64, 8), 103, random_.integer(1, 400));
  c.first_query_position = 300;
  check(c, {}, 13);
}

// More rows than the L2 cache is meant to hold at once, so that heads are worked on in parts.
TEST_P(PrefillAttention, HeadsOfManyBytes) {
  const std::int64_t rows =
      (std::int64_t{5} << 20) / static_cast<std::int64_t>(shape(1, 1).row_bytes());
  AttentionCase c = random_case(random_, shape(8, 2), 300, rows);
  c.first_query_position = rows - 300;
  check(c, {}, 101);
}

TEST_P(PrefillAttention, FewQueriesOfManyRows) {
  for (const std::int64_t tokens : {1, 3, 40}) {
    SCOPED_TRACE(::testing::Message() << tokens << " tokens");
    AttentionCase c = random_case(random_, shape(2, 8), tokens, 12000);
    for (float& value : c.q) value *= 4;
    c.first_query_position = 12000 - tokens;
    DeviceRun on_device = run(c);
    on_device.attend({0, 1000});
    on_device.attend({1000, 12000}, true);
    const std::int64_t step = tokens == 1 ? 1 : 13;
    expect_parity(c, on_device.result(), false, step);
    if (HasFatalFailure()) return;
  }
}

TEST_P(PrefillAttention, MergedPartialsEqualTheWhole) {
  AttentionCase c = random_case(random_, shape(2, 4), 40, 900);
  c.first_query_position = 870;
  DeviceRun on_device = run(c);
  std::int64_t begin = 0;
  while (begin < 900) {
    const std::int64_t end = begin + random_.integer(1, 400);
    on_device.attend({begin, end}, begin > 0);
    begin = end;
  }
  expect_parity(c, on_device.result());
}

TEST_P(PrefillAttention, EmptyPartialIsZeroWithNoWeight) {
  AttentionCase c = random_case(random_, shape(2, 2), 3, 5);
  c.first_row_position = 2;  // the first two tokens see nothing
  DeviceRun on_device = run(c);
  on_device.attend();
  const Partial partial = on_device.result();
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(partial.lse[i], -std::numeric_limits<float>::infinity()) << i;
  }
  for (std::size_t i = 0; i < 8 * static_cast<std::size_t>(c.shape.head_dim); ++i) {
    ASSERT_EQ(partial.out[i], 0.0f) << i;
  }
  expect_parity(c, partial);
}

TEST_P(PrefillAttention, MergingNothingChangesNothing) {
  for (const std::int64_t count : {200, 9000}) {
    AttentionCase c = random_case(random_, shape(1, 4), 30, count);
    c.first_query_position = count;
    DeviceRun on_device = run(c);
    on_device.attend();
    const Partial before = on_device.result();
    on_device.attend({count, count}, true);
    const Partial after = on_device.result();
    EXPECT_EQ(before.out, after.out);
    EXPECT_EQ(before.lse, after.lse);
  }
}

TEST_P(PrefillAttention, MergesIntoAnEmptyPartial) {
  AttentionCase c = random_case(random_, shape(1, 4), 30, 300);
  c.first_query_position = 300;
  DeviceRun on_device = run(c);
  on_device.attend({0, 0});
  on_device.attend({0, 300}, true);
  expect_parity(c, on_device.result());
}

TEST_P(PrefillAttention, RepeatsBitForBit) {
  AttentionCase c = random_case(random_, shape(2, 4), 500, 5000);
  c.first_query_position = 4500;
  DeviceRun on_device = run(c);
  on_device.attend();
  const Partial first = on_device.result();
  for (int i = 0; i < 5; ++i) {
    on_device.attend();
    const Partial again = on_device.result();
    ASSERT_EQ(first.out, again.out);
    ASSERT_EQ(first.lse, again.lse);
  }
}

TEST_P(PrefillAttention, RunsInAGraph) {
  AttentionCase c = random_case(random_, shape(2, 4), 20, 7000);
  c.first_query_position = 6980;
  DeviceRun on_device = run(c);
  on_device.attend();
  const Partial expected = on_device.result();
  DeviceRun captured = run(c);
  const cudaStream_t stream = workspace_->launch().stream;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  captured.attend();
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(stream, &graph), "capture");
  const GraphOwner owner(graph);
  cudaGraphExec_t executable = nullptr;
  require(cudaGraphInstantiate(&executable, graph, 0), "graph");
  const GraphExecOwner executable_owner(executable);
  require(cudaGraphLaunch(executable, stream), "graph");
  const Partial actual = captured.result();
  EXPECT_EQ(expected.out, actual.out);
  EXPECT_EQ(expected.lse, actual.lse);
}

TEST_P(PrefillAttention, HugeLogitsDoNotOverflow) {
  AttentionCase c = random_case(random_, shape(2, 4), 40, 400);
  // Exact in both dtypes, so that a logit of 10,000 is not off by more than its own rounding.
  for (float& value : c.q) value = bf16_to_float(float_to_bf16(value * 3000));
  c.first_query_position = 380;
  DeviceRun on_device = run(c);
  on_device.attend();
  expect_parity(c, on_device.result(), true);
}

TEST_P(PrefillAttention, EnormousKeysDoNotHideOthers) {
  AttentionCase c = random_case(random_, shape(2, 4), 40, 300);
  for (float& value : c.q) value = std::abs(value) + 0.5f;
  c.first_query_position = 300;
  const float lowest = GetParam().dtype == DType::f16 ? -65504.0f : -0x1.fep127f;
  for (std::int64_t row = 0; row < 290; ++row) set_row_element(c, 0, row, 3, lowest);
  for (std::int64_t row = 10; row < 300; ++row) set_row_element(c, 1, row, 0, lowest);
  check(c);
}

TEST_P(PrefillAttention, NaNStaysNaNAndStaysInItsHead) {
  AttentionCase c = random_case(random_, shape(2, 4), 40, 300);
  c.first_query_position = 300;
  set_row_element(c, 0, 150, 7, std::numeric_limits<float>::quiet_NaN());
  check(c);
}

TEST_P(PrefillAttention, InfinityEnds) {
  AttentionCase c = random_case(random_, shape(2, 4), 40, 300);
  c.first_query_position = 280;
  for (const float value :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    set_row_element(c, 0, 10, 7, value);
    c.q[5] = value;
    DeviceRun on_device = run(c);
    on_device.attend();
    const Partial partial = on_device.result();
    EXPECT_TRUE(std::isfinite(partial.lse[4]));
  }
}

// Scratch of 2 MiB holds 1,536 rows of each head as bf16.
TEST(PrefillOfCodedRows, TakesSeveralTurnsIfScratchIsSmall) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  const std::uint64_t seed = testing::seed(20251128);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  Workspace workspace(std::size_t{2} << 20);
  for (const auto& [generic, tokens, rows] : {std::tuple(true, 1, RowCode::int8),
                                              {true, 60, RowCode::k8v4},
                                              {false, 1, RowCode::k8v4},
                                              {false, 60, RowCode::int8},
                                              {false, 60, RowCode::k8v4}}) {
    const KvShape shape = {
        .layers = 1, .query_heads = 8, .kv_heads = 2, .head_dim = 128, .rows = rows};
    SCOPED_TRACE(::testing::Message() << (generic ? "generic " : "best ") << tokens << ' '
                                      << to_string(RowFormat(rows)));
    AttentionCase c = random_case(random, shape, tokens, 4000);
    c.first_query_position = 4000 - tokens;
    DeviceRun run(workspace, generic, c, {});
    run.attend({0, 1000});
    run.attend({1000, 4000}, true);
    expect_parity(c, run.result());
    if (HasFatalFailure()) return;
    run.attend();
    expect_parity(c, run.result());
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(, PrefillAttention,
                         ::testing::ValuesIn(parameters({32, 64, 80, 96, 128, 256}, {64, 128})),
                         name_of);

}  // namespace
}  // namespace sluice::cuda
