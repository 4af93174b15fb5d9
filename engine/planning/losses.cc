#include "engine/planning/losses.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "engine/planning/data.h"
#include "sluice/errors.h"

namespace sluice::planning {
namespace {

const nlohmann::json& table() {
  static const nlohmann::json parsed = nlohmann::json::parse(losses_json());
  return parsed;
}

double loss_of(const char* kind, const std::string& format) {
  for (const nlohmann::json& row : table().at(kind)) {
    if (row.at("format") == format) return row.at("kl").get<double>();
  }
  return 0.0;  // wider than the reference
}

Policy without_prefill(Policy policy) {
  policy.prefill = {};
  return policy;
}

}  // namespace

std::vector<PolicyLoss> preferred_policies(bool on_gpu) {
  std::vector<PolicyLoss> policies;
  for (const nlohmann::json& row : table().at("policies")) {
    const std::string on = row.at("on");
    if (on != "both" && (on == "gpu") != on_gpu) continue;
    policies.push_back({row.at("policy"), row.at("kl")});
  }
  return policies;
}

std::optional<double> policy_loss(const Policy& policy) {
  const Policy wanted = without_prefill(policy);
  if (wanted == Policy()) return 0.0;
  for (const nlohmann::json& row : table().at("policies")) {
    if (parse_policy(row.at("policy").get<std::string>()) == wanted) {
      return row.at("kl").get<double>();
    }
  }
  return std::nullopt;
}

double row_loss(const RowFormat& rows) { return loss_of("rows", to_string(rows)); }

double weight_loss(const std::optional<WeightFormat>& weights) {
  return weights ? loss_of("weights", std::string(to_string(weights->code))) : 0.0;
}

PrefillLoss sparse_prefill() {
  const nlohmann::json& row = table().at("prefill").front();
  return {row.at("setting"), row.at("kl")};
}

double prefill_loss(const Policy& policy) {
  return policy.prefill.dense() ? 0.0 : sparse_prefill().kl;
}

Fitting first_that_fits(const Engine& engine, SessionOptions options,
                        const std::vector<PolicyLoss>& policies, std::string_view suffix) {
  Fitting fitting;
  for (const PolicyLoss& choice : policies) {
    try {
      options.policies = {engine.policy(choice.policy + std::string(suffix))};
      fitting.plan = engine.plan(options);
      fitting.choice = &choice;
      return fitting;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::memory && error.code() != ErrorCode::unsupported) throw;
      const bool says_less = error.code() == ErrorCode::unsupported && fitting.why &&
                             fitting.why->code() == ErrorCode::memory;
      if (says_less) continue;
      fitting.refused = &choice;
      fitting.why = error;
    }
  }
  return fitting;
}

}  // namespace sluice::planning
