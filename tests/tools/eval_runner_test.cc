#include "tools/eval_runner.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sluice/errors.h"
#include "tools/eval_parts.h"

namespace sluice::tools {
namespace {

PassageResult measured(double score) {
  PassageResult result;
  ProbeResult& probe = result.probes.emplace_back();
  probe.facts = {{true, 0.25}, {false, 1.0 / 3.0}};
  probe.score = score;
  probe.answer = "Ros\u00f3v \"1\"\n";
  probe.leading = 3;
  probe.characters = 7;
  probe.nll = {0.1, 1e-300, std::numeric_limits<double>::infinity()};
  probe.kl = {0.0, -0.0, 1.0 / 7.0};
  probe.agree = {1.0, 0.0, 1.0};
  result.cost.cold.tokens = 3;
  result.cost.cold.attended = 0.1;
  result.cost.cold.selected = 0.2;
  result.cost.cold.alpha = 0.3;
  result.cost.cold.alphas = 4;
  result.cost.cold.cut = 5;
  result.cost.cold.traffic[{Tier::host, Tier::device, Cause::miss}] = {6, 7};
  result.cost.warm.traffic[{Tier::disk, Tier::host, Cause::evict}] = {1, std::uint64_t{1} << 60};
  result.prompt_seconds = 1.5;
  result.answer_seconds = 0.1;
  return result;
}

void expect_same(const Cost& a, const Cost& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.attended, b.attended);
  EXPECT_EQ(a.selected, b.selected);
  EXPECT_EQ(a.alpha, b.alpha);
  EXPECT_EQ(a.alphas, b.alphas);
  EXPECT_EQ(a.cut, b.cut);
  ASSERT_EQ(a.traffic.size(), b.traffic.size());
  for (const auto& [movement, moved] : a.traffic) {
    EXPECT_EQ(moved.rows, b.traffic.at(movement).rows);
    EXPECT_EQ(moved.bytes, b.traffic.at(movement).bytes);
  }
}

TEST(EvalParts, AreReadAsTheyWereWritten) {
  const PassageResults before = {measured(1.0 / 3.0), measured(0.0)};
  const nlohmann::json part = nlohmann::json::parse(part_json(before).dump());
  const PassageResults after = part_of(part, 2);
  ASSERT_EQ(after.size(), 2);
  for (std::size_t i = 0; i < 2; ++i) {
    const ProbeResult& a = before[i].probes.front();
    const ProbeResult& b = after[i].probes.front();
    ASSERT_EQ(b.facts.size(), 2);
    EXPECT_TRUE(b.facts[0].right);
    EXPECT_FALSE(b.facts[1].right);
    EXPECT_EQ(b.facts[1].depth, 1.0 / 3.0);
    EXPECT_EQ(a.score, b.score);
    EXPECT_EQ(a.answer, b.answer);
    EXPECT_EQ(a.leading, b.leading);
    EXPECT_EQ(a.characters, b.characters);
    EXPECT_EQ(a.nll, b.nll);
    EXPECT_EQ(a.kl, b.kl);
    EXPECT_EQ(a.agree, b.agree);
    expect_same(before[i].cost.cold, after[i].cost.cold);
    expect_same(before[i].cost.warm, after[i].cost.warm);
    EXPECT_EQ(before[i].prompt_seconds, after[i].prompt_seconds);
    EXPECT_EQ(before[i].answer_seconds, after[i].answer_seconds);
  }
}

TEST(EvalParts, RefusesOthers) {
  const nlohmann::json good = part_json({measured(1.0), measured(0.0)});
  const auto refused = [](const nlohmann::json& part, std::size_t policies) {
    try {
      part_of(part, policies);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt);
    }
  };
  refused(good, 3);
  refused(nullptr, 0);
  refused("x", 1);
  for (const char* const place :
       {"/0/seconds", "/0/cold/tokens", "/0/cold/sums", "/0/cold/traffic/0/2", "/1/probes/0/nll",
        "/1/probes/0/right", "/1/probes/0/answer", "/1/probes"}) {
    SCOPED_TRACE(place);
    const nlohmann::json::json_pointer at(place);
    nlohmann::json part = good;
    part[at] = nlohmann::json::array();
    refused(part, 2);
    part[at] = "0123456789abcdeg";
    if (std::string(place) != "/1/probes/0/answer") refused(part, 2);
  }
}

// Four tokens behind each of three contexts.
TaskInput input() {
  TaskInput input = {Task::longbench, "file", 40, {}};
  for (TokenId first = 100; first < 103; ++first) {
    Passage& passage = input.passages.emplace_back();
    for (TokenId i = 0; i < 40; ++i) passage.context.push_back(first + i);
    Turn turn;
    turn.given = {first};
    turn.length = 4;
    passage.probes.push_back({{turn}, {Metric::f1, {"word"}}});
    passage.writer = Writer::dense;
  }
  return input;
}

Engine engine() {
  EngineConfig config;
  config.model = std::filesystem::path(SLUICE_SOURCE_DIR) / "models/sluice-22m";
  config.threads = 1;
  return Engine::open(config);
}

TaskResult run(Engine& engine, const TaskInput& input, const PassageLog& log) {
  return run_task(
      engine, engine, input, TaskOptions(), {{"streaming", engine.policy("streaming")}},
      Sessions::own, [](double, const std::string&) {}, log);
}

TEST(EvalRunner, PassagesThatAreDoneAreNotMeasuredAgain) {
  Engine own = engine();
  PassageLog log;
  std::vector<PassageResults> added;
  log.add = [&](const PassageResults& passage) { added.push_back(passage); };
  const TaskResult whole = run(own, input(), log);
  ASSERT_EQ(added.size(), 3);

  log.done = {added[0], added[1]};
  log.done[0][1].probes.front().answer = "as it was";
  const TaskResult resumed = run(own, input(), log);
  EXPECT_EQ(added.size(), 4);
  ASSERT_EQ(resumed.policies[1].probes.size(), 3);
  EXPECT_EQ(resumed.policies[1].probes.front().answer, "as it was");
  for (std::size_t i = 0; i < 2; ++i) {
    const PolicyResult& a = whole.policies[i];
    const PolicyResult& b = resumed.policies[i];
    EXPECT_EQ(a.probes[2].kl, b.probes[2].kl);
    EXPECT_EQ(a.probes[2].answer, b.probes[2].answer);
    expect_same(a.cost.cold, b.cost.cold);
  }

  log.done.resize(4, added[0]);
  EXPECT_THROW(run(own, input(), log), Error);
}

// The end of an answer is a token of it, and nothing comes after it.
TEST(EvalRunner, AnswersEndWithATokenThatEndsThem) {
  Engine own = engine();
  TaskInput asked = input();
  asked.passages.resize(1);
  const TaskResult whole = run(own, asked, {});
  const std::string answer = whole.policies[0].probes.front().answer;
  ASSERT_EQ(whole.policies[0].probes.front().kl.size(), 4);

  const TokenId second = own.tokenizer().encode(answer).at(1);
  asked.passages.front().ends = {second};
  const TaskResult ended = run(own, asked, {});
  for (const PolicyResult& policy : ended.policies) {
    EXPECT_LE(policy.probes.front().kl.size(), 2);
    EXPECT_EQ(policy.probes.front().kl.size(), ended.policies[0].probes.front().kl.size());
  }
}

}  // namespace
}  // namespace sluice::tools
