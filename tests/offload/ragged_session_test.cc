// Sessions after prompts that evict: what every layer keeps, against attention in fp64 over just
// those rows, whatever comes next (decoding, alone or together, forks, cuts, prompts of either
// kind); what a decode step reads; the pages that are free again; and policies that select, against
// a session that never had the other tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lib/value_tiles.h"
#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/expect.h"
#include "tests/support/plan.h"
#include "tests/support/random.h"
#include "tests/support/script.h"
#include "tests/support/script_oracle.h"
#include "tests/support/value_basis.h"

namespace sluice {
namespace {

using testing::Device;
using testing::NamedBackend;
using testing::Random;
using testing::Script;
using testing::upload;

constexpr std::int64_t kContext = 1500;

using Mask = std::vector<std::uint8_t>;  // by token: 1 if it has a row

// A session, and what it should have.
struct Live {
  explicit Live(KvSession opened)
      : session(std::move(opened)), masks(static_cast<std::size_t>(session.plan().shape.layers)) {}
  // A fork.
  Live(Live& other) : session(other.session.fork()), masks(other.masks), prompts(other.prompts) {}

  std::int64_t length() const { return session.length(); }

  KvSession session;
  std::vector<Mask> masks;         // by layer
  std::vector<StepRange> prompts;  // that evicted
};

class RaggedSession : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override { device_ = testing::make_or_skip(GetParam()); }

  bool is_gpu() const { return GetParam().name == "cuda"; }
  KvShape shape() const { return {layers_, 4, 2, 64, is_gpu() ? DType::bf16 : DType::f32}; }
  // A GPU rounds queries and weights to 8 bits, and values are of order one.
  double tolerance() const { return is_gpu() ? 0.03 : 3e-5; }

  KvPlan plan_of(std::span<const Policy> policies, std::optional<std::uint64_t> cap,
                 std::int64_t sequences, std::int64_t tokens = 0, std::int64_t chunk = 200) const {
    KvRequest request;
    request.shape = shape();
    request.context = kContext;
    request.chunk = chunk;
    request.sequences = sequences;
    request.tokens = tokens;
    request.decode_batch = 4;
    request.policies = policies;
    request.device_cap = cap;
    request.on = device_->info();
    request.has_value_basis = true;
    return plan_kv(request);
  }
  std::shared_ptr<KvPool> pool_of(const KvPlan& plan, std::span<const Policy> policies) {
    return std::make_shared<KvPool>(device_->backend->make_queue(), plan, policies, own_scorers(),
                                    HostAttender(), DiskSource(), basis());
  }
  // The basis of values in the backend's memory.
  ValueBasis basis() {
    const ValueBasis on_host = testing::value_basis_of(shape());
    if (basis_.data() == nullptr) {
      const std::int64_t floats =
          shape().layers * shape().kv_heads * ValueTiles::basis_floats(shape().head_dim);
      basis_ = upload(*device_, std::vector<float>(on_host.data, on_host.data + floats));
      device_->synchronize();  // the pool's queue does not wait for the device's
    }
    return {basis_.floats(), on_host.hash};
  }

  // Rows, queries and outputs of some tokens in the backend's memory.
  struct Arrays {
    Buffer q, k, v, out, lse;
  };
  Arrays arrays(const Script& script, std::size_t layer,
                std::span<const std::int64_t> positions) const {
    const auto gather = [&](auto row, std::int64_t width) {
      std::vector<float> values;
      for (const std::int64_t at : positions) {
        values.insert(values.end(), row(layer, at), row(layer, at) + width);
      }
      return upload(*device_, values);
    };
    const auto of = [&](auto member) {
      return [&script, member](std::size_t at, std::int64_t token) {
        return (script.*member)(at, token);
      };
    };
    const auto count = positions.size();
    const auto query_floats = count * static_cast<std::size_t>(script.query_width());
    Arrays arrays = {gather(of(&Script::q), script.query_width()),
                     gather(of(&Script::k), script.key_width()),
                     gather(of(&Script::v), script.key_width()),
                     upload(*device_, std::vector<float>(query_floats, 77.0f)),
                     upload(*device_, std::vector<float>(count * 4))};
    device_->synchronize();  // the pool's queue does not wait for the device's
    return arrays;
  }
  static std::vector<std::int64_t> range(std::int64_t first, std::int64_t count) {
    std::vector<std::int64_t> positions;
    for (std::int64_t i = 0; i < count; ++i) positions.push_back(first + i);
    return positions;
  }

