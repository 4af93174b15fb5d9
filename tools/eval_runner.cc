#include "tools/eval_runner.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "sluice/errors.h"
#include "sluice/scorer.h"

namespace sluice::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Returns true if one index can hold the keys and values of both policies.
bool same_codes(const Policy& a, const Policy& b) {
  const bool both_keep_values =
      a.compensate == Compensation::values && b.compensate == Compensation::values;
  const bool same_values = a.values.bits == b.values.bits && a.values.half == b.values.half;
  const Scorer& of_a = own_scorers().at(a.select);
  const Scorer& of_b = own_scorers().at(b.select);
  const bool both_estimate = of_a.info().estimates() && of_b.info().estimates();
  return a.bits == b.bits && (!both_keep_values || same_values) &&
         (!both_estimate || of_a.reads_channels() == of_b.reads_channels());
}

// Policies that can share a prefill and an index.
bool same_group(const Policy& a, const Policy& b) {
  const bool same_layers = a.prefill.dense() || a.dense_layers == b.dense_layers;
  const auto same_in = [&](const auto& entry) {
    return same_codes(a.at(entry.first), b.at(entry.first));
  };
  return a.prefill == b.prefill && same_layers && same_codes(a, b) &&
         std::all_of(a.layers.begin(), a.layers.end(), same_in) &&
         std::all_of(b.layers.begin(), b.layers.end(), same_in);
}

// Policies that share one session.
using Group = std::vector<std::size_t>;

std::vector<Group> groups_of(const std::vector<NamedPolicy>& policies, Sessions sessions) {
  std::vector<Group> groups;
  for (std::size_t i = 0; i < policies.size(); ++i) {
    const auto at = std::find_if(groups.begin(), groups.end(), [&](const Group& group) {
      return sessions == Sessions::shared &&
             std::all_of(group.begin(), group.end(), [&](std::size_t member) {
               return same_group(policies[member].policy, policies[i].policy);
             });
    });
    if (at == groups.end()) {
      groups.push_back({i});
    } else {
      at->push_back(i);
    }
  }
  return groups;
}

// Tokens of a passage and its longest probe.
std::int64_t passage_tokens(const Passage& passage) {
  std::size_t longest = 0;
  for (const Probe& probe : passage.probes) {
    std::size_t length = 0;
    for (const Turn& turn : probe.turns) length += turn.given.size() + turn.answer_tokens();
    longest = std::max(longest, length);
  }
  return static_cast<std::int64_t>(passage.context.size() + longest);
}

// Session options that fit every passage of a group, so that one plan serves all rounds.
SessionOptions session_of(const Group& group, const std::vector<NamedPolicy>& policies,
                          const std::vector<Passage>& passages, int step_tokens) {
  SessionOptions wanted;
  for (const Passage& passage : passages) {
    wanted.context = std::max(wanted.context, passage_tokens(passage));
  }
  for (const std::size_t i : group) wanted.policies.push_back(policies[i].policy);
  wanted.decode_batch = step_tokens;
  return wanted;
}

// The engines of a run: policy 0 is the dense attention that all are compared with.
struct Engines {
  Engine& engine;
  Engine& exact;

  Engine& of(std::size_t policy) const { return policy == 0 ? exact : engine; }
};

// One task under all policies, dense attention first.
struct Run {
  Engines engines;
  const TaskInput& input;
  const TaskOptions& options;
  std::vector<NamedPolicy> policies;
  std::vector<Group> groups;

  SessionOptions session_of(const Group& group) const {
    return tools::session_of(group, policies, input.passages, options.step_tokens);
  }
};

// One result per policy with its plan, before any measurement.
std::vector<PolicyResult> planned(const Run& run) {
  std::vector<PolicyResult> results;
  for (std::size_t i = 0; i < run.policies.size(); ++i) {
    const NamedPolicy& policy = run.policies[i];
    const Plan plan = run.engines.of(i).plan(SessionOptions{run.input.context, {policy.policy}, 1});
    PolicyResult& result = results.emplace_back();
    result.name = policy.name;
    result.policy = to_string(policy.policy);
    result.kept_index_bytes = plan.kv.index_bytes;
  }
  for (const Group& group : run.groups) {
    const Plan plan = run.engines.of(group.front()).plan(run.session_of(group));
    for (const std::size_t i : group) results[i].plan = plan;
  }
  return results;
}

