// Double Sparsity, SnapKV and H2O against plain definitions in fp64 that share nothing with them:
// what is attended to, and the bytes of plans and ledgers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <utility>
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

// What H2O keeps in one layer, told of its tokens one after the other.
class HeavyHitters {
 public:
  HeavyHitters(const Layer& layer, std::size_t rows)
      : layer_(&layer),
        rows_(rows),
        kept_(static_cast<std::size_t>(layer.shape().kv_heads)),
        sums_(kept_.size()) {}

  // Tokens of a prompt, which drop nothing.
  void prompt(std::int64_t first, std::int64_t end) {
    for (std::int64_t at = first; at < end; ++at) see(at);
  }
  // What a token after a prompt may attend to before its own page; its query is not added yet.
  std::vector<std::set<std::int64_t>> chosen(std::int64_t at) {
    drop();
    std::vector<std::set<std::int64_t>> result = kept_;
    for (std::set<std::int64_t>& of : result) {
      of.erase(of.lower_bound(at / kPageTokens * kPageTokens), of.end());
    }
    return result;
  }
  // Adds a token and its query.
  void see(std::int64_t at) {
    unseen(at);
    const int group = layer_->shape().group();
    for (std::size_t head = 0; head < kept_.size(); ++head) {
      for (int g = 0; g < group; ++g) add(at, head, static_cast<int>(head) * group + g);
    }
  }
  // Adds a token without its query.
  void unseen(std::int64_t at) {
    for (std::size_t head = 0; head < kept_.size(); ++head) {
      kept_[head].insert(at);
      sums_[head].resize(static_cast<std::size_t>(at) + 1);
    }
  }
  // Drops the smallest sums before the newest half until `rows` tokens are left.
  void drop() {
    for (std::size_t head = 0; head < kept_.size(); ++head) {
      std::set<std::int64_t>& kept = kept_[head];
      std::vector<double> dropped;
      while (kept.size() > rows_) {
        const std::int64_t least = smallest(head);
        dropped.push_back(sum(head, least));
        kept.erase(least);
      }
      if (dropped.empty()) continue;
      const double most = *std::max_element(dropped.begin(), dropped.end());
      closest_ = std::min(closest_, sum(head, smallest(head)) / most - 1.0);
    }
  }
  // How far apart the sums of what was dropped and what was kept were at the closest, relatively.
  double closest() const { return closest_; }

 private:
  double sum(std::size_t head, std::int64_t t) const {
    return sums_[head][static_cast<std::size_t>(t)];
  }
  std::int64_t smallest(std::size_t head) const {
    const std::set<std::int64_t>& kept = kept_[head];
    const auto newest = std::prev(kept.end(), static_cast<std::ptrdiff_t>(rows_ / 2));
    return *std::min_element(kept.begin(), newest, [&](std::int64_t a, std::int64_t b) {
      return sum(head, a) < sum(head, b);
    });
  }
  void add(std::int64_t at, std::size_t head, int query) {
    std::vector<double> e;
    for (const std::int64_t t : kept_[head])
      e.push_back(std::exp(layer_->logit(at, query, t) - 20));
    const double all = std::accumulate(e.begin(), e.end(), 0.0);
    std::size_t i = 0;
    for (const std::int64_t t : kept_[head])
      sums_[head][static_cast<std::size_t>(t)] += e[i++] / all;
  }

  const Layer* layer_;
  std::size_t rows_;
  std::vector<std::set<std::int64_t>> kept_;  // by KV head
  std::vector<std::vector<double>> sums_;     // [kv_heads, tokens]
  double closest_ = std::numeric_limits<double>::infinity();
};

// The same in all layers of a script.
class AllHeavyHitters {
 public:
  AllHeavyHitters(const Script& script, std::int64_t tokens, std::size_t rows) {
    for (int layer = 0; layer < script.shape().layers; ++layer) {
      layers_.emplace_back(script, static_cast<std::size_t>(layer), tokens);
    }
    for (const Layer& layer : layers_) hitters_.emplace_back(layer, rows);
  }
  AllHeavyHitters(const AllHeavyHitters&) = delete;
  AllHeavyHitters& operator=(const AllHeavyHitters&) = delete;

