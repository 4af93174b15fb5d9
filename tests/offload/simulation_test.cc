// Sessions on queues that do their work later, in an order that a seed decides, and that are
// refused some of it: what they answer is what they answer where every call waits for its work.
//
// SLUICE_SIMULATIONS=N runs N seeds, from SLUICE_SEED on.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpu/cpu_backend.h"
#include "offload/plan/index_layout.h"
#include "offload/step/kv_batch.h"
#include "offload/step/kv_prompt.h"
#include "offload/step/kv_session.h"
#include "offload/step/solo_step.h"
#include "sluice/errors.h"
#include "tests/support/late_backend.h"
#include "tests/support/plan.h"
#include "tests/support/random.h"
#include "tests/support/script.h"

namespace sluice {
namespace {

using testing::largest_difference;
using testing::LateBackend;
using testing::Random;
using testing::Script;

const KvShape kShape{3, 4, 2, 64, DType::bf16};

// Every third world has coded rows, every sixth with values in int4.
KvShape shape_of(std::uint64_t seed) {
  KvShape shape = kShape;
  if (seed % 3 == 0) shape.rows = seed % 2 == 0 ? RowCode::int8 : RowCode::k8v4;
  return shape;
}
constexpr std::int64_t kContext = 640;
constexpr std::int64_t kChunk = 64;
// Pieces whose rows go to host memory beside attention.
constexpr std::int64_t kLongChunk = 500;

constexpr std::array kPolicies = {
    "dense",
    "select=exact prune=top_k(40)",
    "select=int4 prune=top_p(0.8) sinks=2 recent=16 dense=1",
    "select=sparq(r=8) prune=top_k(40) recent=10 compensate=mean_value",
    "select=sparq(r=8) candidates=1/2 prune=top_p(0.9)",
    "select=quest candidates=1/2 prune=top_p(0.9) dense=0,2",
    "select=streaming sinks=4 recent=200",
    "select=int4 prune=top_k(50) anchors=0",
    "select=exact prune=top_k(50) dense=0 anchors=1 anchors_attend=all",
    "select=int4 prune=top_k(16) compensate=values",
    "select=int4 prune=top_k(16) compensate=values early=half",
    "select=quest prune=top_k(50) dense=0 anchors=1 early=half",
    "select=dense prefill=zipvl(0.9)",
    "select=int4 prune=top_k(40) dense=1 prefill=zipvl(0.6)",
    "select=sparq(r=8) prune=top_k(40) prefill=zipvl(0.6,evict)",
    "select=dense prefill=zipvl(0.8,evict)",
    "select=int4 prune=top_k(16) compensate=values early=layer prefill=zipvl(0.7,evict)",
    "select=quest prune=top_k(40) dense=1 prefill=zipvl(0.9,evict)",
    "select=dense prefill=pages(0.6)",
    "select=int4 prune=top_k(40) dense=1 prefill=pages(0.4)",
};

using Outputs = std::vector<std::vector<float>>;

// What one step was given and what came out, until its work is certainly done.
struct Step {
  std::string what;
  std::deque<std::vector<float>> inputs;
  Outputs late;
  Outputs plain;
};

// A session and its twin, whose work is done at once.
struct Twins {
  KvSession late;
  KvSession plain;
  const Script* script;

