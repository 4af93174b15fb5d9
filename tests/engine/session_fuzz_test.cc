// Random sessions against fresh ones that are given the same tokens. Sessions of one pool prefill,
// decode, step together, fork, are saved and loaded, truncated, cancelled and refused, under random
// policies and caps down to the smallest that a plan accepts; every logit that they gave on the way
// has to be that of a session that has a pool of its own, all rows resident, and nothing but the
// tokens.
//
// SLUICE_SESSIONS=N runs N seeds, from SLUICE_SEED on.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "lib/gumbel.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/random.h"
#include "tests/support/random_checkpoint.h"
#include "tests/support/random_policy.h"
#include "tests/support/temp_dir.h"

namespace sluice {
namespace {

using testing::Random;
using testing::RandomCheckpoint;
using testing::RandomPolicy;

std::string number(std::int64_t value) { return std::to_string(value); }

// Whether rows depend on more than the tokens that are left: on which came in one call.
bool remembers(const Policy& policy) { return policy.correct > 0 || !policy.prefill.dense(); }

enum class Way { prefill, decode, truncate };

// A token drawn at temperature 1.
struct Drawn {
  std::uint64_t seed = 0;
  TokenId id = 0;
};

// What a session was given, and the logits that came out after the last token of it.
struct Given {
  Way way = Way::prefill;
  std::size_t policy = 0;
  std::vector<TokenId> tokens;
  std::int64_t length = 0;    // of a truncation
  std::vector<float> logits;  // empty: nobody saw them
  std::optional<Drawn> drawn;
};

struct Live {
  Session session;
  std::vector<Given> log;
  std::size_t policy = 0;

  std::int64_t length() const { return session.length(); }
  void give(Way way, std::span<const TokenId> tokens, std::span<const float> logits) {
    log.push_back(
        {way, policy, {tokens.begin(), tokens.end()}, 0, {logits.begin(), logits.end()}, {}});
  }
};

// Takes the newest tokens out of a log.
void cut(std::vector<Given>& log, std::int64_t tokens) {
  while (tokens > 0) {
    Given& last = log.back();
    const auto taken = std::min<std::int64_t>(tokens, std::ssize(last.tokens));
    last.tokens.resize(last.tokens.size() - static_cast<std::size_t>(taken));
    last.logits.clear();
    last.drawn.reset();
    if (last.tokens.empty()) log.pop_back();
    tokens -= taken;
  }
}

// The tokens of a log whose policy corrects, as if none had been truncated: those that have been
// corrected by now came in a prompt.
std::vector<Given> corrected(const std::vector<Given>& log, std::int64_t interval) {
  std::vector<Given> tokens;
  std::int64_t waiting = 0;  // newest tokens that no correction has reached
  const auto correct = [&] {
    for (auto given = tokens.end() - waiting; given != tokens.end(); ++given) {
      *given = {Way::prefill, given->policy, given->tokens, 0, {}, {}};
    }
    waiting = 0;
  };
  for (const Given& given : log) {
    if (given.way == Way::truncate) {
      waiting = std::max<std::int64_t>(0, waiting - (std::ssize(tokens) - given.length));
      tokens.resize(static_cast<std::size_t>(given.length));
      continue;
    }
    if (given.way == Way::prefill || waiting >= interval) correct();
    for (const TokenId id : given.tokens)
      tokens.push_back({given.way, given.policy, {id}, 0, {}, {}});
    tokens.back().logits = given.logits;
    tokens.back().drawn = given.drawn;
    if (given.way == Way::decode) ++waiting;
  }
  return tokens;
}

std::int64_t tokens_of(const std::vector<Given>& log) {
  std::int64_t tokens = 0;
  for (const Given& given : log) {
    tokens = given.way == Way::truncate ? given.length : tokens + std::ssize(given.tokens);
  }
  return tokens;
}

// How engines may differ without a difference in answers.
struct Shape {
  int chunk;
  std::optional<std::uint64_t> row_cache;

  friend auto operator<=>(const Shape&, const Shape&) = default;
};

// Engines, each opened once.
class Engines {
 public:
  static constexpr int kVariants = 24;

