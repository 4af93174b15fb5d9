// What an engine notes in a trace, and that it computes the same.
#include "sluice/trace.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/backends.h"
#include "tests/support/model_sessions.h"

namespace sluice {
namespace {

using nlohmann::json;

class Traces : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { testing::skips(GetParam()); }

  std::vector<TokenId> run(const std::string& policy, const std::shared_ptr<Trace>& trace,
                           int count) const {
    EngineConfig config = testing::config_for(GetParam());
    config.trace = trace;
    Engine engine = Engine::open(config);
    SessionOptions options;
    options.context = 1024;
    options.policies = {parse_policy(policy)};
    Session session = engine.new_session(options);
    return testing::continuation(session, testing::book_tokens(engine, 600), count);
  }
};

std::vector<json> events_of(const Trace& trace) {
  std::vector<json> events;
  std::string text;
  trace.write_json([&](std::string_view piece) { text += piece; });
  const json root = json::parse(text);
  for (const json& event : root["traceEvents"]) {
    if (event["ph"] == "X") events.push_back(event);
  }
  return events;
}

bool holds(const json& outer, const json& inner) {
  const double begin = inner["ts"];
  const double end = begin + inner["dur"].get<double>();
  const double first = outer["ts"];
  return begin >= first && end <= first + outer["dur"].get<double>();
}

TEST_P(Traces, HaveEveryOperationInItsLayerAndStep) {
  const auto trace = std::make_shared<Trace>();
  const std::vector<TokenId> tokens = run("values", trace, 4);
  EXPECT_EQ(tokens, run("values", nullptr, 4));
  const std::vector<json> events = events_of(*trace);
  std::map<std::string, std::vector<json>> by_line;
  for (const json& event : events) by_line[event["cat"]].push_back(event);
  // Five pieces of the prompt, three tokens.
  ASSERT_EQ(by_line["steps"].size(), 8u);
  EXPECT_EQ(by_line["steps"][0]["name"], "prefill");
  EXPECT_EQ(by_line["steps"][4]["args"]["tokens"], 600 - 4 * 128);
  EXPECT_EQ(by_line["steps"][7]["name"], "decode");
  EXPECT_EQ(by_line["layers"].size(), 8u * 12u);
  EXPECT_EQ(by_line["scan"].size(), 3u * 12u);
  EXPECT_EQ(by_line["select"].size(), 3u * 12u);
  for (const char* line : {"append", "index", "attend"}) EXPECT_FALSE(by_line[line].empty());
  for (const json& scan : by_line["scan"]) {
    int holders = 0;
    for (const json& layer : by_line["layers"]) {
      if (!holds(layer, scan)) continue;
      EXPECT_EQ(layer["args"]["layer"], scan["args"]["layer"]);
      ++holders;
    }
    EXPECT_EQ(holders, 1);
  }
}

TEST_P(Traces, OfASparsePrompt) {
  const auto trace = std::make_shared<Trace>();
  EXPECT_EQ(run("zipvl", trace, 2), run("zipvl", nullptr, 2));
  int prompts = 0;
  for (const json& event : events_of(*trace)) {
    if (event["cat"] == "steps" && event["name"] == "prefill") ++prompts;
  }
  EXPECT_EQ(prompts, 1);
}

INSTANTIATE_TEST_SUITE_P(Devices, Traces, ::testing::ValuesIn(testing::devices()));

}  // namespace
}  // namespace sluice
