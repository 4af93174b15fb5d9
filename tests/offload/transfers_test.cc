// The ledger's bytes beside the papers' element counts: every difference has a name.
#include "sluice/transfers.h"

#include <gtest/gtest.h>

#include "cpu/cpu_backend.h"
#include "lib/backend/key_tiles.h"
#include "offload/step/kv_session.h"
#include "offload/step/solo_step.h"
#include "tests/support/plan.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

constexpr std::int64_t kPrompt = 600;
constexpr KvShape kShape{1, 4, 4, 64, DType::bf16};  // MHA, as the papers count
constexpr std::int64_t kBytes = 2;                   // per element
constexpr std::int64_t kTail = kPrompt % kPageTokens + 1;
constexpr std::int64_t kIndexed = kPrompt / kPageTokens * kPageTokens;

// One decoded token after kPrompt others, and what it moved per head.
class DecodedToken {
 public:
  explicit DecodedToken(const std::string& policy) {
    const Policy parsed = parse_policy(policy);
    KvSession session = testing::session_of(
        backend_, testing::plan_on(backend_.info(), kShape, 700, 256, std::nullopt, {&parsed, 1}),
        {&parsed, 1});
    for (std::int64_t left = kPrompt; left > 0; left -= 200) step(session, Phase::prefill, 200);
    step(session, Phase::decode, 1);
    const auto bytes = [&](Cause cause) {
      const Traffic t = session.ledger().total(Phase::decode, Tier::host, Tier::host, cause);
      return static_cast<std::int64_t>(t.bytes) / kShape.kv_heads;
    };
    rows = bytes(Cause::hit);
    index = bytes(Cause::index_read);
    append = bytes(Cause::append);
  }

  std::int64_t rows = 0;
  std::int64_t index = 0;
  std::int64_t append = 0;

 private:
  void step(KvSession& session, Phase phase, std::int64_t tokens) {
    const std::int64_t width = std::int64_t{kShape.kv_heads} * kShape.head_dim;
    const std::vector<float> q = random_.normal(tokens * width);
    const std::vector<float> k = random_.normal(tokens * width);
    const std::vector<float> v = random_.normal(tokens * width);
    std::vector<float> out(q.size());
    std::vector<float> lse(static_cast<std::size_t>(tokens * kShape.query_heads));
    SoloStep step(session, phase, tokens);
    step.append(0, {k.data(), v.data(), width});
    step.attend(0, {q.data(), width, out.data(), lse.data()});
    step.end();
  }

  cpu::CpuBackend backend_{cpu::CpuOptions{}};
  testing::Random random_{testing::seed(21)};
};

TransferShape shape(std::int64_t kept, std::int64_t channels = 0) {
  return {kPrompt + 1, kShape.head_dim, kept, channels};
}

constexpr std::int64_t kRow = 2 * 64;  // elements of a key and a value

TEST(Transfers, DenseIsWhatThePaperCounts) {
  const DecodedToken token("dense");
  EXPECT_EQ(token.rows + token.append, dense_transfers(shape(0)) * kBytes);
}

TEST(Transfers, SparqDiffersInFourWays) {
  const DecodedToken token("select=sparq(r=16) prune=top_k(50) compensate=mean_value");
  std::int64_t expected = sparq_transfers(shape(50, 16)) * kBytes;
  // 1. The unfinished page is always attended, besides the k tokens that are selected,
  expected += kTail * kRow * kBytes;
  // 2. and is not in the index: no slices of it are read.
  expected -= kTail * 16 * kBytes;
  // 3. The index holds 4 bits per channel and a scale and a zero per 128 tokens, not 16 bits.
  expected -= kIndexed * 16 * kBytes;
  expected += kIndexed / kPageTokens * 16 * (kPageTokens / 2 + 2 * 2);
  // 4. The mean value stays where it is; it never crosses between tiers and is not counted.
  expected -= kRow * kBytes;
  EXPECT_EQ(token.rows + token.index + token.append, expected);
}

TEST(Transfers, StreamingIsLmInfinitePlusTheUnfinishedPage) {
  const DecodedToken token("select=streaming sinks=4 recent=300");
  // The newest 300 tokens include the unfinished page.
  const std::int64_t kept = 4 + 300;
  EXPECT_EQ(token.rows + token.append, lm_infinite_transfers(shape(kept)) * kBytes);
}

TEST(Transfers, ExactSelectionReadsKeysAsFlexGenDoes) {
  const DecodedToken token("select=exact prune=top_k(50)");
  std::int64_t expected = flexgen_transfers(shape(50)) * kBytes;
  // A row is a key and a value: the keys of what is attended are read again,
  expected += 50 * kShape.head_dim * kBytes;
  // and the unfinished page is attended whole.
  expected += kTail * kRow * kBytes;
  EXPECT_EQ(token.rows + token.index + token.append, expected);
}

// H2O keeps scores where Sluice keeps an index: the counts have no term in common but the rows.
TEST(Transfers, H2oPaysForScores) {
  EXPECT_EQ(h2o_transfers(shape(50)) - lm_infinite_transfers(shape(50)), 2 * (kPrompt + 1));
}

TEST(Transfers, TwilightReadsTheTilesOfItsCandidates) {
  const DecodedToken all("select=int4 candidates=1/1 prune=top_p(0.9)");
  const KeyTiles tiles;
  const auto tile = static_cast<std::int64_t>(tiles.page_bytes(kShape.head_dim));
  // Proposed by every channel, re-scored by every channel: each tile is read twice, and so are the
  // keys of the unfinished page, which has none.
  EXPECT_EQ(all.index, 2 * (kIndexed / kPageTokens * tile + kTail * kShape.head_dim * kBytes));
}

}  // namespace
}  // namespace sluice
