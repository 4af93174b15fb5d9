// Reads of scorers on the host: the ledger has those that a scorer made, whatever it declares, and
// reads that are out of range or more than declared are errors that name the scorer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "offload/step/kv_session.h"
#include "sluice/element.h"
#include "sluice/errors.h"
#include "tests/support/counting_backend.h"
#include "tests/support/plan.h"
#include "tests/support/script.h"

namespace sluice {
namespace {

using testing::CountingBackend;
using ::testing::HasSubstr;
using testing::largest_difference;
using testing::Script;

// Logits from every key, as a method computes them that accumulates attention, with the sums of a
// sequence's logits in its own memory.
class EveryKey : public Scorer {
 public:
  // What a call does besides; and the declared bytes per key.
  using Deed = std::function<void(const ScorerReads&)>;
  explicit EveryKey(Deed deed = {}, std::optional<std::size_t> declared = std::nullopt)
      : Scorer({"every_key", ScorerInfo::Kind::logits}),
        deed_(std::move(deed)),
        declared_(declared) {}

  IndexNeeds needs(const ScorerUse& /*use*/) const override {
    IndexNeeds needs;
    needs.page_bytes = 64;
    needs.sequence_bytes = 64;
    return needs;
  }
  std::uint64_t bytes_read(const ScorerUse& use, const ScanExtent& extent) const override {
    return static_cast<std::uint64_t>(extent.pages * kPageTokens) *
           declared_.value_or(use.shape.value_offset());
  }
  void score(const RunScorer& call) const override {
    EXPECT_EQ(call.memory.pages, nullptr) << "reads that nobody counts";
    EXPECT_EQ(call.memory.sequences, nullptr);
    EXPECT_EQ(call.rows.pages, nullptr);
    const KvShape& shape = call.use.shape;
    if (deed_) deed_(*call.reads);
    for (std::int64_t i = 0; i < call.batch.count; ++i) {
      for (int head = 0; head < shape.kv_heads; ++head) {
        for (std::int64_t t = 0; t < call.batch.tokens[i].page_first(); ++t) {
          const std::byte* const key = call.reads->key(i, head, t);
          for (int g = 0; g < shape.group(); ++g) {
            const int query = head * shape.group() + g;
            const float* const q = call.q + i * call.q_stride + query * shape.head_dim;
            double sum = 0.0;
            for (int c = 0; c < shape.head_dim; ++c)
              sum += q[c] * read_element(key, shape.rows.key(), c);
            call.logits.row<float>(i * shape.query_heads + query)[t] =
                static_cast<float>(sum / std::sqrt(shape.head_dim));
          }
        }
      }
    }
  }

