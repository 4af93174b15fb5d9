// Policies that nobody thought of: random ones come back from text and JSON, damaged ones are
// refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>

#include "sluice/errors.h"
#include "sluice/policy.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::Random;

class RandomPolicy {
 public:
  explicit RandomPolicy(std::uint64_t seed) : random_(seed) {}

  Policy next() {
    policy_ = {};
    constexpr const char* kNames[] = {"dense", "streaming", "exact", "int4", "quest", "sparq"};
    const std::int64_t number = random_.integer(0, 5);
    estimates_ = number > 1;
    policy_.select.name = kNames[number];
    policy_.bits = maybe() ? 4 : static_cast<int>(random_.integer(2, 3));
    if (maybe()) policy_.sinks = tokens() - 1;
    if (maybe() || policy_.select.name == "streaming") policy_.recent = tokens();
    choose_prefill();
    if (policy_.select.name != "dense" && maybe()) policy_.correct = tokens();
    if (estimates_) choose_selection();
    choose_layers();
    if (policy_.correct > 0 || !policy_.anchors.empty()) policy_.prefill.evict = false;
    for (int layer = 0; maybe() && layer < 40; layer += static_cast<int>(random_.integer(1, 9))) {
      choose_own(layer);
    }
    return policy_;
  }

 private:
  bool maybe() { return random_.integer(0, 1) == 1; }

  std::int64_t tokens() { return random_.integer(1, std::int64_t{1} << random_.integer(0, 31)); }

  Budget budget() { return maybe() ? Budget{tokens(), 0} : Budget{0, tokens()}; }

  // Of any magnitude, above 0 and up to 1.
  double share() {
    const double mantissa = 1.0 - std::ldexp(static_cast<double>(random_.integer(0, 1023)), -11);
    return std::ldexp(mantissa, -static_cast<int>(random_.integer(0, maybe() ? 2 : 900)));
  }

  void choose_prefill() {
    if (maybe()) return;
    if (maybe()) {
      policy_.prefill = {share(), maybe()};
    } else {
      policy_.prefill.pages = share();
    }
  }

  void choose_selection() {
    if (policy_.select.name == "sparq" && maybe()) policy_.select.parameters["r"] = channels();
    if (policy_.select.name != "quest" && maybe()) {
      policy_.compensate = maybe() ? Compensation::values : Compensation::mean_value;
    }
    if (policy_.compensate == Compensation::values) {
      policy_.values = {static_cast<int>(random_.integer(2, 4)), share()};
      if (random_.integer(0, 3) == 0) {
        policy_.prune = Pruner::none;
        return;
      }
    }
    policy_.prune = maybe() ? Pruner::top_p : Pruner::top_k;
    if (policy_.prune == Pruner::top_p) {
      policy_.p = share();
      if (maybe()) policy_.cap = budget();
    } else {
      policy_.k = budget();
    }
    if (maybe()) policy_.candidates = candidates();
  }

  int channels() { return static_cast<int>(random_.integer(1, 256)); }

  // Not fewer than k.
  Budget candidates() {
    Budget candidates = budget();
    if (candidates.tokens > 0) candidates.tokens = std::max(candidates.tokens, policy_.k.tokens);
    if (policy_.k.divisor > 0 && candidates.divisor > 0) {
      candidates.divisor = std::min(candidates.divisor, policy_.k.divisor);
    }
    return candidates;
  }

  void choose_layers() {
    const bool anchored = estimates_ && maybe();
    const int first = static_cast<int>(random_.integer(0, 4));
    for (int layer = 0; layer < first; ++layer) {
      if (anchored || maybe()) policy_.dense_layers.push_back(layer);
    }
    if (!anchored) return;
    policy_.anchors.push_back(first);
    policy_.dense_anchors = maybe();
    for (int layer = first + 1; layer < 40; ++layer) {
      const std::int64_t role = random_.integer(0, 4);
      if (role == 0) policy_.dense_layers.push_back(layer);
      if (role == 1) policy_.anchors.push_back(layer);
    }
  }

