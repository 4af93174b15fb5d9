#include "tools/eval_report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sluice/types.h"

namespace sluice::tools {
namespace {

constexpr KvShape kShape = {2, 2, 2, 64, DType::bf16};

Cost moved(std::int64_t tokens, std::uint64_t bytes) {
  Cost cost;
  cost.tokens = tokens;
  cost.traffic[{Tier::host, Tier::device, Cause::miss}] = {1, bytes};
  cost.traffic[{Tier::device, Tier::device, Cause::hit}] = {1, 1000 * bytes};  // does not cross
  return cost;
}

PolicyResult result_of(const std::string& name, double nll, int characters) {
  PolicyResult result;
  result.name = name;
  for (int i = 0; i < 2; ++i) {
    ProbeResult probe;
    probe.nll = {nll};
    probe.kl = {0.0};
    probe.agree = {1.0};
    probe.characters = characters;
    probe.facts = {{true, 0.5}};
    result.probes.push_back(probe);
  }
  return result;
}

TaskResult task_of(Task task, double nll_change) {
  TaskResult result;
  result.task = task;
  result.context = 100;
  result.policies = {result_of("dense", 1.0, 5), result_of("other", 1.0 + nll_change, 5)};
  return result;
}

std::string table_of(const TaskResult& result) { return eval_table(eval_json(result, kShape)); }

TEST(EvalReport, WhatRoundsToZeroHasNoMinus) {
  for (const double change : {-4e-5, -1e-12, 0.0, 4e-5}) {
    const std::string table = table_of(task_of(Task::perplexity, change));
    EXPECT_NE(table.find("+0.0000 +- 0.0000"), std::string::npos) << table;
    EXPECT_EQ(table.find("-0.0000"), std::string::npos) << table;
  }
  EXPECT_NE(table_of(task_of(Task::perplexity, -6e-5)).find("-0.0001 +-"), std::string::npos);
  EXPECT_NE(table_of(task_of(Task::perplexity, -1.25)).find(" -1.2500 +-"), std::string::npos);
  for (const Task task : {Task::needle, Task::repetition}) {
    EXPECT_NE(table_of(task_of(task, 0.0)).find(" +0.0 +-"), std::string::npos);
  }
}

TEST(EvalReport, ColdAndWarmStandApart) {
  TaskResult result = task_of(Task::agreement, 0.0);
  result.policies[1].cost = {moved(4, 4 * 2048), moved(10, 10 * 512)};
  result.policies[0].cost = {moved(4, 4 * 4096), {}};
  const nlohmann::json policies = eval_json(result, kShape)["policies"];
  EXPECT_EQ(policies[1]["cold"],
            nlohmann::json({{"tokens", 4}, {"transferred_bytes_per_token", 2048.0}}));
  EXPECT_EQ(policies[1]["warm"],
            nlohmann::json({{"tokens", 10}, {"transferred_bytes_per_token", 512.0}}));
  EXPECT_DOUBLE_EQ(policies[1]["transferred_bytes_per_token"], (4 * 2048.0 + 10 * 512.0) / 14);
  // No context had as many tokens behind it that a cache would be warm.
  EXPECT_EQ(policies[0]["warm"],
            nlohmann::json({{"tokens", 0}, {"transferred_bytes_per_token", nullptr}}));
  const std::string table = table_of(result);
  EXPECT_NE(table.find("    2048 B      512 B"), std::string::npos) << table;
  EXPECT_NE(table.find("    4096 B          -"), std::string::npos) << table;
}

TEST(EvalReport, ScoresStandBesideDense) {
  TaskResult result = task_of(Task::longbench, 0.0);
  result.data = "folder/tasks.jsonl";
  const std::vector<std::vector<double>> scores = {{1.0, 0.5}, {0.5, 0.25}};
  for (std::size_t i = 0; i < 2; ++i) {
    for (std::size_t p = 0; p < 2; ++p) {
      result.policies[i].probes[p].score = scores[i][p];
      result.policies[i].probes[p].answer = "answer " + std::to_string(p);
    }
  }
  const nlohmann::json json = eval_json(result, kShape);
  EXPECT_EQ(json["data"], "folder/tasks.jsonl");
  EXPECT_EQ(json["dense_can_do"], true);
  const nlohmann::json& other = json["policies"][1];
  EXPECT_DOUBLE_EQ(other["score"]["mean"], 0.375);
  EXPECT_DOUBLE_EQ(other["score_change"]["mean"], -0.375);
  EXPECT_DOUBLE_EQ(other["score_change"]["standard_error"], 0.125);
  EXPECT_EQ(other["answers"][1], nlohmann::json({{"score", 0.25}, {"answer", "answer 1"}}));
  EXPECT_FALSE(other.contains("recall"));
  const std::string table = eval_table(json);
  EXPECT_NE(table.find("longbench, folder/tasks.jsonl, at up to 100 tokens, 2 probes per policy\n"),
            std::string::npos)
      << table;
  EXPECT_NE(table.find(" 37.5% +- 12.5  -37.5 +- 12.5 "), std::string::npos) << table;

  for (ProbeResult& probe : result.policies[0].probes) probe.score = 0.1;
  EXPECT_NE(table_of(result).find("dense attention scores 10.0%: the model cannot do this"),
            std::string::npos);
}

// A number that was not finite is null in a report that was read again.
TEST(EvalReport, NumbersThatAreNotFiniteAreShown) {
  nlohmann::json json = eval_json(task_of(Task::agreement, 0.0), kShape);
  json["policies"][1]["kl"] = nullptr;
  EXPECT_NE(eval_table(json).find("nan"), std::string::npos);
}

}  // namespace
}  // namespace sluice::tools
