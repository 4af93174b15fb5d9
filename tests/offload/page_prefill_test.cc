// Prefill among listed pages: what every token of a prompt attends to, against fp64, whatever the
// pieces, the caps and what became of the rows before it; and what the ledger says of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sluice/half.h"
#include "tests/support/backends.h"
#include "tests/support/counting_backend.h"
#include "tests/support/plan.h"
#include "tests/support/script.h"
#include "tests/support/script_oracle.h"

namespace sluice {
namespace {

using testing::CountingBackend;
using testing::Device;
using testing::NamedBackend;
using testing::Random;
using testing::Script;

constexpr std::int64_t kContext = 1300;
constexpr std::int64_t kForks = 3;
constexpr std::int64_t kSomeMore = 1 << 19;  // bytes

// Tokens of a page have something in common, which makes some pages heavier than others.
void give_topics(Script& script, std::int64_t first, Random& random) {
  for (std::int64_t at = first; at < kContext;) {
    const std::int64_t end = std::min(kContext, (at / kPageTokens + 1) * kPageTokens);
    script.shift(at, end - at, 1.0f, random);
    at = end;
  }
}

// Of a block of queries and a KV head, by the definition of ChoosePagesParams.
struct ListOfPages {
  std::vector<bool> has;
  bool is_close = false;  // rounding may list another page, or one less
};

// The mean key of a page, as it is kept.
std::vector<double> mean_key(const Script& script, std::size_t layer, int head, std::int64_t page) {
  const KvShape& shape = script.shape();
  std::vector<double> mean(static_cast<std::size_t>(shape.head_dim));
  for (std::size_t c = 0; c < mean.size(); ++c) {
    double sum = 0.0;
    for (std::int64_t row = page * kPageTokens; row < (page + 1) * kPageTokens; ++row) {
      sum += testing::stored(shape, script.k(layer, row)[head * shape.head_dim + int(c)]);
    }
    mean[c] = bf16_to_float(float_to_bf16(static_cast<float>(sum / kPageTokens)));
  }
  return mean;
}

// Weights of the first `pages` pages for the mean query of a block's tokens.
std::vector<double> page_weights(const Script& script, std::size_t layer, int head, StepRange block,
                                 std::int64_t pages) {
  const KvShape& shape = script.shape();
  std::vector<double> weights(static_cast<std::size_t>(pages));
  for (int q = head * shape.group(); q < (head + 1) * shape.group(); ++q) {
    std::vector<double> own;
    for (std::int64_t page = 0; page < pages; ++page) {
      const std::vector<double> mean = mean_key(script, layer, head, page);
      double logit = 0.0;
      for (std::int64_t token = block.first; token < block.end(); ++token) {
        const float* const query = script.q(layer, token) + q * shape.head_dim;
        logit = std::inner_product(mean.begin(), mean.end(), query, logit);
      }
      own.push_back(
          std::exp(logit / static_cast<double>(block.tokens) / std::sqrt(shape.head_dim)));
    }
    const double sum = std::accumulate(own.begin(), own.end(), 0.0);
    for (std::size_t page = 0; page < own.size(); ++page) weights[page] += own[page] / sum;
  }
  return weights;
}

ListOfPages list_for(const Script& script, std::size_t layer, int head, StepRange block,
                     double share) {
  constexpr double kClose = 1e-3;
  const std::int64_t before = block.first / kPageTokens;  // pages that end before the block
  ListOfPages list;
  list.has.assign(static_cast<std::size_t>((block.end() - 1) / kPageTokens + 1), true);
  if (share == 1.0) return list;
  const std::vector<double> weights = page_weights(script, layer, head, block, before);
  std::vector<double> heaviest = weights;
  std::sort(heaviest.begin(), heaviest.end(), std::greater<>());
  const double all = std::accumulate(heaviest.begin(), heaviest.end(), 0.0);
  double sum = 0.0;
  double least = 0.0;
  for (const double weight : heaviest) {
    list.is_close |= std::abs(sum - share * all) < kClose * all;
    if (sum >= share * all) break;
    sum += weight;
    least = weight;
  }
  for (std::int64_t page = 1; page < before - 1; ++page) {
    const auto at = static_cast<std::size_t>(page);
    list.has[at] = weights[at] >= least;
    list.is_close |= weights[at] != least && std::abs(weights[at] / least - 1.0) < kClose;
  }
  return list;
}

Policy policy_of(double share, const std::string& more = "select=dense") {
  return parse_policy(more + " prefill=pages(" + std::to_string(share) + ")");
}

KvPlan plan_for(const BackendInfo& info, const KvShape& shape, const Policy& policy,
                std::int64_t chunk, std::optional<std::uint64_t> cap) {
  KvRequest request;
  request.shape = shape;
  request.context = kContext;
  request.chunk = chunk;
  request.sequences = kForks;
  request.decode_batch = kForks;
  request.policies = {&policy, 1};
  request.device_cap = cap;
  request.on = info;
  return plan_kv(request);
}

std::uint64_t least_cap(const BackendInfo& info, const KvShape& shape, const Policy& policy,
                        std::int64_t chunk) {
  return testing::least_cap([&](std::uint64_t cap) { plan_for(info, shape, policy, chunk, cap); });
}

struct Fork {
  KvSession session;
  Script script;
};

// Forks of a text, and what they answer.
class Family {
 public:
  Family(Device& device, const KvShape& shape, const Policy& policy, const KvPlan& plan,
         double tolerance, std::uint64_t seed)
      : device_(&device), policy_(policy), tolerance_(tolerance), random_(seed) {
    Script script(shape, kContext, seed);
    give_topics(script, 0, random_);
    forks_.push_back({testing::session_of(*device.backend, plan, {&policy, 1}), script});
  }

