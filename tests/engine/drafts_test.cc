// Decoding with drafts gives the text without them, under every policy and however good the drafts
// are; draws keep their distribution; what ends an answer ends it in the middle of drafts, too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "engine/draft_pace.h"
#include "sluice/drafter.h"
#include "sluice/errors.h"
#include "sluice/generate.h"
#include "tests/support/backends.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/random.h"
#include "tests/support/random_checkpoint.h"

namespace sluice {
namespace {

using testing::book_tokens;
using testing::config_for;
using testing::expect_error;
using testing::Random;
using testing::RandomCheckpoint;

constexpr int kDrafts = 5;

Engine open_random(const RandomCheckpoint& checkpoint, const std::string& device) {
  EngineConfig config = config_for(device);
  config.model = checkpoint.path();
  config.chunk = 64;
  return Engine::open(config);
}

std::vector<TokenId> random_tokens(Random& random, int count) {
  std::vector<TokenId> ids;
  for (int i = 0; i < count; ++i) {
    ids.push_back(static_cast<TokenId>(random.integer(0, RandomCheckpoint::kVocabulary - 1)));
  }
  return ids;
}

SessionOptions options_for(const Engine& engine, std::int64_t context, const std::string& policy) {
  SessionOptions options;
  options.context = context;
  options.policies = {engine.policy(policy)};
  options.decode_batch = kDrafts + 1;
  return options;
}

// Drafts whose first `good` are right; `known` are the tokens to come.
std::vector<TokenId> drafts_of(std::span<const TokenId> known, std::size_t good, Random& random) {
  std::vector<TokenId> drafts = random_tokens(random, kDrafts);
  for (std::size_t i = 0; i < std::min({good, known.size(), drafts.size()}); ++i) {
    drafts[i] = known[i];
  }
  return drafts;
}

class DraftedSteps : public ::testing::TestWithParam<std::tuple<std::string, const char*>> {};

// The tokens and, at the end, the logits of a session that drafted are those of one that did not:
// to the bit on the reference backend without corrections, and elsewhere up to the rounding of
// sums over several tokens, which is how batches are held to single sessions.
TEST_P(DraftedSteps, DrawWhatSingleStepsDraw) {
  const auto& [device, line] = GetParam();
  if (testing::skips(device)) return;
  for (const double temperature : {0.0, 0.9}) {
    const RandomCheckpoint checkpoint(7);
    Engine engine = open_random(checkpoint, device);
    SamplingParams sampling;
    sampling.temperature = temperature;
    sampling.top_p = 0.9;
    sampling.repetition_penalty = temperature == 0.0 ? 1.1 : 1.0;
    const Sampler sampler(sampling);
    Random random(11);
    SCOPED_TRACE(::testing::Message() << "temperature " << temperature << ", seed 11");
    const int length = device == "reference" ? 160 : 300;  // the reference is slow
    const std::vector<TokenId> prompt = random_tokens(random, length);
    const SessionOptions options = options_for(engine, 460, line);
    float tolerance = device == "cuda" ? 6e-2f : 2e-3f;
    if (device == "reference" && options.policies.front().correct == 0) tolerance = 0.0f;
    Session plain = engine.new_session(options);
    plain.prefill(prompt);
    std::vector<TokenId> text = {5};  // what is drawn, and its margins
    std::vector<TokenId> history = prompt;
    for (int i = 0; i < length / 3; ++i) {
      history.push_back(text.back());
      text.push_back(plain.decode(text.back(), sampler, history));
    }
    Session drafted = engine.new_session(options);
    drafted.prefill(prompt);
    history = prompt;
    int accepted = 0;
    std::size_t at = 0;
    while (at + 1 < text.size()) {
      const auto good = static_cast<std::size_t>(random.integer(0, kDrafts));
      const std::span<const TokenId> known = std::span(text).subspan(at + 1);
      const std::size_t room = known.size() - 1;
      std::vector<TokenId> drafts = drafts_of(known, good, random);
      drafts.resize(std::min(drafts.size(), room));
      history.push_back(text[at]);
      const std::vector<TokenId> drawn =
          drafted.decode(text[at], drafts, sampler, history, [](TokenId) { return true; });
      accepted += static_cast<int>(drawn.size()) - 1;
      for (const TokenId id : drawn) {
        ++at;
        if (tolerance == 0.0f) {
          ASSERT_EQ(id, text[at]) << at;
        }
        if (id != text[at]) {
          // Both paths go on with one text; a draw may differ where logits are within rounding.
          RecordProperty("differs_at", static_cast<int>(at));
          at = text.size();
          break;
        }
      }
      history.insert(history.end(), drawn.begin(), drawn.end() - 1);
      if (at < text.size()) {
        ASSERT_EQ(drafted.length(), length + static_cast<std::int64_t>(at));
      }
    }
    EXPECT_GT(accepted, 10);
    // Another text after it: what was rejected shows in no logit.
    const std::int64_t common = std::min(plain.length(), drafted.length());
    plain.truncate(common);
    drafted.truncate(common);
    if (!std::equal(plain.tokens().begin(), plain.tokens().end(), drafted.tokens().begin(),
                    drafted.tokens().end())) {
      ASSERT_GT(tolerance, 0.0f);
      continue;
    }
    const std::vector<float> expected = testing::copy_of(plain.decode(3));
    EXPECT_LE(testing::largest_difference(expected, drafted.decode(3)), tolerance);
  }
}

std::vector<std::string> with_reference() {
  std::vector<std::string> all = testing::devices();
  all.insert(all.begin(), "reference");
  return all;
}

INSTANTIATE_TEST_SUITE_P(
    Policies, DraftedSteps,
    ::testing::Combine(::testing::ValuesIn(with_reference()),
                       ::testing::Values("dense", "sparq prune=top_k(48)", "values prune=top_k(8)",
                                         "twilight",
                                         "tidaldecode dense=0 anchors=1 prune=top_k(48)",
                                         "quest prune=top_k(32)", "sluice",
                                         "select=streaming sinks=2 recent=20 correct=9")),
    [](const auto& parameter) {
      return std::get<0>(parameter.param) + "_" + std::to_string(parameter.index);
    });

// ---- Distribution

// Draws behind drafts have the probabilities of the logits, whatever was drafted: 4,000 seeds,
// first and second token, against the softmax that single steps give.
TEST(DraftedDraws, KeepTheirDistribution) {
  const RandomCheckpoint checkpoint(3);
  Engine engine = open_random(checkpoint, "cpu");
  Random random(5);
  const std::vector<TokenId> prompt = random_tokens(random, 20);
  Session session = engine.new_session(64);
  session.prefill(prompt);
  const auto softmax = [](std::span<const float> logits, double temperature) {
    std::vector<double> p;
    double sum = 0.0;
    for (const float logit : logits)
      p.push_back(std::exp(static_cast<double>(logit) / temperature));
    for (const double each : p) sum += each;
    for (double& each : p) each /= sum;
    return p;
  };
  const double temperature = 0.7;
  const std::vector<float> logits = testing::copy_of(session.decode(9));
  const std::vector<double> first = softmax(logits, temperature);
  const TokenId draft = testing::likeliest(logits);
  const std::vector<double> second = softmax(session.decode(draft), temperature);
  session.truncate(20);
  constexpr int kSeeds = 4000;
  std::vector<int> firsts(first.size());
  std::vector<int> seconds(second.size());
  int accepted = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    SamplingParams sampling;
    sampling.temperature = temperature;
    sampling.seed = static_cast<std::uint64_t>(seed);
    const std::vector<TokenId> drafts = {draft};
    const std::vector<TokenId> drawn =
        session.decode(9, drafts, Sampler(sampling), {}, [](TokenId) { return true; });
    ++firsts[static_cast<std::size_t>(drawn[0])];
    ASSERT_EQ(drawn.size() == 2, drawn[0] == draft);
    if (drawn.size() == 2) ++seconds[static_cast<std::size_t>(drawn[1])];
    accepted += static_cast<int>(drawn.size()) - 1;
    session.truncate(20);
  }
  // Chi-square over the tokens expected five times or more, the rest as one class. Its mean is the
  // degrees of freedom and its deviation sqrt(2 * degrees): 5 deviations are never reached by
  // chance.
  const auto expect_drawn = [](std::span<const int> counts, std::span<const double> p, int draws) {
    double chi = 0.0;
    double rest = draws;
    int rest_count = draws;
    int classes = 0;
    for (std::size_t id = 0; id < p.size(); ++id) {
      const double expected = p[id] * draws;
      if (expected < 5.0) continue;
      chi += (counts[id] - expected) * (counts[id] - expected) / expected;
      rest -= expected;
      rest_count -= counts[id];
      ++classes;
    }
    if (rest > 5.0) chi += (rest_count - rest) * (rest_count - rest) / rest;
    EXPECT_GT(classes, 3);
    EXPECT_LT(chi, classes + 5.0 * std::sqrt(2.0 * classes));
  };
  expect_drawn(firsts, first, kSeeds);
  expect_drawn(seconds, second, accepted);
  EXPECT_GT(accepted, 200);
}

// ---- Answers

// Drafts a text that is known, with every `wrong`-th token wrong.
class KnownText final : public Drafter {
 public:
  KnownText(std::vector<TokenId> text, std::size_t wrong) : text_(std::move(text)), wrong_(wrong) {}

