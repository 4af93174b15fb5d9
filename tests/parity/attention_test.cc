// Every implementation of KvOps::attend() and attend_batch() against the same fp64 oracle.
#include "cpu/attention.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "cpu/reference_backend.h"
#include "cpu/threads.h"
#include "lib/half.h"
#include "tests/support/attention_cases.h"
#include "tests/support/attention_parity.h"
#include "tests/support/backends.h"
#include "tests/support/paged_cases.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using cpu::AttendKernel;
using testing::around;
using testing::AttentionCase;
using testing::AttentionRun;
using testing::BatchRun;
using testing::newest_case;
using testing::only;
using testing::Partial;
using testing::Places;
using testing::Random;
using testing::random_case;
using testing::Rounding;

// One kernel, with one instruction set, in the place of the reference's.
class KernelQueue : public cpu::ReferenceQueue {
 public:
  KernelQueue(cpu::ReferenceBackend& backend, AttendKernel kernel, std::int64_t targets)
      : ReferenceQueue(backend), kernel_(kernel) {
    hwy::SetSupportedTargetsForTest(targets);
  }
  ~KernelQueue() override { hwy::SetSupportedTargetsForTest(0); }

  void attend(const AttendParams& params) override { cpu::attend(params, threads_, kernel_); }
  void attend_batch(const AttendBatchParams& params) override {
    cpu::attend_batch(params, threads_);
  }

 private:
  AttendKernel kernel_;
  cpu::Threads threads_{2};
};

class KernelBackend : public cpu::ReferenceBackend {
 public:
  KernelBackend(AttendKernel kernel, std::int64_t targets) : kernel_(kernel), targets_(targets) {}

  std::unique_ptr<Queue> make_queue(const QueueOptions& /*options*/) override {
    return std::make_unique<KernelQueue>(*this, kernel_, targets_);
  }

 private:
  AttendKernel kernel_;
  std::int64_t targets_;
};

struct Implementation {
  testing::NamedBackend backend;
  bool batches = true;  // or attend_batch() is another's
  std::vector<DType> dtypes = {DType::f32, DType::f16, DType::bf16};
  std::vector<int> head_dims = {32, 40, 64, 80, 128, 256};
  // By the rows' dtype: of attend(), and of attend_batch().
  std::function<Rounding(DType)> rounding = [](DType) { return Rounding(); };
  std::function<Rounding(DType)> batch_rounding = [](DType) { return Rounding(); };
};

Implementation forced(const std::string& name, AttendKernel kernel, std::int64_t targets) {
  return {.backend = {name, [=] { return std::make_unique<KernelBackend>(kernel, targets); }},
          .batches = kernel == AttendKernel::decode};
}

Rounding bf16_rounding(DType dtype) {
  return dtype == DType::bf16 ? Rounding{testing::kBf16Step, testing::kBf16Step} : Rounding();
}

Rounding cuda_rounding(DType dtype) {
  const double step = dtype == DType::bf16 ? testing::kBf16Step : testing::kHalfStep;
  return {step, step};
}

// Decoded tokens' queries and weights are sums of two numbers of the rows' dtype.
Rounding cuda_batch_rounding(DType dtype) {
  const Rounding one = cuda_rounding(dtype);
  return {one.queries * one.queries, one.weights * one.weights};
}

