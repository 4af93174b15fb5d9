// What KvCache refuses: with one clear line, and so that what was right before still is.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sluice/kv_cache.h"
#include "tests/support/expect.h"
#include "tests/support/random.h"
#include "tests/support/value_cases.h"

namespace sluice {
namespace {

using testing::expect_error;

constexpr int kLayers = 3;
constexpr int kQueryHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kDim = 32;

KvConfig config() {
  KvConfig config;
  config.shape = {kLayers, kQueryHeads, kKvHeads, kDim, DType::bf16};
  config.context = 200;
  config.chunk = 8;
  config.sequences = 2;
  config.threads = 1;
  config.policies = {Policy(), parse_policy("select=int4 prune=top_k(4)"),
                     parse_policy("select=int4 prune=top_k(4) anchors=0")};
  return config;
}

class Misuse : public ::testing::Test {
 protected:
  void append(KvStep& step, int layer) { step.append(layer, k_.data(), v_.data()); }
  void attend(KvStep& step, int layer) { step.attend(layer, q_.data(), out_.data()); }
  void run(KvStep step) {
    for (int layer = 0; layer < kLayers; ++layer) {
      append(step, layer);
      attend(step, layer);
    }
    step.end();
  }
  void prefill(KvSequence& sequence, std::int64_t tokens) {
    run(sequence.begin_step(Phase::prefill, tokens));
  }
  void expect_append(ErrorCode code, const std::string& text, KvStep& step, const KvInput& keys) {
    expect_error(code, text, [&] { step.append(0, keys, v_.data()); });
  }

  KvCache cache_{config()};
  KvSequence sequence_ = cache_.new_sequence();
  // Of 16 tokens.
  std::vector<float> k_ = std::vector<float>(16 * kKvHeads * kDim, 0.5f);
  std::vector<float> v_ = k_;
  std::vector<float> q_ = std::vector<float>(16 * kQueryHeads * kDim, 0.25f);
  std::vector<float> out_ = q_;
};

TEST(KvCacheConfig, NamesWhatIsWrong) {
  const auto refused = [](ErrorCode code, const std::string& text, const auto& change) {
    KvConfig changed = config();
    change(changed);
    expect_error(code, text, [&] { KvCache cache(changed); });
  };
  constexpr ErrorCode kUsage = ErrorCode::usage;
  refused(kUsage, "context", [](KvConfig& c) { c.context = 0; });
  refused(kUsage, "context", [](KvConfig& c) { c.context = -5; });
  refused(kUsage, "chunk", [](KvConfig& c) { c.chunk = 0; });
  refused(kUsage, "chunk", [](KvConfig& c) { c.chunk = 100000; });
  refused(kUsage, "threads", [](KvConfig& c) { c.threads = -1; });
  refused(kUsage, "sequences", [](KvConfig& c) { c.sequences = 0; });
  refused(kUsage, "decode", [](KvConfig& c) { c.decode_batch = 65; });
  refused(kUsage, "tokens", [](KvConfig& c) { c.tokens = 401; });
  refused(kUsage, "layers", [](KvConfig& c) { c.shape.layers = 0; });
  refused(kUsage, "query_heads", [](KvConfig& c) { c.shape.query_heads = 3; });
  refused(kUsage, "kv_heads", [](KvConfig& c) { c.shape.kv_heads = 0; });
  refused(kUsage, "head_dim", [](KvConfig& c) { c.shape.head_dim = 33; });
  refused(ErrorCode::unsupported, "dtype",
          [](KvConfig& c) { c.shape.rows.element = static_cast<DType>(7); });
  refused(ErrorCode::unsupported, "dtype",
          [](KvConfig& c) { c.shape.rows.code = static_cast<RowCode>(7); });
  refused(ErrorCode::unsupported, "rows in int8 need a head_dim that is a multiple of 16, not 40",
          [](KvConfig& c) {
            c.shape.head_dim = 40;
            c.shape.rows = RowCode::int8;
          });
  refused(ErrorCode::unsupported,
          "rows in k8v4 need a head_dim that is a multiple of 16 from 32 on, not 16",
          [](KvConfig& c) {
            c.shape.head_dim = 16;
            c.shape.rows = RowCode::k8v4;
          });
  for (const double scale : {0.0, -1.0, static_cast<double>(NAN), HUGE_VAL, 1e300}) {
    refused(kUsage, "scale", [&](KvConfig& c) { c.scale = scale; });
  }
  refused(kUsage, "abacus", [](KvConfig& c) { c.device = "abacus"; });
  refused(kUsage, "cuda:-1", [](KvConfig& c) { c.device = "cuda:-1"; });
  refused(ErrorCode::unsupported, "device", [](KvConfig& c) { c.device = "cuda:99"; });
  refused(kUsage, "dense",
          [](KvConfig& c) { c.policies = {parse_policy("select=int4 prune=top_k(4) dense=7")}; });
  refused(ErrorCode::unsupported, "prefill",
          [](KvConfig& c) { c.policies = {parse_policy("select=dense prefill=zipvl(0.9)")}; });
  refused(ErrorCode::unsupported, "early=none",
          [](KvConfig& c) { c.policies = {parse_policy("values early=half")}; });
  refused(kUsage, "value_basis has 7 numbers; layers * kv_heads * head_dim / 2 * head_dim are",
          [](KvConfig& c) { c.value_basis.assign(7, 0.0f); });
  refused(ErrorCode::unsupported, "give the cache its value_basis",
          [](KvConfig& c) { c.policies = {parse_policy("compact")}; });
  for (const float wrong : {2.0f, NAN, HUGE_VALF}) {
    refused(kUsage, "value_basis are not orthonormal in layer 2, KV head 1", [&](KvConfig& c) {
      testing::Random random(3);
      const int heads = c.shape.layers * c.shape.kv_heads;
      c.value_basis = testing::random_bases(random, heads, c.shape.head_dim);
      c.value_basis.back() = wrong;
    });
  }
  refused(ErrorCode::memory, "device_memory", [](KvConfig& c) { c.device_memory = 1000; });
  refused(ErrorCode::memory, "host_memory", [](KvConfig& c) { c.host_memory = 1000; });
}

// Wants more memory than there is a number for.
class Greedy : public Scorer {
 public:
  explicit Greedy(std::size_t bytes)
      : Scorer({"greedy", ScorerInfo::Kind::bounds, {}}), bytes_(bytes) {}
  IndexNeeds needs(const ScorerUse& /*use*/) const override {
    return {.page_bytes = bytes_, .sequence_bytes = 0};
  }
  void score(const RunScorer& /*call*/) const override {}
  std::uint64_t bytes_read(const ScorerUse& /*use*/, const ScanExtent& /*extent*/) const override {
    return 0;
  }

