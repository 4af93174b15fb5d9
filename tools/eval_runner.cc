#include "tools/eval_runner.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "lib/sample_token.h"

namespace sluice::tools {
namespace {

// log softmax, fp64 sum.
std::vector<float> log_probabilities(std::span<const float> logits) {
  const float highest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x - highest));
  const auto shift = static_cast<float>(static_cast<double>(highest) + std::log(sum));
  std::vector<float> result(logits.begin(), logits.end());
  for (float& x : result) x -= shift;
  return result;
}

std::size_t likeliest(std::span<const float> logits) {
  return static_cast<std::size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double divergence(const std::vector<float>& dense, const std::vector<float>& other) {
  double sum = 0.0;
  for (std::size_t i = 0; i < dense.size(); ++i) {
    const auto p = static_cast<double>(dense[i]);
    sum += std::exp(p) * (p - static_cast<double>(other[i]));
  }
  return sum;
}

// log probabilities of every target of every probe under dense attention.
using Baseline = std::vector<std::vector<std::vector<float>>>;

// What a session's ledger has counted so far of decoding, and of the corrections in between.
std::map<Movement, Traffic> counted(const Ledger& ledger) {
  std::map<Movement, Traffic> traffic;
  for (const Tier from : {Tier::device, Tier::host}) {
    for (const Tier to : {Tier::device, Tier::host}) {
      for (int number = 0; number < kCauses; ++number) {
        const auto cause = static_cast<Cause>(number);
        Traffic sum = ledger.total(Phase::decode, from, to, cause);
        sum += ledger.total(Phase::correction, from, to, cause);
        if (sum.rows > 0) traffic[{from, to, cause}] = sum;
      }
    }
  }
  return traffic;
}

// Rows attended by corrections, all layers and KV heads.
std::uint64_t corrected_rows(const Ledger& ledger) {
  std::uint64_t rows = ledger.total(Phase::correction, Tier::host, Tier::device, Cause::miss).rows;
  for (const Tier tier : {Tier::device, Tier::host}) {
    rows += ledger.total(Phase::correction, tier, tier, Cause::hit).rows;
  }
  return rows;
}

// What one step attended, from the session's own account. Layers that did not select were dense.
Cost cost_of(const Session& session, std::int64_t tokens) {
  const KvShape& shape = session.plan().shape;
  Cost cost;
  cost.tokens = tokens;
  const std::int64_t first = session.length() - tokens;
  double dense = 0.0;
  double tail = 0.0;
  for (std::int64_t i = 0; i < tokens; ++i) {
    dense += static_cast<double>(first + i + 1);
    tail += static_cast<double>((first + i) % kPageTokens + 1);
  }
  const StepSelection& selection = session.selection();
  const auto dense_layers =
      static_cast<double>(shape.layers) - static_cast<double>(selection.size());
  cost.attended = dense * dense_layers;
  cost.selected = (dense - tail) * dense_layers;
  for (const LayerSelection& layer : selection) {
    cost.attended += layer.attended * static_cast<double>(tokens);
    cost.selected += layer.selected * static_cast<double>(tokens);
    if (layer.follower) continue;
    cost.cut += layer.cut;
    cost.alpha += layer.alpha * static_cast<double>(tokens);
    cost.alphas += tokens;
  }
  return cost;
}

// What came to an account between two looks at it.
std::map<Movement, Traffic> between(const std::map<Movement, Traffic>& before,
                                    std::map<Movement, Traffic> after) {
  for (const auto& [movement, traffic] : before) {
    after[movement].rows -= traffic.rows;
    after[movement].bytes -= traffic.bytes;
  }
  return after;
}

// Feeds a probe in pieces of one step and scores its targets.
class ProbeRun {
 public:
  ProbeRun(const Engine& engine, Session& session, const Probe& probe, std::size_t step_tokens)
      : engine_(engine), session_(session), probe_(probe), step_tokens_(step_tokens) {
    result_.depth = probe.depth;
    result_.right = true;
  }

  // `baseline` is filled if it is empty, compared with otherwise. With `until_wrong` the probe ends
  // with the first step that has a wrong answer: nothing after it counts.
  ProbeResult run(std::vector<std::vector<float>>& baseline, bool until_wrong, Cost& cost) {
    const bool first = baseline.empty();
    const std::map<Movement, Traffic> before = counted(session_.ledger());
    const std::uint64_t corrected = corrected_rows(session_.ledger());
    for (std::size_t done = 0; done < probe_.tokens.size();) {
      const std::size_t count = std::min(step_tokens_, probe_.tokens.size() - done);
      std::size_t accounted = 0;
      session_.decode_known(std::span(probe_.tokens).subspan(done, count),
                            [&](std::size_t i, std::span<const float> logits) {
                              if (i == accounted) accounted += account(cost);
                              if (done + i >= probe_.scored) {
                                score(done + i - probe_.scored, logits, baseline, first);
                              }
                            });
      done += count;
      if (until_wrong && !result_.right) break;
    }
    Cost counts;
    counts.traffic = between(before, counted(session_.ledger()));
    counts.attended = counts.selected =
        static_cast<double>(corrected_rows(session_.ledger()) - corrected) /
        static_cast<double>(session_.plan().shape.kv_heads);
    cost += counts;
    const std::span leading(probe_.targets.data(), static_cast<std::size_t>(result_.leading));
    result_.characters = static_cast<int>(engine_.tokenizer().decode(leading).size());
    return result_;
  }

 private:
  // Adds what the last step attended; returns the step's tokens.
  std::size_t account(Cost& cost) {
    const int tokens = session_.ledger().history().back().tokens;
    cost += cost_of(session_, tokens);
    return static_cast<std::size_t>(tokens);
  }

  void score(std::size_t target, std::span<const float> logits,
             std::vector<std::vector<float>>& baseline, bool first) {
    if (target >= probe_.targets.size()) return;
    const auto expected = static_cast<std::size_t>(probe_.targets[target]);
    std::vector<float> own = log_probabilities(logits);
    const auto best = static_cast<std::size_t>(sample_token(logits, {}));  // NaN is an error
    if (best != expected) result_.right = false;
    if (result_.right) ++result_.leading;
    result_.nll.push_back(-static_cast<double>(own[expected]));
    if (first) baseline.push_back(own);
    if (target >= baseline.size()) return;
    if (likeliest(baseline[target]) == best) ++result_.top1_as_dense;
    result_.kl += divergence(baseline[target], own);
  }

  const Engine& engine_;
  Session& session_;
  const Probe& probe_;
  std::size_t step_tokens_;
  ProbeResult result_;
};

// Whether an index that serves both can hold keys and values in their bits.
bool same_bits(const Policy& a, const Policy& b) {
  const bool both_keep_values =
      a.compensate == Compensation::values && b.compensate == Compensation::values;
  return a.bits == b.bits && (!both_keep_values || a.values.bits == b.values.bits);
}

// Policies that can share a prefill and an index.
bool same_group(const Policy& a, const Policy& b) {
  const bool same_layers = a.prefill.tau == 0.0 || a.dense_layers == b.dense_layers;
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

std::size_t longest_probe(const Passage& passage) {
  std::size_t longest = 0;
  for (const Probe& probe : passage.probes) longest = std::max(longest, probe.tokens.size());
  return longest;
}

}  // namespace

Cost& Cost::operator+=(const Cost& other) {
  tokens += other.tokens;
  attended += other.attended;
  selected += other.selected;
  alpha += other.alpha;
  alphas += other.alphas;
  cut += other.cut;
  for (const auto& [movement, moved] : other.traffic) traffic[movement] += moved;
  return *this;
}

TaskResult run_task(Engine& engine, const PassageBuilder& passages, Task task,
                    const TaskOptions& options, const std::vector<NamedPolicy>& policies,
                    const EvalProgress& progress) {
  std::vector<NamedPolicy> all = {{"dense", Policy()}};
  all.insert(all.end(), policies.begin(), policies.end());
  TaskResult result;
  result.task = task;
  result.context = options.context;
  for (const NamedPolicy& policy : all) {
    result.policies.push_back({policy.name, to_string(policy.policy), {}, {}});
  }
  std::vector<Baseline> baselines(static_cast<std::size_t>(options.rounds));
  const auto steps = static_cast<double>(options.rounds) * static_cast<double>(all.size());
  double done = 0.0;
  const auto report = [&](double share, const std::string& what) {
    const std::string note =
        std::string(to_string(task)) + ", " + std::to_string(options.context) + " tokens: " + what;
    progress((done + share) / steps, note);
  };
  for (const std::vector<std::size_t>& group : groups_of(all)) {
    std::optional<Session> session;
    for (int round = 0; round < options.rounds; ++round) {
      const Passage passage = passages.build(task, round);
      if (!session) {
        SessionOptions wanted;
        wanted.context =
            static_cast<std::int64_t>(passage.context.size() + longest_probe(passage)) + 64;
        for (const std::size_t i : group) wanted.policies.push_back(all[i].policy);
        wanted.decode_batch = options.step_tokens;
        session.emplace(engine.new_session(wanted));
      }
      session->truncate(0);
      session->use(all[group.front()].policy);
      session->prefill(passage.context, [&](std::int64_t at, std::int64_t of) {
        report(0.5 * static_cast<double>(at) / static_cast<double>(of), "prefill");
        return true;
      });
      Baseline& baseline = baselines[static_cast<std::size_t>(round)];
      baseline.resize(passage.probes.size());
      const std::int64_t length = session->length();
      for (const std::size_t i : group) {
        report(0.5, all[i].name);
        session->use(all[i].policy);
        for (std::size_t probe = 0; probe < passage.probes.size(); ++probe) {
          ProbeRun run(engine, *session, passage.probes[probe],
                       static_cast<std::size_t>(options.step_tokens));
          result.policies[i].probes.push_back(run.run(
              baseline[probe], task == Task::repetition && i != 0, result.policies[i].cost));
          session->truncate(length);
        }
        done += 1.0;
      }
    }
  }
  return result;
}

}  // namespace sluice::tools
