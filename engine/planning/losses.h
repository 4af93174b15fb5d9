// The table of what choices lose, losses.json.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/engine.h"
#include "sluice/errors.h"
#include "sluice/row_format.h"
#include "sluice/weight_format.h"

namespace sluice::planning {

struct PolicyLoss {
  std::string policy;  // a policy line
  double kl = 0.0;
};

// Policies in the order in which they are preferred, each with a smaller index than the one before.
std::vector<PolicyLoss> preferred_policies(bool on_gpu);
// The loss of a policy; none if the table does not have it. Its prefill does not count.
std::optional<double> policy_loss(const Policy& policy);
double row_loss(const RowFormat& rows);
double weight_loss(const std::optional<WeightFormat>& weights);

// A setting for long prompts: "prefill=pages(0.95)".
struct PrefillLoss {
  std::string setting;
  double kl = 0.0;
};
PrefillLoss sparse_prefill();
// The loss of a prompt under this policy, by the table's nearest setting that loses at least it.
double prefill_loss(const Policy& policy);

// The first of `policies` whose plan fits.
struct Fitting {
  const PolicyLoss* choice = nullptr;  // null: none fits
  std::optional<Plan> plan = std::nullopt;
  // The last before it that does not fit; one that the model or device does not take only if there
  // is no other.
  const PolicyLoss* refused = nullptr;
  std::optional<Error> why = std::nullopt;  // it is refused
};
// `suffix` is put behind each line.
Fitting first_that_fits(const Engine& engine, SessionOptions options,
                        const std::vector<PolicyLoss>& policies, std::string_view suffix = "");

}  // namespace sluice::planning