 private:
  std::size_t bytes_;
};

TEST(KvCacheConfig, ScorersHaveBoundedMemory) {
  for (const std::size_t bytes : {std::size_t{1} << 31, std::size_t{1} << 61, SIZE_MAX}) {
    KvConfig greedy = config();
    greedy.scorers.add(std::make_shared<Greedy>(bytes));
    greedy.policies = {parse_policy("select=greedy prune=top_k(4)", greedy.scorers)};
    greedy.device_memory = std::uint64_t{64} << 20;
    expect_error(ErrorCode::usage, "1 GiB", [&] { KvCache cache(greedy); });
  }
}

TEST_F(Misuse, DecodingHasNoRoomAtTheEndOfTheContext) {
  while (sequence_.length() < cache_.plan().context) {
    const std::int64_t left = cache_.plan().context - sequence_.length();
    EXPECT_GT(sequence_.decode_room(), 0);
    EXPECT_LE(sequence_.decode_room(), left);
    prefill(sequence_, std::min(left, cache_.plan().chunk));
  }
  EXPECT_EQ(sequence_.decode_room(), 0);
  expect_error(ErrorCode::prompt, "context", [&] { sequence_.begin_step(Phase::decode, 1); });
}

TEST_F(Misuse, OfStepsChangesNothing) {
  prefill(sequence_, 5);
  for (const std::int64_t tokens : {-1, 0, 9}) {
    expect_error(ErrorCode::usage, "1 to 8", [&] { sequence_.begin_step(Phase::prefill, tokens); });
  }
  expect_error(ErrorCode::usage, "phase", [&] { sequence_.begin_step(static_cast<Phase>(9), 1); });
  expect_error(ErrorCode::usage, "1 to", [&] { sequence_.begin_step(Phase::decode, 9); });
  KvStep step = sequence_.begin_step(Phase::decode, 1);
  const auto under_way = [&](const auto& call) {
    expect_error(ErrorCode::usage, "under way", call);
  };
  under_way([&] { sequence_.begin_step(Phase::decode, 1); });
  under_way([&] { cache_.new_sequence(); });
  under_way([&] { sequence_.fork(); });
  under_way([&] { sequence_.truncate(0); });
  under_way([&] { sequence_.reset(); });
  under_way([&] { sequence_.use(Policy()); });
  expect_error(ErrorCode::usage, "layer 0 is attended right after", [&] { attend(step, 0); });
  expect_error(ErrorCode::usage, "layer 0 has no rows", [&] { step.end(); });
  append(step, 1);
  expect_error(ErrorCode::usage, "layer 1 has its rows", [&] { append(step, 1); });
  expect_error(ErrorCode::usage, "layer 2 is attended", [&] { attend(step, 2); });
  attend(step, 1);
  expect_error(ErrorCode::usage, "layer 1 was attended in this step already",
               [&] { attend(step, 1); });
  for (const int layer : {-1, kLayers, std::numeric_limits<int>::max()}) {
    expect_error(ErrorCode::usage, "there are 0 to 2", [&] { append(step, layer); });
    expect_error(ErrorCode::usage, "there are 0 to 2", [&] { attend(step, layer); });
  }
  append(step, 0);
  expect_error(ErrorCode::usage, "layer 1 is attended", [&] { attend(step, 1); });
  append(step, 2);
  expect_error(ErrorCode::usage, "layer 0 was not attended", [&] { step.end(); });
  EXPECT_EQ(sequence_.length(), 5);
  attend(step, 2);
  expect_error(ErrorCode::usage, "layer 0 is attended", [&] { attend(step, 0); });
}

TEST_F(Misuse, OfWhatIsOverOrMovedFrom) {
  KvStep step = sequence_.begin_step(Phase::prefill, 2);
  for (int layer = 0; layer < kLayers; ++layer) append(step, layer);
  step.end();  // a prompt need not be attended
  EXPECT_EQ(sequence_.length(), 2);
  expect_error(ErrorCode::usage, "over", [&] { append(step, 0); });
  expect_error(ErrorCode::usage, "over", [&] { attend(step, 0); });
  expect_error(ErrorCode::usage, "over", [&] { step.end(); });
  KvSequence moved = std::move(sequence_);
  const auto gone = [&](const auto& call) { expect_error(ErrorCode::usage, "moved from", call); };
  gone([&] { sequence_.begin_step(Phase::decode, 1); });
  gone([&] { sequence_.length(); });
  gone([&] { sequence_.reset(); });
  gone([&] { sequence_.fork(); });
  gone([&] { sequence_.failure(); });
  KvSequence* const batch[] = {&sequence_};
  gone([&] { cache_.begin_step(batch); });
  KvCache other = std::move(cache_);
  gone([&] { cache_.new_sequence(); });
  gone([&] { cache_.plan(); });
  gone([&] { cache_.memory(); });
  step = moved.begin_step(Phase::prefill, 3);
  KvStep its_heir = std::move(step);
  // NOLINTNEXTLINE(bugprone-use-after-move): what is left is what is tried
  gone([&] { append(step, 0); });
  gone([&] { step.end(); });
  run(std::move(its_heir));
  EXPECT_EQ(moved.length(), 5);
  sequence_ = std::move(moved);
  EXPECT_EQ(sequence_.length(), 5);
}

TEST_F(Misuse, OfArraysChangesNothing) {
  constexpr ErrorCode kUsage = ErrorCode::usage;
  KvStep step = sequence_.begin_step(Phase::prefill, 4);
  expect_append(kUsage, "keys: a null pointer", step, nullptr);
  expect_error(kUsage, "values: a null", [&] { step.append(0, k_.data(), nullptr); });
  expect_append(ErrorCode::unsupported, "keys: dtype", step, {k_.data(), {static_cast<DType>(3)}});
  const auto* const bytes = reinterpret_cast<const char*>(k_.data());
  expect_append(kUsage, "keys: the pointer is not aligned", step, {bytes + 2, {}});
  expect_append(kUsage, "keys: the pointer is not aligned", step, {bytes + 1, {DType::bf16}});
  expect_append(kUsage, "no memory of its own", step,
                {k_.data(), {DType::f32, 0, 0, Tier::device}});
  expect_append(kUsage, "tier must be", step, {k_.data(), {DType::f32, 0, 0, Tier::disk}});
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t stride : {std::int64_t{-64}, kLargest}) {
    expect_append(kUsage, "strides must be", step, {k_.data(), {DType::f32, stride}});
    expect_append(kUsage, "strides must be", step, {k_.data(), {DType::f32, 0, stride}});
  }
  expect_append(kUsage, "overlap", step, {k_.data(), {DType::f32, kDim}});
  expect_append(kUsage, "overlap", step, {k_.data(), {DType::f32, 0, kDim - 1}});
  expect_append(kUsage, "overlap", step, {k_.data(), {DType::f32, kDim, 3 * kDim}});
  step.append(0, {k_.data(), {DType::f32, kDim, 4 * kDim}}, v_.data());
  expect_error(kUsage, "queries: a null", [&] { step.attend(0, nullptr, out_.data()); });
  expect_error(kUsage, "out: a null", [&] { step.attend(0, q_.data(), nullptr); });
  expect_error(kUsage, "out: heads overlap", [&] {
    step.attend(0, q_.data(), {out_.data(), {DType::f32, kDim}});
  });
  attend(step, 0);
  for (int layer = 1; layer < kLayers; ++layer) append(step, layer);
  step.end();
  EXPECT_EQ(sequence_.length(), 4);
}

TEST_F(Misuse, OfBatches) {
  KvSequence other = cache_.new_sequence();
  KvCache foreign_cache{config()};
  KvSequence foreign = foreign_cache.new_sequence();
  const auto refused = [&](const std::string& text, std::vector<KvSequence*> batch) {
    expect_error(ErrorCode::usage, text, [&] { cache_.begin_step(batch); });
  };
  refused("must be", {});
  refused("null", {&sequence_, nullptr});
  refused("twice", {&sequence_, &sequence_});
  refused("of this KV cache", {&sequence_, &foreign});
  other.use(config().policies[1]);
  refused("one policy", {&sequence_, &other});
  other.use(Policy());
  expect_error(ErrorCode::memory, "all 2 sequences", [&] { cache_.new_sequence(); });
  expect_error(ErrorCode::memory, "all 2 sequences", [&] { other.fork(); });
  KvSequence* const both[] = {&sequence_, &other};
  run(cache_.begin_step(both));
  EXPECT_EQ(sequence_.length(), 1);
  EXPECT_EQ(other.length(), 1);
}

TEST_F(Misuse, OfSequences) {
  prefill(sequence_, 6);
  expect_error(ErrorCode::usage, "of 6 tokens", [&] { sequence_.truncate(7); });
  expect_error(ErrorCode::usage, "of 6 tokens", [&] { sequence_.truncate(-1); });
  expect_error(ErrorCode::usage, "planned for the policy",
               [&] { sequence_.use(parse_policy("quest")); });
  while (sequence_.length() < 200)
    prefill(sequence_, std::min<std::int64_t>(8, 200 - sequence_.length()));
  expect_error(ErrorCode::prompt, "200", [&] { sequence_.begin_step(Phase::decode, 1); });
  sequence_.truncate(199);
  run(sequence_.begin_step(Phase::decode, 1));
  EXPECT_EQ(sequence_.length(), 200);
}

TEST_F(Misuse, FollowersComeAfterTheirAnchor) {
  sequence_.use(config().policies[2]);
  prefill(sequence_, 8);
  KvStep step = sequence_.begin_step(Phase::decode, 1);
  append(step, 2);
  expect_error(ErrorCode::usage, "reuses the selection of layer 0", [&] { attend(step, 2); });
}

TEST_F(Misuse, NotANumberNamesWhatAndWhere) {
  const auto failed = [&](const std::string& text, std::vector<float>& array, std::size_t at,
                          float value) {
    const float before = std::exchange(array[at], value);
    for (const Phase phase : {Phase::prefill, Phase::decode}) {
      KvStep step = sequence_.begin_step(phase, phase == Phase::decode ? 1 : 2);
      append(step, 0);
      expect_error(ErrorCode::numeric, text, [&] {
        attend(step, 0);
        append(step, 1);
        attend(step, 1);
      });
      expect_error(ErrorCode::numeric, text, [&] { append(step, 2); });
      expect_error(ErrorCode::numeric, text, [&] { step.end(); });
      expect_error(ErrorCode::internal, text, [&] { sequence_.begin_step(phase, 1); });
      expect_error(ErrorCode::internal, text, [&] { sequence_.truncate(0); });
      sequence_.reset();
    }
    array[at] = before;
  };
  failed("queries of layer 0, KV head 1", q_, 2 * kDim + 3, NAN);
  failed("queries of layer 0, KV head 0", q_, kDim, -INFINITY);
  k_[5 * kDim] = INFINITY;
  KvStep step = sequence_.begin_step(Phase::prefill, 3);
  expect_error(ErrorCode::numeric, "keys of layer 0, KV head 1, token 2", [&] { append(step, 0); });
}

TEST_F(Misuse, AStepThatIsNotEndedFailsItsSequencesAndLetsOthersGoOn) {
  KvSequence other = cache_.new_sequence();
  {
    KvStep step = sequence_.begin_step(Phase::prefill, 3);
    append(step, 0);
  }
  prefill(other, 4);
  expect_error(ErrorCode::internal, "not ended", [&] { prefill(sequence_, 1); });
  sequence_.reset();
  prefill(sequence_, 3);
  EXPECT_EQ(sequence_.length(), 3);
  EXPECT_EQ(sequence_.ledger().tokens(Phase::prefill), 3u);
}

TEST_F(Misuse, AStepThatIsOverKeepsNoPlace) {
  KvStep step = sequence_.begin_step(Phase::prefill, 1);
  for (int layer = 0; layer < kLayers; ++layer) append(step, layer);
  step.end();
  { const KvSequence gone = std::move(sequence_); }
  KvSequence one = cache_.new_sequence();
  {
    KvSequence two = cache_.new_sequence();
    step = one.begin_step(Phase::prefill, 1);  // a handle that goes during another's step
  }
  step = KvStep(std::move(step));
  for (int layer = 0; layer < kLayers; ++layer) append(step, layer);
  step.end();
  cache_.new_sequence();
}

TEST_F(Misuse, OneStepBySeveralThreadsIsAnError) {
  KvStep step = sequence_.begin_step(Phase::prefill, 8);
  std::atomic<int> refused = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int layer = 0; layer < kLayers; ++layer) {
        try {
          append(step, layer);
        } catch (const Error& error) {
          refused += error.code() == ErrorCode::usage;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused, 3 * kLayers);
  step.end();
  EXPECT_EQ(sequence_.length(), 8);
}

TEST(KvCacheMemory, IsWhatWasPlanned) {
  for (const RowFormat rows : {RowFormat(DType::bf16), RowFormat(DType::f32),
                               RowFormat(RowCode::int8), RowFormat(RowCode::k8v4)}) {
    KvConfig one = config();
    one.shape.rows = rows;
    one.sequences = 1;
    testing::Random random(3);
    one.value_basis =
        testing::random_bases(random, one.shape.layers * one.shape.kv_heads, one.shape.head_dim);
    KvCache cache(one);
    KvSequence sequence = cache.new_sequence();
    const std::vector<float> zeros(8 * kQueryHeads * kDim);
    while (sequence.length() < 200) {
      KvStep step = sequence.begin_step(Phase::prefill, 8);
      for (int layer = 0; layer < kLayers; ++layer) step.append(layer, zeros.data(), zeros.data());
      step.end();
    }
    EXPECT_EQ(cache.memory().host_bytes, cache.plan().host_bytes);
    EXPECT_EQ(cache.memory().device_peak, 0u);
  }
}

TEST(KvCacheMemory, OfTheHostIsRefusedBeforeItIsTaken) {
  KvCache uncapped{config()};
  KvConfig capped = config();
  capped.host_memory = uncapped.plan().host_bytes - 1;
  expect_error(ErrorCode::memory, std::to_string(uncapped.plan().host_bytes) + "B",
               [&] { KvCache cache(capped); });
  capped.host_memory = uncapped.plan().host_bytes;
  KvCache cache(capped);
  EXPECT_LE(cache.memory().host_bytes, *capped.host_memory);
}

}  // namespace
}  // namespace sluice