 private:
  Deed deed_;
  std::optional<std::size_t> declared_;
};

struct Setting {
  KvShape shape{2, 4, 2, 16, DType::bf16};
  bool capped = false;
};

KvPlan plan_of(const BackendInfo& on, const Setting& setting, const Policy& policy,
               const Scorers& scorers, std::optional<std::uint64_t> cap = std::nullopt) {
  KvRequest request;
  request.shape = setting.shape;
  request.on = on;
  request.context = 700;
  request.chunk = 64;
  request.decode_batch = 8;
  request.policies = {&policy, 1};
  request.scorers = &scorers;
  request.device_cap = cap;
  return plan_kv(request);
}

// Steps of one token and of five behind 530, by `scorers`' own; the session's reads of keys.
struct Measured {
  std::vector<float> outputs;
  Traffic near;
  Traffic far;
};

Measured run(const Setting& setting, const char* text, const Scorers& scorers) {
  const Policy policy = parse_policy(text, scorers);
  const KvPlan free = plan_of(CountingBackend().info(), setting, policy, scorers);
  const std::uint64_t cap = free.index_bytes + free.work_bytes + free.table_bytes +
                            4 * kPageTokens * setting.shape.token_bytes();
  CountingBackend backend(setting.capped ? cap : MemoryAccount::kNoCap);
  const KvPlan plan =
      setting.capped ? plan_of(backend.info(), setting, policy, scorers, cap) : free;
  KvSession session = testing::session_of(backend, plan, {&policy, 1}, scorers);
  const Script script(setting.shape, 700, 5);
  script.prefill(session, 530);
  Measured run;
  for (const std::int64_t tokens : {1, 5, 1}) {
    const std::vector<float> out = script.step(session, Phase::decode, tokens);
    run.outputs.insert(run.outputs.end(), out.begin(), out.end());
  }
  const Tier tier = setting.capped ? Tier::device : Tier::host;
  const Ledger& ledger = session.ledger();
  run.near = ledger.total(Phase::decode, tier, tier, Cause::index_read);
  run.far = ledger.total(Phase::decode, Tier::host, Tier::device, Cause::index_read);
  return run;
}

std::string refusal(const EveryKey::Deed& deed, std::optional<std::size_t> declared = {}) {
  Scorers scorers;
  scorers.add(std::make_shared<EveryKey>(deed, declared));
  try {
    run({}, "select=every_key prune=top_k(64)", scorers);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return "";
}

// `exact` computes the same, and its reads are held to the backend's own count of them in
// ledger_reads_test.cc.
TEST(ScorerReads, OfEveryKeyAreThoseOfExact) {
  Scorers scorers;
  scorers.add(std::make_shared<EveryKey>());
  for (const bool capped : {false, true}) {
    for (const int group : {1, 2, 8}) {
      SCOPED_TRACE(std::to_string(group) + (capped ? ", capped" : ""));
      const Setting setting{{2, 2 * group, 2, 16, DType::bf16}, capped};
      const Measured own = run(setting, "select=every_key prune=top_p(0.9)", scorers);
      const Measured exact = run(setting, "select=exact prune=top_p(0.9)", scorers);
      EXPECT_LT(largest_difference(own.outputs, exact.outputs), 3e-5);
      // Under a cap the two have room for other numbers of pages.
      EXPECT_EQ(own.near.bytes + own.far.bytes, exact.near.bytes + exact.far.bytes);
      EXPECT_EQ(own.near.rows + own.far.rows, exact.near.rows + exact.far.rows);
      EXPECT_GT(own.near.bytes, 0u);
      EXPECT_EQ(own.far.bytes > 0, capped);
    }
  }
}

TEST(ScorerReads, AreCountedEachTimeAndNotAsDeclared) {
  Scorers once;
  once.add(std::make_shared<EveryKey>(EveryKey::Deed(), 1000));
  Scorers again;
  again.add(std::make_shared<EveryKey>(
      [](const ScorerReads& reads) {
        reads.key(0, 1, 3);
        reads.page(0, 1, 2, 16, 48);
        reads.sequence(0, 0, 8, 4);
      },
      1000));
  const char* const policy = "select=every_key prune=top_k(64)";
  const Measured less = run({}, policy, once);
  const Measured more = run({}, policy, again);
  // Three steps in two layers. Tokens with bytes of the scorer's memory count as estimated by it.
  EXPECT_EQ(more.near.bytes - less.near.bytes, 3u * 2 * (32 + 48 + 4));
  EXPECT_EQ(more.near.rows - less.near.rows, 3u * 2 * (1 + 512 + 512));
}

TEST(ScorerReads, OutOfRangeNameTheScorer) {
  struct Wrong {
    EveryKey::Deed deed;
    const char* why;
  };
  const Wrong all[] = {
      {[](const ScorerReads& r) { r.key(0, 0, 530); },
       "reads the key of position 530, and may read those below 530"},
      {[](const ScorerReads& r) { r.key(0, 0, -1); }, "reads the key of position -1"},
      {[](const ScorerReads& r) { r.key(1, 0, 0); }, "reads for token 1"},
      {[](const ScorerReads& r) { r.key(0, 2, 0); }, "reads KV head 2"},
      {[](const ScorerReads& r) { r.page(0, 0, 4, 0, 64); },
       "reads page 4, and may read those below 4"},
      {[](const ScorerReads& r) { r.page(0, 0, 0, 60, 8); },
       "reads 8 bytes from byte 60 of a page of its memory, which has 64"},
      {[](const ScorerReads& r) { r.page(0, 0, 0, 65, 0); }, "reads 0 bytes from byte 65"},
      {[](const ScorerReads& r) { r.sequence(0, 0, 1, ~std::size_t{0}); },
       "from byte 1 of its sequence's memory, which has 64"},
  };
  for (const Wrong& wrong : all) {
    const std::string message = refusal(wrong.deed);
    EXPECT_THAT(message, HasSubstr("the scorer 'every_key' in score(): "));
    EXPECT_THAT(message, HasSubstr(wrong.why));
  }
}

TEST(ScorerReads, BeyondWhatIsDeclaredNameTheScorer) {
  const std::string message = refusal({}, 31);
  EXPECT_THAT(message,
              HasSubstr("the scorer 'every_key' in score(): read 16384 bytes for KV head 0 "
                        "behind 4 pages, and bytes_read() declares at most 15872"));
}

}  // namespace
}  // namespace sluice
