#include "offload/step/kv_session.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "offload/step/solo_step.h"
#include "sluice/errors.h"
#include "tests/support/counting_backend.h"
#include "tests/support/expect.h"
#include "tests/support/plan.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using sluice::testing::CountingBackend;
using sluice::testing::Random;

// A session with made-up queries, keys and values, and what attention must give for them in fp64.
class Conversation {
 public:
  Conversation(const KvShape& shape, std::uint64_t seed) : shape_(shape), random_(seed) {
    keys_.resize(static_cast<std::size_t>(shape.layers));
    values_.resize(keys_.size());
  }

  // Runs one step through `session` and returns the largest error of its attention.
  double step(KvSession& session, std::int64_t tokens) {
    const std::int64_t key_width = std::int64_t{shape_.kv_heads} * shape_.head_dim;
    const std::int64_t query_width = std::int64_t{shape_.query_heads} * shape_.head_dim;
    double error = 0.0;
    SoloStep step(session, tokens == 1 ? Phase::decode : Phase::prefill, tokens);
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const std::vector<float> k = random_.normal(tokens * key_width);
      const std::vector<float> v = random_.normal(tokens * key_width);
      const std::vector<float> q = random_.normal(tokens * query_width);
      auto& keys = keys_[static_cast<std::size_t>(layer)];
      auto& values = values_[static_cast<std::size_t>(layer)];
      keys.insert(keys.end(), k.begin(), k.end());
      values.insert(values.end(), v.begin(), v.end());
      std::vector<float> out(q.size());
      std::vector<float> lse(static_cast<std::size_t>(tokens * shape_.query_heads));
      step.append(layer, {k.data(), v.data(), key_width});
      step.attend(layer, {q.data(), query_width, out.data(), lse.data()});
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int head = 0; head < shape_.query_heads; ++head) {
          error = std::max(error,
                           check_head(layer, length_ + token, head, q.data() + token * query_width,
                                      out.data() + token * query_width));
        }
      }
    }
    step.end();
    length_ += tokens;
    return error;
  }

  std::int64_t length() const { return length_; }

 private:
  double check_head(int layer, std::int64_t position, int head, const float* q,
                    const float* out) const {
    const auto dim = static_cast<std::size_t>(shape_.head_dim);
    const auto width = static_cast<std::size_t>(shape_.kv_heads) * dim;
    const std::size_t kv = static_cast<std::size_t>(head / shape_.group()) * dim;
    const auto& keys = keys_[static_cast<std::size_t>(layer)];
    const auto& values = values_[static_cast<std::size_t>(layer)];
    q += static_cast<std::size_t>(head) * dim;
    out += static_cast<std::size_t>(head) * dim;
    std::vector<double> expected(dim);
    double total = 0.0;
    for (std::size_t row = 0; row <= static_cast<std::size_t>(position); ++row) {
      double logit = 0.0;
      for (std::size_t c = 0; c < dim; ++c) logit += double{q[c]} * keys[row * width + kv + c];
      const double weight = std::exp(logit / std::sqrt(static_cast<double>(dim)));
      total += weight;
      for (std::size_t c = 0; c < dim; ++c) expected[c] += weight * values[row * width + kv + c];
    }
    double error = 0.0;
    for (std::size_t c = 0; c < dim; ++c) {
      error = std::max(error, std::abs(expected[c] / total - out[c]));
    }
    return error;
  }

  KvShape shape_;
  Random random_;
  std::int64_t length_ = 0;
  std::vector<std::vector<float>> keys_;    // [layer][tokens, kv_heads, head_dim]
  std::vector<std::vector<float>> values_;  // likewise
};

// fp32 rows and sums: the error is that of adding a few thousand fp32 terms of order one.
constexpr double kTolerance = 2e-5;

std::uint64_t bytes(const Ledger& ledger, Tier from, Tier to, Cause cause) {
  return ledger.total(Phase::prefill, from, to, cause).bytes +
         ledger.total(Phase::decode, from, to, cause).bytes;
}

