// Random policies with budgets that suit short contexts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "sluice/errors.h"
#include "sluice/policy.h"
#include "tests/support/random.h"

namespace sluice::testing {

// For a model of three layers.
class RandomPolicy {
 public:
  explicit RandomPolicy(Random& random) : random_(&random) {}

  // A random policy that Sluice accepts.
  Policy next() {
    std::optional<Policy> policy;
    while (!policy) policy = accepted(line());
    return *policy;
  }

 private:
  // nullopt for a combination that is refused.
  static std::optional<Policy> accepted(const std::string& line) {
    try {
      return parse_policy(line);
    } catch (const Error&) {
      return {};
    }
  }
  bool one_in(int count) { return random_->integer(1, count) == 1; }
  std::int64_t tokens() { return random_->integer(1, one_in(2) ? 20 : 200); }
  std::string share() { return "0." + std::to_string(random_->integer(1, 99)); }

  std::string line() {
    constexpr const char* kSelectors[] = {"dense", "streaming", "exact",
                                          "int4",  "quest",     "sparq(r=8)"};
    const std::string select = kSelectors[random_->integer(0, 5)];
    std::string words = "select=" + select;
    if (one_in(3)) words += " sinks=" + std::to_string(random_->integer(0, 8));
    if (one_in(3) || select == "streaming") words += " recent=" + std::to_string(tokens());
    if (select != "dense" && select != "streaming") words += selection();
    if (one_in(4)) words += " dense=" + std::to_string(random_->integer(0, 2));
    if (one_in(6)) words += prefill();
    if (one_in(8)) words += " correct=" + std::to_string(random_->integer(1, 20));
    return words;
  }

  std::string pruner() {
    if (one_in(2)) return "prune=top_k(" + std::to_string(tokens()) + ")";
    return "prune=top_p(" + share() + ")";
  }
  std::string compensation() {
    if (one_in(2)) return "compensate=mean_value";
    return "compensate=values(bits=" + std::to_string(random_->integer(1, 4)) +
           ",pages=" + share() + (one_in(3) ? ",components=half)" : ")");
  }

  std::string selection() {
    std::string words = " " + pruner();
    if (one_in(3)) words += " cap=" + std::to_string(tokens());
    if (one_in(3)) words += " candidates=1/" + std::to_string(random_->integer(1, 4));
    if (one_in(3)) words += " bits=" + std::to_string(random_->integer(2, 3));
    if (one_in(3)) words += " " + compensation();
    if (one_in(4)) words += one_in(2) ? " dense=0 anchors=1" : " anchors=0,2";
    if (one_in(8)) words += " anchors_attend=all";
    if (one_in(4)) words += one_in(2) ? " early=half" : " early=layer";
    if (one_in(4)) words += " " + std::to_string(random_->integer(0, 2)) + ":" + pruner();
    if (one_in(8)) words += " " + std::to_string(random_->integer(0, 2)) + ":" + compensation();
    return words;
  }

  std::string prefill() {
    if (one_in(2)) return " prefill=pages(" + share() + ")";
    return " prefill=zipvl(" + share() + (one_in(3) ? ",evict)" : ")");
  }

  Random* random_;
};

}  // namespace sluice::testing