// Every backend, and every kernel of the CPU backend with every instruction set that runs here.
std::vector<Implementation> implementations() {
  std::vector<Implementation> all;
  all.push_back({.backend = testing::reference_backend()});
  all.push_back({.backend = testing::cpu_backend(DType::f32)});
  for (const std::int64_t target : {HWY_AVX3, HWY_AVX2, HWY_SCALAR}) {
    if (target != HWY_SCALAR && (hwy::SupportedTargets() & target) == 0) continue;
    const std::string suffix = std::string("_") + hwy::TargetName(target);
    for (const auto& [name, kernel] :
         {std::pair{"decode", AttendKernel::decode}, std::pair{"prefill", AttendKernel::prefill}}) {
      all.push_back(forced(name + suffix, kernel, target));
      // Vectors of one element fill rows of any length.
      if (target == HWY_SCALAR) all.back().head_dims = {40, 64};
    }
  }
  for (const AttendKernel kernel : {AttendKernel::amx, AttendKernel::avx512_bf16}) {
    if (!cpu::attend_supported(kernel, {.dtype = DType::bf16})) continue;
    all[1].rounding = bf16_rounding;
    all.push_back(forced(kernel == AttendKernel::amx ? "amx" : "avx512_bf16", kernel, 0));
    all.back().dtypes = {DType::bf16};
    all.back().rounding = bf16_rounding;
  }
  const std::vector<testing::NamedBackend> gpu = testing::gpu_backends();
  if (!gpu.empty()) {
    // The dtype of matrix products is nothing to attention: one of them stands for all.
    all.push_back({.backend = {"cuda", gpu.front().make},
                   .dtypes = {DType::f16, DType::bf16},
                   .head_dims = {32, 64, 80, 96, 128, 256},
                   .rounding = cuda_rounding,
                   .batch_rounding = cuda_batch_rounding});
  }
  return all;
}

struct Parameter {
  Implementation implementation;
  DType dtype;
  int head_dim;
};

std::ostream& operator<<(std::ostream& out, const Parameter& p) {
  return out << p.implementation.backend.name << ' ' << to_string(p.dtype) << ' ' << p.head_dim;
}

// Of all the implementations' head dimensions those that `wanted` says.
std::vector<Parameter> parameters(const std::function<bool(int)>& wanted) {
  std::vector<Parameter> all;
  for (const Implementation& implementation : implementations()) {
    for (const DType dtype : implementation.dtypes) {
      for (const int head_dim : implementation.head_dims) {
        if (wanted(head_dim)) all.push_back({implementation, dtype, head_dim});
      }
    }
  }
  return all;
}

std::string name_of(const ::testing::TestParamInfo<Parameter>& info) {
  return info.param.implementation.backend.name + "_" + std::string(to_string(info.param.dtype)) +
         "_d" + std::to_string(info.param.head_dim);
}

class AttentionParity : public ::testing::TestWithParam<Parameter> {
 protected:
  KvShape shape(int kv_heads, int group) const {
    return {.layers = 1,
            .query_heads = kv_heads * group,
            .kv_heads = kv_heads,
            .head_dim = GetParam().head_dim,
            .dtype = GetParam().dtype};
  }
  void SetUp() override {
    backend_ = testing::make_or_skip(GetParam().implementation.backend, GetParam().head_dim);
  }
  Rounding rounding() const { return GetParam().implementation.rounding(GetParam().dtype); }
  Rounding batch_rounding() const {
    return GetParam().implementation.batch_rounding(GetParam().dtype);
  }
  // All queries behind all rows, unless the case says otherwise.
  static void show_all(AttentionCase& c) {
    for (int head = 0; head < c.shape.kv_heads; ++head) {
      c.first_query_position = std::max(c.first_query_position, c.count(head));
    }
  }
  void check(const AttentionCase& c) {
    AttentionRun run(*backend_, c);
    run.attend();
    testing::expect_parity(c, run.result(), rounding());
  }
  void check_batch(const std::vector<AttentionCase>& cases, Places places = Places::either,
                   std::int64_t arena_rows = 0) {
    if (!GetParam().implementation.batches) return;
    BatchRun run(*backend_, random_, cases, places);
    check_results(cases, run.attend(arena_rows), batch_rounding());
  }
  // A token that is the newest of its sequence, beside one of another.
  void check_in_batch(const AttentionCase& c) {
    AttentionCase other = newest_case(random_, c.shape, 200);
    other.scale = c.scale;
    std::vector<AttentionCase> cases = {other, c};
    cases[1].first_query_position = c.count(0) - 1;
    check_batch(cases);
  }
  static void check_results(const std::vector<AttentionCase>& cases,
                            const std::vector<Partial>& results, const Rounding& rounding) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE(::testing::Message() << "sequence " << i << " of " << cases[i].count(0));
      testing::expect_parity(cases[i], results[i], rounding);
      if (HasFatalFailure()) return;
    }
  }

  const std::uint64_t seed_ = testing::seed(20250611);
  Random random_{seed_};
  std::unique_ptr<testing::Device> backend_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

