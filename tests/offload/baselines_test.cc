// Double Sparsity and SnapKV against plain definitions in fp64 that share nothing with them: what
// is attended to, and the bytes of plans and ledgers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "offload/step/kv_session.h"
#include "sluice/errors.h"
#include "sluice/half.h"
#include "tests/support/backends.h"
#include "tests/support/counting_backend.h"
#include "tests/support/elements.h"
#include "tests/support/plan.h"
#include "tests/support/script.h"

namespace sluice {
namespace {

using testing::CountingBackend;
using ::testing::HasSubstr;
using testing::largest_difference;
using testing::Script;

constexpr double kTolerance = 3e-5;  // fp32 sums of a few thousand terms of order one

// One layer's queries, keys and values as rows have them.
class Layer {
 public:
  Layer(const Script& script, std::size_t layer, std::int64_t tokens)
      : shape_(script.shape()),
        q_(script.q(layer, 0), script.q(layer, 0) + tokens * script.query_width()),
        k_(rounded(script.k(layer, 0), tokens * script.key_width())),
        v_(rounded(script.v(layer, 0), tokens * script.key_width())) {}

  const KvShape& shape() const { return shape_; }
  double q(std::int64_t t, int query, int c) const {
    return at(q_, t, shape_.query_heads, query, c);
  }
  double k(std::int64_t t, int head, int c) const { return at(k_, t, shape_.kv_heads, head, c); }
  double logit(std::int64_t at, int query, std::int64_t t) const {
    double sum = 0.0;
    for (int c = 0; c < shape_.head_dim; ++c)
      sum += q(at, query, c) * k(t, query / shape_.group(), c);
    return sum / std::sqrt(shape_.head_dim);
  }
  // Attention of `at` to the positions chosen by its KV heads and to its own page.
  std::vector<float> output(std::int64_t at,
                            const std::vector<std::set<std::int64_t>>& chosen) const {
    std::vector<float> result;
    for (int query = 0; query < shape_.query_heads; ++query) {
      const int head = query / shape_.group();
      std::set<std::int64_t> positions = chosen[static_cast<std::size_t>(head)];
      for (std::int64_t t = at / kPageTokens * kPageTokens; t <= at; ++t) positions.insert(t);
      std::vector<double> sums(static_cast<std::size_t>(shape_.head_dim));
      double total = 0.0;
      for (const std::int64_t t : positions) {
        const double weight = std::exp(logit(at, query, t) - 20.0);
        total += weight;
        for (int c = 0; c < shape_.head_dim; ++c) {
          sums[static_cast<std::size_t>(c)] += weight * this->at(v_, t, shape_.kv_heads, head, c);
        }
      }
      for (const double sum : sums) result.push_back(static_cast<float>(sum / total));
    }
    return result;
  }

 private:
  std::vector<float> rounded(const float* from, std::int64_t count) const {
    return testing::rounded({from, from + count}, shape_.rows.element);
  }
  double at(const std::vector<float>& of, std::int64_t t, int heads, int head, int c) const {
    return of[static_cast<std::size_t>((t * heads + head) * shape_.head_dim + c)];
  }

  KvShape shape_;
  std::vector<float> q_, k_, v_;
};

// The `count` largest, the first of equal ones.
std::vector<std::int64_t> largest(const std::vector<double>& values, std::size_t count) {
  std::vector<std::int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)];
  });
  order.resize(std::min(order.size(), count));
  return order;
}

// What Double Sparsity estimates of position t from r channels in 4 bits.
class LabelOracle {
 public:
  LabelOracle(const Layer& layer, int r) : layer_(&layer) {
    const KvShape& shape = layer.shape();
    for (int head = 0; head < shape.kv_heads; ++head) {
      std::vector<double> variance;
      for (int c = 0; c < shape.head_dim; ++c) {
        double mean = 0.0;
        for (std::int64_t t = 4; t < kPageTokens; ++t) mean += layer.k(t, head, c) / 124.0;
        double sum = 0.0;
        for (std::int64_t t = 4; t < kPageTokens; ++t) {
          sum += (layer.k(t, head, c) - mean) * (layer.k(t, head, c) - mean);
        }
        variance.push_back(sum);
      }
      channels_.push_back(largest(variance, static_cast<std::size_t>(r)));
    }
  }

