#include "tools/void_flags.h"

#include <algorithm>
#include <cstdint>

#include "lib/bytes.h"

namespace sluice::tools {
namespace {

// Collects the names of the flags that were given.
struct Given {
  std::vector<std::string> flags;

  void add(const char* flag, bool is_given) {
    if (is_given) flags.emplace_back(flag);
  }
};

bool asks_for_row_cache(const ModelFlags& flags) {
  return !flags.row_cache.empty() && parse_bytes(flags.row_cache, "--row-cache") > 0;
}

// Returns true if the policy reads key tiles of the index, which `bits` applies to.
bool has_tiles(const Policy& policy) {
  const std::string& name = policy.select.name;
  return name == "int4" || name == "sparq" || (name == "quest" && policy.candidates.limited());
}

std::string void_in_policy(const Policy& policy) {
  const std::string& name = policy.select.name;
  std::string text;
  if (name == "dense") {
    Given given;
    given.add("sinks", policy.sinks > 0);
    given.add("recent", policy.recent > 0);
    text += void_note(given.flags, "the policy select=dense keeps every token");
  }
  const bool own_bits =
      std::any_of(policy.layers.begin(), policy.layers.end(),
                  [](const auto& layer) { return layer.second.bits.has_value(); });
  if (!has_tiles(policy) && (policy.bits != Policy().bits || own_bits)) {
    text += void_note({"bits"}, "the policy select=" + name + " keeps no keys in its index");
  }
  return text;
}

std::string void_row_cache(const ModelFlags& flags, const Plan& plan, const Policy& policy) {
  // void_on_device() reports this without a device tier.
  if (!asks_for_row_cache(flags) || plan.kv.cache_rows > 0 || plan.kv.in_place) return {};
  const bool selects = policy.select.name != "dense";
  const bool whole = plan.kv.all_resident();
  return void_note({"--row-cache"},
                   whole     ? "every row is on the device already"
                   : selects ? "it has no room for the rows that one step selects"
                             : "the policy is dense, so no row is selected again and again");
}

}  // namespace

std::string void_note(const std::vector<std::string>& flags, const std::string& why) {
  if (flags.empty()) return {};
  std::string names;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    names += (i == 0 ? "" : i + 1 < flags.size() ? ", " : " and ") + flags[i];
  }
  return "note: " + names + (flags.size() == 1 ? " does nothing: " : " do nothing: ") + why + "\n";
}

std::string void_sampling(const SamplingParams& sampling) {
  const SamplingParams defaults;
  const bool by_temperature = sampling.temperature == 0.0;
  const bool by_top_k = !by_temperature && sampling.top_k == 1;
  if (!by_temperature && !by_top_k) return {};
  Given given;
  given.add("--temperature", by_top_k);
  given.add("--top-k", by_temperature && sampling.top_k > 0);
  given.add("--top-p", sampling.top_p != defaults.top_p);
  given.add("--min-p", sampling.min_p != defaults.min_p);
  given.add("--seed", sampling.seed != defaults.seed);
  return void_note(given.flags, std::string(by_temperature ? "--temperature 0" : "--top-k 1") +
                                    " always takes the likeliest token");
}

std::string void_on_device(const ModelFlags& flags, bool on_device) {
  std::string text;
  if (flags.device == "reference") {
    Given given;
    given.add("--threads", flags.threads > 1);
    given.add("--compute", flags.compute == "bf16");
    text += void_note(given.flags, "the reference device computes in f32, on one thread");
  }
  if (on_device) return text;
  if (flags.host_attention != "auto") {
    text += void_note({"--host-attention"}, "without a GPU all attention is the CPU's");
  }
  if (asks_for_row_cache(flags) && flags.device_memory.empty()) {
    text += void_note({"--row-cache"}, "it is a part of --device-memory, which is not given");
  }
  return text;
}

std::string void_in_plan(const ModelFlags& flags, const Plan& plan, const Policy& policy) {
  std::string text = void_on_device(flags, plan.on_device);
  text += void_row_cache(flags, plan, policy);
  const bool attends = plan.kv.host_attention || flags.config().host_attention.value_or(0.0) == 0.0;
  if (plan.on_device && !attends) {
    text += void_note({"--host-attention"}, "no layer of this policy attends to everything");
  }
  return text + void_in_policy(policy);
}

std::string void_without_plan(const ModelFlags& flags, const std::string& policy) {
  const ModelFlags defaults;
  Given given;
  given.add("--policy", policy != "dense");
  given.add("--device-memory", !flags.device_memory.empty());
  given.add("--host-memory", !flags.host_memory.empty());
  given.add("--disk", !flags.disk.empty());
  given.add("--row-cache", !flags.row_cache.empty());
  given.add("--host-attention", flags.host_attention != defaults.host_attention);
  given.add("--compute", flags.compute != defaults.compute);
  given.add("--weights", flags.weights != defaults.weights);
  given.add("--threads", flags.threads != defaults.threads);
  given.add("--chunk", flags.chunk != defaults.chunk);
  return void_note(given.flags, "there is no plan to show without --context");
}

std::string void_in_tasks(const TaskOptions& options, const std::vector<Task>& tasks) {
  const auto none = [&](const auto& uses) {
    return std::none_of(tasks.begin(), tasks.end(), uses);
  };
  const auto asks = [](Task task) { return has_facts(task) && task != Task::common_words; };
  const auto continues = [](Task task) {
    return task == Task::perplexity || task == Task::agreement || task == Task::drift;
  };
  const TaskOptions defaults;
  Given given;
  given.add("--needles", options.needles != defaults.needles &&
                             none([&](Task task) { return !continues(task); }));
  given.add("--digits", options.digits != defaults.digits && none(asks));
  given.add("--tokens", options.tokens != defaults.tokens && none([&](Task task) {
                          return continues(task) || task == Task::repetition;
                        }));
  given.add("--seed", options.seed != defaults.seed &&
                          none([&](Task task) { return task == Task::drift || !continues(task); }));
  return void_note(given.flags, "no --task that was given depends on that");
}

std::string void_with_data(const TaskOptions& options) {
  const TaskOptions defaults;
  Given given;
  given.add("--rounds", options.rounds != defaults.rounds);
  given.add("--needles", options.needles != defaults.needles);
  given.add("--digits", options.digits != defaults.digits);
  given.add("--seed", options.seed != defaults.seed);
  return void_note(given.flags, "the tasks are those of --data");
}

}  // namespace sluice::tools
