// KvCache as callers with a model of their own use it, on every device, against attention in fp64.
#include "sluice/kv_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <thread>

#include "tests/support/backends.h"
#include "tests/support/caller.h"
#include "tests/support/random.h"
#include "tests/support/test_disk.h"
#include "tests/support/value_cases.h"

namespace sluice {
namespace {

using testing::Attended;
using testing::CallerFormat;
using testing::expected_of;
using testing::largest_difference;
using testing::Order;
using testing::run_step;
using testing::Script;
using testing::ScriptPart;
using testing::take;

std::vector<std::string> devices() {
  std::vector<std::string> all;
  for (const testing::NamedBackend& backend : testing::backends_by_kind()) {
    all.push_back(backend.name);
  }
  return all;
}

class Caches : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!on_gpu()) return;
    device_ = testing::make_or_skip(testing::gpu_backends().front());
  }
  bool on_gpu() const { return GetParam() == "cuda"; }
  bool skips() const { return on_gpu() && device_ == nullptr; }
  DType row_dtype() const { return on_gpu() ? DType::bf16 : DType::f32; }

  KvConfig config(std::int64_t context, const RowFormat& rows) const {
    KvConfig config;
    config.shape = {2, 8, 2, 64, rows};
    config.context = context;
    config.chunk = 16;
    config.device = GetParam();
    config.threads = 2;
    return config;
  }
  KvConfig config(std::int64_t context) const { return config(context, row_dtype()); }

  // fp32 sums of terms of order one; a GPU, and AMX in a prompt, round queries and the softmax's
  // weights to the 8 or 11 bits of the rows. Then what is written rounds once more.
  // Keys and values of INT8 rows are rounded to bf16 there, too.
  double tolerance(const RowFormat& rows, DType out) const {
    const double coded = on_gpu() ? 6e-2 : 3e-2;
    const double exact = rows == DType::f32    ? 3e-5
                         : rows == DType::f16  ? 5e-3
                         : rows == DType::bf16 ? 3e-2
                                               : coded;
    return exact + (out == DType::f32 ? 0.0 : out == DType::f16 ? 2e-3 : 2e-2);
  }
  void expect_near(const Attended& actual, const Attended& expected, const RowFormat& rows,
                   DType out = DType::f32) {
    EXPECT_LT(largest_difference(actual.out, expected.out), tolerance(rows, out));
    EXPECT_LT(largest_difference(actual.lse, expected.lse), tolerance(rows, DType::f32));
  }

  const std::uint64_t seed_ = testing::seed(11);
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
  std::unique_ptr<testing::Device> device_;  // whose memory callers' arrays are in
};

INSTANTIATE_TEST_SUITE_P(Devices, Caches, ::testing::ValuesIn(devices()),
                         [](const auto& parameter) { return parameter.param; });

TEST_P(Caches, TakeArraysOfAnyDtypeLayoutMemoryAndScale) {
  if (skips()) return;
  constexpr DType kAll[] = {DType::f32, DType::f16, DType::bf16};
  int number = 0;
  for (const RowFormat& rows :
       {RowFormat(DType::f32), RowFormat(DType::f16), RowFormat(DType::bf16),
        RowFormat(RowCode::int8), RowFormat(RowCode::k8v4)}) {
    if (rows == DType::f32 && on_gpu()) continue;
    for (const DType in : kAll) {
      for (const Order order : {Order::dense, Order::part_of_a_row, Order::heads_first}) {
        // Every dtype of the output, scale and memory with some of the others.
        const DType out = kAll[static_cast<std::size_t>(number % 3)];
        testing::Device* const memory = number % 2 == 0 ? device_.get() : nullptr;
        KvConfig config = this->config(64, rows);
        if (number % 4 > 1) config.scale = 0.31;
        SCOPED_TRACE(std::to_string(number++));
        const KvShape shape = config.shape;
        const double scale = config.scale.value_or(1.0 / 8.0);
        KvCache cache(config);
        KvSequence sequence = cache.new_sequence();
        const Script script(shape, 64, seed_);
        const CallerFormat format = {in, out, order, memory};
        expect_near(take(sequence, shape, script, Phase::prefill, 11, format),
                    expected_of(script, shape, 0, 11, scale, in), rows, out);
        expect_near(take(sequence, shape, script, Phase::decode, 1, format),
                    expected_of(script, shape, 11, 1, scale, in), rows, out);
        expect_near(take(sequence, shape, script, Phase::decode, 3, format),
                    expected_of(script, shape, 12, 3, scale, in), rows, out);
      }
    }
  }
}