  // Attention of `position` over the rows that a mask leaves, up to it.
  void expect_attention(const Script& script, std::size_t layer, std::int64_t position,
                        const Mask& mask, const float* got, std::string_view what) const {
    const auto sees = [&](std::int64_t token, std::int64_t row) {
      return row == token || mask[static_cast<std::size_t>(row)] != 0;
    };
    for (int head = 0; head < shape().query_heads; ++head) {
      const std::vector<double> expected =
          testing::attention_of(script, layer, position, head, sees);
      for (std::size_t c = 0; c < expected.size(); ++c) {
        ASSERT_NEAR(got[static_cast<std::size_t>(head * shape().head_dim) + c], expected[c],
                    tolerance())
            << what << ", layer " << layer << ", position " << position << ", head " << head;
      }
    }
  }

  // A step of tokens that stand for any positions of the script; the last layer's output.
  std::vector<float> run(KvSession& session, const Script& script, Phase phase,
                         std::span<const std::int64_t> positions) const {
    std::vector<float> out;
    SoloStep step(session, phase, std::ssize(positions));
    for (int layer = 0; layer < shape().layers; ++layer) {
      const Arrays a = arrays(script, static_cast<std::size_t>(layer), positions);
      step.append(layer, {a.k.floats(), a.v.floats(), script.key_width()});
      step.attend(layer, {a.q.floats(), script.query_width(), a.out.floats(), a.lse.floats()});
      session.pool()->queue().synchronize();
      out = testing::download<float>(*device_, a.out);
    }
    step.end();
    return out;
  }

  // Runs a step of several tokens of one session and compares every 17th and the last ones.
  void step(Live& live, const Script& script, Phase phase, std::int64_t tokens) {
    const std::int64_t first = live.length();
    SoloStep step(live.session, phase, tokens);
    for (std::size_t layer = 0; layer < live.masks.size(); ++layer) {
      const Arrays a = arrays(script, layer, range(first, tokens));
      step.append(static_cast<int>(layer), {a.k.floats(), a.v.floats(), script.key_width()});
      step.attend(static_cast<int>(layer),
                  {a.q.floats(), script.query_width(), a.out.floats(), a.lse.floats()});
      live.session.pool()->queue().synchronize();
      live.masks[layer].resize(static_cast<std::size_t>(first + tokens), 1);
      const std::vector<float> out = testing::download<float>(*device_, a.out);
      for (std::int64_t i = 0; i < tokens; i += i + 20 < tokens ? 17 : 1) {
        expect_attention(script, layer, first + i, live.masks[layer],
                         out.data() + i * script.query_width(), to_string(phase));
      }
    }
    step.end();
  }