  void each(const auto& body) {
    for (HeavyHitters& of : hitters_) body(of);
  }
  // All layers' outputs of a token after a prompt, which is seen then.
  std::vector<float> next(std::int64_t at) {
    std::vector<float> all;
    for (std::size_t layer = 0; layer < hitters_.size(); ++layer) {
      const std::vector<float> out = layers_[layer].output(at, hitters_[layer].chosen(at));
      all.insert(all.end(), out.begin(), out.end());
      hitters_[layer].see(at);
    }
    return all;
  }
  // The state to go back to.
  std::vector<HeavyHitters> state() const { return hitters_; }
  void go_back(const std::vector<HeavyHitters>& state) {
    was_clear_ = is_clear();
    hitters_ = state;
  }
  // Sums are further apart than fp32 sums can be off, so that both drop the same.
  bool is_clear() const {
    return was_clear_ && std::all_of(hitters_.begin(), hitters_.end(),
                                     [](const HeavyHitters& of) { return of.closest() > 1e-5; });
  }

 private:
  std::vector<Layer> layers_;
  std::vector<HeavyHitters> hitters_;
  bool was_clear_ = true;  // before the last go_back()
};

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

constexpr const char* kH2o = "select=h2o(rows=256) prune=top_p(0.9999)";

// Steps of one token, and of several.
TEST(H2o, AttendsToWhatTheDefinitionSays) {
  const Policy policy = parse_policy(kH2o);
  int compared = 0;
  for (int number = 0; number < 3; ++number) {
    const std::uint64_t seed = testing::seed(61 + number);
    SCOPED_TRACE(testing::seed_message(seed));
    for (const int group : {1, 4}) {
      const KvShape shape{2, 2 * group, 2, 32, DType::bf16};
      const Script script(shape, 530, seed);
      AllHeavyHitters hitters(script, 530, 256);
      hitters.each([](HeavyHitters& of) { of.prompt(0, 450); });
      std::vector<float> expected;
      for (std::int64_t at = 450; at < 530; ++at) {
        const std::vector<float> out = hitters.next(at);
        expected.insert(expected.end(), out.begin(), out.end());
      }
      if (!hitters.is_clear()) continue;
      ++compared;
      with_and_without_cap(shape, policy, [&](KvSession& session) {
        script.prefill(session, 450);
        const auto width = static_cast<std::int64_t>(shape.layers) * script.query_width();
        for (std::int64_t done = 0; done < 80;) {
          const std::int64_t tokens =
              done < 60 ? 1 : std::min<std::int64_t>(session.decode_room(), 80 - done);
          const std::vector<float> actual = script.step(session, Phase::decode, tokens);
          // A step gives layers of tokens, the definition tokens of layers.
          for (std::int64_t i = 0; i < tokens; ++i) {
            std::vector<float> own;
            for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
              const auto from = actual.begin() + (layer * tokens + i) * script.query_width();
              own.insert(own.end(), from, from + script.query_width());
            }
            const auto from = expected.begin() + (done + i) * width;
            ASSERT_LT(largest_difference(own, {from, from + width}), kTolerance)
                << "group " << group << ", position " << 450 + done + i;
          }
          done += tokens;
        }
      });
    }
  }
  EXPECT_GE(compared, 4) << "of six, sums are closer than fp32 can tell in the others";
}

// By the positions that a session reports.
TEST(H2o, WhatIsDroppedStaysDroppedAndBudgetsHold) {
  const std::uint64_t seed = testing::seed(64);
  SCOPED_TRACE(testing::seed_message(seed));
  const KvShape shape{2, 4, 2, 32, DType::bf16};
  const Policy policy = parse_policy(kH2o);
  const Script script(shape, 700, seed);
  CountingBackend backend;
  KvRequest request;
  request.shape = shape;
  request.on = backend.info();
  request.context = 700;
  request.chunk = 64;
  request.policies = {&policy, 1};
  request.reports_positions = true;
  KvSession session = testing::session_of(backend, plan_kv(request), {&policy, 1});
  script.prefill(session, 300);
  // By layer and head, of positions before the page of the last token.
  std::vector<std::set<std::int64_t>> dropped(4);
  const auto answer = [&](std::int64_t end) {
    for (std::int64_t at = session.length(); at < end; ++at) {
      script.step(session, Phase::decode, 1);
      const std::int64_t first = at / kPageTokens * kPageTokens;
      for (std::size_t i = 0; i < dropped.size(); ++i) {
        const auto& of = session.selection().at(i / 2).positions.at(i % 2);
        const std::set<std::int64_t> selected(of.begin(), of.end());
        ASSERT_EQ(selected.size() + static_cast<std::size_t>(at - first), 256u) << at;
        for (std::int64_t t = at - 128; t < first; ++t) ASSERT_TRUE(selected.contains(t)) << t;
        for (std::int64_t t = 0; t < first; ++t) {
          if (!selected.contains(t)) dropped[i].insert(t);
          ASSERT_FALSE(selected.contains(t) && dropped[i].contains(t)) << t << " is back at " << at;
        }
      }
    }
  };
  answer(420);
  script.prefill(session, 150);
  answer(600);
  for (const std::set<std::int64_t>& of : dropped) {
    EXPECT_GE(of.size(), 300u) << "another prompt brings nothing back either";
  }
}