TEST_P(Caches, ScaleSelectionAsTheyScaleAttention) {
  if (skips()) return;
  for (const char* const line :
       {"select=int4 prune=top_k(20)", "select=sparq(r=8) prune=top_p(0.9) compensate=mean_value",
        "select=quest prune=top_k(32)", "select=exact prune=top_p(0.8)",
        "select=int4 prune=top_k(8) compensate=values"}) {
    SCOPED_TRACE(line);
    KvConfig scaled = config(320);
    scaled.policies = {parse_policy(line)};
    KvConfig plain = scaled;
    scaled.scale = 0.5;  // 4 times 1/sqrt(64), which is no rounding
    KvCache one(scaled);
    KvCache other(plain);
    KvSequence a = one.new_sequence();
    KvSequence b = other.new_sequence();
    const Script script(scaled.shape, 320, seed_);
    Script by_hand = script;
    by_hand.scale_queries(4.0f);
    for (int i = 0; i < 18; ++i) {
      take(a, scaled.shape, script, Phase::prefill, 16);
      take(b, scaled.shape, by_hand, Phase::prefill, 16);
    }
    for (int i = 0; i < 5; ++i) {
      const Attended actual = take(a, scaled.shape, script, Phase::decode, 1);
      const Attended expected = take(b, scaled.shape, by_hand, Phase::decode, 1);
      EXPECT_EQ(actual.out, expected.out);
      EXPECT_EQ(actual.lse, expected.lse);
      ASSERT_EQ(a.selection().size(), 2u);
      EXPECT_EQ(a.selection()[1].alpha, b.selection()[1].alpha);
      EXPECT_LT(a.selection()[1].attended, 280.0);
    }
  }
}

TEST_P(Caches, CompletePoliciesGiveTheOracleAtAnyScale) {
  if (skips()) return;
  KvConfig config = this->config(200);
  config.scale = 0.05;
  config.policies = {parse_policy("select=int4 prune=top_k(1/1)"), Policy()};
  KvCache cache(config);
  KvSequence sequence = cache.new_sequence();
  const Script script(config.shape, 200, seed_);
  for (int i = 0; i < 10; ++i) take(sequence, config.shape, script, Phase::prefill, 16);
  for (int i = 0; i < 2; ++i) {
    const std::int64_t at = sequence.length();
    expect_near(take(sequence, config.shape, script, Phase::decode, 1),
                expected_of(script, config.shape, at, 1, 0.05), config.shape.rows);
    EXPECT_EQ(sequence.selection().empty(), i == 1);
    sequence.use(config.policies[1]);
  }
}

// Leaves the part of a value that the vectors [d / 2, d] span.
void project(const float* basis, std::size_t d, float* value) {
  std::vector<float> spanned(d);
  for (std::size_t i = 0; i < d / 2; ++i) {
    float product = 0.0f;
    for (std::size_t c = 0; c < d; ++c) product += basis[i * d + c] * value[c];
    for (std::size_t c = 0; c < d; ++c) spanned[c] += product * basis[i * d + c];
  }
  std::copy(spanned.begin(), spanned.end(), value);
}

std::vector<float> basis_of(const KvShape& shape) {
  testing::Random random(23);
  return testing::random_bases(random, shape.layers * shape.kv_heads, shape.head_dim);
}