  // Settings of one layer, if they go with the rest.
  void choose_own(int layer) {
    LayerSettings own;
    if (maybe()) own.bits = static_cast<int>(random_.integer(2, 4));
    if (maybe()) own.cap = maybe() ? budget() : Budget{};
    if (maybe()) own.prune = LayerSettings::Pruning{Pruner::top_k, budget(), 0.0};
    if (maybe()) own.prune = LayerSettings::Pruning{Pruner::top_p, {}, share()};
    if (maybe()) own.compensate = LayerSettings::Compensating{Compensation::mean_value, {}};
    if (maybe()) {
      own.compensate = LayerSettings::Compensating{
          Compensation::values, {static_cast<int>(random_.integer(2, 4)), share()}};
    }
    policy_.layers[layer] = own;
    try {
      validate(policy_);
    } catch (const Error&) {
      policy_.layers.erase(layer);
    }
  }

  Random random_;
  Policy policy_;
  bool estimates_ = false;
};

TEST(PolicyProperty, EveryValidPolicyComesBackFromTextAndJson) {
  const std::uint64_t seed = testing::seed(20250611);
  SCOPED_TRACE(testing::seed_message(seed));
  RandomPolicy policies(seed);
  std::size_t own = 0;
  for (int i = 0; i < 5000; ++i) {
    const Policy policy = policies.next();
    own += policy.layers.size();
    const std::string text = to_string(policy);
    ASSERT_NO_THROW(validate(policy)) << text;
    ASSERT_EQ(parse_policy(text), policy) << text;
    ASSERT_EQ(to_string(parse_policy(text)), text);
    ASSERT_TRUE(text.starts_with("select=")) << text;
    ASSERT_EQ(policy_from_json(to_json(policy)), policy) << to_json(policy);
  }
  EXPECT_GT(own, 500u);
}

// Some bytes of `text` replaced, removed or repeated.
std::string mutated(std::string text, Random& random) {
  constexpr std::string_view kBytes = "=(),/ .0129-\"{}[]:nr\\\xff";
  for (std::int64_t i = random.integer(1, 3); i > 0 && !text.empty(); --i) {
    const auto at =
        static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(text.size()) - 1));
    const auto byte =
        static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(kBytes.size()) - 1));
    if (random.integer(0, 2) == 0) {
      text.erase(at, 1);
    } else if (random.integer(0, 1) == 0) {
      text.insert(at, text.substr(at / 2, 8));
    } else {
      text[at] = kBytes[byte];
    }
  }
  return text;
}

// The policy that `read` makes of `text`, if it takes it. Any other exception fails the test.
template <typename Read>
std::optional<Policy> read_if_valid(Read read, const std::string& text) {
  try {
    return read(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage) << text;
    return std::nullopt;
  }
}

TEST(PolicyProperty, DamagedTextIsRefusedOrReadAsAValidPolicy) {
  const std::uint64_t seed = testing::seed(20250612);
  SCOPED_TRACE(testing::seed_message(seed));
  RandomPolicy policies(seed);
  Random random(seed);
  int accepted = 0;
  for (int i = 0; i < 5000; ++i) {
    const Policy policy = policies.next();
    const std::string text = mutated(to_string(policy), random);
    const std::string json = mutated(to_json(policy), random);
    for (const auto& read :
         {read_if_valid([](const std::string& t) { return parse_policy(t); }, text),
          read_if_valid([](const std::string& t) { return policy_from_json(t); }, json)}) {
      if (!read) continue;
      ++accepted;
      ASSERT_NO_THROW(validate(*read)) << text << "\n" << json;
      ASSERT_EQ(parse_policy(to_string(*read)), *read) << text << "\n" << json;
    }
  }
  EXPECT_GT(accepted, 100) << "hardly any damage was harmless: nothing was tested";
  EXPECT_LT(accepted, 9000) << "hardly any text was damaged";
}

}  // namespace
}  // namespace sluice