TEST(H2o, ForksAndCutSessionsKeepTheDefinition) {
  const std::uint64_t seed = testing::seed(65);
  SCOPED_TRACE(testing::seed_message(seed));
  const KvShape shape{1, 4, 2, 32, DType::bf16};
  const Policy policy = parse_policy(kH2o);
  const Script script(shape, 700, seed);
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool = std::make_shared<KvPool>(
      backend.make_queue(), plan_of(backend.info(), shape, policy, {}, 3), std::span(&policy, 1));
  AllHeavyHitters hitters(script, 700, 256);
  const auto expect = [&](KvSession& session, std::int64_t tokens, const char* what) {
    for (std::int64_t i = 0; i < tokens; ++i) {
      const std::vector<float> expected = hitters.next(session.length());
      ASSERT_LT(largest_difference(script.step(session, Phase::decode, 1), expected), kTolerance)
          << what << ", token " << i;
    }
  };
  const auto sees_prompt = [&](std::int64_t first, std::int64_t end) {
    hitters.each([&](HeavyHitters& of) { of.prompt(first, end); });
  };
  const std::vector<HeavyHitters> nothing = hitters.state();
  KvSession root(pool);
  script.prefill(root, 300);
  sees_prompt(0, 300);
  const std::vector<HeavyHitters> prompt = hitters.state();
  KvSession fork = root.fork();
  expect(root, 20, "an answer");
  const std::vector<HeavyHitters> answer = hitters.state();

  hitters.go_back(prompt);
  script.prefill(fork, 100);
  sees_prompt(300, 400);
  expect(fork, 20, "a fork that goes on with the prompt");

  hitters.go_back(answer);
  expect(root, 5, "the other, beside it");
  script.step(root, Phase::decode, 4);
  root.reject(4);
  expect(root, 5, "drafts that were rejected");
  script.prefill(root, 60);
  hitters.each([](HeavyHitters& of) { of.drop(); });
  sees_prompt(330, 390);
  expect(root, 10, "another prompt, without what was dropped");

  root.truncate(390);
  hitters.go_back(nothing);
  sees_prompt(0, 300);
  for (std::int64_t at = 300; at < 330; ++at) hitters.next(at);
  hitters.each([](HeavyHitters& of) { of.drop(); });
  sees_prompt(330, 390);
  expect(root, 10, "an answer that was taken back, and what it dropped with it");

  fork.truncate(410);
  hitters.go_back(prompt);
  sees_prompt(300, 400);
  hitters.each([](HeavyHitters& of) {
    of.drop();
    for (std::int64_t at = 400; at < 410; ++at) {
      of.unseen(at);
      of.drop();
    }
  });
  expect(fork, 10, "an answer that was cut");

  fork.truncate(350);
  hitters.go_back(nothing);
  const std::vector<float> everything = all_outputs(script, 350, [&](const Layer& layer) {
    std::set<std::int64_t> all;
    for (std::int64_t t = 0; t < 350; ++t) all.insert(t);
    return std::vector<std::set<std::int64_t>>(static_cast<std::size_t>(layer.shape().kv_heads),
                                               all);
  });
  EXPECT_LT(largest_difference(script.step(fork, Phase::decode, 1), everything), kTolerance)
      << "a prompt that was cut, whose sums are forgotten";
  script.prefill(fork, 60);
  hitters.each([](HeavyHitters& of) {
    for (std::int64_t at = 0; at < 351; ++at) of.unseen(at);
  });
  sees_prompt(351, 411);
  expect(fork, 10, "the next prompt, whose sums are its own queries'");

  KvSession alone(pool);
  hitters.go_back(nothing);
  expect(alone, 300, "no prompt");
  EXPECT_TRUE(hitters.is_clear()) << "this seed's sums are closer than fp32 can tell";
}