// Where nothing, or nothing that matters, depends on which of two equals is selected. Estimates go
// through weights of 8 bits on the CPU and numbers of 16 bits on a GPU.
TEST_P(Caches, ValuesInAFewBitsAreThoseOfTheReference) {
  if (skips()) return;
  constexpr double kClose = 6e-2;
  for (const char* const line :
       {"select=int4 prune=none compensate=values(bits=2,pages=1)",
        "select=int4 prune=none compensate=values(bits=3,pages=1)",
        "select=int4 prune=none compensate=values(bits=4,pages=1)",
        "select=int4 prune=none sinks=130 compensate=values(pages=0.3)",
        "select=int4 prune=top_k(16) compensate=values(bits=4,pages=1)",
        "select=int4 prune=none compensate=values(components=half,pages=1)"}) {
    SCOPED_TRACE(line);
    KvConfig config = this->config(300);
    config.policies = {parse_policy(line)};
    if (config.policies[0].values.half) config.value_basis = basis_of(config.shape);
    // Rounded weights may choose other pages.
    if (on_gpu() && config.policies[0].values.pages < 1.0) continue;
    KvConfig reference = config;
    reference.device = "reference";
    KvCache cache(config);
    KvCache expected_cache(reference);
    KvSequence sequence = cache.new_sequence();
    KvSequence expected_sequence = expected_cache.new_sequence();
    const Script script(config.shape, 300, seed_);
    for (int i = 0; i < 15; ++i) {
      take(sequence, config.shape, script, Phase::prefill, 16);
      take(expected_sequence, config.shape, script, Phase::prefill, 16);
    }
    // Over the end of a page, which is then of those that are built.
    for (int i = 0; i < 20; ++i) {
      const Attended actual = take(sequence, config.shape, script, Phase::decode, 1);
      const Attended expected = take(expected_sequence, config.shape, script, Phase::decode, 1);
      EXPECT_LT(largest_difference(actual.out, expected.out), kClose) << i;
      EXPECT_LT(largest_difference(actual.lse, expected.lse), kClose) << i;
    }
    const auto values = [](const KvSequence& of, Tier tier) {
      return of.ledger().total(Phase::decode, tier, tier, Cause::value_read).bytes;
    };
    EXPECT_GT(values(expected_sequence, Tier::host), 0u);
    EXPECT_EQ(values(sequence, on_gpu() ? Tier::device : Tier::host),
              values(expected_sequence, Tier::host));
  }
}

// Values that the vectors span lose nothing by them, and others lose what lies beside.
TEST_P(Caches, ComponentsOfValuesAreThoseOfTheCallersBasis) {
  if (skips()) return;
  KvConfig config = this->config(400);
  config.policies = {
      parse_policy("select=int4 prune=none compensate=values(bits=4,components=half,pages=1)")};
  config.value_basis = basis_of(config.shape);
  KvConfig whole = config;
  whole.policies = {parse_policy("select=int4 prune=none compensate=values(bits=4,pages=1)")};
  whole.value_basis.clear();
  KvCache cache(config);
  KvCache expected_cache(whole);
  EXPECT_EQ(cache.plan().staging_bytes,
            expected_cache.plan().staging_bytes + config.value_basis.size() * sizeof(float));
  testing::Random random(29);
  const KvShape& shape = config.shape;
  const auto width = static_cast<std::size_t>(shape.kv_heads * shape.head_dim);
  const std::size_t d = static_cast<std::size_t>(shape.head_dim);
  for (const bool is_spanned : {true, false}) {
    SCOPED_TRACE(is_spanned);
    KvSequence sequence = cache.new_sequence();
    KvSequence expected = expected_cache.new_sequence();
    std::vector<float> out(static_cast<std::size_t>(shape.query_heads) * d);
    std::vector<float> wanted = out;
    const auto take_both = [&](Phase phase, std::int64_t tokens) {
      KvStep step = sequence.begin_step(phase, tokens);
      KvStep other = expected.begin_step(phase, tokens);
      for (int layer = 0; layer < shape.layers; ++layer) {
        const std::vector<float> k = random.normal(tokens * static_cast<std::int64_t>(width));
        std::vector<float> v = random.normal(tokens * static_cast<std::int64_t>(width));
        for (std::size_t row = 0; is_spanned && row < v.size() / d; ++row) {
          const std::size_t head = static_cast<std::size_t>(layer * shape.kv_heads) +
                                   row % static_cast<std::size_t>(shape.kv_heads);
          project(&config.value_basis[head * d / 2 * d], d, &v[row * d]);
        }
        step.append(layer, k.data(), v.data());
        other.append(layer, k.data(), v.data());
        if (phase != Phase::decode) continue;
        const std::vector<float> q = random.normal(std::ssize(out));
        step.attend(layer, q.data(), out.data());
        other.attend(layer, q.data(), wanted.data());
      }
      step.end();
      other.end();
    };
    for (int i = 0; i < 20; ++i) take_both(Phase::prefill, 16);
    take_both(Phase::decode, 1);
    const double difference = largest_difference(out, wanted);
    if (is_spanned) {
      EXPECT_LT(difference, 0.08);
    } else {
      EXPECT_GT(difference, 0.12);
    }
  }
}