  std::int64_t length() const { return plain.length(); }
};

class World {
 public:
  World(std::uint64_t seed, LateBackend& late, cpu::CpuBackend& plain)
      : shape_(shape_of(seed)),
        seed_(seed),
        random_(seed),
        policy_(parse_policy(kPolicies[seed % kPolicies.size()])),
        backend_(late) {
    late.begin(seed);
    if (random_.integer(0, 1) == 0)
      policies_.push_back(parse_policy("select=exact prune=top_k(8)"));
    // What a sparse prefill attends to follows each other, unless it is staged.
    if (policy_.prefill.tau > 0.0 && !policy_.prefill.evict) sequences_ = 1;
    const KvPlan plan = some_plan();
    const HostAttender attender = some_attender();
    late_ = std::make_shared<KvPool>(late.make_queue(), plan, policies_, own_scorers(), attender);
    KvPlan indexed = plan;
    auto layout = std::make_shared<IndexLayout>(*plan.layout);
    layout->tiles = layout->all_tiles;
    indexed.layout = std::move(layout);
    plain_ =
        std::make_shared<KvPool>(plain.make_queue(), indexed, policies_, own_scorers(), attender);
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  ~World() {
    late_->queue().synchronize();
    late_->transfer().synchronize();
  }

  void act() {
    if (twins_.empty()) return open();
    switch (random_.integer(0, 13)) {
      case 0:
        return open();
      case 1:
        return fork();
      case 2:
        return close();
      case 3:
        return truncate();
      case 4:
      case 5:
        return run(Phase::prefill, random_.integer(1, chunk()));
      case 6:
        return correct();
      case 7:
        return run(Phase::decode, random_.integer(1, 8));
      case 8:
        return compare();
      case 9:
        return use();
      case 10:
        return prompt();
      default:
        return decode_together();
    }
  }

  // Everything that was asked for so far.
  void compare() {
    late_->queue().synchronize();
    // Slots that a refused step gave back are taken in another order, and runs of rows are other
    // ones then: that rounds otherwise, weights to bf16 by kernels for prompts.
    const double allowed = refused() > 0 ? 0x1p-7 : 0.0;
    for (const Step& step : steps_) {
      ASSERT_EQ(step.late.size(), step.plain.size());
      for (std::size_t i = 0; i < step.late.size(); ++i) {
        ASSERT_LE(largest_difference(step.late[i], step.plain[i]), allowed)
            << step.what << ", " << (i % 2 == 0 ? "out" : "lse") << " of layer " << i / 2 << " by '"
            << to_string(policy_) << "'";
      }
    }
    steps_.clear();
  }

  std::int64_t most_waiting() const { return backend_.most_waiting; }
  std::int64_t refused() const { return backend_.refused; }

 private:
  // From rows that stream all the time to rows that all stay.
  KvPlan some_plan() {
    KvRequest request;
    request.shape = shape_;
    request.context = kContext;
    request.chunk = random_.integer(0, 1) == 0 ? kLongChunk : kChunk;
    request.sequences = sequences_;
    request.decode_batch = 8;
    request.policies = policies_;
    request.on = testing::cpu_info();
    request.on.attends_host_rows = random_.integer(0, 1) == 0;
    request.host_attention = random_.integer(0, 1) == 0;
    // Index tiles of sessions that do not step go to host memory.
    const bool indexes_less = seed_ / kPolicies.size() % 2 == 0;
    if (!policy_.prefill.evict && indexes_less) request.indexed_tokens = kContext;
    request.device_cap = std::uint64_t{1} << 40;
    const KvPlan whole = plan_kv(request);
    const std::uint64_t rows =
        whole.device_bytes - whole.index_bytes - whole.work_bytes - whole.table_bytes;
    if (random_.integer(0, 2) > 0) request.cache_memory = rows / 4;
    for (auto share = static_cast<std::uint64_t>(random_.integer(1, 40));; ++share) {
      request.device_cap = whole.device_bytes - rows + rows * share / 40;
      try {
        return plan_kv(request);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::memory) << "too little for this policy";
      }
    }
  }

  // Nothing, some or all of what is in host memory is the host's.
  HostAttender some_attender() {
    return {std::make_shared<cpu::CpuBackend>(LateBackend::one_thread()),
            static_cast<double>(random_.integer(0, 4)) / 4};
  }

  Twins& any() {
    return twins_[static_cast<std::size_t>(random_.integer(0, std::ssize(twins_) - 1))];
  }
  static const Script& script_of(std::int64_t number) {
    static const std::array scripts = {Script(kShape, kContext, 1), Script(kShape, kContext, 2),
                                       Script(kShape, kContext, 3)};
    return scripts[static_cast<std::size_t>(number)];
  }

  // A small cap has made it smaller.
  std::int64_t chunk() const { return late_->plan().chunk; }
  bool is_full() const { return std::ssize(twins_) == sequences_; }
  void open() {
    if (is_full()) return;
    const Script& script = script_of(random_.integer(0, 2));
    twins_.push_back({KvSession(late_), KvSession(plain_), &script});
    // Long enough for something to be selected, or for rows to go to host memory late.
    const std::int64_t tokens = random_.integer(1, std::max<std::int64_t>(300, chunk()));
    for (std::int64_t at = 0; at < tokens && !twins_.empty(); at += chunk()) {
      run_of(twins_.back(), Phase::prefill, std::min(chunk(), tokens - at));
    }
  }
  void fork() {
    if (is_full()) return;
    Twins& twins = any();
    twins_.push_back({twins.late.fork(), twins.plain.fork(), twins.script});
  }
  void close() { close(any()); }
  void close(const Twins& twins) { twins_.erase(twins_.begin() + (&twins - twins_.data())); }
  void truncate() {
    Twins& twins = any();
    truncate(twins, random_.integer(twins.length() / 2, twins.length()));
  }
  // False if it would end within a prompt that evicted.
  static bool truncate(Twins& twins, std::int64_t length) {
    try {
      twins.late.truncate(length);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage) << error.what();
      return false;
    }
    twins.plain.truncate(length);
    return true;
  }
  void correct() {
    Twins& twins = any();
    if (twins.length() < 2) return;
    const std::int64_t tokens = random_.integer(1, std::min(twins.length(), chunk()));
    if (truncate(twins, twins.length() - tokens)) run_of(twins, Phase::correction, tokens);
  }

