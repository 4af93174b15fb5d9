#include "tools/eval_runner.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "sluice/scorer.h"

namespace sluice::tools {
namespace {

// Returns true if one index can hold the keys and values of both policies.
bool same_codes(const Policy& a, const Policy& b) {
  const bool both_keep_values =
      a.compensate == Compensation::values && b.compensate == Compensation::values;
  const Scorer& of_a = own_scorers().at(a.select);
  const Scorer& of_b = own_scorers().at(b.select);
  const bool both_estimate = of_a.info().estimates() && of_b.info().estimates();
  return a.bits == b.bits && (!both_keep_values || a.values.bits == b.values.bits) &&
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
std::int64_t length_of(const Passage& passage) {
  std::size_t longest = 0;
  for (const Probe& probe : passage.probes) {
    std::size_t length = 0;
    for (const Turn& turn : probe.turns) length += turn.given.size() + turn.answer.size();
    longest = std::max(longest, length);
  }
  return static_cast<std::int64_t>(passage.context.size() + longest);
}

// Session options that fit every passage of a group, so that one plan serves all rounds.
SessionOptions session_of(const Group& group, const std::vector<NamedPolicy>& policies,
                          const std::vector<Passage>& passages, int step_tokens) {
  SessionOptions wanted;
  for (const Passage& passage : passages) {
    wanted.context = std::max(wanted.context, length_of(passage));
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

// One result per policy with its plan, before any measurement.
std::vector<PolicyResult> planned(const Engines& engines, const std::vector<NamedPolicy>& policies,
                                  const std::vector<Group>& groups,
                                  const std::vector<Passage>& passages,
                                  const TaskOptions& options) {
  std::vector<PolicyResult> results;
  for (std::size_t i = 0; i < policies.size(); ++i) {
    const NamedPolicy& policy = policies[i];
    const Plan plan = engines.of(i).plan(SessionOptions{options.context, {policy.policy}, 1});
    results.push_back({policy.name, to_string(policy.policy), plan.kv.index_bytes, {}, {}, {}});
  }
  for (const Group& group : groups) {
    const Plan plan =
        engines.of(group.front()).plan(session_of(group, policies, passages, options.step_tokens));
    for (const std::size_t i : group) results[i].plan = plan;
  }
  return results;
}

}  // namespace

TaskResult run_task(Engine& engine, Engine& exact, const PassageBuilder& builder, Task task,
                    const TaskOptions& options, const std::vector<NamedPolicy>& policies,
                    Sessions sessions, const EvalProgress& progress) {
  std::vector<NamedPolicy> all = {{"dense", Policy()}};
  all.insert(all.end(), policies.begin(), policies.end());
  std::vector<Passage> passages;
  for (int round = 0; round < options.rounds; ++round) {
    passages.push_back(builder.build(task, round));
  }
  const Engines engines{engine, exact};
  const std::vector<Group> groups = groups_of(all, sessions);
  TaskResult result{task, options.context, planned(engines, all, groups, passages, options)};
  const auto steps = static_cast<double>(options.rounds) * static_cast<double>(all.size());
  double done = 0.0;
  const auto report = [&](double share, const std::string& what) {
    const std::string note =
        std::string(to_string(task)) + ", " + std::to_string(options.context) + " tokens: " + what;
    progress((done + share) / steps, note);
  };
  for (std::size_t round = 0; round < passages.size(); ++round) {
    const Passage& passage = passages[round];
    std::vector<Baseline> baselines(passage.probes.size());
    for (const Group& group : groups) {
      Session session = engines.of(group.front())
                            .new_session(session_of(group, all, passages, options.step_tokens));
      session.prefill(passage.context, [&](std::int64_t at, std::int64_t of) {
        report(0.5 * static_cast<double>(at) / static_cast<double>(of), "prefill");
        return true;
      });
      CostMeter meter(session);
      for (const std::size_t i : group) {
        report(0.5, all[i].name);
        session.use(all[i].policy);
        const ProbeOptions how = {passage.writer, static_cast<std::size_t>(options.step_tokens),
                                  options.seed + static_cast<std::uint64_t>(round),
                                  task == Task::repetition && i != 0, task == Task::repetition};
        for (std::size_t probe = 0; probe < passage.probes.size(); ++probe) {
          PolicyResult& own = result.policies[i];
          own.probes.push_back(run_probe(engine.tokenizer(), session, passage.probes[probe], how,
                                         baselines[probe], meter, own.cost));
          session.truncate(std::ssize(passage.context));
        }
        done += 1.0;
      }
    }
  }
  return result;
}

}  // namespace sluice::tools