// What a step selected weighs as much as what it did not, but for the rounding of rows and logits.
void expect_largest_selected(const KvCache& cache, const KvSequence& sequence, const Script& script,
                             std::size_t selected) {
  const KvShape& shape = cache.plan().shape;
  ASSERT_EQ(sequence.selection().size(), 2u);
  const auto heads = static_cast<std::size_t>(shape.kv_heads);
  for (const LayerSelection& layer : sequence.selection()) {
    const std::size_t source = layer.follower ? 0 : static_cast<std::size_t>(layer.layer);
    ASSERT_EQ(layer.positions.size(), static_cast<std::size_t>(layer.tokens) * heads);
    for (std::size_t i = 0; i < layer.positions.size(); ++i) {
      const std::int64_t token =
          sequence.length() - layer.tokens + static_cast<std::int64_t>(i / heads);
      const std::int64_t page = token / kPageTokens * kPageTokens;
      const std::vector<std::int32_t>& chosen = layer.positions[i];
      ASSERT_EQ(chosen.size(), selected);
      ASSERT_TRUE(std::is_sorted(chosen.begin(), chosen.end()));
      double least = 1e30;
      double most_left = -1e30;
      for (std::int64_t at = 0; at < page; ++at) {
        const auto head = static_cast<std::int64_t>(i % heads) * shape.head_dim;
        double logit = 0.0;
        for (int c = 0; c < shape.head_dim; ++c) {
          logit += static_cast<double>(script.q(source, token)[head + c]) *
                   static_cast<double>(script.k(source, at)[head + c]);
        }
        logit /= std::sqrt(shape.head_dim);
        const bool is_chosen = std::binary_search(chosen.begin(), chosen.end(), at);
        (is_chosen ? least : most_left) =
            is_chosen ? std::min(least, logit) : std::max(most_left, logit);
      }
      EXPECT_GT(least, most_left - 0.05) << "layer " << layer.layer << ", entry " << i;
    }
  }
}

TEST_P(Caches, ReportPositionsThatStepsSelected) {
  if (skips()) return;
  for (const char* const line :
       {"select=exact prune=top_k(24)", "select=exact prune=top_k(24) anchors=0",
        "select=exact prune=top_k(24) anchors=0 anchors_attend=all"}) {
    SCOPED_TRACE(line);
    KvConfig config = this->config(400);
    config.shape.query_heads = config.shape.kv_heads;
    config.policies = {parse_policy(line)};
    config.decode_batch = 2;
    KvCache silent(config);
    config.reports_positions = true;
    KvCache cache(config);
    EXPECT_GT(cache.plan().work_bytes, silent.plan().work_bytes);
    const Script script(config.shape, 400, seed_);
    KvSequence sequence = cache.new_sequence();
    for (int i = 0; i < 15; ++i) take(sequence, config.shape, script, Phase::prefill, 16);
    for (int i = 0; i < 20; ++i) {
      take(sequence, config.shape, script, Phase::decode, sequence.decode_room());
      expect_largest_selected(cache, sequence, script, 24);
    }
    KvSequence quiet = silent.new_sequence();
    for (int i = 0; i < 15; ++i) take(quiet, config.shape, script, Phase::prefill, 16);
    take(quiet, config.shape, script, Phase::decode, 1);
    EXPECT_TRUE(quiet.selection().front().positions.empty());
  }
}