  Engine& at(const Shape& shape) {
    const auto found = engines_.find(shape);
    if (found != engines_.end()) return found->second;
    return engines_.emplace(shape, open(checkpoint_, shape)).first->second;
  }
  Engine& plain() { return at(kPlain); }
  // Over weights that differ by a little more than rounding.
  Engine& variant(std::size_t number) {
    while (variants_.size() <= number) {
      constexpr float kJitters[] = {1e-6f, 3e-6f, 1e-5f};
      checkpoints_.emplace_back(kModel, variants_.size(), kJitters[variants_.size() % 3]);
      variants_.push_back(open(checkpoints_.back(), kPlain));
    }
    return variants_[number];
  }

 private:
  static constexpr std::uint64_t kModel = 1;
  static constexpr Shape kPlain{2048, 0};

  static Engine open(const RandomCheckpoint& checkpoint, const Shape& shape) {
    EngineConfig config;
    config.model = checkpoint.path();
    config.threads = 1;
    config.compute = DType::f32;
    config.kv_dtype = DType::f32;
    config.chunk = shape.chunk;
    config.row_cache = shape.row_cache;
    return Engine::open(config);
  }

  RandomCheckpoint checkpoint_{kModel};
  std::map<Shape, Engine> engines_;
  std::list<RandomCheckpoint> checkpoints_;
  std::vector<Engine> variants_;
};

// Sums in f32 whose order differs; logits have a deviation of 1.
constexpr double kTolerance = 3e-4;
// The same between models of which one is jittered.
constexpr double kVariantTolerance = 3e-3;

struct Counts {
  std::int64_t sessions = 0;
  std::int64_t logits = 0;  // vectors compared
  std::int64_t drawn = 0;   // tokens
  std::int64_t jumps = 0;   // sessions in which rounding made a difference
  std::int64_t refusals = 0;
  std::int64_t capped = 0;
  double difference = 0.0;  // the largest

  std::string text() const {
    std::ostringstream text;
    text << sessions << " sessions, " << capped << " pools capped, " << refusals
         << " calls refused; " << logits << " logits and " << drawn
         << " draws compared, which differ by up to " << difference << "; in " << jumps
         << " sessions rounding decided";
    return text.str();
  }
  void add(std::span<const Given> log, std::span<const double> differences) {
    for (const Given& given : log) {
      logits += given.logits.empty() ? 0 : 1;
      drawn += given.drawn ? 1 : 0;
    }
    for (const double one : differences) {
      if (one < kTolerance) difference = std::max(difference, one);
    }
  }
};

struct Stop : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Interrupted {};  // thrown by a prefill's progress

// A fresh session that is given what another was given.
class Replay {
 public:
  // `joins`: pieces of a prompt are given as one.
  Replay(Engine& engine, const SessionOptions& options, bool joins)
      : policies_(options.policies), session_(engine.new_session(options)), joins_(joins) {}

  // By how much each entry's logits differ, 0 where nobody saw them.
  std::vector<double> run(std::span<const Given> log) {
    differences_.assign(log.size(), 0.0);
    for (std::size_t first = 0; first < log.size();) {
      session_.use(policies_[log[first].policy]);
      const std::size_t end = end_of_call(log, first);
      give(log, first, end);
      first = end;
    }
    return differences_;
  }

 private:
  // Of the entries that are given in one call.
  std::size_t end_of_call(std::span<const Given> log, std::size_t first) const {
    std::size_t end = first + 1;
    if (!joins_ || log[first].way != Way::prefill) return end;
    while (end < log.size() && log[end].way == Way::prefill &&
           log[end].policy == log[first].policy) {
      ++end;
    }
    return end;
  }

  void give(std::span<const Given> log, std::size_t first, std::size_t end) {
    const Given& given = log[first];
    if (given.way == Way::truncate) return session_.truncate(given.length);
    std::vector<TokenId> tokens;
    for (std::size_t i = first; i < end; ++i) {
      tokens.insert(tokens.end(), log[i].tokens.begin(), log[i].tokens.end());
    }
    const auto check = [&](std::size_t i, std::span<const float> logits) {
      differences_[i] = difference(log[i], logits);
    };
    if (given.way == Way::prefill) return check(end - 1, session_.prefill(tokens));
    check(first, session_.decode(tokens[0]));
  }

  double difference(const Given& given, std::span<const float> logits) const {
    if (given.drawn) return missed_by(*given.drawn, logits);
    return given.logits.empty() ? 0.0 : testing::largest_difference(given.logits, logits);
  }