  // A sparse prompt, whose choice becomes part of the masks. Tokens that stay are checked.
  void prompt(Live& live, const Script& script, std::int64_t tokens, bool evicts = true) {
    const std::int64_t before = live.length();
    KvPrompt prompt(live.session, tokens);
    try {
      for (std::size_t layer = 0; layer < live.masks.size(); ++layer) {
        run_layer(live, prompt, script, layer, {before, tokens}, evicts);
      }
    } catch (const Error&) {
      prompt.cancel();
      throw;
    }
    prompt.end();
    for (const Mask& mask : live.masks) {
      if (std::count(mask.end() - tokens, mask.end(), 1) == tokens) continue;
      live.prompts.push_back({before, tokens});
      break;
    }
  }
  void run_layer(Live& live, KvPrompt& prompt, const Script& script, std::size_t layer,
                 const StepRange& of_prompt, bool evicts) {
    const int number = static_cast<int>(layer);
    std::list<Arrays> pieces;
    const auto for_pieces = [&](const auto& body) {
      const std::int64_t chunk = live.session.plan().chunk;
      auto piece = pieces.begin();
      for (std::int64_t first = 0; first < of_prompt.tokens; first += chunk) {
        const std::int64_t count = std::min(chunk, of_prompt.tokens - first);
        prompt.take(first, count);
        if (piece == pieces.end()) {
          pieces.push_back(arrays(script, layer, range(of_prompt.first + first, count)));
          piece = std::prev(pieces.end());
        }
        body(*piece, Queries{piece->q.floats(), script.query_width(), piece->out.floats(),
                             piece->lse.floats()});
        ++piece;
      }
    };
    for_pieces([&](const Arrays& a, const Queries& queries) {
      prompt.append(number, {a.k.floats(), a.v.floats(), script.key_width()});
      prompt.collect(queries);
    });
    prompt.choose(number);
    keep_listed(live, layer, of_prompt.tokens, evicts);
    for_pieces([&](const Arrays&, const Queries& queries) { prompt.attend(number, queries); });
    live.session.pool()->queue().synchronize();
    if (evicts) expect_prompt(live, script, layer, of_prompt.first, pieces);
  }
  // Only a length within a prompt that evicted is refused.
  static void cut(Live& live, std::int64_t length) {
    const std::int64_t before = live.length();
    const bool inside = std::any_of(
        live.prompts.begin(), live.prompts.end(),
        [&](const StepRange& prompt) { return prompt.first < length && length < prompt.end(); });
    try {
      live.session.truncate(length);
      ASSERT_FALSE(inside) << length;
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::usage);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("came in a prompt that evicted"));
      ASSERT_TRUE(inside) << length << ": " << error.what();
      ASSERT_EQ(live.length(), before);
      return;
    }
    for (Mask& mask : live.masks) mask.resize(static_cast<std::size_t>(length));
    while (!live.prompts.empty() && live.prompts.back().end() > length) live.prompts.pop_back();
  }
  void expect_prompt(const Live& live, const Script& script, std::size_t layer, std::int64_t before,
                     const std::list<Arrays>& pieces) {
    std::int64_t first = before;
    for (const Arrays& piece : pieces) {
      const std::vector<float> out = testing::download<float>(*device_, piece.out);
      const std::int64_t count = std::ssize(out) / script.query_width();
      for (std::int64_t i = 0; i < count; i += 29) {
        if (live.masks[layer][static_cast<std::size_t>(first + i)] == 0) continue;
        expect_attention(script, layer, first + i, live.masks[layer],
                         out.data() + i * script.query_width(), "prompt");
      }
      first += count;
    }
  }
  // The list counts rows; a mask has a place for every token.
  static void keep_listed(Live& live, std::size_t layer, std::int64_t tokens, bool evicts) {
    const std::span<const std::uint8_t> listed = live.session.pool()->important()->listed();
    Mask& mask = live.masks[layer];
    const auto newest = listed.last(static_cast<std::size_t>(tokens));
    ASSERT_EQ(std::count(mask.begin(), mask.end(), 1), std::ssize(listed) - tokens);
    if (evicts) {
      mask.insert(mask.end(), newest.begin(), newest.end());
    } else {
      mask.resize(mask.size() + newest.size(), 1);
    }
  }

  static std::int64_t rows_left(const Live& live, std::size_t layer) {
    return std::count(live.masks[layer].begin(), live.masks[layer].end(), 1);
  }
  static void require_rows(const Live& live) {
    for (std::size_t layer = 0; layer < live.masks.size(); ++layer) {
      ASSERT_EQ(live.session.rows(static_cast<int>(layer)), rows_left(live, layer));
    }
  }

  int layers_ = 3;
  std::unique_ptr<Device> device_;
  Buffer basis_;
};

Policy evicting(double tau, const std::string& rest = "select=dense") {
  return parse_policy(rest + " prefill=zipvl(" + std::to_string(tau) + ",evict)");
}

