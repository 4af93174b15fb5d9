#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/calibration.h"
#include "tools/eval_report.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

constexpr int kMostChecks = 5;  // measurements of a whole plan

// The rows and bits that a layer may keep.
struct LayerChoice {
  std::int64_t rows = 0;  // per KV head
  int value_bits = 2;
  int key_bits = 3;
  bool dense = false;
};

// The bytes that a choice costs in one layer.
struct Price {
  double first = 0.0;  // bytes of the kind to save first
  double second = 0.0;

  friend auto operator<=>(const Price&, const Price&) = default;
};

struct Measured {
  LayerChoice choice;
  Price price;
  double kl = 0.0;  // nats per token, with only this layer sparse
};

using Layer = std::vector<Measured>;         // a layer's choices, the most expensive (dense) last
using LayerPlan = std::vector<std::size_t>;  // index of each layer's choice

std::vector<LayerChoice> choices_of(const LayerChoices& choices) {
  std::vector<LayerChoice> all;
  for (const std::int64_t rows : choices.rows) {
    for (const int value_bits : choices.value_bits) {
      for (const int key_bits : choices.key_bits)
        all.push_back({rows, value_bits, key_bits, false});
    }
  }
  return all;
}

// "rows/value bits/key bits" of a choice that is not dense.
std::string name_of(const LayerChoice& choice) {
  return std::to_string(choice.rows) + "/" + std::to_string(choice.value_bits) + "/" +
         std::to_string(choice.key_bits);
}

void apply(const LayerChoice& choice, int layer, Policy& policy) {
  if (choice.dense) {
    policy.dense_layers.push_back(layer);
    return;
  }
  const Policy base = parse_policy("values");
  LayerSettings own;
  const LayerSettings::Pruning pruning =
      choice.rows == 0 ? LayerSettings::Pruning{Pruner::none, {}, 0.0}
                       : LayerSettings::Pruning{Pruner::top_k, {choice.rows, 0}, 0.0};
  if (pruning != LayerSettings::Pruning{base.prune, base.k, base.p}) own.prune = pruning;
  if (choice.value_bits != base.values.bits) {
    own.compensate = {Compensation::values,
                      {choice.value_bits, base.values.pages, base.values.half}};
  }
  if (choice.key_bits != base.bits) own.bits = choice.key_bits;
  if (own != LayerSettings{}) policy.layers[layer] = own;
}

Policy policy_of(const std::vector<Layer>& layers, const LayerPlan& plan) {
  Policy policy = parse_policy("values");
  for (std::size_t i = 0; i < plan.size(); ++i) {
    apply(layers[i][plan[i]].choice, static_cast<int>(i), policy);
  }
  return policy;
}

// A policy with this choice in one layer and all other layers dense.
Policy alone(const LayerChoice& choice, int layer, int layers) {
  Policy policy = parse_policy("values");
  for (int other = 0; other < layers; ++other) {
    apply(other == layer ? choice : LayerChoice{0, 0, 0, true}, other, policy);
  }
  return policy;
}

Price price_of(const Engine& engine, const LayerChoice& choice, const Policy& policy,
               std::int64_t context, Saving saving) {
  const KvShape& shape = engine.info().kv;
  const std::int64_t rows = choice.dense ? context : choice.rows;
  const auto bus =
      static_cast<double>(static_cast<std::uint64_t>(rows * shape.kv_heads) * shape.row_bytes());
  SessionOptions wanted;
  wanted.context = context;
  wanted.policies = {policy};
  const auto device = static_cast<double>(engine.plan(wanted).kv.index_bytes);
  return saving == Saving::bus ? Price{bus, device} : Price{device, bus};
}

TaskResult measure(Engine& engine, const PassageBuilder& passages, const TaskOptions& options,
                   const std::vector<NamedPolicy>& policies, Sessions sessions,
                   const std::string& what) {
  ProgressBar bar(what);
  TaskResult result =
      run_task(engine, engine, input_of(passages, Task::agreement, options), options, policies,
               sessions, [&](double share, const std::string& note) { bar.update(share, note); });
  bar.clear();
  return result;
}