TEST(H2o, ItsBytesArePlannedAndInTheLedger) {
  const KvShape shape{3, 8, 2, 64, DType::bf16};
  const Policy policy = parse_policy(kH2o);
  CountingBackend backend;
  const KvPlan plan = plan_of(backend.info(), shape, policy);
  const std::uint64_t query = 4 * 64 * 4;  // of one KV head
  EXPECT_EQ(plan.index_bytes, 3 * aligned(32 + 64 * 2 * query + 2 * 256 * 8 + 2 * 700 * 4));
  KvSession session = testing::session_of(backend, plan, {&policy, 1});
  const Script script(shape, 700, 3);
  const auto index = [&](Phase phase) {
    return session.ledger().total(phase, Tier::host, Tier::host, Cause::index_read).bytes;
  };
  script.prefill(session, 650);
  std::uint64_t prompt = 0;
  for (std::uint64_t first = 0; first < 650; first += 64) {
    prompt += 3 * (32 + 2 * std::min<std::uint64_t>(650, first + 64) * (4 + 128));
  }
  EXPECT_EQ(index(Phase::prefill), prompt) << "notes; sums and keys";
  // Under a cap the same keys are read where their rows are.
  with_and_without_cap(shape, policy, [&](KvSession& capped) {
    script.prefill(capped, 650);
    std::uint64_t keys = 0;
    for (const auto& [from, to] : {std::pair{Tier::host, Tier::host},
                                   {Tier::device, Tier::device},
                                   {Tier::host, Tier::device}}) {
      keys += capped.ledger().total(Phase::prefill, from, to, Cause::index_read).rows;
    }
    EXPECT_EQ(keys, 3 * 2 * (64 * 55 + 650)) << "chunks of 64, of 128 and so on, and of 650";
  });
  script.step(session, Phase::decode, 1);
  const std::uint64_t first = index(Phase::decode);
  EXPECT_EQ(first, 3 * (32 + 2 * (650 * 4 + 256 * 8 + query + 11 * 128)))
      << "notes; sums, kept tokens, the query, newest keys";
  script.step(session, Phase::decode, 1);
  EXPECT_EQ(index(Phase::decode) - first,
            3 * (32 + 2 * (2 * 256 * 8 + 2 * query + 257 * 128 + 12 * 128)))
      << "notes; kept tokens twice, two queries, keys, newest keys";
}

// Why this policy is refused; empty if it is not.
std::string refusal(const std::string& policy) {
  try {
    validate(parse_policy(policy), KvShape{1, 4, 2, 32, DType::bf16});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    return error.what();
  }
  return "";
}

TEST(H2o, RefusesWhatItCannotKeep) {
  for (const char* rows : {"255", "1048577", "300.5", "-1", "nan"}) {
    const std::string text = "h2o select=h2o(rows=" + std::string(rows) + ")";
    EXPECT_THAT(refusal(text), HasSubstr("h2o(rows=256..1048576)")) << text;
    EXPECT_EQ(refusal(text).find('\n'), std::string::npos);
  }
  Policy policy = parse_policy("h2o");
  policy.select.parameters["rows"] = 255;
  try {
    validate(policy);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("has to be from 256 to 1048576"));
  }
  EXPECT_THAT(refusal("h2o early=half"), HasSubstr("reads keys that are not there"));
  EXPECT_THAT(refusal("h2o prefill=zipvl(0.9)"), HasSubstr("looks at the prompt's queries"));
  EXPECT_THAT(refusal("h2o compensate=mean_value"), HasSubstr("needs the weight of every token"));
  EXPECT_EQ(refusal("h2o"), "");
  EXPECT_EQ(refusal("h2o select=h2o(rows=256)"), "");
}

TEST(SnapKv, RefusesWhatItCannotKeep) {
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