  // How much better the best token's sum of logit and noise is than the drawn one's.
  double missed_by(const Drawn& drawn, std::span<const float> logits) const {
    const auto position = static_cast<std::uint64_t>(session_.length());
    std::vector<double> scores;
    for (std::size_t id = 0; id < logits.size(); ++id) {
      const auto group = static_cast<std::uint32_t>(id / kNoiseGroup);
      const std::uint32_t word = noise_words(drawn.seed, position, group)[id % kNoiseGroup];
      scores.push_back(static_cast<double>(logits[id]) + gumbel(word));
    }
    return *std::max_element(scores.begin(), scores.end()) -
           scores.at(static_cast<std::size_t>(drawn.id));
  }

  std::vector<Policy> policies_;
  Session session_;
  bool joins_;
  std::vector<double> differences_;
};

class World {
 public:
  World(Engines& engines, std::uint64_t seed, Counts& counts)
      : engines_(&engines), counts_(&counts), random_(seed) {
    choose_policies();
    // Forks are refused sparse prefills, but not before a correction that was due.
    const Policy& first = options_.policies.front();
    const bool alone = first.correct > 0 && first.prefill.tau > 0.0;
    options_.sequences = alone ? 1 : static_cast<int>(random_.integer(1, 4));
    options_.decode_batch = one_in(2) ? 1 : static_cast<int>(random_.integer(2, 9));
    // Pages are listed for blocks of 128 queries.
    const bool lists = options_.policies.front().prefill.pages > 0.0;
    constexpr int kChunks[] = {128, 512, 17, 64};
    shape_.chunk = kChunks[random_.integer(0, lists ? 1 : 3)];
    if (one_in(3)) shape_.row_cache = one_in(2) ? 0 : 20'000;
    engine_ = &engines.at(shape_);
    if ((!remembers_any() || options_.policies.front().prefill.evict) && one_in(2)) {
      options_.tokens = options_.context * random_.integer(4, 4 * options_.sequences) / 4;
    }
    const bool evicts = std::any_of(options_.policies.begin(), options_.policies.end(),
                                    [](const Policy& policy) { return policy.prefill.evict; });
    if (seed % 2 == 0 && !evicts) options_.indexed_tokens = options_.context;
    if (!one_in(4)) choose_cap();
    live_.push_back({engine_->new_session(options_), {}, 0});
    text_ = "context " + number(options_.context) + ", sequences " + number(options_.sequences) +
            ", tokens " + number(options_.tokens) + ", chunk " + number(shape_.chunk) +
            ", row cache " +
            (shape_.row_cache ? number(static_cast<std::int64_t>(*shape_.row_cache)) : "unset") +
            ", cap " +
            (options_.device_memory ? number(static_cast<std::int64_t>(*options_.device_memory))
                                    : "none");
    for (const Policy& policy : options_.policies) text_ += "\n  " + to_string(policy);
  }

  void run() {
    for (std::int64_t left = random_.integer(4, 20); left > 0; --left) do_something();
    for (Live& live : live_) {
      if (can_decode(live)) decode(live);
      require_tokens(live);
      compare(live);
    }
  }

  // What was made and done, to go with a failure.
  const std::string& text() const { return text_; }

 private:
  bool one_in(int count) { return random_.integer(1, count) == 1; }
  std::size_t index(std::size_t count) {
    return static_cast<std::size_t>(random_.integer(0, static_cast<std::int64_t>(count) - 1));
  }
  bool remembers_any() const { return remembers(options_.policies.front()); }

  void choose_policies() {
    RandomPolicy policies(random_);
    options_.policies = {policies.next()};
    options_.context = random_.integer(100, 700);
    if (remembers_any() || one_in(2)) return;
    const Policy other = policies.next();
    if (remembers(other)) return;
    options_.policies.push_back(other);
    try {
      engines_->plain().plan(options_);
    } catch (const Error&) {
      options_.policies.pop_back();  // they need indexes that differ
    }
  }

  bool fits(std::uint64_t cap) {
    options_.device_memory = cap;
    try {
      engine_->plan(options_);
      return true;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::memory) throw;
      return false;
    }
  }

  // From the smallest that a plan accepts to one that holds everything.
  void choose_cap() {
    options_.device_memory = std::uint64_t{1} << 40;
    std::uint64_t high = engine_->plan(options_).kv.device_bytes;
    const std::uint64_t all = high;
    std::uint64_t low = 0;
    while (high - low > 1024) {
      const std::uint64_t middle = low + (high - low) / 2;
      (fits(middle) ? high : low) = middle;
    }
    const std::uint64_t more = one_in(3) ? 0 : (all - high) / 1024;
    options_.device_memory =
        high + more * static_cast<std::uint64_t>(random_.integer(0, one_in(2) ? 200 : 1024));
    ++counts_->capped;
  }

