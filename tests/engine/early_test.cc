// Layers of a model that choose their rows early: by the right hidden state, and with the weights
// of the layer that is to come.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/random_checkpoint.h"

namespace sluice {
namespace {

using testing::RandomCheckpoint;

class EarlyModel : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { testing::skips(GetParam()); }
  EngineConfig config(const std::filesystem::path& model) const {
    EngineConfig config = testing::config_for(GetParam());
    config.model = model;
    return config;
  }
};

std::vector<TokenId> some_tokens(std::size_t count) {
  std::vector<TokenId> tokens;
  for (std::size_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<TokenId>(i * i * 31 % RandomCheckpoint::kVocabulary));
  }
  return tokens;
}

struct Outcome {
  std::vector<std::vector<float>> logits;
  std::vector<StepSelection> selections;
};

Outcome decode(Engine& engine, const std::string& line, bool reports = true) {
  constexpr std::size_t kPrompt = 600;
  const std::vector<TokenId> tokens = some_tokens(kPrompt + 6);
  SessionOptions options;
  options.context = 640;
  options.policies = {parse_policy(line)};
  options.reports_positions = reports;
  Session session = engine.new_session(options);
  session.prefill(std::span(tokens).first(kPrompt));
  Outcome outcome;
  for (std::size_t i = kPrompt; i < tokens.size(); ++i) {
    outcome.logits.push_back(testing::copy_of(session.decode(tokens[i])));
    outcome.selections.push_back(session.selection());
  }
  return outcome;
}

// The share of a layer's positions that are the same.
double shared(const Outcome& a, const Outcome& b, std::size_t layer) {
  double same = 0.0;
  double all = 0.0;
  for (std::size_t step = 0; step < a.selections.size(); ++step) {
    const auto& of_a = a.selections[step][layer].positions;
    const auto& of_b = b.selections[step][layer].positions;
    for (std::size_t head = 0; head < of_a.size(); ++head) {
      std::vector<std::int32_t> both;
      std::set_intersection(of_a[head].begin(), of_a[head].end(), of_b[head].begin(),
                            of_b[head].end(), std::back_inserter(both));
      same += static_cast<double>(both.size());
      all += static_cast<double>(of_a[head].size());
    }
  }
  return same / all;
}

// Without a feed-forward part, the state after the previous layer's attention is the layer's input,
// so that half a layer early is exact. Layers 2 and 3 do not attend either: then the input of the
// layer before is exact in layers 3 and 4. With one query head per KV head, the newest rows do not
// change what is chosen.
TEST_P(EarlyModel, GuessesRightWhereTheStateStays) {
  // Products that are fused with norms round in another order on a GPU.
  const double least = GetParam() == "cpu" ? 1.0 : 0.97;
  const float tolerance = GetParam() == "cpu" ? 0.0f : 2e-2f;
  for (const char* const type : {"llama", "qwen2", "qwen3"}) {
    SCOPED_TRACE(type);
    testing::RandomModel still;
    still.type = type;
    still.layers = 5;
    still.kv_heads = RandomCheckpoint::kHeads;
    still.varied_norms = true;
    testing::RandomModel moving = still;
    still.without_feed_forward = {0, 1, 2, 3, 4};
    still.without_attention = {2, 3};
    const RandomCheckpoint checkpoint(3, 0, 0.0f, still);
    const RandomCheckpoint other(3, 0, 0.0f, moving);
    Engine engine = Engine::open(config(checkpoint.path()));
    Engine changing = Engine::open(config(other.path()));
    for (const char* const line :
         {"select=int4 prune=top_k(24)", "select=int4 prune=top_k(24) compensate=mean_value"}) {
      for (const char* const how : {" early=half", " early=layer"}) {
        SCOPED_TRACE(std::string(line) + how);
        const Outcome real = decode(engine, line);
        const Outcome early = decode(engine, std::string(line) + how);
        for (std::size_t layer = 0; layer < 5; ++layer) {
          EXPECT_GE(shared(early, real, layer), least) << "layer " << layer;
        }
        for (std::size_t i = 0; i < real.logits.size(); ++i) {
          EXPECT_LE(testing::largest_difference(real.logits[i], early.logits[i]), tolerance);
        }
        const Outcome moved = decode(changing, line);
        const Outcome guessed = decode(changing, std::string(line) + how);
        EXPECT_GE(shared(guessed, moved, 0), least);
        for (std::size_t layer = 1; layer < 5; ++layer) {
          EXPECT_LT(shared(guessed, moved, layer), 0.97) << "layer " << layer;
        }
      }
    }
  }
}

// A traced engine waits for every operation, so nothing runs beside anything else.
TEST_P(EarlyModel, AnswersAsWithOneOperationAtATime) {
  testing::RandomModel model;
  model.layers = 5;
  const RandomCheckpoint checkpoint(4, 0, 0.0f, model);
  EngineConfig plain = config(checkpoint.path());
  EngineConfig traced = plain;
  traced.trace = std::make_shared<Trace>();
  Engine engine = Engine::open(plain);
  Engine waiting = Engine::open(traced);
  for (const char* const line :
       {"select=int4 prune=top_k(24) compensate=values early=half",
        "select=int4 prune=top_k(24) compensate=values early=layer",
        "select=sparq candidates=1/4 prune=top_p(0.9) cap=40 compensate=mean_value early=layer",
        "select=int4 prune=top_k(24) dense=0 anchors=1,3 early=half"}) {
    SCOPED_TRACE(line);
    EXPECT_EQ(decode(engine, line, false).logits, decode(waiting, line, false).logits);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, EarlyModel, ::testing::ValuesIn(testing::devices()),
                         [](const auto& of) { return of.param; });

}  // namespace
}  // namespace sluice