TEST_P(Caches, BatchesGiveWhatSequencesGetAlone) {
  if (skips()) return;
  for (const char* const line : {"dense", "select=int4 prune=top_k(24)",
                                 "select=sparq prune=top_k(32) compensate=mean_value",
                                 "select=int4 prune=top_k(16) compensate=values"}) {
    SCOPED_TRACE(line);
    KvConfig shared = config(300);
    shared.policies = {parse_policy(line)};
    KvConfig single = shared;
    shared.sequences = 4;
    const std::int64_t lengths[] = {1, 127, 128, 250};
    KvCache cache(shared);
    std::vector<KvCache> own;
    std::vector<KvSequence> together, alone;
    std::vector<KvSequence*> batch;
    std::vector<Script> scripts;
    for (std::size_t i = 0; i < 4; ++i) {
      scripts.emplace_back(shared.shape, 300, seed_ + i);
      together.push_back(cache.new_sequence());
      alone.push_back(own.emplace_back(single).new_sequence());
      while (alone[i].length() < lengths[i]) {
        const auto tokens = std::min<std::int64_t>(16, lengths[i] - alone[i].length());
        take(together[i], shared.shape, scripts[i], Phase::prefill, tokens);
        take(alone[i], shared.shape, scripts[i], Phase::prefill, tokens);
      }
    }
    for (KvSequence& sequence : together) batch.push_back(&sequence);
    for (int step = 0; step < 3; ++step) {
      std::vector<ScriptPart> parts;
      for (std::size_t i = 0; i < 4; ++i) parts.push_back({&scripts[i], together[i].length(), 1});
      KvStep several = cache.begin_step(batch);
      const Attended all = run_step(several, shared.shape, parts,
                                    {DType::f32, DType::f32, Order::part_of_a_row, device_.get()});
      const std::size_t width = 8 * 64;
      for (std::size_t i = 0; i < 4; ++i) {
        const Attended expected = take(alone[i], shared.shape, scripts[i], Phase::decode, 1);
        Attended actual;
        for (std::size_t layer = 0; layer < 2; ++layer) {
          const std::size_t at = layer * 4 + i;
          const auto out = all.out.begin() + static_cast<std::ptrdiff_t>(at * width);
          const auto lse = all.lse.begin() + static_cast<std::ptrdiff_t>(at * 8);
          actual.out.insert(actual.out.end(), out, out + width);
          actual.lse.insert(actual.lse.end(), lse, lse + 8);
        }
        EXPECT_LT(largest_difference(actual.out, expected.out), on_gpu() ? 2e-3 : 3e-5) << i;
        EXPECT_LT(largest_difference(actual.lse, expected.lse), on_gpu() ? 2e-3 : 3e-5) << i;
        EXPECT_EQ(together[i].length(), alone[i].length());
      }
    }
  }
}

TEST_P(Caches, ForksAndCutsAnswerAsTheirTokensSay) {
  if (skips()) return;
  KvConfig config = this->config(160);
  config.sequences = 3;
  const KvShape shape = config.shape;
  KvCache cache(config);
  KvSequence root = cache.new_sequence();
  const Script script(shape, 160, seed_);
  for (int i = 0; i < 9; ++i) take(root, shape, script, Phase::prefill, 16);
  const std::uint64_t before = cache.memory().host_bytes;
  KvSequence fork = root.fork();
  KvSequence cut = root.fork();
  cut.truncate(70);
  EXPECT_EQ(cache.memory().host_bytes, before);
  EXPECT_EQ(fork.ledger().tokens(Phase::prefill), 0u);
  // One script after another's first tokens.
  Script other(shape, 160, seed_ + 1);
  other.begin_as(script, 70);
  for (int i = 0; i < 3; ++i) {
    for (KvSequence* const sequence : {&root, &fork}) {
      const std::int64_t at = sequence->length();
      expect_near(take(*sequence, shape, script, Phase::decode, 1),
                  expected_of(script, shape, at, 1, 0.125), shape.rows);
    }
    const std::int64_t at = cut.length();
    expect_near(take(cut, shape, other, Phase::prefill, 5), expected_of(other, shape, at, 5, 0.125),
                shape.rows);
  }
  EXPECT_EQ(cut.length(), 85);
  EXPECT_EQ(root.length(), 147);
}

