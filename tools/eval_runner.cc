#include "tools/eval_runner.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace sluice::tools {
namespace {

// Whether an index that serves both can hold keys and values in their bits.
bool same_bits(const Policy& a, const Policy& b) {
  const bool both_keep_values =
      a.compensate == Compensation::values && b.compensate == Compensation::values;
  return a.bits == b.bits && (!both_keep_values || a.values.bits == b.values.bits);
}

// Policies that can share a prefill and an index.
bool same_group(const Policy& a, const Policy& b) {
  const bool same_layers = a.prefill.dense() || a.dense_layers == b.dense_layers;
  const auto same_in = [&](const auto& entry) {
    return same_bits(a.at(entry.first), b.at(entry.first));
  };
  return a.prefill == b.prefill && same_layers && same_bits(a, b) &&
         std::all_of(a.layers.begin(), a.layers.end(), same_in) &&
         std::all_of(b.layers.begin(), b.layers.end(), same_in);
}

std::vector<std::vector<std::size_t>> groups_of(const std::vector<NamedPolicy>& policies) {
  std::vector<std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < policies.size(); ++i) {
    const auto at = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
      return std::all_of(group.begin(), group.end(), [&](std::size_t member) {
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

// Tokens of a passage with its longest probe.
std::int64_t length_of(const Passage& passage) {
  std::size_t longest = 0;
  for (const Probe& probe : passage.probes) {
    std::size_t length = 0;
    for (const Turn& turn : probe.turns) length += turn.given.size() + turn.answer.size();
    longest = std::max(longest, length);
  }
  return static_cast<std::int64_t>(passage.context.size() + longest);
}

}  // namespace

TaskResult run_task(Engine& engine, const PassageBuilder& builder, Task task,
                    const TaskOptions& options, const std::vector<NamedPolicy>& policies,
                    const EvalProgress& progress) {
  std::vector<NamedPolicy> all = {{"dense", Policy()}};
  all.insert(all.end(), policies.begin(), policies.end());
  TaskResult result;
  result.task = task;
  result.context = options.context;
  for (const NamedPolicy& policy : all) {
    const Plan plan = engine.plan(SessionOptions{options.context, {policy.policy}, 1});
    result.policies.push_back({policy.name, to_string(policy.policy), plan.kv.index_bytes, {}, {}});
  }
  const auto steps = static_cast<double>(options.rounds) * static_cast<double>(all.size());
  double done = 0.0;
  const auto report = [&](double share, const std::string& what) {
    const std::string note =
        std::string(to_string(task)) + ", " + std::to_string(options.context) + " tokens: " + what;
    progress((done + share) / steps, note);
  };
  const std::vector<std::vector<std::size_t>> groups = groups_of(all);
  for (int round = 0; round < options.rounds; ++round) {
    const Passage passage = builder.build(task, round);
    std::vector<Baseline> baselines(passage.probes.size());
    for (const std::vector<std::size_t>& group : groups) {
      SessionOptions wanted;
      wanted.context = length_of(passage);
      for (const std::size_t i : group) wanted.policies.push_back(all[i].policy);
      wanted.decode_batch = options.step_tokens;
      Session session = engine.new_session(wanted);
      session.prefill(passage.context, [&](std::int64_t at, std::int64_t of) {
        report(0.5 * static_cast<double>(at) / static_cast<double>(of), "prefill");
        return true;
      });
      for (const std::size_t i : group) {
        report(0.5, all[i].name);
        session.use(all[i].policy);
        const ProbeOptions how = {passage.writer, static_cast<std::size_t>(options.step_tokens),
                                  options.seed + static_cast<std::uint64_t>(round),
                                  task == Task::repetition && i != 0, task == Task::repetition};
        for (std::size_t probe = 0; probe < passage.probes.size(); ++probe) {
          result.policies[i].probes.push_back(run_probe(engine.tokenizer(), session,
                                                        passage.probes[probe], how,
                                                        baselines[probe], result.policies[i].cost));
          session.truncate(std::ssize(passage.context));
        }
        done += 1.0;
      }
    }
  }
  return result;
}

}  // namespace sluice::tools