// Called with the policies of a group that are done, and a note.
using GroupProgress = std::function<void(double share, const std::string& what)>;

// Asks one policy, which is in force, all that is asked behind a passage.
void ask(const Run& run, Session& session, std::size_t round, std::size_t policy,
         std::vector<Baseline>& baselines, CostMeter& meter, PassageResult& result) {
  const Passage& passage = run.input.passages[round];
  const bool repeats = run.input.task == Task::repetition;
  const ProbeOptions how = {passage.writer,
                            static_cast<std::size_t>(run.options.step_tokens),
                            run.options.seed + static_cast<std::uint64_t>(round),
                            passage.ends,
                            repeats && policy != 0,
                            repeats};
  const Clock::time_point start = Clock::now();
  for (std::size_t probe = 0; probe < passage.probes.size(); ++probe) {
    result.probes.push_back(run_probe(run.engines.engine.tokenizer(), session,
                                      passage.probes[probe], how, baselines[probe], meter,
                                      result.cost));
    session.truncate(std::ssize(passage.context));
  }
  result.answer_seconds = seconds_since(start);
}

// The results of one group behind one passage go to `results`, which has one per policy.
void run_group(const Run& run, std::size_t round, const Group& group,
               std::vector<Baseline>& baselines, PassageResults& results,
               const GroupProgress& progress) {
  Session session = run.engines.of(group.front()).new_session(run.session_of(group));
  const Clock::time_point start = Clock::now();
  session.prefill(run.input.passages[round].context, [&](std::int64_t at, std::int64_t of) {
    progress(0.5 * static_cast<double>(at) / static_cast<double>(of), "prefill");
    return true;
  });
  const double seconds = seconds_since(start);
  CostMeter meter(session);
  double done = 0.5;
  for (const std::size_t i : group) {
    progress(done++, run.policies[i].name);
    session.use(run.policies[i].policy);
    results[i].prompt_seconds = seconds;
    ask(run, session, round, i, baselines, meter, results[i]);
  }
}

void add(const PassageResults& passage, std::vector<PolicyResult>& policies) {
  for (std::size_t i = 0; i < policies.size(); ++i) {
    PolicyResult& sum = policies[i];
    sum.probes.insert(sum.probes.end(), passage[i].probes.begin(), passage[i].probes.end());
    sum.cost += passage[i].cost;
    sum.prompt_seconds += passage[i].prompt_seconds;
    sum.answer_seconds += passage[i].answer_seconds;
  }
}

}  // namespace

TaskInput input_of(const PassageBuilder& builder, Task task, const TaskOptions& options) {
  TaskInput input = {task, {}, options.context, {}};
  for (int round = 0; round < options.rounds; ++round) {
    input.passages.push_back(builder.build(task, round));
  }
  return input;
}

TaskResult run_task(Engine& engine, Engine& exact, const TaskInput& input,
                    const TaskOptions& options, const std::vector<NamedPolicy>& policies,
                    Sessions sessions, const EvalProgress& progress, const PassageLog& log) {
  Run run = {{engine, exact}, input, options, {{"dense", Policy()}}, {}};
  run.policies.insert(run.policies.end(), policies.begin(), policies.end());
  run.groups = groups_of(run.policies, sessions);
  TaskResult result = {input.task, input.data, input.context, planned(run)};
  if (log.done.size() > input.passages.size()) {
    throw Error(ErrorCode::corrupt, "the report has more passages than --resume has left to do");
  }
  for (const PassageResults& passage : log.done) add(passage, result.policies);
  const auto steps = static_cast<double>(input.passages.size() * run.policies.size());
  auto done = static_cast<double>(log.done.size() * run.policies.size());
  for (std::size_t round = log.done.size(); round < input.passages.size(); ++round) {
    std::vector<Baseline> baselines(input.passages[round].probes.size());
    PassageResults passage(run.policies.size());
    for (const Group& group : run.groups) {
      run_group(run, round, group, baselines, passage, [&](double share, const std::string& what) {
        progress((done + share) / steps, std::string(to_string(input.task)) + ", " +
                                             std::to_string(input.context) + " tokens: " + what);
      });
      done += static_cast<double>(group.size());
    }
    add(passage, result.policies);
    if (log.add) log.add(passage);
  }
  return result;
}

}  // namespace sluice::tools
