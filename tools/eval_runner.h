// Runs passages under several policies and measures what each got right and what it cost.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "sluice/engine.h"
#include "tools/eval_tasks.h"

namespace sluice::tools {

struct NamedPolicy {
  std::string name;  // a preset's name or the line itself
  Policy policy;
};

// One probe under one policy.
struct ProbeResult {
  bool right = false;       // every target was the likeliest token
  int leading = 0;          // targets before the first that was not
  int characters = 0;       // of the leading targets' text
  std::vector<double> nll;  // per target, nats
  int top1_as_dense = 0;    // targets whose likeliest token is dense attention's
  double kl = 0.0;          // sum over targets of KL(dense || this), nats
  double depth = 0.0;
};

// From one tier to another, or in place, and why.
using Movement = std::tuple<Tier, Tier, Cause>;

// Sums over all decoded tokens and layers.
struct Cost {
  std::int64_t tokens = 0;
  double attended = 0.0;  // rows per KV head, summed over layers and tokens
  double selected = 0.0;  // of them, those outside the newest page
  double alpha = 0.0;     // of layers that select, mean over query heads
  std::int64_t alphas = 0;
  std::int64_t cut = 0;  // (layer, token, KV head) in which a cap cut the selection
  // What the sessions' ledgers counted while decoding and correcting.
  std::map<Movement, Traffic> traffic;

  Cost& operator+=(const Cost& other);
};

struct PolicyResult {
  std::string name;
  std::string policy;
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
TaskResult run_task(Engine& engine, const PassageBuilder& passages, Task task,
                    const TaskOptions& options, const std::vector<NamedPolicy>& policies,
                    const EvalProgress& progress);

}  // namespace sluice::tools