// Everything that a session may do, under caps from none to the least.
TEST_P(RaggedSession, AttendsToWhatWasKept) {
  const std::uint64_t seed = testing::seed(20261128);
  const std::uint64_t seeds = GetParam().name == "reference" ? 2 : 8;
  for (std::uint64_t i = 0; i < seeds; ++i) {
    SCOPED_TRACE(testing::seed_message(seed + i));
    Random random(seed + i);
    const Script script(shape(), kContext, seed + i);
    const std::string dense =
        random.integer(0, 1) == 0 ? "" : " dense=" + std::to_string(random.integer(0, 2));
    const std::vector<Policy> policies = {
        evicting(0.2 + 0.1 * static_cast<double>(random.integer(0, 7)),
                 dense.empty() ? "select=dense" : "select=exact prune=top_k(1/1)" + dense),
        parse_policy("select=dense prefill=zipvl(0.7)"), Policy{}};
    std::optional<std::uint64_t> cap;
    if (random.integer(0, 2) > 0) {
      const std::uint64_t least =
          testing::least_cap([&](std::uint64_t bytes) { plan_of(policies, bytes, 3); });
      cap = least + static_cast<std::uint64_t>(random.integer(0, 4)) * (200u << 10);
    }
    const auto pool = pool_of(plan_of(policies, cap, 3), policies);
    const std::int64_t chunk = pool->plan().chunk;  // smaller under a small cap
    std::list<Live> all;
    all.emplace_back(KvSession(pool));
    for (int left = 14; left > 0 && !::testing::Test::HasFatalFailure(); --left) {
      auto at = std::next(all.begin(), random.integer(0, std::ssize(all) - 1));
      const std::int64_t room = kContext - at->length();
      switch (random.integer(0, 9)) {
        case 0:
        case 1:
        case 2:
          at->session.use(policies[0]);
          if (room > 0) prompt(*at, script, random.integer(1, std::min<std::int64_t>(room, 700)));
          break;
        case 3:
          at->session.use(policies[1]);
          if (room > 0) prompt(*at, script, random.integer(1, std::min(room, chunk)), false);
          break;
        case 4:
          at->session.use(policies[2]);
          if (room > 0) {
            step(*at, script, Phase::prefill, random.integer(1, std::min(room, chunk)));
          }
          break;
        case 5:
          if (all.size() < 3) all.emplace_back(*at);
          break;
        case 6:
          if (all.size() > 1) all.erase(at);
          break;
        case 7:
          cut(*at, random.integer(0, at->length()));
          break;
        default:
          for (std::int64_t n = random.integer(1, 6); n > 0 && kContext > at->length(); --n) {
            step(*at, script, Phase::decode,
                 std::min(random.integer(1, at->session.decode_room()), kContext - at->length()));
          }
      }
      for (const Live& live : all) require_rows(live);
    }
  }
}

// Sessions that evicted and one that did not decode in one step.
TEST_P(RaggedSession, DecodesTogetherWithOthers) {
  const Script script(shape(), kContext, 7);
  const std::vector<Policy> policies = {evicting(0.4), Policy{}};
  const auto pool = pool_of(plan_of(policies, std::nullopt, 3), policies);
  std::list<Live> all;
  Live& evicted = all.emplace_back(KvSession(pool));
  prompt(evicted, script, 900);
  all.emplace_back(evicted);
  Live& whole = all.emplace_back(KvSession(pool));
  whole.session.use(policies[1]);
  step(whole, script, Phase::prefill, 150);
  for (Live& live : all) live.session.use(policies[1]);
  step(evicted, script, Phase::decode, 1);
  for (int steps = 0; steps < 5; ++steps) {
    std::vector<KvSession*> sessions;
    std::vector<std::int64_t> positions;
    for (Live& live : all) {
      sessions.push_back(&live.session);
      positions.push_back(live.length());
      for (Mask& mask : live.masks) mask.push_back(1);
    }
    KvBatch batch(sessions);
    for (std::size_t layer = 0; layer < evicted.masks.size(); ++layer) {
      const Arrays a = arrays(script, layer, positions);
      batch.append(static_cast<int>(layer), {a.k.floats(), a.v.floats(), script.key_width()});
      batch.attend(static_cast<int>(layer),
                   {a.q.floats(), script.query_width(), a.out.floats(), a.lse.floats()});
      pool->queue().synchronize();
      const std::vector<float> out = testing::download<float>(*device_, a.out);
      std::size_t i = 0;
      for (const Live& live : all) {
        const Mask& mask = live.masks[layer];
        expect_attention(script, layer, positions[i], mask,
                         out.data() + static_cast<std::int64_t>(i) * script.query_width(), "batch");
        ++i;
      }
    }
    batch.issue_report();
    for (const std::optional<Error>& error : batch.end()) EXPECT_FALSE(error.has_value());
  }
  for (const Live& live : all) require_rows(live);
}

