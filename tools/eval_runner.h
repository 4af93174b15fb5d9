// Runs passages under several policies and measures the answers and the cost of each.
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

// What is asked of every policy, behind each of some passages.
struct TaskInput {
  Task task = Task::needle;
  std::string data;          // the file that it is from; empty: made out of a text
  std::int64_t context = 0;  // tokens of the longest passage
  std::vector<Passage> passages;
};
// The passages of all rounds. Throws what PassageBuilder::build() throws.
TaskInput input_of(const PassageBuilder& builder, Task task, const TaskOptions& options);

// One policy behind one passage.
struct PassageResult {
  std::vector<ProbeResult> probes;
  DecodeCost cost;
  double prompt_seconds = 0.0;  // a prompt of shared policies counts for each of them
  double answer_seconds = 0.0;
};

struct PolicyResult {
  std::string name;
  std::string policy;
  // Bytes, where attention reads, for a context of TaskResult::context: everything kept of keys and
  // values for selecting and approximating.
  std::uint64_t kept_index_bytes = 0;
  Plan plan;                        // of the session that answered
  std::vector<ProbeResult> probes;  // of all passages
  DecodeCost cost;
  double prompt_seconds = 0.0;
  double answer_seconds = 0.0;
};

struct TaskResult {
  Task task = Task::needle;
  std::string data;
  std::int64_t context = 0;
  std::vector<PolicyResult> policies;  // the first is dense
};

// All policies behind one passage, dense first.
using PassageResults = std::vector<PassageResult>;

// The measured passages of a task, in their order.
struct PassageLog {
  std::vector<PassageResults> done;                // by an earlier run; not measured again
  std::function<void(const PassageResults&)> add;  // called with each one measured, if set
};

// Called with the share done, 0 to 1, and a note on the current work.
using EvalProgress = std::function<void(double share, const std::string& note)>;

// The session in which a policy answers.
enum class Sessions : std::uint8_t {
  own,     // planned for the policy alone, as `generate` plans it, behind a prefill of its own
  shared,  // planned for all policies that one prefill and one index can serve: faster, but each
           // gets less device memory, so it moves other bytes than it would alone
};

// `policies` without the dense attention that they are compared with: that of `exact`, run first.
// If `exact` is another engine than `engine`, it keeps rows in another format. Every policy answers
// after a dense prefill (or its own, if it has one) of the same passages. Answers depend on
// `sessions` only by rounding. Throws Error{memory} if a cap does not hold one of the plans, before
// anything is read, and Error{corrupt} if `log` has more passages than there are.
TaskResult run_task(Engine& engine, Engine& exact, const TaskInput& input,
                    const TaskOptions& options, const std::vector<NamedPolicy>& policies,
                    Sessions sessions, const EvalProgress& progress, const PassageLog& log = {});

}  // namespace sluice::tools