  void use() {
    Twins& twins = any();
    const Policy& policy =
        policies_[static_cast<std::size_t>(random_.integer(0, std::ssize(policies_) - 1))];
    twins.late.use(policy);
    twins.plain.use(policy);
  }

  // Some steps are refused something.
  void provoke() {
    if (random_.integer(0, 11) == 0) backend_.refuse_after = random_.integer(0, 60);
  }
  void calm() { backend_.refuse_after = -1; }

  void run(Phase phase, std::int64_t tokens) { run_of(any(), phase, tokens); }
  void run_of(Twins& twins, Phase phase, std::int64_t tokens) {
    tokens = std::min(tokens, kContext - twins.length());
    if (phase == Phase::decode) tokens = std::min(tokens, twins.late.decode_room());
    if (tokens == 0) return;
    step_of(twins, std::string(to_string(phase)), tokens, [&](KvSession& session, Outputs& out) {
      run_one(session, *twins.script, phase, tokens, out);
    });
  }
  void prompt() {
    Twins& twins = any();
    const std::int64_t tokens = std::min(random_.integer(1, 250), kContext - twins.length());
    if (twins.late.policy().prefill.tau == 0.0 || tokens == 0) return;
    step_of(twins, "prompt", tokens, [&](KvSession& session, Outputs& out) {
      run_prompt(session, *twins.script, tokens, out);
    });
  }
  // What one session does, and then its twin.
  void step_of(Twins& twins, const std::string& what, std::int64_t tokens, const auto& run) {
    Step& step = steps_.emplace_back();
    step.what =
        what + " of " + std::to_string(tokens) + " tokens after " + std::to_string(twins.length());
    provoke();
    try {
      run(twins.late, step.late);
    } catch (const std::bad_alloc&) {
      give_up();
      return close(twins);
    }
    calm();
    run(twins.plain, step.plain);
  }
  // What the step was given is still read.
  void give_up() {
    calm();
    late_->queue().synchronize();
    steps_.pop_back();
  }

  static void run_one(KvSession& session, const Script& script, Phase phase, std::int64_t tokens,
                      Outputs& out) {
    const std::int64_t first = session.length();
    SoloStep step(session, phase, tokens);
    for (int layer = 0; layer < kShape.layers; ++layer) {
      const auto at = static_cast<std::size_t>(layer);
      float* const to = room(out, tokens * script.query_width());
      float* const lse = room(out, tokens * kShape.query_heads);
      step.append(layer, {script.k(at, first), script.v(at, first), script.key_width()});
      step.attend(layer, {script.q(at, first), script.query_width(), to, lse});
      script.begin_early(session, step, layer + 1, Early::half, first);
    }
    step.end();
  }
  // See Decoder::prefill().
  static void run_prompt(KvSession& session, const Script& script, std::int64_t tokens,
                         Outputs& out) {
    const std::int64_t before = session.length();
    KvPrompt prompt(session, tokens);
    for (int layer = 0; layer < kShape.layers; ++layer) {
      const auto number = static_cast<std::size_t>(layer);
      float* const to = room(out, tokens * script.query_width());
      float* const lse = room(out, tokens * kShape.query_heads);
      const auto for_pieces = [&](const auto& body) {
        const std::int64_t chunk = session.plan().chunk;
        for (std::int64_t first = 0; first < tokens; first += chunk) {
          prompt.take(first, std::min(chunk, tokens - first));
          const std::int64_t at = before + first;
          body(at, Queries{script.q(number, at), script.query_width(),
                           to + first * script.query_width(), lse + first * kShape.query_heads});
        }
      };
      for_pieces([&](std::int64_t at, const Queries& queries) {
        prompt.append(layer, {script.k(number, at), script.v(number, at), script.key_width()});
        prompt.collect(queries);
      });
      prompt.choose(layer);
      for_pieces([&](std::int64_t, const Queries& queries) { prompt.attend(layer, queries); });
    }
    prompt.end();
  }
  static float* room(Outputs& out, std::int64_t floats) {
    return out.emplace_back(static_cast<std::size_t>(floats)).data();
  }