  std::vector<TokenId> some_tokens(std::int64_t count) {
    std::vector<TokenId> tokens(static_cast<std::size_t>(count));
    for (TokenId& id : tokens) {
      id = static_cast<TokenId>(random_.integer(0, RandomCheckpoint::kVocabulary - 1));
    }
    return tokens;
  }
  std::int64_t room(const Live& live) const { return options_.context - live.length(); }
  bool can_decode(const Live& live) const { return live.length() > 0 && room(live) > 0; }

  void note(const std::string& what) { text_ += "\n  " + what; }

  // Runs what may find the pool full, or be what a policy refuses. Sessions keep the tokens of the
  // steps before.
  // False if it was refused.
  bool attempt(const auto& call) {
    try {
      call();
      return true;
    } catch (const Error& error) {
      const bool is_full =
          error.code() == ErrorCode::memory && (options_.tokens > 0 || options_.indexed_tokens > 0);
      const bool is_zipvl =
          options_.policies.front().prefill.tau > 0.0 &&
          (error.code() == ErrorCode::unsupported || error.code() == ErrorCode::usage);
      if (!is_full && !is_zipvl) throw;
      note(std::string("  refused: ") + error.what());
    }
    ++counts_->refusals;
    for (const Live& live : live_) require_tokens(live);
    return false;
  }

  static void require_tokens(const Live& live) {
    if (live.length() == tokens_of(live.log)) return;
    throw Stop("a session of " + number(live.length()) + " tokens has been given " +
               number(tokens_of(live.log)));
  }

  void do_something() {
    const std::size_t which = index(live_.size());
    Live& live = *std::next(live_.begin(), static_cast<std::ptrdiff_t>(which));
    const std::int64_t kind = random_.integer(0, 19);
    note(number(static_cast<std::int64_t>(which)) + " of " + number(live.length()) + ": ");
    if (kind <= 4) return prefill(live);
    if (kind <= 6) return decode_some(live);
    if (kind == 7) return one_in(2) ? decode_drafts(live) : decode_known(live);
    if (kind <= 9) return truncate(live);
    if (kind <= 11) return add(live);
    if (kind == 12) return use(live);
    if (kind == 13) return cancel(live);
    if (kind == 19) return save(live);
    if (kind >= 16) return rewrite(live);
    if (kind == 14 && live_.size() > 1 && one_in(2)) {
      text_ += "drop";
      live_.erase(std::next(live_.begin(), static_cast<std::ptrdiff_t>(which)));
      return;
    }
    step_together();
  }

  void prefill(Live& live) {
    const std::int64_t most = std::min<std::int64_t>(room(live), one_in(3) ? 5 : 300);
    if (most == 0) return;
    const std::vector<TokenId> tokens = some_tokens(random_.integer(1, most));
    text_ += "prefill " + number(std::ssize(tokens));
    attempt([&] { live.give(Way::prefill, tokens, live.session.prefill(tokens)); });
  }

  void decode(Live& live) {
    const std::vector<TokenId> token = some_tokens(1);
    attempt([&] { live.give(Way::decode, token, live.session.decode(token[0])); });
  }
  void decode_some(Live& live) {
    const std::int64_t count = random_.integer(1, 20);
    text_ += "decode " + number(count);
    for (std::int64_t i = 0; i < count && can_decode(live); ++i) decode(live);
  }

  void decode_known(Live& live) {
    if (!can_decode(live)) return;
    const std::vector<TokenId> tokens = some_tokens(std::min(room(live), random_.integer(1, 40)));
    text_ += "decode known " + number(std::ssize(tokens));
    attempt([&] {
      live.session.decode_known(tokens, [&](std::size_t i, std::span<const float> logits) {
        live.give(Way::decode, std::span(tokens).subspan(i, 1), logits);
      });
    });
  }

