// A replayed step reads what changes from memory: it does what the same calls do then.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "tests/support/backends.h"
#include "tests/support/device.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::download;
using testing::NamedBackend;
using testing::Random;
using testing::upload;

constexpr int kVocabulary = 50;
constexpr int kTokens = 5;
constexpr int kPages = 40;  // of a sequence
constexpr KvShape kShape = {.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
constexpr std::int64_t kWidth = (4 + 2 + 2) * 64;  // queries, keys, values

// The rows of new tokens, from their ids: without products, so that it is the same everywhere.
class Step {
 public:
  Step(testing::Device& backend, const std::vector<float>& table)
      : backend_(backend),
        table_(upload(backend, table)),
        ids_(upload(backend, std::vector<TokenId>(kTokens))),
        tokens_(upload(backend, std::vector<BatchToken>(kTokens))),
        pages_(upload(backend, std::vector<PageSlots>(kTokens * kPages, {0, 1}))),
        x_(backend.allocate(backend.info().compute_tier, kTokens * kWidth * sizeof(float))),
        device_(backend.allocate(backend.info().compute_tier, kPoolBytes)),
        host_(backend.allocate(Tier::host, kPoolBytes)),
        sums_(backend.allocate(backend.info().compute_tier, kTokens * 2 * 64 * sizeof(float))) {}

  void set(const std::vector<TokenId>& ids, const std::vector<BatchToken>& tokens) {
    const CopyOp ops[] = {
        {ids_.data(), reinterpret_cast<const std::byte*>(ids.data()), ids_.bytes()},
        {tokens_.data(), reinterpret_cast<const std::byte*>(tokens.data()), tokens_.bytes()}};
    backend_.queue->copy(ops);
  }

  void issue() {
    ++issued;
    const TokenBatch batch = {reinterpret_cast<const BatchToken*>(tokens_.data()), kTokens,
                              kPages * kPageTokens};
    backend_.queue->run(EmbedParams{{table_.data(), DType::f32, kVocabulary, kWidth, kWidth},
                                    reinterpret_cast<const TokenId*>(ids_.data()),
                                    {x_.data(), DType::f32, kTokens, kWidth, kWidth}});
    RopeParams rope;
    rope.x = x_.floats();
    rope.tokens = kTokens;
    rope.stride = kWidth;
    rope.query_heads = kShape.query_heads;
    rope.key_heads = kShape.kv_heads;
    rope.head_dim = kShape.head_dim;
    rope.batch = batch;
    const std::vector<float> frequencies(static_cast<std::size_t>(kShape.head_dim / 2), 0.01f);
    rope.inverse_frequency = frequencies.data();
    backend_.queue->run(rope);
    AppendBatchParams append;
    append.k = x_.floats() + 4 * 64;
    append.v = append.k + 2 * 64;
    append.stride = kWidth;
    append.shape = kShape;
    append.batch = batch;
    append.rows = {device_.data(),
                   host_.data(),
                   kPoolBytes / 2,
                   kPoolBytes / 2,
                   reinterpret_cast<const PageSlots*>(pages_.data()),
                   kPages};
    append.sums = sums_.floats();
    backend_.queue->run(append);
  }

  std::vector<std::vector<std::byte>> results() const {
    return {download<std::byte>(backend_, x_), download<std::byte>(backend_, device_),
            download<std::byte>(backend_, host_), download<std::byte>(backend_, sums_)};
  }

  int issued = 0;

 private:
  static constexpr std::int64_t kPoolBytes = 2 * 2 * kPageTokens * 256;  // 2 heads of 2 slots

  testing::Device& backend_;
  Buffer table_, ids_, tokens_, pages_, x_, device_, host_, sums_;
};

class ReplayParity : public ::testing::TestWithParam<NamedBackend> {};

TEST_P(ReplayParity, AReplayedStepSeesWhatChanged) {
  const auto backend = testing::make_or_skip(GetParam());
  if (backend == nullptr) return;
  const std::uint64_t seed = testing::seed(19);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const std::vector<float> table = random.normal(kVocabulary * kWidth);
  Step replayed(*backend, table);
  Step plain(*backend, table);
  std::unique_ptr<Recording> recording;
  for (int round = 0; round < 5; ++round) {
    std::vector<TokenId> ids;
    std::vector<BatchToken> tokens;
    for (int i = 0; i < kTokens; ++i) {
      ids.push_back(static_cast<TokenId>(random.integer(0, kVocabulary - 1)));
      // All write to one page: each to a row of its own.
      const auto page = static_cast<std::int32_t>(random.integer(0, kPages - 1));
      tokens.push_back({i, page * kPageTokens + 20 * i + round});
    }
    replayed.set(ids, tokens);
    backend->queue->replay(recording, [&] { replayed.issue(); });
    plain.set(ids, tokens);
    plain.issue();
    ASSERT_TRUE(replayed.results() == plain.results()) << "round " << round;
  }
  const ReplayCounts counts = backend->queue->replay_counts();
  EXPECT_EQ(counts.recordings, recording != nullptr ? 1 : 0);
  EXPECT_EQ(counts.launches, recording != nullptr ? 5 : 0);
  EXPECT_EQ(replayed.issued, recording != nullptr ? 1 : 5);
}

// Doubles numbers in host memory.
class Doubling : public HostCall {
 public:
  explicit Doubling(std::span<float> numbers) : numbers_(numbers) {}
  void run() noexcept override {
    for (float& number : numbers_) number *= 2.0f;
    ++runs;
  }

  int runs = 0;

 private:
  std::span<float> numbers_;
};

// The host has its part on another queue, between what it waits for and what waits for it.
TEST_P(ReplayParity, AReplayedStepCallsTheHost) {
  constexpr std::int64_t kRows = 32;
  constexpr int kDim = 64;
  const auto backend = testing::make_or_skip(GetParam());
  if (backend == nullptr) return;
  const std::unique_ptr<Queue> beside = backend->queue->make_sibling({.computes = false});
  const Buffer from = upload(*backend, std::vector<float>(kRows * kDim));
  const Buffer zeros = upload(*backend, std::vector<float>(kRows));
  const Tier tier = backend->info().compute_tier;
  const Buffer out = backend->allocate(tier, from.bytes());
  const Buffer lse = backend->allocate(tier, zeros.bytes());
  const Buffer host_out = backend->allocate(Tier::host, from.bytes());
  const Buffer host_lse = backend->allocate(Tier::host, zeros.bytes());
  const Buffer times = backend->allocate(Tier::host, 2 * sizeof(std::uint64_t));
  auto* const noted = reinterpret_cast<std::uint64_t*>(times.data());
  Doubling call({host_out.floats(), kRows * kDim});
  Queue& queue = *backend->queue;
  const auto issue = [&] {
    const CopyOp to_host = {host_out.data(), from.data(), from.bytes()};
    queue.copy({&to_host, 1});
    beside->wait_for(queue);
    beside->call_host(call);
    queue.note_time(noted);
    const CopyOp ops[] = {{out.data(), from.data(), from.bytes()},
                          {lse.data(), zeros.data(), zeros.bytes()}};
    queue.copy(ops);
    queue.note_time(noted + 1);
    queue.wait_for(*beside);
    queue.run(MergePartialsParams{kRows, kDim, host_out.floats(), host_lse.floats(), out.floats(),
                                  lse.floats()});
  };
  std::unique_ptr<Recording> recording;
  for (int round = 1; round <= 5; ++round) {
    const std::vector<float> numbers(kRows * kDim, static_cast<float>(round));
    const CopyOp op = {from.data(), reinterpret_cast<const std::byte*>(numbers.data()),
                       from.bytes()};
    queue.copy({&op, 1});
    queue.replay(recording, issue);
    for (const float number : download<float>(*backend, out)) {
      ASSERT_NEAR(number, 1.5f * static_cast<float>(round), 1e-5f);
    }
    for (const float number : download<float>(*backend, lse)) ASSERT_NEAR(number, 0.693147f, 1e-5f);
    EXPECT_EQ(call.runs, round);
    EXPECT_GT(noted[0], 0u);
    EXPECT_GE(noted[1], noted[0]);
  }
}

INSTANTIATE_TEST_SUITE_P(, ReplayParity, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

}  // namespace
}  // namespace sluice