  // Returns true if these sessions can take up to 6 steps together.
  bool has_slots(std::span<KvSession* const> sessions) const {
    std::vector<std::int32_t> sequences;
    for (const KvSession* session : sessions) sequences.push_back(session->sequence());
    return late_->tables().has_slots(sequences, 6 * std::ssize(sessions));
  }
  void decode_together() {
    std::vector<KvSession*> late, plain;
    for (Twins& twins : twins_) {
      if (twins.length() == kContext || random_.integer(0, 3) == 0) continue;
      if (!plain.empty() && !(twins.plain.policy() == plain.front()->policy())) continue;
      late.push_back(&twins.late);
      plain.push_back(&twins.plain);
      if (has_slots(late)) continue;
      late.pop_back();
      plain.pop_back();
    }
    if (late.empty()) return;
    for (std::int64_t steps = random_.integer(1, 6); steps > 0; --steps) {
      if (std::any_of(plain.begin(), plain.end(),
                      [](const KvSession* s) { return s->length() == kContext; })) {
        return;
      }
      Step& step = steps_.emplace_back();
      step.what = "decode of " + std::to_string(plain.size()) + " sequences";
      provoke();
      try {
        run_batch(late, step.inputs, step.late);
      } catch (const std::bad_alloc&) {
        give_up();
        std::erase_if(twins_, [](const Twins& twins) { return twins.late.in_step(); });
        return;
      }
      calm();
      run_batch(plain, step.inputs, step.plain);
    }
  }

  void run_batch(std::span<KvSession* const> sessions, std::deque<std::vector<float>>& inputs,
                 Outputs& out) {
    KvBatch batch(sessions);
    const auto count = static_cast<std::int64_t>(sessions.size());
    for (int layer = 0; layer < kShape.layers; ++layer) {
      const auto at = static_cast<std::size_t>(layer);
      std::vector<float>& q = inputs.emplace_back();
      std::vector<float>& k = inputs.emplace_back();
      std::vector<float>& v = inputs.emplace_back();
      for (const KvSession* session : sessions) {
        const Script& script = script_of_session(session);
        const std::int64_t position = session->length();
        const auto add = [](std::vector<float>& to, const float* from, std::int64_t width) {
          to.insert(to.end(), from, from + width);
        };
        add(q, script.q(at, position), script.query_width());
        add(k, script.k(at, position), script.key_width());
        add(v, script.v(at, position), script.key_width());
      }
      const Script& any = script_of(0);
      float* const to = room(out, count * any.query_width());
      float* const lse = room(out, count * kShape.query_heads);
      batch.append(layer, {k.data(), v.data(), any.key_width()});
      batch.attend(layer, {q.data(), any.query_width(), to, lse});
      if (layer + 1 == kShape.layers || batch.early(layer + 1) == Early::none) continue;
      std::vector<float>& early = inputs.emplace_back();
      for (const KvSession* session : sessions) {
        const float* const own = script_of_session(session).early_q(at + 1, session->length());
        early.insert(early.end(), own, own + any.query_width());
      }
      batch.queue().branch((layer + 1) % 2, [&] {
        batch.choose_early(layer + 1, {early.data(), any.query_width(), nullptr, nullptr});
      });
    }
    batch.issue_report();
    for (const std::optional<Error>& error : batch.end()) {
      if (error) throw Error(*error);
    }
  }
  const Script& script_of_session(const KvSession* session) const {
    return *std::find_if(twins_.begin(), twins_.end(), [&](const Twins& twins) {
              return &twins.late == session || &twins.plain == session;
            })->script;
  }

  KvShape shape_;
  std::uint64_t seed_;
  Random random_;
  Policy policy_;
  std::vector<Policy> policies_ = {policy_};
  std::int64_t sequences_ = 3;
  LateBackend& backend_;
  std::shared_ptr<KvPool> late_;
  std::shared_ptr<KvPool> plain_;
  std::deque<Step> steps_;  // which stay where they are
  std::vector<Twins> twins_;
};

TEST(Simulation, LateWorkGivesTheSameAnswers) {
  const std::uint64_t first = testing::seed(1);
  const char* const asked = std::getenv("SLUICE_SIMULATIONS");
  const std::uint64_t count = asked != nullptr ? std::strtoull(asked, nullptr, 10) : 100;
  LateBackend late;
  cpu::CpuBackend plain{LateBackend::one_thread()};
  std::int64_t most_waiting = 0;
  std::int64_t refused = 0;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE(testing::seed_message(seed) + " SLUICE_SIMULATIONS=1");
    World world(seed, late, plain);
    for (int action = 0; action < 25 && !HasFatalFailure(); ++action) world.act();
    world.compare();
    ASSERT_FALSE(HasFatalFailure());
    most_waiting = std::max(most_waiting, world.most_waiting());
    refused += world.refused();
  }
  std::printf("%llu seeds from %llu on: %lld refusals, up to %lld pieces of work waiting\n",
              static_cast<unsigned long long>(count), static_cast<unsigned long long>(first),
              static_cast<long long>(refused), static_cast<long long>(most_waiting));
  if (count < 50) return;
  EXPECT_GT(most_waiting, 10) << "work is not late";
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace sluice
