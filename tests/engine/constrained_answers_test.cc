// Answers of a model under constraints, from generate() and a batcher.
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "sluice/batcher.h"
#include "sluice/constraint.h"
#include "sluice/generate.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/schema_oracle.h"
#include "tests/support/served.h"

namespace sluice {
namespace {

using testing::config_for;
using testing::expect_error;
using testing::OrderedJson;
using testing::read_all;
using testing::SchemaOracle;
using testing::Served;

constexpr TokenId kEnd = 1;

const char* const kPerson = R"({"type":"object","properties":{
    "name":{"type":"string","maxLength":12},
    "age":{"type":"integer"},
    "tags":{"type":"array","items":{"enum":["tall","old","rich"]},"maxItems":3}},
  "required":["name","age","tags"],"additionalProperties":false})";

BatcherOptions options_of(int running) {
  BatcherOptions options;
  options.context = 1024;
  options.running = running;
  return options;
}

class ConstrainedAnswers : public ::testing::Test {
 protected:
  Request request(double temperature) {
    Request request;
    request.prompt = engine_.encode_prompt("The prince was");
    request.sampling.max_tokens = 900;  // white space may take many
    request.sampling.temperature = temperature;
    request.sampling.seed = 5;
    request.constraint = constraints_.json_schema(kPerson);
    return request;
  }
  GenerateOptions generating(const Request& request) {
    GenerateOptions options;
    options.sampling = request.sampling;
    options.constraint = request.constraint;
    return options;
  }
  static void expect_valid(const Served& answer) {
    EXPECT_EQ(answer.reason, FinishReason::end_of_text);
    OrderedJson value;
    ASSERT_NO_THROW(value = OrderedJson::parse(answer.text)) << answer.text;
    EXPECT_TRUE(SchemaOracle(OrderedJson::parse(kPerson)).is_valid(value)) << answer.text;
  }

  Engine engine_ = Engine::open(config_for());
  Constraints constraints_{engine_.tokenizer()};
};

TEST_F(ConstrainedAnswers, OfABatchAreValidAndThoseOfGenerate) {
  BatcherOptions options = options_of(6);
  options.drafts = 4;  // constrained answers take none
  Batcher batcher(engine_, options);
  Request several = request(1.0);
  several.choices = 3;
  Stream drawn = batcher.submit(several);
  Stream greedy = batcher.submit(request(0.0));
  for (const Served& answer : read_all(drawn, 3)) expect_valid(answer);
  const Served answer = read_all(greedy)[0];
  expect_valid(answer);
  Session session = engine_.new_session(1024);
  const Request alone = request(0.0);
  const GenerateResult result = generate(engine_, session, alone.prompt, generating(alone));
  EXPECT_EQ(answer, (Served{result.text, result.tokens, {}, result.reason}));
}

TEST_F(ConstrainedAnswers, MayBeCutOffByTheirNumberOfTokens) {
  Batcher batcher(engine_, options_of(2));
  Request cut = request(0.0);
  cut.sampling.max_tokens = 3;
  Stream stream = batcher.submit(cut);
  const Served answer = read_all(stream)[0];
  EXPECT_EQ(answer.reason, FinishReason::max_tokens);
  EXPECT_EQ(answer.tokens.size(), 3u);
  EXPECT_EQ(answer.text.substr(answer.text.find_first_not_of(" \n\t"), 1), "{") << answer.text;
}

// The mask of `rules` runs before, so a constraint has the last word.
TEST_F(ConstrainedAnswers, KeepTheirConstraintUnderRules) {
  Batcher batcher(engine_, options_of(2));
  Request biased = request(0.7);
  biased.rules.bias = {{engine_.tokenizer().encode("\"")[0], 5.0}};
  biased.rules.frequency_penalty = 0.5;
  biased.rules.mask = [](std::span<const TokenId>, std::span<float> logits) {
    logits[kEnd] = 100.0f;
  };
  biased.logprobs = 1;
  Stream stream = batcher.submit(biased);
  expect_valid(read_all(stream)[0]);
}

// One that cannot be followed ends its own request alone.
TEST_F(ConstrainedAnswers, FailAlone) {
  Batcher batcher(engine_, options_of(4));
  Request ambiguous = request(0.0);
  ambiguous.constraint = constraints_.regex("x((a?){1000}){1000}b");
  Stream failing = batcher.submit(ambiguous);
  Stream other = batcher.submit(request(0.0));
  expect_error(ErrorCode::unsupported, "too ambiguous", [&] { read_all(failing); });
  expect_valid(read_all(other)[0]);
}

TEST_F(ConstrainedAnswers, RefuseWhatContradictsThem) {
  Batcher batcher(engine_, options_of(2));
  Request endless = request(0.0);
  endless.ignore_eos = true;
  expect_error(ErrorCode::usage, "`ignore_eos`", [&] { batcher.submit(endless); });
  Session session = engine_.new_session(1024);
  GenerateOptions options = generating(request(0.0));
  options.ignore_eos = true;
  expect_error(ErrorCode::usage, "`ignore_eos`",
               [&] { generate(engine_, session, request(0.0).prompt, options); });
  LookupDrafter drafter;
  options.ignore_eos = false;
  options.drafter = &drafter;
  expect_error(ErrorCode::usage, "`drafter`",
               [&] { generate(engine_, session, request(0.0).prompt, options); });
}

}  // namespace
}  // namespace sluice
