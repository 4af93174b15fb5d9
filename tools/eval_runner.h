// Runs passages under several policies and measures what each got right and what it cost.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sluice/engine.h"
#include "tools/eval_cost.h"
#include "tools/eval_probe.h"
#include "tools/eval_tasks.h"

namespace sluice::tools {

struct NamedPolicy {
  std::string name;  // a preset's name or the line itself
  Policy policy;
};

struct PolicyResult {
  std::string name;
  std::string policy;
  // That the policy alone would have where attention reads: all that choosing and approximating
  // keep of keys and values.
  std::uint64_t kept_index_bytes = 0;
  std::vector<ProbeResult> probes;
  Cost cost;
};

struct TaskResult {
  Task task = Task::needle;
  std::int64_t context = 0;
  std::vector<PolicyResult> policies;  // the first is dense
};

// Called with the share done and what is being done.
using EvalProgress = std::function<void(double share, const std::string& note)>;

// `policies` without dense, which is always run first. Every policy answers after a dense prefill
// (or its own, if it has one) of the same passages.
TaskResult run_task(Engine& engine, const PassageBuilder& builder, Task task,
                    const TaskOptions& options, const std::vector<NamedPolicy>& policies,
                    const EvalProgress& progress);

}  // namespace sluice::tools