  void begin(std::span<const TokenId> tokens) override { begun_ = tokens.size(); }
  Drafts propose(std::span<const TokenId> tokens, int most, const Sampler&) override {
    Drafts drafts;
    const std::size_t drawn = tokens.size() - begun_;
    for (std::size_t i = drawn; i < text_.size() && std::ssize(drafts.tokens) < most; ++i) {
      drafts.tokens.push_back(i % wrong_ == 0 ? 7 : text_[i]);
    }
    return drafts;
  }
  double cost() const override { return 0.0; }

 private:
  std::vector<TokenId> text_;
  std::size_t wrong_;
  std::size_t begun_ = 0;
};

class DraftedAnswers : public ::testing::Test {
 protected:
  DraftedAnswers() : engine_(Engine::open(config_for())), prompt_(book_tokens(engine_, 200)) {
    options_.sampling.max_tokens = 40;
    options_.ignore_eos = true;
  }
  Session new_session(const std::string& policy = "values") {
    return engine_.new_session(options_for(engine_, 300, policy));
  }
  GenerateResult run(Session& session, Drafter* drafter) {
    options_.drafter = drafter;
    options_.drafts = kDrafts;
    return generate(engine_, session, prompt_, options_);
  }
  // Answers with and without drafts, which must agree in everything.
  void expect_same(const std::vector<TokenId>& text) {
    Session plain = new_session();
    const GenerateResult expected = run(plain, nullptr);
    for (const std::size_t wrong : {2, 7, 1000}) {
      SCOPED_TRACE(wrong);
      KnownText drafter(text, wrong);
      Session drafted = new_session();
      std::string streamed;
      options_.on_text = [&](std::string_view piece) { streamed += piece; };
      const GenerateResult result = run(drafted, &drafter);
      options_.on_text = {};
      EXPECT_EQ(result.tokens, expected.tokens);
      EXPECT_EQ(result.text, expected.text);
      EXPECT_EQ(streamed, expected.text);
      EXPECT_EQ(result.reason, expected.reason);
      EXPECT_EQ(result.pending, expected.pending);
      EXPECT_EQ(result.timings.decode_tokens, expected.timings.decode_tokens);
      EXPECT_EQ(drafted.length(), plain.length());
      EXPECT_TRUE(std::equal(drafted.tokens().begin(), drafted.tokens().end(),
                             plain.tokens().begin(), plain.tokens().end()));
      EXPECT_EQ(drafted.ledger().tokens(Phase::decode), plain.ledger().tokens(Phase::decode));
      EXPECT_LE(result.drafts.accepted, result.drafts.drafted);
      if (wrong > 2) {
        EXPECT_GT(result.drafts.accepted, 0);
      }
    }
  }
  // Places of three tokens, from the tenth on, that the text does not have before.
  static std::vector<std::size_t> new_tokens(const std::vector<TokenId>& text) {
    std::vector<std::size_t> places;
    for (std::size_t at = 10; at < text.size() && places.size() < 3; ++at) {
      const auto end = text.begin() + static_cast<std::ptrdiff_t>(at);
      if (std::find(text.begin(), end, text[at]) == end) places.push_back(at);
    }
    EXPECT_EQ(places.size(), 3u);
    return places;
  }
  std::vector<TokenId> text() {
    Session session = new_session();
    return run(session, nullptr).tokens;
  }

