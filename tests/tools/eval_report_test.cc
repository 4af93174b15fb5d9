#include "tools/eval_report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

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

TEST(EvalReport, WhatRoundsToZeroHasNoMinus) {
  for (const double change : {-4e-5, -1e-12, 0.0, 4e-5}) {
    const std::string table = eval_table(task_of(Task::perplexity, change), kShape);
    EXPECT_NE(table.find("+0.0000 +- 0.0000"), std::string::npos) << table;
    EXPECT_EQ(table.find("-0.0000"), std::string::npos) << table;
  }
  EXPECT_NE(eval_table(task_of(Task::perplexity, -6e-5), kShape).find("-0.0001 +-"),
            std::string::npos);
  EXPECT_NE(eval_table(task_of(Task::perplexity, -1.25), kShape).find(" -1.2500 +-"),
            std::string::npos);
  for (const Task task : {Task::needle, Task::repetition}) {
    EXPECT_NE(eval_table(task_of(task, 0.0), kShape).find(" +0.0 +-"), std::string::npos);
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
  const std::string table = eval_table(result, kShape);
  EXPECT_NE(table.find("    2048 B      512 B"), std::string::npos) << table;
  EXPECT_NE(table.find("    4096 B          -"), std::string::npos) << table;
}

}  // namespace
}  // namespace sluice::tools
