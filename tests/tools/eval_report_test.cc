#include "tools/eval_report.h"

#include <gtest/gtest.h>

#include <string>

#include "sluice/types.h"

namespace sluice::tools {
namespace {

constexpr KvShape kShape = {2, 2, 2, 64, DType::bf16};

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

}  // namespace
}  // namespace sluice::tools