  // Drafts whose first is right if the step before it was taken back.
  void decode_drafts(Live& live) {
    if (!can_decode(live) || options_.decode_batch == 1 || remembers_any()) return;
    const Sampler greedy{SamplingParams()};
    const auto decode = [&](TokenId token, std::span<const TokenId> drafts) {
      return live.session.decode(token, drafts, greedy, {}, [](TokenId) { return true; });
    };
    const std::vector<TokenId> token = some_tokens(1);
    std::vector<TokenId> drafts = some_tokens(random_.integer(1, 8));
    text_ += "decode drafts " + number(std::ssize(drafts));
    attempt([&] {
      if (one_in(2)) {
        drafts[0] = decode(token[0], {})[0];
        live.session.truncate(live.length() - 1);
      }
      const std::vector<TokenId> drawn = decode(token[0], drafts);
      live.give(Way::decode, token, {});
      for (std::size_t i = 0; i + 1 < drawn.size(); ++i) {
        live.give(Way::decode, std::span(drawn).subspan(i, 1), {});
      }
    });
  }

  void truncate(Live& live) {
    const std::int64_t before = live.length();
    std::int64_t to = one_in(2) ? std::max<std::int64_t>(0, before - random_.integer(0, 12))
                                : random_.integer(0, before);
    if (one_in(4)) to = to / kPageTokens * kPageTokens;
    text_ += "truncate to " + number(to) + " ";
    // Not within a prompt that evicted.
    if (!attempt([&] { live.session.truncate(to); })) return;
    if (remembers_any()) {
      live.log.push_back({Way::truncate, live.policy, {}, to, {}, {}});
    } else {
      cut(live.log, before - to);
    }
  }

  // Whole pages that steps have selected rows of, with other tokens in them.
  void rewrite(Live& live) {
    text_ += "rewrite: ";
    for (std::int64_t i = 0; i < 3 && can_decode(live); ++i) decode(live);
    truncate(live);
    prefill(live);
    for (std::int64_t i = 0; i < 3 && can_decode(live); ++i) decode(live);
  }

  // A fork or an empty sibling.
  void add(Live& live) {
    if (static_cast<int>(live_.size()) == options_.sequences) return;
    const bool forks = !one_in(4);
    text_ += forks ? "fork" : "sibling";
    attempt([&] {
      if (forks) {
        live_.push_back({live.session.fork(), live.log, live.policy});
      } else {
        live_.push_back({live.session.sibling(), {}, 0});
      }
    });
  }

  // Saved and loaded into a pool of its own, where it goes on.
  void save(Live& live) {
    text_ += "save";
    if (live.length() == 0) return;
    attempt([&] {
      live.session.save(saved_.path() / "session");
      Live loaded = {engine_->load_session(saved_.path() / "session", options_), live.log,
                     live.policy};
      loaded.session.use(options_.policies[live.policy]);
      require_tokens(loaded);
      prefill(loaded);
      for (std::int64_t i = 0; i < 3 && can_decode(loaded); ++i) decode(loaded);
      compare(loaded);
    });
  }

  void use(Live& live) {
    live.policy = index(options_.policies.size());
    text_ += "use " + number(static_cast<std::int64_t>(live.policy));
    live.session.use(options_.policies[live.policy]);
  }

  // A prefill that its progress stops, or throws out of.
  void cancel(Live& live) {
    const Policy& policy = options_.policies.front();
    // Of a sparse prefill that is stopped nothing stays but a correction that was due.
    if (room(live) == 0 || (policy.correct > 0 && policy.prefill.tau > 0.0)) return;
    const std::vector<TokenId> tokens =
        some_tokens(random_.integer(1, std::min<std::int64_t>(room(live), 300)));
    // One that is stopped at once has made a correction that was due.
    const std::int64_t at = random_.integer(remembers_any() ? 1 : 0, std::ssize(tokens));
    const bool throws = !remembers_any() && one_in(2);
    text_ += "prefill " + number(std::ssize(tokens)) + (throws ? " thrown" : " stopped") + " at " +
             number(at);
    const std::int64_t before = live.length();
    attempt([&] {
      try {
        const std::span<const float> logits =
            live.session.prefill(tokens, [&](std::int64_t done, std::int64_t) {
              if (throws && done >= at) throw Interrupted();
              return done < at;
            });
        const auto done = static_cast<std::size_t>(live.length() - before);
        if (!logits.empty() && done != tokens.size()) throw Stop("logits of a stopped prefill");
        if (done > 0) live.give(Way::prefill, std::span(tokens).first(done), logits);
      } catch (const Interrupted&) {
        if (live.length() != before) throw Stop("a thrown prefill left tokens");
      }
    });
  }