// Without the newest page on the device steps may begin in a page that is there and end beyond it.
TEST(KvSession, StepsLeaveResidentPagesWhereTheNewestIsNotKept) {
  const KvShape shape{3, 2, 1, 32, DType::f32};
  int plans = 0;
  for (std::uint64_t cap = 400 * shape.token_bytes(); plans < 5; cap -= 16 * shape.row_bytes()) {
    const KvPlan plan = testing::plan_of(shape, 400, 64, cap, true);
    if (plan.tails || plan.resident_tokens == 0) continue;
    ++plans;
    CountingBackend backend(cap);
    KvSession session = testing::session_of(backend, plan);
    Conversation conversation(shape, 9);
    for (const std::int64_t tokens : {10, 64, 54, 64, 3, 61}) {
      EXPECT_LT(conversation.step(session, tokens), kTolerance);
    }
  }
}

TEST(KvSession, EqualsDenseAttentionAtEveryCap) {
  const KvShape shape{2, 4, 2, 32, DType::f32};
  const std::int64_t context = 700;
  const std::uint64_t page = kPageTokens * shape.row_bytes();
  const std::uint64_t everything = shape.token_bytes() * context;
  for (const std::uint64_t cap :
       {everything, everything - 1, 20 * page, 12 * page, 8 * page, 6 * page, 5 * page}) {
    SCOPED_TRACE(cap);
    CountingBackend backend(cap);
    const KvPlan plan = testing::plan_of(shape, context, 200, cap, true);
    KvSession session = testing::session_of(backend, plan);
    Conversation conversation(shape, 42);
    for (const std::int64_t tokens : {3, 200, 60, 1, 1, 128, 5}) {
      for (std::int64_t left = tokens; left > 0;) {
        const std::int64_t now = std::min(left, plan.chunk);
        EXPECT_LT(conversation.step(session, now), kTolerance) << conversation.length();
        left -= now;
      }
    }
    while (conversation.length() < context) {
      ASSERT_LT(conversation.step(session, 1), kTolerance) << conversation.length();
    }
    EXPECT_EQ(backend.host_rows_attended, 0u) << "attention saw rows outside the device tier";
    EXPECT_LE(backend.device_peak, cap);
    EXPECT_EQ(backend.device_peak, plan.device_bytes);
  }
}

TEST(KvSession, LedgerEqualsTheBytesThatReallyMoved) {
  const std::uint64_t seed = sluice::testing::seed(7);
  SCOPED_TRACE(sluice::testing::seed_message(seed));
  Random random(seed);
  for (int i = 0; i < 12; ++i) {
    const int heads = static_cast<int>(random.integer(1, 3));
    const KvShape shape{static_cast<int>(random.integer(1, 3)),
                        heads * static_cast<int>(random.integer(1, 4)), heads,
                        static_cast<int>(random.integer(8, 20)) * 2, DType::f32};
    const std::int64_t context = random.integer(200, 600);
    const std::uint64_t page = kPageTokens * shape.row_bytes();
    const std::uint64_t cap =
        page * static_cast<std::uint64_t>(random.integer(4 * heads, 8 * heads * shape.layers));
    SCOPED_TRACE(::testing::Message() << "case " << i << ", cap " << cap);
    CountingBackend backend(cap);
    const KvPlan plan = testing::plan_of(shape, context, random.integer(1, 150), cap, true);
    KvSession session = testing::session_of(backend, plan);
    Conversation conversation(shape, seed);
    std::uint64_t seen_rows = 0;
    while (conversation.length() < context) {
      const std::int64_t tokens =
          std::min({random.integer(1, plan.chunk), context - conversation.length(), plan.chunk});
      ASSERT_LT(conversation.step(session, tokens), kTolerance);
      seen_rows += static_cast<std::uint64_t>(conversation.length() * heads * shape.layers);
    }
    const Ledger& ledger = session.ledger();
    EXPECT_EQ(ledger.crossed(Tier::host, Tier::device).bytes, backend.host_to_device);
    EXPECT_EQ(ledger.crossed(Tier::device, Tier::host).bytes, backend.device_to_host);
    const std::uint64_t all = shape.token_bytes() * static_cast<std::uint64_t>(context);
    EXPECT_EQ(bytes(ledger, Tier::device, Tier::host, Cause::write_back), all);
    EXPECT_EQ(bytes(ledger, Tier::device, Tier::device, Cause::append), all);
    EXPECT_EQ(bytes(ledger, Tier::device, Tier::device, Cause::hit) +
                  bytes(ledger, Tier::host, Tier::device, Cause::miss),
              seen_rows * shape.row_bytes())
        << "every visible row is a hit or a miss of its step";
  }
}