std::vector<Layer> measure_layers(Engine& engine, const PassageBuilder& passages,
                                  const TaskOptions& options, const LayerChoices& choices) {
  const int count = engine.info().kv.layers;
  const std::vector<LayerChoice> all = choices_of(choices);
  std::vector<NamedPolicy> policies;
  for (int layer = 0; layer < count; ++layer) {
    for (const LayerChoice& choice : all) policies.push_back({"", alone(choice, layer, count)});
  }
  // A shared session is enough because only losses are compared, and they do not depend on the
  // plan.
  const TaskResult result =
      measure(engine, passages, options, policies, Sessions::shared, "each layer by itself");
  std::vector<Layer> layers(static_cast<std::size_t>(count));
  std::size_t next = 0;
  for (int layer = 0; layer < count; ++layer) {
    Layer& measured = layers[static_cast<std::size_t>(layer)];
    for (const LayerChoice& choice : all) {
      measured.push_back(
          {choice, price_of(engine, choice, policies[next].policy, options.context, choices.saving),
           score_of(result.policies[next + 1], result.policies.front()).kl});
      ++next;
    }
    const LayerChoice dense{0, 0, 0, true};
    measured.push_back(
        {dense, price_of(engine, dense, parse_policy("dense"), options.context, choices.saving),
         0.0});
  }
  return layers;
}

double loss_of(const std::vector<Layer>& layers, const LayerPlan& plan) {
  double loss = 0.0;
  for (std::size_t i = 0; i < plan.size(); ++i) loss += layers[i][plan[i]].kl;
  return loss;
}

// Starts with the cheapest choice of every layer and takes, step by step, the change that removes
// the most loss per byte, until the sum of losses is at most `loss`. Bytes are those that are saved
// first.
LayerPlan cheapest(const std::vector<Layer>& layers, double loss) {
  LayerPlan plan;
  for (const Layer& layer : layers) {
    const auto by_price = [](const Measured& a, const Measured& b) { return a.price < b.price; };
    plan.push_back(static_cast<std::size_t>(std::min_element(layer.begin(), layer.end(), by_price) -
                                            layer.begin()));
  }
  while (loss_of(layers, plan) > loss) {
    double best = 0.0;
    std::pair<std::size_t, std::size_t> step;
    for (std::size_t i = 0; i < plan.size(); ++i) {
      const Measured& now = layers[i][plan[i]];
      for (std::size_t next = 0; next < layers[i].size(); ++next) {
        const Measured& other = layers[i][next];
        const double gain = now.kl - other.kl;
        if (gain <= 0.0) continue;
        // Weighs bytes of the second kind a million times less, so they only break near ties.
        constexpr double kSecond = 1e-6;
        const double price = std::max(other.price.first - now.price.first, 0.0) +
                             kSecond * std::max(other.price.second - now.price.second, 1.0);
        if (gain / price <= best) continue;
        best = gain / price;
        step = {i, next};
      }
    }
    if (best == 0.0) break;
    plan[step.first] = step.second;
  }
  return plan;
}

// A plan and its measurement as a whole, beside the preset.
struct Checked {
  LayerPlan plan;
  TaskResult result;
  double kl = 0.0;
};

Checked check_whole(Engine& engine, const PassageBuilder& passages, const TaskOptions& options,
                    const std::vector<Layer>& layers, const LayerPlan& plan) {
  const std::vector<NamedPolicy> policies = {{"calibrated", policy_of(layers, plan)},
                                             {"values", parse_policy("values")}};
  TaskOptions one_by_one = options;  // because tokens that share a step share bytes
  one_by_one.step_tokens = 1;
  Checked checked{plan, measure(engine, passages, one_by_one, policies, Sessions::own, "the whole"),
                  0.0};
  checked.kl = score_of(checked.result.policies[1], checked.result.policies[0]).kl;
  return checked;
}