  void step_together() {
    std::vector<Live*> those;
    for (Live& live : live_) {
      const bool fits = those.empty() || live.policy == those.front()->policy;
      if (can_decode(live) && fits) those.push_back(&live);
    }
    text_ += "step of " + number(std::ssize(those));
    for (std::int64_t i = random_.integer(1, 4); i > 0 && !those.empty(); --i) {
      if (!step(those)) return;
      std::erase_if(those, [&](const Live* live) { return room(*live) == 0; });
    }
  }
  bool step(std::span<Live* const> those) {
    const std::vector<TokenId> tokens = some_tokens(std::ssize(those));
    SamplingParams params;
    params.temperature = 1.0;
    params.seed = random_.engine()();
    const Sampler sampler(params);
    std::vector<StepToken> batch;
    for (std::size_t i = 0; i < those.size(); ++i) {
      batch.push_back({&those[i]->session, tokens[i], one_in(3) ? &sampler : nullptr});
    }
    return attempt([&] {
      const std::vector<StepResult> results = engine_->step(batch);
      for (std::size_t i = 0; i < those.size(); ++i) {
        if (results[i].error) throw Error(*results[i].error);
        those[i]->give(Way::decode, {&tokens[i], 1}, results[i].logits);
        if (batch[i].sampler == nullptr) continue;
        those[i]->log.back().drawn = {params.seed, results[i].next};
      }
    });
  }

  // Gives a fresh session what this one has been given. Where two rows or two codes of an index are
  // within rounding of each other, logits jump. Then models that differ by little more than
  // rounding jump, too, some to either side: all logits have to be on the side of one of them.
  void compare(const Live& live) {
    SessionOptions options;
    options.context = options_.context;
    options.policies = options_.policies;
    ++counts_->sessions;
    const Policy& policy = options.policies.front();
    const bool corrects = policy.correct > 0 && policy.prefill.dense();
    const std::vector<Given> log = corrects ? corrected(live.log, policy.correct) : live.log;
    const auto replay = [&](Engine& engine) {
      return Replay(engine, options, corrects || !remembers_any()).run(log);
    };
    std::vector<double> least = replay(engines_->plain());
    counts_->add(log, least);
    if (all_below(least, kTolerance)) return;
    ++counts_->jumps;
    for (std::size_t variant = 0; variant < Engines::kVariants; ++variant) {
      const std::vector<double> differences = replay(engines_->variant(variant));
      for (std::size_t i = 0; i < least.size(); ++i) least[i] = std::min(least[i], differences[i]);
      if (all_below(least, kVariantTolerance)) return;
    }
    const double most = *std::max_element(least.begin(), least.end());
    throw Stop("logits of a session of " + number(live.length()) + " tokens differ by " +
               std::to_string(most));
  }
  static bool all_below(const std::vector<double>& differences, double bound) {
    return std::all_of(differences.begin(), differences.end(),
                       [&](double difference) { return difference < bound; });
  }

  Engines* engines_;
  Counts* counts_;
  Random random_;
  Shape shape_{};
  Engine* engine_ = nullptr;
  SessionOptions options_;
  std::list<Live> live_;
  testing::TempDir saved_;
  std::string text_;
};

std::int64_t seeds_to_run() {
  const char* text = std::getenv("SLUICE_SESSIONS");
  return text != nullptr ? std::strtoll(text, nullptr, 10) : 300;
}

TEST(SessionFuzz, AnswersAsFreshSessionsDo) {
  const std::uint64_t first = testing::seed(1);
  const std::int64_t count = seeds_to_run();
  ASSERT_GT(count, 0) << "SLUICE_SESSIONS: give a number of seeds";
  Engines engines;
  Counts counts;
  int failures = 0;
  for (std::int64_t i = 0; i < count && failures < 10; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    std::string text = "making it";
    try {
      World world(engines, seed, counts);
      try {
        world.run();
        continue;
      } catch (const std::exception& error) {
        text = world.text() + "\n" + error.what();
      }
    } catch (const std::exception& error) {
      text += std::string("\n") + error.what();
    }
    ++failures;
    ADD_FAILURE() << "SLUICE_SESSIONS=1 " << testing::seed_message(seed) << "\n" << text;
  }
  std::printf("%s seeds from %s on: %s\n", number(count).c_str(), std::to_string(first).c_str(),
              counts.text().c_str());
}

}  // namespace
}  // namespace sluice
