#include "sluice/logit_rules.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr double kMostPenalty = 2.0;
constexpr double kMostBias = 100.0;

void require_within(double value, double most, const std::string& name) {
  if (std::abs(value) <= most) return;  // false for NaN
  throw Error(ErrorCode::usage, "`" + name + "` " + digits(value) + ": give a number from -" +
                                    digits(most) + " to " + digits(most));
}

void add(float& logit, double amount) { logit = static_cast<float>(logit + amount); }

}  // namespace

bool LogitRules::empty() const {
  return presence_penalty == 0.0 && frequency_penalty == 0.0 && bias.empty() && !mask;
}

void LogitRules::validate(int vocabulary) const {
  require_within(presence_penalty, kMostPenalty, "presence_penalty");
  require_within(frequency_penalty, kMostPenalty, "frequency_penalty");
  for (const LogitBias& one : bias) {
    if (one.token < 0 || one.token >= vocabulary) {
      throw Error(ErrorCode::usage, "`logit_bias`: token " + std::to_string(one.token) +
                                        " is not one of the model's " + std::to_string(vocabulary));
    }
    require_within(one.bias, kMostBias, "logit_bias");
  }
}

void LogitRules::apply(std::span<const TokenId> answer, std::span<float> logits) const {
  if (presence_penalty != 0.0 || frequency_penalty != 0.0) {
    std::map<TokenId, int> counts;
    for (const TokenId id : answer) ++counts[id];
    for (const auto& [id, count] : counts) {
      add(logits[static_cast<std::size_t>(id)], -presence_penalty - frequency_penalty * count);
    }
  }
  for (const LogitBias& one : bias) add(logits[static_cast<std::size_t>(one.token)], one.bias);
  if (mask) mask(answer, logits);
}

}  // namespace sluice