class AttentionParityOfShapes : public AttentionParity {};

TEST_P(AttentionParityOfShapes, DecodesBatches) {
  for (const int group : {1, 3, 4, 8, 17}) {
    SCOPED_TRACE(::testing::Message() << "group " << group);
    std::vector<AttentionCase> cases;
    for (const std::int64_t count : {1, 127, 128, 129, 64}) {
      cases.push_back(newest_case(random_, shape(2, group), count));
    }
    cases.push_back(newest_case(random_, shape(2, group), random_.integer(130, 1000)));
    // Two tokens on either side of a page's border, and three at the beginning of a sequence.
    cases.push_back(newest_case(random_, shape(2, group), 257, 2));
    cases.push_back(newest_case(random_, shape(2, group), 3, 3));
    std::shuffle(cases.begin(), cases.end(), random_.engine());
    check_batch(cases);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionParityOfShapes, DecodesFromAnyTier) {
  for (const Places places : {Places::device, Places::home, Places::both, Places::either}) {
    // None, part of a page, and whole pages.
    for (const std::int64_t arena_rows : {0, 50, 300}) {
      SCOPED_TRACE(::testing::Message()
                   << "places " << static_cast<int>(places) << " arena " << arena_rows);
      check_batch({newest_case(random_, shape(2, 2), random_.integer(400, 700)),
                   newest_case(random_, shape(2, 2), random_.integer(1, 300))},
                  places, arena_rows);
      if (HasFatalFailure()) return;
    }
  }
}

// A gap of whole pages before a token's own: none, some, or all of them.
PositionGap random_gap(Random& random, std::int64_t position) {
  const std::int64_t pages = position / kPageTokens;
  const std::int64_t first = random.integer(0, 3) == 0 ? 0 : random.integer(0, pages);
  const std::int64_t end = random.integer(0, 3) == 0 ? pages : random.integer(first, pages);
  return {static_cast<std::int32_t>(first * kPageTokens),
          static_cast<std::int32_t>(end * kPageTokens)};
}

TEST_P(AttentionParityOfShapes, LeavesGapsToOthers) {
  for (const bool batch : {true, false}) {
    for (const int group : {1, 4, 9}) {
      SCOPED_TRACE(::testing::Message() << "group " << group);
      std::vector<AttentionCase> cases, outside, inside;
      std::vector<PositionGap> gaps;
      for (const std::int64_t count : {random_.integer(700, 3000), random_.integer(1, 500),
                                       std::int64_t{128}, std::int64_t{257}}) {
        cases.push_back(newest_case(random_, shape(2, group), count));
        gaps.push_back(random_gap(random_, count - 1));
        outside.push_back(around(cases.back(), gaps.back()));
        inside.push_back(only(cases.back(), gaps.back().first, gaps.back().end));
        if (!batch) break;
      }
      if (!GetParam().implementation.batches) return;
      BatchRun run(*backend_, random_, cases);
      check_results(outside, run.attend_around(gaps), batch_rounding());
      if (HasFatalFailure()) return;
      if (backend_->info().compute_tier == Tier::device) continue;
      check_results(inside, run.attend_within(gaps), batch_rounding());
      if (HasFatalFailure()) return;
    }
  }
}

// As many rows are left of all sequences, and then not.
TEST_P(AttentionParityOfShapes, GapsMayMakeLengthsEqual) {
  const std::vector<AttentionCase> cases = {newest_case(random_, shape(2, 4), 900),
                                            newest_case(random_, shape(2, 4), 900 - 256),
                                            newest_case(random_, shape(2, 4), 900 - 256)};
  if (!GetParam().implementation.batches) return;
  BatchRun run(*backend_, random_, cases);
  for (const PositionGap& last : {PositionGap{0, 0}, PositionGap{256, 512}}) {
    const std::vector<PositionGap> gaps = {{128, 384}, {0, 0}, last};
    std::vector<AttentionCase> outside;
    for (std::size_t i = 0; i < cases.size(); ++i) outside.push_back(around(cases[i], gaps[i]));
    check_results(outside, run.attend_around(gaps), batch_rounding());
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionParityOfShapes, AttendsForOneTokenOfAnyGroupAndLength) {
  for (const int group : {1, 2, 3, 4, 7, 8, 16}) {
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{127}, std::int64_t{128},
                                     std::int64_t{129}, random_.integer(2, 1000)}) {
      SCOPED_TRACE(::testing::Message() << "group " << group << " rows " << count);
      // The second head has another count, often none.
      const std::int64_t counts[] = {count, count / 128};
      AttentionCase c = random_case(random_, shape(2, group), 1, counts);
      show_all(c);
      check(c);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(AttentionParityOfShapes, PrefillsChunksUnderACausalMask) {
  for (const int group : {1, 2, 4, 8, 16, 5}) {
    const std::int64_t tokens = random_.integer(2, 300 / group);
    const std::int64_t before = random_.integer(0, 200);
    SCOPED_TRACE(::testing::Message()
                 << "group " << group << " tokens " << tokens << " rows before " << before);
    // The second head misses the newest rows, as after eviction.
    const std::int64_t counts[] = {before + tokens, (before + tokens) / 2};
    AttentionCase c = random_case(random_, shape(2, group), tokens, counts);
    c.first_row_position = random_.integer(0, 1 << 20);
    c.first_query_position = c.first_row_position + before;
    check(c);
    if (HasFatalFailure()) return;
  }
}

// Numbers that grow by any steps, from none of the rows to more than there are.
std::vector<std::int32_t> random_steps(Random& random, std::int64_t tokens, std::int64_t most) {
  std::vector<std::int32_t> seen;
  std::int64_t now = random.integer(-5, 20);
  while (static_cast<std::int64_t>(seen.size()) < tokens) {
    const std::int64_t run = random.integer(1, std::max<std::int64_t>(1, tokens / 2));
    for (std::int64_t i = 0; i < run && static_cast<std::int64_t>(seen.size()) < tokens; ++i) {
      seen.push_back(static_cast<std::int32_t>(std::max<std::int64_t>(0, now)));
    }
    now += random.integer(0, most);
  }
  return seen;
}

TEST_P(AttentionParityOfShapes, TokensSeeWhatTheyAreSaidToSee) {
  for (const int group : {1, 4, 5}) {
    for (const std::int64_t tokens : {std::int64_t{2}, random_.integer(30, 500 / group)}) {
      SCOPED_TRACE(::testing::Message() << "group " << group << " tokens " << tokens);
      const std::int64_t counts[] = {400, 150};
      AttentionCase c = random_case(random_, shape(2, group), tokens, counts);
      c.seen = random_steps(random_, tokens, 300);
      check(c);
      AttentionRun run(*backend_, c);
      run.attend({0, 130}, false);
      run.attend({130, 256}, true);
      run.attend({256, 400}, true);
      testing::expect_parity(c, run.result(), rounding());
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(AttentionParityOfShapes, MergedPartialsEqualTheWhole) {
  for (const std::int64_t tokens : {1, 40}) {
    const std::int64_t counts[] = {900, 500};
    AttentionCase c = random_case(random_, shape(2, 4), tokens, counts);
    c.first_query_position = 870;
    AttentionRun run(*backend_, c);
    std::int64_t begin = 0;
    while (begin < 900) {
      const std::int64_t end = begin + random_.integer(1, 400);
      run.attend({begin, end}, begin > 0);
      begin = end;
    }
    testing::expect_parity(c, run.result(), rounding());
    if (HasFatalFailure()) return;
  }
}

std::vector<Parameter> all_shapes() {
  return parameters([](int) { return true; });
}

std::vector<Parameter> common_shapes() {
  return parameters([](int head_dim) { return head_dim == 64 || head_dim == 128; });
}

INSTANTIATE_TEST_SUITE_P(, AttentionParityOfShapes, ::testing::ValuesIn(all_shapes()), name_of);

TEST_P(AttentionParity, LongContext) {
  const std::int64_t counts[] = {20000, 1111};
  AttentionCase c = random_case(random_, shape(2, 8), 1, counts);
  // Logits with a deviation of 4, so that few rows dominate and partials differ in weight.
  for (float& value : c.q) value *= 4;
  show_all(c);
  check(c);
}

TEST_P(AttentionParity, LongContextInABatch) {
  std::vector<AttentionCase> cases;
  for (const std::int64_t count : {12000, 1, 4097, 128}) {
    cases.push_back(newest_case(random_, shape(2, 8), count));
    for (float& value : cases.back().q) value *= 4;
  }
  check_batch(cases);
  if (HasFatalFailure()) return;
  check_batch({cases.front()});
}

// The division of work follows the positions, not the room that a launch has for them.
TEST_P(AttentionParity, CapacityChangesNothing) {
  BatchRun run(*backend_, random_,
               {newest_case(random_, shape(2, 4), 700), newest_case(random_, shape(2, 4), 300)});
  const std::vector<Partial> tight = run.attend();
  const std::vector<Partial> wide = run.attend(run.sequences().batch(std::int64_t{1} << 30), 0);
  for (std::size_t i = 0; i < tight.size(); ++i) {
    EXPECT_EQ(tight[i].out, wide[i].out);
    EXPECT_EQ(tight[i].lse, wide[i].lse);
  }
}

TEST_P(AttentionParity, AttendsForOneTokenOfManyHeads) {
  constexpr int kHeads = 50;
  for (const bool differ : {false, true}) {
    std::vector<std::int64_t> counts(kHeads, random_.integer(260, 400));
    for (std::int64_t& count : counts) {
      if (differ) count = random_.integer(0, 2) * random_.integer(0, 250);
    }
    AttentionCase c = random_case(random_, shape(kHeads, 2), 1, counts);
    show_all(c);
    check(c);
    if (HasFatalFailure()) return;
  }
}

// More tiles than a GPU has workers, most of which serve parts of several heads.
TEST_P(AttentionParity, DecodesManyHeads) {
  constexpr int kHeads = 50;
  const std::int64_t count = random_.integer(260, 400);
  check_batch({newest_case(random_, shape(kHeads, 2), count)});
  if (HasFatalFailure()) return;
  // As many for all, and others.
  check_batch({newest_case(random_, shape(kHeads, 2), count),
               newest_case(random_, shape(kHeads, 2), count)});
  if (HasFatalFailure()) return;
  std::vector<AttentionCase> cases;
  for (int i = 0; i < 12; ++i) {
    const std::int64_t others = random_.integer(0, 2) * random_.integer(1, 250);
    cases.push_back(newest_case(random_, shape(kHeads / 5, 2), 1 + others));
  }
  check_batch(cases);
}

TEST_P(AttentionParity, LongContextOfAChunk) {
  const std::int64_t counts[] = {5000};
  AttentionCase c = random_case(random_, shape(1, 4), 9, counts);
  c.first_query_position = 4991;
  check(c);
}

TEST_P(AttentionParity, LongContextInSteps) {
  const std::int64_t counts[] = {5000};
  AttentionCase c = random_case(random_, shape(1, 4), 70, counts);
  for (int t = 0; t < 70; ++t) c.seen.push_back(t < 20 ? 0 : t < 45 ? 1033 : 4990);
  check(c);
}

TEST_P(AttentionParity, EmptyPartialIsZeroWithNoWeight) {
  const std::int64_t counts[] = {0, 5};
  AttentionCase c = random_case(random_, shape(2, 2), 3, counts);
  c.first_row_position = 2;  // the first two tokens see nothing of the second head either
  AttentionRun run(*backend_, c);
  run.attend();
  const Partial partial = run.result();
  for (std::size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(partial.lse[i], -std::numeric_limits<float>::infinity()) << i;
  }
  for (std::size_t i = 0; i < 10 * static_cast<std::size_t>(c.shape.head_dim); ++i) {
    ASSERT_EQ(partial.out[i], 0.0f) << i;
  }
  testing::expect_parity(c, partial, rounding());
}

TEST_P(AttentionParity, MergingNothingChangesNothing) {
  for (const std::int64_t tokens : {1, 30}) {
    const std::int64_t counts[] = {200};
    AttentionCase c = random_case(random_, shape(1, 4), tokens, counts);
    c.first_query_position = 200;
    AttentionRun run(*backend_, c);
    run.attend();
    const Partial before = run.result();
    run.attend({200, 200}, true);
    const Partial after = run.result();
    EXPECT_EQ(before.out, after.out);
    EXPECT_EQ(before.lse, after.lse);
  }
}

TEST_P(AttentionParity, MergesIntoAnEmptyPartial) {
  for (const std::int64_t tokens : {1, 30}) {
    const std::int64_t counts[] = {300};
    AttentionCase c = random_case(random_, shape(1, 4), tokens, counts);
    c.first_query_position = 300;
    AttentionRun run(*backend_, c);
    run.attend({0, 0});
    run.attend({0, 300}, true);
    testing::expect_parity(c, run.result(), rounding());
  }
}

TEST_P(AttentionParity, HugeLogitsDoNotOverflow) {
  for (const std::int64_t tokens : {1, 40}) {
    const std::int64_t counts[] = {400, 400};
    AttentionCase c = random_case(random_, shape(2, 4), tokens, counts);
    // Exact in bf16, so that a logit of 10,000 is not off by more than its own rounding.
    for (float& value : c.q) value = bf16_to_float(float_to_bf16(value * 3000));
    c.first_query_position = 380;
    AttentionRun run(*backend_, c);
    run.attend();
    testing::expect_parity(c, run.result(), {0, rounding().weights});
    if (HasFatalFailure()) return;
    c.first_query_position = 400 - tokens;
    if (tokens == 1) {
      check_results({c}, BatchRun(*backend_, random_, {c}).attend(), {0, batch_rounding().weights});
    }
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionParity, EnormousKeysDoNotHideOthers) {
  for (const std::int64_t tokens : {1, 40}) {
    const std::int64_t counts[] = {300, 300};
    AttentionCase c = random_case(random_, shape(2, 4), tokens, counts);
    for (float& value : c.q) value = std::abs(value) + 0.5f;
    c.first_query_position = 300;
    // The most negative key there is: logits of about -10^38 (-10^4 in f16), or -inf once summed.
    const float lowest = GetParam().dtype == DType::f16 ? -65504.0f : -0x1.fep127f;
    for (std::int64_t row = 0; row < 290; ++row) set_row_element(c, 0, row, 3, lowest);
    for (std::int64_t row = 10; row < 300; ++row) set_row_element(c, 1, row, 0, lowest);
    check(c);
    if (HasFatalFailure()) return;
    if (tokens == 1) check_in_batch(c);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionParity, NaNStaysNaNAndStaysInItsHead) {
  for (const std::int64_t tokens : {1, 40}) {
    const std::int64_t counts[] = {300, 300};
    AttentionCase c = random_case(random_, shape(2, 4), tokens, counts);
    c.first_query_position = 300;
    set_row_element(c, 0, 150, 7, std::numeric_limits<float>::quiet_NaN());
    check(c);
    if (HasFatalFailure()) return;
    if (tokens == 1) check_in_batch(c);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionParity, NegativeScale) {
  for (const std::int64_t tokens : {1, 40}) {
    const std::int64_t counts[] = {300};
    AttentionCase c = random_case(random_, shape(1, 4), tokens, counts);
    c.first_query_position = 280;
    c.scale = -c.scale;
    check(c);
    if (HasFatalFailure()) return;
    if (tokens == 1) check_in_batch(c);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(, AttentionParity, ::testing::ValuesIn(common_shapes()), name_of);

}  // namespace
}  // namespace sluice