TEST(KvSession, InPlaceMovesNothing) {
  const KvShape shape{2, 4, 2, 32, DType::f32};
  CountingBackend backend;
  KvSession session =
      testing::session_of(backend, testing::plan_of(shape, 400, 150, std::nullopt, true));
  Conversation conversation(shape, 3);
  for (const std::int64_t tokens : {150, 1, 100, 1, 1}) {
    EXPECT_LT(conversation.step(session, tokens), kTolerance);
  }
  EXPECT_EQ(backend.host_to_device + backend.device_to_host + backend.device_peak, 0u);
  EXPECT_EQ(session.ledger().crossed(Tier::host, Tier::device), Traffic{});
  EXPECT_EQ(session.ledger().total(Phase::decode, Tier::host, Tier::host, Cause::hit).rows,
            static_cast<std::uint64_t>((151 + 252 + 253) * 2 * 2));
}

TEST(KvSession, RefusesMoreThanItWasPlannedFor) {
  const KvShape shape{1, 1, 1, 32, DType::f32};
  CountingBackend backend;
  KvSession session =
      testing::session_of(backend, testing::plan_of(shape, 10, 8, std::nullopt, true));
  Conversation conversation(shape, 3);
  conversation.step(session, 8);
  const auto code_of = [&](std::int64_t tokens) {
    try {
      const SoloStep step(session, Phase::decode, tokens);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::internal;
  };
  EXPECT_EQ(code_of(3), ErrorCode::prompt);
  EXPECT_EQ(code_of(0), ErrorCode::usage);
  EXPECT_EQ(code_of(9), ErrorCode::usage);
  EXPECT_LT(conversation.step(session, 2), kTolerance) << "a refused step changes nothing";
}

TEST(KvSession, WithoutMemoryForAStepGoesOnWithoutIt) {
  const KvShape shape{1, 1, 1, 32, DType::f32};
  const std::uint64_t rows = 64 * shape.row_bytes();
  CountingBackend backend(MemoryAccount::kNoCap, 6 * rows);
  const KvPlan plan = testing::plan_of(shape, 100000, 512, std::nullopt, true);
  KvSession hungry = testing::session_of(backend, plan);
  try {
    const SoloStep step(hungry, Phase::prefill, 512);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory);
  }
  EXPECT_EQ(hungry.ledger().tokens(Phase::prefill), 0u);
  Conversation conversation(shape, 3);
  EXPECT_LT(conversation.step(hungry, 64), kTolerance);
}

// Rows in two layers, all zero.
struct Zeros {
  std::vector<float> rows = std::vector<float>(4 * 32);
  std::vector<float> out = rows;
  std::vector<float> lse = std::vector<float>(4);

  NewRows appended() const { return {rows.data(), rows.data(), 32}; }
  Queries attended() { return {rows.data(), 32, out.data(), lse.data()}; }
};