TEST_P(Caches, WhatIsNoNumberEndsItsSequenceAlone) {
  if (skips()) return;
  KvConfig config = this->config(160);
  config.sequences = 2;
  config.policies = {parse_policy("select=int4 prune=top_k(1/1)")};
  const KvShape shape = config.shape;
  const Script script(shape, 160, seed_);
  for (const float value : {NAN, INFINITY, -INFINITY, 0x1p60f}) {
    for (const bool in_key : {true, false}) {
      std::vector<testing::Device*> memories = {nullptr};
      if (on_gpu()) memories.push_back(device_.get());
      for (testing::Device* const memory : memories) {
        KvCache cache(config);
        KvSequence good = cache.new_sequence();
        KvSequence bad = cache.new_sequence();
        for (KvSequence* const sequence : {&good, &bad}) {
          for (int i = 0; i < 8; ++i) take(*sequence, shape, script, Phase::prefill, 16);
        }
        Script damaged = script;
        if (in_key) damaged.damage_key(1, 128, value);
        if (!in_key) damaged.damage_value(1, 128, value);
        KvSequence* const both[] = {&bad, &good};
        const ScriptPart parts[] = {{&damaged, 128, 1}, {&script, 128, 1}};
        KvStep step = cache.begin_step(both);
        try {
          run_step(step, shape, parts, {DType::f32, DType::f32, Order::dense, memory});
          FAIL() << "took " << value;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::numeric);
          const std::string text = error.what();
          EXPECT_NE(text.find(in_key ? "keys of layer 1, KV head 0" : "values of layer 1, KV head"),
                    std::string::npos)
              << text;
        }
        EXPECT_FALSE(good.failure());
        ASSERT_TRUE(bad.failure());
        EXPECT_THROW(bad.begin_step(Phase::decode, 1), Error);
        EXPECT_THROW(bad.fork(), Error);
        expect_near(take(good, shape, script, Phase::decode, 1),
                    expected_of(script, shape, 129, 1, 0.125), shape.rows);
        // Memory that it had serves again.
        bad.reset();
        EXPECT_EQ(bad.length(), 0);
        for (int i = 0; i < 8; ++i) take(bad, shape, script, Phase::prefill, 16);
        expect_near(take(bad, shape, script, Phase::decode, 1),
                    expected_of(script, shape, 128, 1, 0.125), shape.rows);
      }
    }
  }
}

TEST_P(Caches, ThreadsTakeTurns) {
  if (skips()) return;
  KvConfig config = this->config(60);
  config.sequences = 4;
  const KvShape shape = config.shape;
  KvCache cache(config);
  std::vector<std::thread> threads;
  std::vector<Attended> last(4);
  std::atomic<int> errors = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      try {
        const Script script(shape, 60, seed_ + i);
        KvSequence sequence = cache.new_sequence();
        take(sequence, shape, script, Phase::prefill, 16);
        KvSequence(std::move(sequence)).truncate(3);  // and its end
        sequence = cache.new_sequence();
        for (int step = 0; step < 20; ++step) {
          last[i] = take(sequence, shape, script, Phase::decode, 1);
        }
      } catch (const Error&) {
        ++errors;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors, 0);
  for (std::size_t i = 0; i < 4; ++i) {
    expect_near(last[i], expected_of(Script(shape, 60, seed_ + i), shape, 19, 1, 0.125),
                shape.rows);
  }
}

// Steps of 16 tokens and of one in turn, up to the whole context; the last one's attention.
Attended fill(KvSequence& sequence, const KvShape& shape, const Script& script,
              std::int64_t context) {
  Attended last;
  for (int i = 0; sequence.length() < context; ++i) {
    const auto tokens = std::min<std::int64_t>(context - sequence.length(), i % 2 == 0 ? 16 : 1);
    last = take(sequence, shape, script, tokens == 1 ? Phase::decode : Phase::prefill, tokens);
  }
  return last;
}