// What is read in a decode step, by the ledger, is what was kept.
TEST_P(RaggedSession, ReadsOnlyWhatWasKept) {
  const Script script(shape(), kContext, 8);
  const std::vector<Policy> policies = {evicting(0.3)};
  Live live{KvSession(pool_of(plan_of(policies, std::nullopt, 1), policies))};
  prompt(live, script, 1200);
  const auto read = [&] {
    std::uint64_t rows = 0;
    for (const Tier tier : {Tier::host, Tier::device}) {
      rows += live.session.ledger().total(Phase::decode, tier, tier, Cause::hit).rows;
    }
    return rows;
  };
  for (int steps = 0; steps < 3; ++steps) {
    std::uint64_t left = 0;
    const std::uint64_t before = read();
    step(live, script, Phase::decode, 1);
    for (std::size_t layer = 0; layer < live.masks.size(); ++layer) {
      left += static_cast<std::uint64_t>(rows_left(live, layer));
    }
    const auto parts = static_cast<std::uint64_t>(
        ReadPattern::parts(shape().group(), device_->info().reads.attend_queries));
    EXPECT_EQ(read() - before, left * 2 * parts);
    EXPECT_LT(left, 1200u * 3 / 2) << "half of the rows are gone";
  }
}

// Sessions that evict share what they leave; one that finds no room keeps what it had.
TEST_P(RaggedSession, LeavesItsPagesToOthers) {
  const Script script(shape(), kContext, 9);
  const std::vector<Policy> policies = {evicting(0.6), Policy{}};
  const KvPlan plan = plan_of(policies, std::nullopt, 20, kContext);
  const auto pool = pool_of(plan, policies);
  std::list<Live> all;
  std::int64_t pages = 0;
  const std::string full = [&] {
    while (true) {
      Live& live = all.emplace_back(KvSession(pool));
      live.session.use(policies[1]);
      step(live, script, Phase::prefill, 1);
      live.session.use(policies[0]);
      try {
        prompt(live, script, 1200);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::memory);
        EXPECT_EQ(live.session.length(), 1);
        for (Mask& mask : live.masks) mask.resize(1);
        require_rows(live);
        return std::string(error.what());
      }
      for (std::size_t layer = 0; layer < live.masks.size(); ++layer) {
        pages += (rows_left(live, layer) + kPageTokens - 1) / kPageTokens;
      }
      EXPECT_EQ(pool->tables().block_slots().used(), pages);
    }
  }();
  EXPECT_THAT(full, ::testing::HasSubstr("of one layer that were planned"));
  EXPECT_GE(all.size(), 3u) << "a pool for the tokens of one dense session";
  EXPECT_LE(pages, layers_ * plan.blocks);
  step(all.back(), script, Phase::decode, 1);
  all.pop_front();
  prompt(all.back(), script, 1200);
  for (const Live& live : all) require_rows(live);
}

// A layer after an eviction is a shorter sequence: policies choose from it as from one that never
// had the other tokens.
TEST_P(RaggedSession, SelectsAsIfTheOthersHadNeverBeen) {
  layers_ = 1;
  const Script script(shape(), kContext, 10);
  for (const char* text :
       {"values", "compact", "sparq", "quest dense=", "select=int4 prune=top_p(0.8) cap=90",
        "select=int4 candidates=1/2 prune=top_k(20) compensate=mean_value", "streaming",
        "quantized", "select=exact prune=top_k(64)"}) {
    SCOPED_TRACE(text);
    const std::string rest =
        text == std::string("quest dense=") ? "select=quest prune=top_k(128)" : text;
    const std::vector<Policy> policies = {parse_policy(rest + " prefill=zipvl(0.5,evict)")};
    const std::vector<Policy> plain = {parse_policy(rest)};
    Live live{KvSession(pool_of(plan_of(policies, std::nullopt, 1), policies))};
    prompt(live, script, 1300);
    std::vector<std::int64_t> kept;
    for (std::int64_t t = 0; t < 1300; ++t) {
      if (live.masks[0][static_cast<std::size_t>(t)] != 0) kept.push_back(t);
    }
    ASSERT_GT(kept.size(), 300u);
    ASSERT_LT(kept.size(), 1200u);
    KvSession fresh(pool_of(plan_of(plain, std::nullopt, 1), plain));
    for (std::size_t first = 0; first < kept.size(); first += 200) {
      const auto part =
          std::span(kept).subspan(first, std::min<std::size_t>(200, kept.size() - first));
      run(fresh, script, Phase::prefill, part);
    }
    for (std::int64_t t = 1300; t < 1440; ++t) {
      const std::array<std::int64_t, 1> position = {t};
      const std::vector<float> expected = run(fresh, script, Phase::decode, position);
      const std::vector<float> got = run(live.session, script, Phase::decode, position);
      ASSERT_LT(testing::largest_difference(expected, got), 1e-6) << t;
    }
  }
}