TEST(SoloStep, RefusesCallsOutOfOrderAndGoesOn) {
  const KvShape shape{2, 1, 1, 32, DType::f32};
  CountingBackend backend;
  KvSession session =
      testing::session_of(backend, testing::plan_of(shape, 10, 8, std::nullopt, true));
  Zeros zeros;
  SoloStep step(session, Phase::prefill, 4);
  const auto refused = [](const std::string& why, const auto& call) {
    testing::expect_error(ErrorCode::usage, why, call);
  };
  refused("layer 2: there are 0 to 1", [&] { step.append(2, zeros.appended()); });
  step.append(0, zeros.appended());
  refused("layer 0 has its rows of this step already", [&] { step.append(0, zeros.appended()); });
  refused("layer 1 is attended right after", [&] { step.attend(1, zeros.attended()); });
  step.attend(0, zeros.attended());
  refused("layer 1 has no rows of this step yet", [&] { step.end(); });
  EXPECT_EQ(session.length(), 0);
  step.append(1, zeros.appended());
  step.attend(1, zeros.attended());
  step.end();
  EXPECT_EQ(session.length(), 4);
  refused("after the end of their step", [&] { step.append(0, zeros.appended()); });
  refused("a step that is over", [&] { step.end(); });
  EXPECT_FALSE(session.in_step());
}

TEST(KvSession, RollsBackAStepWithNoneOrSomeOfItsRows) {
  const KvShape shape{2, 2, 1, 32, DType::f32};
  const std::uint64_t cap = 300 * shape.token_bytes();
  CountingBackend backend(cap);
  KvSession session = testing::session_of(backend, testing::plan_of(shape, 400, 64, cap, true));
  Conversation conversation(shape, 11);
  EXPECT_LT(conversation.step(session, 50), kTolerance);
  session.begin(Phase::decode, 1);
  EXPECT_TRUE(session.in_step());
  session.roll_back();
  EXPECT_EQ(session.length(), 50);
  EXPECT_EQ(session.ledger().tokens(Phase::decode), 0u);
  // The first of two layers got rows; of both, more pages were taken than there were.
  session.begin(Phase::decode, 100);
  session.appended(0, 150);
  session.roll_back();
  EXPECT_EQ(session.own_tokens(), kPageTokens);
  for (const std::int64_t tokens : {64, 1, 60}) {
    EXPECT_LT(conversation.step(session, tokens), kTolerance);
  }
  EXPECT_EQ(session.ledger().tokens(Phase::prefill), 174u);
}

// A GPU has no rows in f32 and no coded rows.
TEST(RequireSupported, NamesRowsThatABackendDoesNotHave) {
  BackendInfo info;
  info.name = "cuda:0";
  info.f32_rows = false;
  info.row_codes.clear();
  KvShape shape{1, 4, 2, 64, DType::bf16};
  EXPECT_NO_THROW(require_supported(info, shape));
  shape.rows = RowCode::int8;
  testing::expect_error(ErrorCode::unsupported,
                        "device cuda:0 keeps rows in bf16 or f16, not int8 (`kv_dtype`)",
                        [&] { require_supported(info, shape); });
  shape.rows = DType::f32;
  testing::expect_error(ErrorCode::unsupported, "not f32 (`kv_dtype`)",
                        [&] { require_supported(info, shape); });
  info.row_codes = {RowCode::int8, RowCode::k8v4};
  shape.rows = RowCode::int8;
  EXPECT_NO_THROW(require_supported(info, shape));
  shape.head_dim = 72;
  testing::expect_error(ErrorCode::unsupported,
                        "rows in int8 need a head_dim that is a multiple of 16, not 72",
                        [&] { require_supported(info, shape); });
}

TEST(KvSession, AnInterruptedStepEndsTheSessionAndNoOther) {
  const KvShape shape{1, 1, 1, 32, DType::f32};
  CountingBackend backend;
  const KvPlan plan = testing::plan_of(shape, 64, 64, std::nullopt, true);
  KvSession stopped = testing::session_of(backend, plan);
  KvSession other = testing::session_of(backend, plan);
  { const SoloStep interrupted(stopped, Phase::prefill, 8); }
  try {
    const SoloStep next(stopped, Phase::prefill, 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
  }
  Conversation conversation(shape, 3);
  EXPECT_LT(conversation.step(other, 64), kTolerance);
}

}  // namespace
}  // namespace sluice