std::string table_of(const std::vector<Layer>& layers, const LayerPlan& plan) {
  std::array<char, 64> text{};
  std::string table =
      "KL(dense || policy) x 1000 with only that layer sparse, by rows/bits of "
      "values/bits of keys;\n[chosen]\nlayer";
  for (const Measured& measured : layers.front()) {
    if (measured.choice.dense) continue;
    std::snprintf(text.data(), text.size(), "  %9s", name_of(measured.choice).c_str());
    table += text.data();
  }
  table += "\n";
  for (std::size_t i = 0; i < layers.size(); ++i) {
    std::snprintf(text.data(), text.size(), "%5zu", i);
    table += text.data();
    for (std::size_t c = 0; c < layers[i].size(); ++c) {
      const Measured& measured = layers[i][c];
      if (measured.choice.dense) {
        if (plan[i] == c) table += "  [all]";
        continue;
      }
      std::array<char, 32> number{};
      std::snprintf(number.data(), number.size(), plan[i] == c ? "[%.3f]" : "%.3f ",
                    1000.0 * measured.kl);
      std::snprintf(text.data(), text.size(), "  %9s", number.data());
      table += text.data();
    }
    table += "\n";
  }
  return table;
}

// One choice of one layer. A dense layer has no index, so no bits.
nlohmann::json choice_json(const Measured& measured, Saving saving) {
  const LayerChoice& choice = measured.choice;
  const bool by_bus = saving == Saving::bus;
  nlohmann::json entry = {{"dense", choice.dense},
                          {"kl", measured.kl},
                          {"row_bytes", by_bus ? measured.price.first : measured.price.second},
                          {"index_bytes", by_bus ? measured.price.second : measured.price.first}};
  if (choice.dense) return entry;
  entry["rows"] = choice.rows;
  entry["value_bits"] = choice.value_bits;
  entry["key_bits"] = choice.key_bits;
  return entry;
}

nlohmann::json report_of(const std::vector<Layer>& layers, const Checked& best,
                         const LayerChoices& choices, const KvShape& shape) {
  nlohmann::json list = nlohmann::json::array();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    nlohmann::json measured = nlohmann::json::array();
    for (std::size_t c = 0; c < layers[i].size(); ++c) {
      measured.push_back(choice_json(layers[i][c], choices.saving));
      measured.back()["chosen"] = best.plan[i] == c;
    }
    list.push_back({{"layer", i}, {"choices", measured}});
  }
  return {{"saved_first", choices.saving == Saving::bus ? "bus" : "device"},
          {"most_loss", choices.loss},
          {"sum_of_layers", loss_of(layers, best.plan)},
          {"loss", best.kl},
          {"holds", best.kl <= choices.loss},
          {"layers", list},
          {"whole", eval_json(best.result, shape)}};
}

// A sentence that says if the loss holds.
std::string verdict_of(const std::vector<Layer>& layers, const Checked& best, double most) {
  std::array<char, 128> text{};
  std::snprintf(text.data(), text.size(),
                "layer by layer it loses %.4f nats a token; as a whole %.4f, %s %.4f\n",
                loss_of(layers, best.plan), best.kl,
                best.kl <= most ? "within" : "which is NOT within", most);
  return text.data();
}

}  // namespace

Calibration calibrate_layers(Engine& engine, const PassageBuilder& passages,
                             const TaskOptions& options, const LayerChoices& choices) {
  const KvShape& shape = engine.info().kv;
  const std::vector<Layer> layers = measure_layers(engine, passages, options, choices);
  std::optional<Checked> best;
  double allowed = choices.loss;
  for (int check = 0; check < kMostChecks; ++check) {
    const LayerPlan plan = cheapest(layers, allowed);
    if (best && plan == best->plan) break;
    Checked checked = check_whole(engine, passages, options, layers, plan);
    // The loss of the whole differs from the sum over layers, so the next limit is scaled by the
    // ratio.
    allowed = loss_of(layers, plan) * std::clamp(choices.loss / checked.kl, 0.3, 3.0) * 0.95;
    const bool holds = checked.kl <= choices.loss;
    const bool is_closer = !best || (holds ? best->kl > choices.loss || checked.kl > best->kl
                                           : best->kl > choices.loss && checked.kl < best->kl);
    if (is_closer) best = std::move(checked);
  }
  return {policy_of(layers, best->plan),
          table_of(layers, best->plan) + "\n" + eval_table(eval_json(best->result, shape)) +
              verdict_of(layers, *best, choices.loss),
          report_of(layers, *best, choices, shape)};
}

}  // namespace sluice::tools