TEST_P(Caches, CapsChangeTheBytesMovedAndNotTheAnswer) {
  if (skips()) return;
  KvConfig free = config(500);
  free.sequences = 2;
  const KvShape shape = free.shape;
  const Script script(shape, 500, seed_);
  KvCache uncapped(free);
  KvSequence whole = uncapped.new_sequence();
  const Attended expected = fill(whole, shape, script, 500);
  EXPECT_EQ(uncapped.memory().device_bytes == 0, !on_gpu());
  // Room for 2 pages of every layer and KV head and for two streaming buffers, or for everything;
  // on a GPU besides what the backend and callers' arrays take.
  const std::uint64_t page = kPageTokens * shape.row_bytes();
  EXPECT_EQ(uncapped.plan().device_bytes, uncapped.memory().device_bytes);
  const std::uint64_t beside = on_gpu() ? uncapped.plan().staging_bytes : 0;
  for (const std::uint64_t pages : {16u, 24u, 80u}) {
    KvConfig capped = free;
    capped.device_memory = beside + pages * page;
    KvCache cache(capped);
    EXPECT_LE(cache.plan().device_bytes, *capped.device_memory);
    KvSequence sequence = cache.new_sequence();
    const Attended actual = fill(sequence, shape, script, 500);
    EXPECT_LT(largest_difference(actual.out, expected.out), on_gpu() ? 2e-3 : 3e-5);
    EXPECT_LE(cache.memory().device_peak, *capped.device_memory);
    EXPECT_EQ(sequence.ledger().crossed(Tier::host, Tier::device).rows == 0, pages == 80);
  }
}

TEST_P(Caches, RowsOnDiskAnswerAsRowsInMemory) {
  if (skips()) return;
  const auto directory = testing::disk_directory();
  if (!directory) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
  for (const char* const policy : {"dense", "select=int4 prune=top_k(40) compensate=values",
                                   "select=int4 prune=top_k(40) dense=1"}) {
    SCOPED_TRACE(policy);
    // More rows than the least that the host needs beside a disk; the reference is slow.
    const std::int64_t context = on_gpu() ? 3000 : 700;
    KvConfig config = this->config(context);
    config.chunk = 64;
    if (policy != std::string("dense")) config.policies = {parse_policy(policy)};
    const KvShape shape = config.shape;
    const Script script(shape, context, seed_);
    KvCache in_memory(config);
    KvSequence whole = in_memory.new_sequence();
    const Attended expected = fill(whole, shape, script, context - 50);
    const std::uint64_t page = kPageTokens * shape.row_bytes();
    config.device_memory = in_memory.plan().staging_bytes + in_memory.plan().index_bytes +
                           in_memory.plan().work_bytes + 16 * page;
    config.host_memory = KvCache(config).plan().host_bytes - 1;
    config.disk = DiskConfig{{*directory}, {}};
    KvCache cache(config);
    ASSERT_TRUE(cache.plan().on_disk);
    KvSequence sequence = cache.new_sequence();
    const Attended actual = fill(sequence, shape, script, context - 50);
    EXPECT_LT(largest_difference(actual.out, expected.out), on_gpu() ? 1e-2 : 3e-5);
    KvSequence* const both[] = {&whole, &sequence};
    for (int i = 0; i < 20; ++i) {
      Attended after[2];
      for (int k : {0, 1}) after[k] = take(*both[k], shape, script, Phase::decode, 1);
      EXPECT_LT(largest_difference(after[1].out, after[0].out), on_gpu() ? 1e-2 : 3e-5) << i;
    }
    EXPECT_GT(sequence.ledger().total(Phase::decode, Tier::disk, Tier::host, Cause::miss).rows, 0u);
    EXPECT_LE(cache.memory().host_peak, *config.host_memory);
    EXPECT_LE(cache.memory().device_peak, *config.device_memory);
  }
}

TEST_P(Caches, OutliveTheirHandles) {
  if (skips()) return;
  std::optional<KvSequence> sequence;
  std::optional<KvSequence> fork;
  const KvConfig config = [&] {
    KvConfig two = this->config(60);
    two.sequences = 2;
    return two;
  }();
  const Script script(config.shape, 60, seed_);
  {
    KvCache cache(config);
    KvCache moved = std::move(cache);
    sequence = moved.new_sequence();
    take(*sequence, config.shape, script, Phase::prefill, 9);
    fork = sequence->fork();
  }
  KvStep step = sequence->begin_step(Phase::decode, 1);
  const ScriptPart part = {&script, 9, 1};
  sequence.reset();
  expect_near(run_step(step, config.shape, {&part, 1}),
              expected_of(script, config.shape, 9, 1, 0.125), config.shape.rows);
  expect_near(take(*fork, config.shape, script, Phase::decode, 1),
              expected_of(script, config.shape, 9, 1, 0.125), config.shape.rows);
}

}  // namespace
}  // namespace sluice