  Fork& first() { return forks_.front(); }
  Fork& any() { return *std::next(forks_.begin(), random_.integer(0, std::ssize(forks_) - 1)); }
  Random& random() { return random_; }
  int checked() const { return checked_; }
  int close() const { return close_; }

  // A piece of a prompt, all of whose tokens attend to what is listed for them.
  void prefill(Fork& fork, std::int64_t tokens) {
    const StepRange step = {fork.session.length(), tokens};
    const std::vector<std::vector<float>> out = run(fork, Phase::prefill, tokens);
    for (std::size_t layer = 0; layer < out.size(); ++layer) {
      const std::vector<int>& dense = policy_.dense_layers;
      const bool is_dense = std::find(dense.begin(), dense.end(), int(layer)) != dense.end();
      for (std::int64_t at = 0; at < tokens; at += PageLists::kBlock) {
        const StepRange block = {step.first + at, std::min(tokens - at, PageLists::kBlock)};
        expect_block(fork.script, layer, block, is_dense ? 1.0 : policy_.prefill.pages,
                     out[layer].data() + at * fork.script.query_width());
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
  void prefill_all(Fork& fork) {
    while (fork.session.length() < kContext && !::testing::Test::HasFatalFailure()) {
      prefill(fork, std::min(kContext - fork.session.length(), fork.session.plan().chunk));
    }
  }

  // Decoding is dense, and sees what prompts left.
  void decode(Fork& fork) {
    const std::int64_t token = fork.session.length();
    if (token == kContext) return;
    const std::vector<std::vector<float>> out = run(fork, Phase::decode, 1);
    for (std::size_t layer = 0; layer < out.size(); ++layer) {
      for (int head = 0; head < fork.script.shape().query_heads; ++head) {
        expect_token(
            fork.script, layer, token, head, [](auto, auto) { return true; }, out[layer].data());
      }
    }
  }

  // One of the things that happen to a text.
  void act() {
    Fork& fork = any();
    const std::int64_t length = fork.session.length();
    const std::int64_t few = random_.integer(0, std::min<std::int64_t>(length, 200));
    switch (random_.integer(0, 6)) {
      case 0:
        if (std::ssize(forks_) == kForks) return forks_.pop_front();
        forks_.push_back({fork.session.fork(), fork.script});
        return renew(forks_.back(), length);
      case 1:
        fork.session.truncate(length - few);
        return renew(fork, length - few);
      case 2:
        if (few == 0 || few > fork.session.plan().chunk) return;
        fork.session.truncate(length - few);
        renew(fork, length - few);
        run(fork, Phase::correction, few);
        return;
      case 3:
        for (std::int64_t i = 0; i < few; ++i) decode(fork);
        return;
      default:
        const std::int64_t most = std::min(kContext - length, fork.session.plan().chunk);
        if (most > 0) prefill(fork, random_.integer(1, most));
    }
  }

 private:
  void renew(Fork& fork, std::int64_t first) {
    fork.script.renew(first, kContext - first, random_);
    give_topics(fork.script, first, random_);
  }

  // A step of a session whose rows and queries are in the device's memory; by layer.
  std::vector<std::vector<float>> run(Fork& fork, Phase phase, std::int64_t tokens) {
    const std::int64_t first = fork.session.length();
    const Script& script = fork.script;
    const auto part = [&](const float* from, std::int64_t width) {
      return upload(*device_, std::vector<float>(from, from + tokens * width));
    };
    std::vector<std::vector<float>> result;
    SoloStep step(fork.session, phase, tokens);
    for (int layer = 0; layer < script.shape().layers; ++layer) {
      const auto at = static_cast<std::size_t>(layer);
      const Buffer q = part(script.q(at, first), script.query_width());
      const Buffer k = part(script.k(at, first), script.key_width());
      const Buffer v = part(script.v(at, first), script.key_width());
      const Buffer out = part(script.q(at, first), script.query_width());
      const Buffer lse = part(script.q(at, first), script.query_width());
      device_->synchronize();
      step.append(layer, {k.floats(), v.floats(), script.key_width()});
      step.attend(layer, {q.floats(), script.query_width(), out.floats(), lse.floats()});
      fork.session.pool()->queue().synchronize();
      result.push_back(testing::download<float>(*device_, out));
    }
    step.end();
    return result;
  }

  // `got`: of the block's first token.
  void expect_block(const Script& script, std::size_t layer, StepRange block, double share,
                    const float* got) {
    const KvShape& shape = script.shape();
    for (int head = 0; head < shape.kv_heads; ++head) {
      const ListOfPages list = list_for(script, layer, head, block, share);
      ++(list.is_close ? close_ : checked_);
      if (list.is_close) continue;
      const testing::Sees sees = [&](std::int64_t /*token*/, std::int64_t row) {
        return list.has[static_cast<std::size_t>(row / kPageTokens)];
      };
      for (std::int64_t token = block.first; token < block.end(); ++token) {
        if (token % 29 != 0 && token != block.first && token + 1 != block.end()) continue;
        for (int q = head * shape.group(); q < (head + 1) * shape.group(); ++q) {
          expect_token(script, layer, token, q, sees,
                       got + (token - block.first) * script.query_width());
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
  void expect_token(const Script& script, std::size_t layer, std::int64_t token, int head,
                    const testing::Sees& sees, const float* got) const {
    const std::vector<double> expected = attention_of(script, layer, token, head, sees);
    for (std::size_t c = 0; c < expected.size(); ++c) {
      ASSERT_NEAR(got[static_cast<std::size_t>(head) * expected.size() + c], expected[c],
                  tolerance_)
          << "layer " << layer << " token " << token << " head " << head;
    }
  }

  Device* device_;
  Policy policy_;
  double tolerance_;
  Random random_;
  std::list<Fork> forks_;  // which stay where they are
  int checked_ = 0;
  int close_ = 0;
};

class PagePrefill : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override { device_ = testing::make_or_skip(GetParam()); }

  bool is_gpu() const { return GetParam().name == "cuda"; }
  KvShape shape() const { return {2, 4, 2, 64, is_gpu() ? DType::bf16 : DType::f32}; }

  Family family(const Policy& policy, std::int64_t chunk, std::optional<std::uint64_t> cap) {
    // A GPU rounds queries and weights to 8 bits, and values are of order one.
    return {*device_,
            shape(),
            policy,
            plan_for(device_->info(), shape(), policy, chunk, cap),
            is_gpu() ? 0.03 : 2e-5,
            seed_};
  }
  std::uint64_t least(const Policy& policy, std::int64_t chunk) const {
    return least_cap(device_->info(), shape(), policy, chunk);
  }

  const std::uint64_t seed_ = testing::seed(20251125);
  std::unique_ptr<Device> device_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_P(PagePrefill, AttendsToTheListedPages) {
  for (const auto& [policy, chunk] : {std::pair{policy_of(0.5), 700},
                                      {policy_of(0.8), 128},
                                      {policy_of(0.9, "dense=1"), 300},
                                      {policy_of(1.0), 512},
                                      {policy_of(0.7, "select=int4 prune=top_k(64)"), 97}}) {
    for (const std::optional<std::uint64_t> cap : {std::optional<std::uint64_t>{},
                                                   {least(policy, chunk)},
                                                   {least(policy, chunk) + kSomeMore}}) {
      SCOPED_TRACE(::testing::Message()
                   << to_string(policy) << " chunk " << chunk << " cap " << cap.value_or(0));
      Family one = family(policy, chunk, cap);
      one.prefill_all(one.first());
      ASSERT_FALSE(HasFatalFailure());
      EXPECT_GT(one.checked(), 5 * one.close());
      EXPECT_EQ(one.first().session.prefill_share() == 1.0, policy.prefill.pages == 1.0);
    }
  }
}

TEST_P(PagePrefill, SeesWhatWasDecodedForkedCutAndCorrected) {
  const Policy policy = policy_of(0.6);
  for (const bool is_capped : {false, true}) {
    SCOPED_TRACE(is_capped);
    std::optional<std::uint64_t> cap;
    if (is_capped) cap = least(policy, 400) + kSomeMore;
    Family all = family(policy, 400, cap);
    for (int round = 0; round < 30; ++round) {
      all.act();
      ASSERT_FALSE(HasFatalFailure()) << "round " << round;
    }
    all.prefill_all(all.any());
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_GT(all.checked(), 5 * all.close());
  }
}

std::vector<NamedBackend> fast_backends() {
  std::vector<NamedBackend> all = testing::backends_by_kind();
  all.erase(all.begin());  // the reference
  return all;
}

INSTANTIATE_TEST_SUITE_P(Backends, PagePrefill, ::testing::ValuesIn(fast_backends()),
                         testing::name_of);

class PagePrefillLedger : public ::testing::Test {
 protected:
  // What the lists say of a prompt in pieces of `chunk` tokens.
  struct Listed {
    std::uint64_t rows = 0;   // that any block of a piece attends to
    std::uint64_t pages = 0;  // of all blocks
    std::uint64_t all = 0;
    int close = 0;
  };

  PagePrefillLedger() {
    Random random(seed_);
    give_topics(script_, 0, random);
  }

  Listed listed(std::int64_t chunk, double share) const {
    Listed sum;
    for (std::int64_t first = 0; first < kContext; first += chunk) {
      const StepRange piece = {first, std::min(chunk, kContext - first)};
      for (std::size_t layer = 0; layer < 2; ++layer) {
        for (int head = 0; head < shape_.kv_heads; ++head) add(piece, layer, head, share, sum);
      }
    }
    return sum;
  }

  const KvShape shape_{2, 4, 2, 32, DType::f32};
  const std::uint64_t seed_ = testing::seed(20251126);
  Script script_{shape_, kContext, seed_};
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};

 private:
  void add(StepRange piece, std::size_t layer, int head, double share, Listed& sum) const {
    std::vector<bool> any(static_cast<std::size_t>((piece.end() - 1) / kPageTokens + 1));
    for (std::int64_t at = piece.first; at < piece.end(); at += PageLists::kBlock) {
      const StepRange block = {at, std::min(piece.end() - at, PageLists::kBlock)};
      const ListOfPages list = list_for(script_, layer, head, block, share);
      for (std::size_t page = 0; page < list.has.size(); ++page) {
        any[page] = any[page] || list.has[page];
        sum.pages += list.has[page] ? 1 : 0;
      }
      sum.all += list.has.size();
      sum.close += list.is_close ? 1 : 0;
    }
    for (std::size_t page = 0; page < any.size(); ++page) {
      const auto first = static_cast<std::int64_t>(page) * kPageTokens;
      if (any[page]) {
        sum.rows +=
            static_cast<std::uint64_t>(std::min<std::int64_t>(kPageTokens, piece.end() - first));
      }
    }
  }
};

TEST_F(PagePrefillLedger, CountsWhatCrosses) {
  const Policy policy = policy_of(0.6);
  for (const std::int64_t more : {std::int64_t{0}, kSomeMore}) {
    SCOPED_TRACE(more);
    auto owned = std::make_unique<CountingBackend>(MemoryAccount::kNoCap);
    const CountingBackend& counts = *owned;
    Device device(std::move(owned));
    const std::uint64_t cap =
        least_cap(device.info(), shape_, policy, 200) + static_cast<std::uint64_t>(more);
    const KvPlan plan = plan_for(device.info(), shape_, policy, 200, cap);
    KvSession session = testing::session_of(*device.backend, plan, {&policy, 1});
    script_.prefill(session, kContext);
    const Ledger& ledger = session.ledger();
    EXPECT_EQ(counts.host_to_device, ledger.crossed(Tier::host, Tier::device).bytes);
    EXPECT_EQ(counts.device_to_host, ledger.crossed(Tier::device, Tier::host).bytes);
    EXPECT_EQ(counts.host_rows_attended, 0u);
    EXPECT_EQ(counts.host_to_device > 0, plan.resident_tokens < kContext);
    EXPECT_LE(counts.device_peak, cap);
  }
}

TEST_F(PagePrefillLedger, CountsWhatWasLookedAt) {
  for (const std::int64_t chunk : {std::int64_t{128}, std::int64_t{300}, std::int64_t{1000}}) {
    SCOPED_TRACE(chunk);
    const Policy policy = policy_of(0.6);
    Device device(testing::cpu_backend(DType::f32).make());
    const KvPlan plan = plan_for(device.info(), shape_, policy, chunk, std::nullopt);
    KvSession session = testing::session_of(*device.backend, plan, {&policy, 1});
    script_.prefill(session, kContext);
    const Listed expected = listed(chunk, 0.6);
    // A close list may have a page more or less.
    EXPECT_LT(expected.close, 20);
    const Ledger& ledger = session.ledger();
    EXPECT_NEAR(
        static_cast<double>(ledger.total(Phase::prefill, Tier::host, Tier::host, Cause::hit).rows),
        static_cast<double>(expected.rows), expected.close * kPageTokens);
    EXPECT_NEAR(session.prefill_share() * static_cast<double>(expected.all),
                static_cast<double>(expected.pages), expected.close + 1e-6);
    EXPECT_LT(session.prefill_share(), 0.9);
  }
}

}  // namespace
}  // namespace sluice