  double estimate(std::int64_t at, int query, std::int64_t t) const {
    const int head = query / layer_->shape().group();
    std::vector<double> key;
    for (const std::int64_t c : channels_[static_cast<std::size_t>(head)]) {
      key.push_back(layer_->k(t, head, static_cast<int>(c)));
    }
    const auto [least, most] = std::minmax_element(key.begin(), key.end());
    const auto f16 = [](double x) { return f16_to_float(float_to_f16(static_cast<float>(x))); };
    const double lowest = f16(*least);
    const double step = f16((*most - *least) / 15.0);
    double sum = 0.0;
    for (std::size_t i = 0; i < key.size(); ++i) {
      const double code = std::clamp(std::round((key[i] - lowest) / step), 0.0, 15.0);
      const auto c = static_cast<int>(channels_[static_cast<std::size_t>(head)][i]);
      sum += layer_->q(at, query, c) * (lowest + step * code);
    }
    return sum / std::sqrt(layer_->shape().head_dim);
  }

  std::vector<std::set<std::int64_t>> chosen(std::int64_t at, std::size_t k) const {
    const KvShape& shape = layer_->shape();
    const std::int64_t first = at / kPageTokens * kPageTokens;
    std::vector<std::set<std::int64_t>> result;
    for (int head = 0; head < shape.kv_heads; ++head) {
      std::vector<double> weights(static_cast<std::size_t>(first));
      for (int g = 0; g < shape.group(); ++g) {
        const int query = head * shape.group() + g;
        std::vector<double> e;
        double sum = 0.0;
        for (std::int64_t t = 0; t <= at; ++t) {
          e.push_back(
              std::exp((t < first ? estimate(at, query, t) : layer_->logit(at, query, t)) - 20.0));
          sum += e.back();
        }
        for (std::size_t t = 0; t < weights.size(); ++t) weights[t] += e[t] / sum;
      }
      const std::vector<std::int64_t> best = largest(weights, k);
      result.emplace_back(best.begin(), best.end());
    }
    return result;
  }

 private:
  const Layer* layer_;
  std::vector<std::vector<std::int64_t>> channels_;  // by KV head
};

struct Snap {
  std::int64_t end = 0;     // of the prompt
  std::int64_t window = 0;  // of its queries, as many as were seen
  std::size_t rows = 0;
  std::int64_t kernel = 0;
};

// What SnapKV keeps of a prompt and of what follows, before the page of `at`.
std::vector<std::set<std::int64_t>> kept(const Layer& layer, const Snap& snap, std::int64_t at) {
  const KvShape& shape = layer.shape();
  const std::int64_t before = snap.end - snap.window;
  std::vector<std::set<std::int64_t>> result;
  for (int head = 0; head < shape.kv_heads; ++head) {
    std::vector<double> votes(static_cast<std::size_t>(before));
    for (std::int64_t from = before; from < snap.end; ++from) {
      for (int query = head * shape.group(); query < (head + 1) * shape.group(); ++query) {
        std::vector<double> e;
        for (std::int64_t t = 0; t <= from; ++t) {
          e.push_back(std::exp(layer.logit(from, query, t) - 20.0));
        }
        const double sum = std::accumulate(e.begin(), e.end(), 0.0);
        for (std::size_t t = 0; t < votes.size(); ++t) votes[t] += e[t] / sum;
      }
    }
    std::vector<double> pooled;
    for (std::int64_t t = 0; t < before; ++t) {
      double most = 0.0;
      for (std::int64_t near = t - snap.kernel / 2; near < t - snap.kernel / 2 + snap.kernel;
           ++near) {
        if (near >= 0 && near < before)
          most = std::max(most, votes[static_cast<std::size_t>(near)]);
      }
      pooled.push_back(most);
    }
    const std::vector<std::int64_t> best =
        largest(pooled, std::min(snap.rows, static_cast<std::size_t>(snap.end)) -
                            static_cast<std::size_t>(snap.window));
    std::set<std::int64_t>& all = result.emplace_back(best.begin(), best.end());
    const std::int64_t first = at / kPageTokens * kPageTokens;
    for (std::int64_t t = before; t < first; ++t) all.insert(t);
    std::erase_if(all, [&](std::int64_t t) { return t >= first; });
  }
  return result;
}