  Engine engine_;
  std::vector<TokenId> prompt_;
  GenerateOptions options_;
};

TEST_F(DraftedAnswers, EndAtMaxTokens) { expect_same(text()); }

TEST_F(DraftedAnswers, EndAtAnEndToken) {
  options_.sampling.temperature = 1.0;  // a greedy text repeats itself
  const std::vector<TokenId> known = text();
  options_.ignore_eos = false;
  for (const std::size_t at : new_tokens(known)) {
    options_.end_tokens = {known[at]};
    expect_same(known);
  }
}

TEST_F(DraftedAnswers, EndAtAStopString) {
  options_.sampling.temperature = 1.0;  // a greedy text repeats itself
  const std::vector<TokenId> known = text();
  for (const std::size_t at : new_tokens(known)) {
    options_.sampling.stop = {engine_.tokenizer().decode(std::span(known).subspan(at - 1, 2))};
    expect_same(known);
  }
}

TEST_F(DraftedAnswers, DrawAndPenalizeAsWithout) {
  options_.sampling.temperature = 0.8;
  options_.sampling.seed = 3;
  expect_same(text());
  options_.sampling.repetition_penalty = 1.3;
  expect_same(text());
}

TEST_F(DraftedAnswers, GoOnWhereAnInterruptEndedThem) {
  std::atomic<bool> interrupt = false;
  const std::vector<TokenId> known = text();
  KnownText drafter(known, 1000);
  Session session = new_session();
  options_.interrupt = [&] { return interrupt.load(); };
  options_.on_decode = [&](const Session&) { interrupt = true; };
  const GenerateResult result = run(session, &drafter);
  EXPECT_EQ(result.reason, FinishReason::interrupted);
  EXPECT_GT(result.tokens.size(), 2u);
  EXPECT_EQ(session.length(), 200 + std::ssize(result.tokens) - 1);
  EXPECT_TRUE(std::equal(result.tokens.begin(), result.tokens.end(), known.begin()));
}

TEST_F(DraftedAnswers, RefuseWhatWasNotPlanned) {
  KnownText drafter({1, 2, 3}, 1000);
  Session single = engine_.new_session({300, {engine_.policy("values")}, 1});
  expect_error(ErrorCode::usage, "decode_batch", [&] { run(single, &drafter); });
  options_.drafter = &drafter;
  for (const int drafts : {0, -1, 64}) {
    options_.drafts = drafts;
    expect_error(ErrorCode::usage, "drafts", [&] { generate(engine_, single, prompt_, options_); });
  }
}

// A model that drafts for itself: every draft of a greedy text, and of draws with the same noise.
TEST_F(DraftedAnswers, AcceptADraftModelThatIsTheModel) {
  for (const double temperature : {0.0, 1.0}) {
    options_.sampling.temperature = temperature;
    Session plain = new_session("dense");
    const GenerateResult expected = run(plain, nullptr);
    ModelDrafter drafter(engine_, engine_.new_session(300), engine_);
    Session session = new_session("dense");
    const GenerateResult result = run(session, &drafter);
    EXPECT_EQ(result.tokens, expected.tokens);
    EXPECT_EQ(result.drafts.accepted, result.drafts.drafted);
    // Drafts that cost as much as the model itself are given up.
    EXPECT_LT(result.drafts.drafted, 20);
  }
}

TEST(ModelDrafts, WantOneVocabulary) {
  const RandomCheckpoint other(1);
  Engine engine = Engine::open(config_for());
  Engine draft = open_random(other, "cpu");
  EXPECT_THROW(require_same_tokens(draft, engine), Error);
  require_same_tokens(engine, engine);
}

// ---- Lookup

std::vector<TokenId> lookup(LookupDrafter& drafter, const std::vector<TokenId>& tokens, int most) {
  return drafter.propose(tokens, most, Sampler(SamplingParams())).tokens;
}

TEST(Lookup, ContinuesTheLongestMatch) {
  LookupDrafter drafter;
  drafter.begin({});
  using Ids = std::vector<TokenId>;
  EXPECT_EQ(lookup(drafter, {1, 2, 3}, 4), Ids{});
  // 4 3 2 1 precedes 50; the later 3 2 1 precedes 60.
  EXPECT_EQ(lookup(drafter, {1, 2, 3, 4, 3, 2, 1, 50, 51, 9, 3, 2, 1, 60, 4, 3, 2, 1}, 2),
            (Ids{50, 51}));
  drafter.begin(Ids{9, 3, 2, 1, 60, 8, 3, 2, 1, 61, 3, 2, 1});
  EXPECT_EQ(lookup(drafter, {9, 3, 2, 1, 60, 8, 3, 2, 1, 61, 3, 2, 1}, 9), (Ids{61, 3, 2, 1}));
  // Shorter again: what is gone is found no more.
  drafter.begin(Ids{9, 3, 2, 1, 60});
  EXPECT_EQ(lookup(drafter, {9, 3, 2, 1, 60, 7, 3, 2, 1}, 1), Ids{60});
}

// Against a search through everything, over texts with many repeats.
TEST(Lookup, FindsWhatASearchFinds) {
  Random random(77);
  std::vector<TokenId> tokens;
  LookupDrafter drafter;
  drafter.begin({});
  for (int round = 0; round < 2000; ++round) {
    if (round % 97 == 96) {
      tokens.resize(tokens.size() / 2);
      drafter.begin(tokens);
    }
    tokens.push_back(static_cast<TokenId>(random.integer(0, 5)));
    std::size_t longest = 2;
    std::vector<TokenId> expected;
    int places = 0;
    for (std::size_t end = tokens.size() - 1; end >= 3 && places < 16; --end) {
      std::size_t length = 0;
      while (length < std::min<std::size_t>(end, 32) &&
             tokens[end - 1 - length] == tokens[tokens.size() - 1 - length]) {
        ++length;
      }
      if (length >= 3) ++places;
      if (length <= longest) continue;
      longest = length;
      expected.assign(
          tokens.begin() + static_cast<std::ptrdiff_t>(end),
          tokens.begin() + static_cast<std::ptrdiff_t>(std::min(end + 4, tokens.size())));
    }
    ASSERT_EQ(lookup(drafter, tokens, 4), expected) << "seed 77, round " << round;
  }
}

// ---- Pace

TEST(DraftPace, FollowsWhatIsAccepted) {
  DraftPace pace(8, 0.0);
  EXPECT_GT(pace.next(0, 0.0), 0);
  for (int i = 0; i < 30; ++i) pace.note(0, 8, 8);
  EXPECT_EQ(pace.next(0, 0.0), 8);
  EXPECT_EQ(pace.next(0, 1.0), 0);
  for (int i = 0; i < 60; ++i) pace.note(0, 4, 0);
  EXPECT_EQ(pace.next(0, 0.0), 0);
  EXPECT_GT(pace.next(1, 0.0), 0);  // kinds are apart
  for (int i = 0; i < DraftPace::kRetrySteps; ++i) pace.note(0, 0, 0);
  EXPECT_EQ(pace.next(0, 0.0), 1);
  pace.note(0, 1, 0);
  EXPECT_EQ(pace.next(0, 0.0), 0);
}

}  // namespace
}  // namespace sluice