TEST_P(RaggedSession, RefusesWhatNeedsEveryRow) {
  const Script script(shape(), kContext, 11);
  const std::vector<Policy> policies = {evicting(0.4), parse_policy("dense prefill=pages(0.9)")};
  Live live{KvSession(pool_of(plan_of(policies, std::nullopt, 1), policies))};
  prompt(live, script, 700);
  const auto expect_refusal = [&](const auto& call, const char* what) {
    try {
      call();
      ADD_FAILURE() << what;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      EXPECT_THAT(error.what(), ::testing::HasSubstr(what));
    }
    EXPECT_EQ(live.length(), 700);
  };
  expect_refusal([&] { live.session.truncate(300); }, "cut the session to 0 tokens, or to 700");
  expect_refusal([&] { live.session.require_whole(); }, "cannot be saved");
  live.session.use(policies[1]);
  expect_refusal([&] { SoloStep(live.session, Phase::prefill, 1); }, "prefill=pages cannot list");
  step(live, script, Phase::decode, 1);
  cut(live, 0);
  EXPECT_NO_THROW(live.session.require_whole());
}

INSTANTIATE_TEST_SUITE_P(Backends, RaggedSession, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

// The pages that are left, and the host memory under them, of a prompt of many pages.
TEST(RaggedMemory, IsTheShareThatWasKept) {
  constexpr std::int64_t kTokens = 12'000;
  const KvShape shape{2, 2, 1, 16, DType::bf16};
  const Script script(shape, kTokens + 1, 12);
  for (const double tau : {0.1, 0.5, 0.9}) {
    SCOPED_TRACE(tau);
    const std::vector<Policy> policies = {evicting(tau)};
    const KvPlan plan = testing::plan_of(shape, kTokens + 1, 512, std::nullopt, true, policies);
    Device device(testing::cpu_backend(DType::f32).make());
    const auto pool = std::make_shared<KvPool>(device.backend->make_queue(), plan, policies);
    const std::uint64_t empty = device.backend->account(Tier::host).used();
    KvSession session(pool);
    script.sparse_prompt(session, kTokens);
    std::int64_t rows = 0;
    for (int layer = 0; layer < shape.layers; ++layer) rows += session.rows(layer);
    const double share = static_cast<double>(rows) / static_cast<double>(shape.layers * kTokens);
    EXPECT_LT(share, 0.95);
    const double all = static_cast<double>(shape.token_bytes() * kTokens);
    const auto pages = static_cast<double>(pool->tables().block_slots().used() * kPageTokens);
    EXPECT_LE(pages, (share + 0.03) * static_cast<double>(shape.layers * kTokens));
    const std::uint64_t held = device.backend->account(Tier::host).used() - empty;
    EXPECT_LE(static_cast<double>(held), (share + 0.03) * all);
    const Traffic appended =
        session.ledger().total(Phase::prefill, Tier::host, Tier::host, Cause::append);
    EXPECT_EQ(appended.rows, static_cast<std::uint64_t>(rows));
    EXPECT_EQ(session.own_tokens(), pool->tables().block_slots().used() * kPageTokens / 2);
  }
}

}  // namespace
}  // namespace sluice