KvPlan plan_of(const BackendInfo& on, const KvShape& shape, const Policy& policy,
               std::optional<std::uint64_t> cap = std::nullopt, std::int64_t sequences = 1) {
  KvRequest request;
  request.shape = shape;
  request.on = on;
  request.context = 700;
  request.chunk = 64;
  request.sequences = sequences;
  request.decode_batch = 4;
  request.policies = {&policy, 1};
  request.device_cap = cap;
  return plan_kv(request);
}

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + 63) / 64 * 64; }

std::vector<float> all_outputs(const Script& script, std::int64_t at, const auto& chosen_in) {
  std::vector<float> expected;
  for (std::size_t number = 0; number < static_cast<std::size_t>(script.shape().layers); ++number) {
    const Layer layer(script, number, at + 1);
    const std::vector<float> of = layer.output(at, chosen_in(layer));
    expected.insert(expected.end(), of.begin(), of.end());
  }
  return expected;
}

// Calls body(session) with all rows resident, and under a cap that holds a few pages.
void with_and_without_cap(const KvShape& shape, const Policy& policy, const auto& body) {
  const KvPlan free = plan_of(CountingBackend().info(), shape, policy);
  const std::uint64_t cap = free.index_bytes + free.work_bytes + free.table_bytes +
                            8 * kPageTokens * shape.token_bytes() / 2;
  for (const bool capped : {false, true}) {
    SCOPED_TRACE(capped ? "capped" : "free");
    CountingBackend backend(capped ? cap : MemoryAccount::kNoCap);
    const KvPlan plan = capped ? plan_of(backend.info(), shape, policy, cap) : free;
    KvSession session = testing::session_of(backend, plan, {&policy, 1});
    body(session);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(DoubleSparsity, AttendsToWhatTheDefinitionSays) {
  const std::uint64_t seed = testing::seed(51);
  SCOPED_TRACE(testing::seed_message(seed));
  for (const int group : {1, 4}) {
    const KvShape shape{2, 2 * group, 2, 32, DType::bf16};
    const Script script(shape, 700, seed);
    for (const int r : {8, 5, 32}) {
      const Policy policy =
          parse_policy("select=double_sparsity(r=" + std::to_string(r) + ") prune=top_k(48)");
      with_and_without_cap(shape, policy, [&](KvSession& session) {
        script.prefill(session, 510);
        for (std::int64_t at = 510; at < 514; ++at) {
          const std::vector<float> actual = script.step(session, Phase::decode, 1);
          const std::vector<float> expected = all_outputs(
              script, at, [&](const Layer& layer) { return LabelOracle(layer, r).chosen(at, 48); });
          ASSERT_LT(largest_difference(actual, expected), kTolerance)
              << "group " << group << ", r " << r << ", position " << at;
        }
      });
    }
  }
}

// Labels are those of a sequence's first page, also after that was forgotten.
TEST(DoubleSparsity, ForksAndRewindingKeepTheDefinition) {
  const std::uint64_t seed = testing::seed(52);
  SCOPED_TRACE(testing::seed_message(seed));
  const KvShape shape{2, 4, 2, 32, DType::bf16};
  const Policy policy = parse_policy("select=double_sparsity prune=top_k(20)");
  const Script one(shape, 700, seed);
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool = std::make_shared<KvPool>(
      backend.make_queue(), plan_of(backend.info(), shape, policy, {}, 3), std::span(&policy, 1));
  KvSession root(pool);
  one.prefill(root, 300);
  for (const std::int64_t length : {300, 256, 130, 5}) {
    Script two(shape, 700, seed + 1);
    two.begin_as(one, length);
    KvSession fork = root.fork();
    fork.truncate(length);
    two.prefill(fork, 520 - length);
    const std::vector<float> expected = all_outputs(
        two, 520, [&](const Layer& layer) { return LabelOracle(layer, 8).chosen(520, 20); });
    EXPECT_LT(largest_difference(two.step(fork, Phase::decode, 1), expected), kTolerance) << length;
  }
}

TEST(DoubleSparsity, ItsBytesArePlannedAndInTheLedger) {
  const KvShape shape{3, 8, 2, 64, DType::bf16};
  const Policy policy = parse_policy("double_sparsity");
  EXPECT_EQ(to_string(policy), "select=double_sparsity prune=top_k(1/16)");
  const std::uint64_t page = 128 * (2 + 2 + 16 / 2);  // scale, lowest, 16 channels
  CountingBackend backend;
  const KvPlan plan = plan_of(backend.info(), shape, policy);
  const std::uint64_t pages = plan.index_bytes - 3 * aligned(2 * 16);
  EXPECT_EQ(pages % (3 * 2 * kTilePages * page), 0u);
  EXPECT_GE(pages, 3 * 2 * 6 * page);
  EXPECT_LE(pages, 3 * 2 * (6 + 2 * kTilePages) * page);
  KvSession session = testing::session_of(backend, plan, {&policy, 1});
  const Script script(shape, 700, 3);
  script.prefill(session, 650);
  script.step(session, Phase::decode, 1);
  const Traffic index =
      session.ledger().total(Phase::decode, Tier::host, Tier::host, Cause::index_read);
  EXPECT_EQ(index.bytes, 3u * 2 * (16 + 5 * page + 11 * 64 * 2)) << "channels, pages, newest keys";
  EXPECT_EQ(index.rows, 3u * 2 * 651);
}

TEST(SnapKv, AttendsToWhatTheDefinitionSays) {
  const std::uint64_t seed = testing::seed(53);
  SCOPED_TRACE(testing::seed_message(seed));
  const Policy policy =
      parse_policy("select=snapkv(kernel=5,rows=60,window=16) prune=top_p(0.9999)");
  for (const int group : {1, 4}) {
    const KvShape shape{2, 2 * group, 2, 32, DType::bf16};
    const Script script(shape, 700, seed);
    with_and_without_cap(shape, policy, [&](KvSession& session) {
      // The last piece of the prompt has 2 tokens, so the window is in two; tokens after it fill a
      // page.
      script.prefill(session, 450);
      for (std::int64_t at = 450; at < 520; ++at) {
        const std::vector<float> actual = script.step(session, Phase::decode, 1);
        if (at > 451 && at < 511) continue;
        std::size_t rows = 0;
        const std::vector<float> expected = all_outputs(script, at, [&](const Layer& layer) {
          const auto chosen = kept(layer, {450, 16, 60, 5}, at);
          rows = chosen[0].size() + chosen[1].size();
          return chosen;
        });
        ASSERT_LT(largest_difference(actual, expected), kTolerance)
            << "group " << group << ", position " << at;
        EXPECT_EQ(session.selection().at(1).selected, static_cast<double>(rows) / 2);
      }
    });
  }
}

TEST(SnapKv, ChoosesAgainAfterAnotherPrompt) {
  const std::uint64_t seed = testing::seed(54);
  SCOPED_TRACE(testing::seed_message(seed));
  const KvShape shape{1, 4, 2, 32, DType::bf16};
  const Policy policy = parse_policy("select=snapkv(rows=60,window=16) prune=top_p(0.9999)");
  const Script script(shape, 700, seed);
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool = std::make_shared<KvPool>(
      backend.make_queue(), plan_of(backend.info(), shape, policy, {}, 3), std::span(&policy, 1));
  const auto expect = [&](KvSession& session, const Snap& snap, const char* what) {
    const std::int64_t at = session.length();
    const std::vector<float> expected =
        all_outputs(script, at, [&](const Layer& layer) { return kept(layer, snap, at); });
    EXPECT_LT(largest_difference(script.step(session, Phase::decode, 1), expected), kTolerance)
        << what;
  };
  KvSession root(pool);
  script.prefill(root, 300);
  KvSession fork = root.fork();
  expect(root, {300, 16, 60, 7}, "a prompt");
  script.prefill(fork, 200);
  expect(fork, {500, 16, 60, 7}, "a fork's own prompt");
  expect(root, {300, 16, 60, 7}, "beside it");
  script.prefill(root, 3);
  expect(root, {305, 3, 60, 7}, "three tokens behind an answer, whose queries were not seen");
  fork.truncate(500);
  expect(fork, {500, 16, 60, 7}, "an answer that was taken back");
  fork.truncate(495);
  expect(fork, {495, 11, 60, 7}, "a prompt that was cut");
  fork.truncate(400);
  const std::vector<float> everything = all_outputs(script, 400, [&](const Layer& layer) {
    return kept(layer, {0, 0, 60, 7}, 400);
  });
  EXPECT_LT(largest_difference(script.step(fork, Phase::decode, 1), everything), kTolerance)
      << "cut before the window, so nothing is forgotten";
}

TEST(SnapKv, ItsBytesArePlannedAndInTheLedger) {
  const KvShape shape{3, 8, 2, 64, DType::bf16};
  const Policy policy = parse_policy("select=snapkv(rows=100,window=8) prune=top_p(0.9999)");
  CountingBackend backend;
  const KvPlan plan = plan_of(backend.info(), shape, policy);
  const std::uint64_t queries = 8 * 8 * 64 * 4;
  EXPECT_EQ(plan.index_bytes, 3 * aligned(24 + queries + 2 * 100 * 4));
  KvSession session = testing::session_of(backend, plan, {&policy, 1});
  const Script script(shape, 700, 3);
  script.prefill(session, 650);
  const auto index = [&] {
    return session.ledger().total(Phase::decode, Tier::host, Tier::host, Cause::index_read).bytes;
  };
  script.step(session, Phase::decode, 1);
  const std::uint64_t each = 24 + 2 * 92 * 4;  // notes; positions
  EXPECT_EQ(index(), 3 * (each + 2 * (queries + 650 * 128 + 92 * 4 + 11 * 128)));
  const std::uint64_t first = index();
  script.step(session, Phase::decode, 1);
  EXPECT_EQ(index() - first, 3 * (each + 2 * 12 * 128));
}

TEST(SnapKv, RefusesWhatItCannotKeep) {
  const auto refusal = [](const std::string& text) -> std::string {
    try {
      validate(parse_policy(text), KvShape{1, 4, 2, 32, DType::bf16});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal("snapkv select=snapkv(rows=32)"),
              HasSubstr("rows has to be more than window"));
  EXPECT_THAT(refusal("snapkv prefill=zipvl(0.9)"), HasSubstr("looks at the prompt's queries"));
  EXPECT_THAT(refusal("snapkv compensate=mean_value"),
              HasSubstr("needs the weight of every token"));
  EXPECT_THAT(refusal("double_sparsity select=double_sparsity(r=33)"),
              HasSubstr("it has to be from 1 to 32"));
  EXPECT_EQ(refusal("snapkv"), "");
  EXPECT_EQ(refusal("double_sparsity"), "");
}

}  // namespace
}  // namespace sluice
