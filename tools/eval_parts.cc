#include "tools/eval_parts.h"

#include <array>
#include <bit>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "sluice/errors.h"

namespace sluice::tools {
namespace {

constexpr std::size_t kDigits = 16;  // of a double

[[noreturn]] void refuse() {
  throw Error(ErrorCode::corrupt,
              "the unfinished part of the report cannot be read; leave out --resume");
}

// The bits of each value in 16 digits: one JSON string instead of thousands of JSON numbers.
std::string hex_of(const std::vector<double>& values) {
  std::string text;
  for (const double value : values) {
    std::array<char, kDigits + 1> digits{};
    std::snprintf(digits.data(), digits.size(), "%016llx",
                  static_cast<unsigned long long>(std::bit_cast<std::uint64_t>(value)));
    text += digits.data();
  }
  return text;
}

std::vector<double> values_of(const std::string& text) {
  if (text.size() % kDigits != 0) refuse();
  std::vector<double> values;
  for (std::size_t at = 0; at < text.size(); at += kDigits) {
    std::uint64_t bits = 0;
    const char* const end = text.data() + at + kDigits;
    if (std::from_chars(text.data() + at, end, bits, 16).ptr != end) refuse();
    values.push_back(std::bit_cast<double>(bits));
  }
  return values;
}

// Yes and no as 1 and 0.
std::string marks_of(const std::vector<double>& values) {
  std::string marks;
  for (const double value : values) marks += value > 0.5 ? '1' : '0';
  return marks;
}

std::vector<double> of_marks(const std::string& marks) {
  std::vector<double> values;
  for (const char mark : marks) values.push_back(mark == '1' ? 1.0 : 0.0);
  return values;
}

template <typename Value>
Value named(const std::string& name, int count) {
  for (int i = 0; i < count; ++i) {
    if (to_string(static_cast<Value>(i)) == name) return static_cast<Value>(i);
  }
  refuse();
}

nlohmann::json cost_json(const Cost& cost) {
  nlohmann::json traffic = nlohmann::json::array();
  for (const auto& [movement, moved] : cost.traffic) {
    const auto& [from, to, cause] = movement;
    traffic.push_back({to_string(from), to_string(to), to_string(cause), moved.rows, moved.bytes});
  }
  return {{"tokens", cost.tokens},
          {"alphas", cost.alphas},
          {"cut", cost.cut},
          {"sums", hex_of({cost.attended, cost.selected, cost.alpha})},
          {"traffic", traffic}};
}

Cost cost_of(const nlohmann::json& json) {
  constexpr int kTiers = static_cast<int>(Tier::disk) + 1;
  Cost cost;
  cost.tokens = json.at("tokens");
  cost.alphas = json.at("alphas");
  cost.cut = json.at("cut");
  const std::vector<double> sums = values_of(json.at("sums"));
  if (sums.size() != 3) refuse();
  cost.attended = sums[0];
  cost.selected = sums[1];
  cost.alpha = sums[2];
  for (const nlohmann::json& entry : json.at("traffic")) {
    const Movement movement = {named<Tier>(entry.at(0), kTiers), named<Tier>(entry.at(1), kTiers),
                               named<Cause>(entry.at(2), kCauses)};
    cost.traffic[movement] = {entry.at(3), entry.at(4)};
  }
  return cost;
}

nlohmann::json probe_json(const ProbeResult& probe) {
  std::vector<double> right;
  std::vector<double> depths;
  for (const FactResult& fact : probe.facts) {
    right.push_back(fact.right ? 1.0 : 0.0);
    depths.push_back(fact.depth);
  }
  return {{"right", marks_of(right)}, {"depths", hex_of(depths)}, {"score", hex_of({probe.score})},
          {"answer", probe.answer},   {"leading", probe.leading}, {"characters", probe.characters},
          {"nll", hex_of(probe.nll)}, {"kl", hex_of(probe.kl)},   {"agree", marks_of(probe.agree)}};
}

ProbeResult probe_of(const nlohmann::json& json) {
  ProbeResult probe;
  const std::string right = json.at("right");
  const std::vector<double> depths = values_of(json.at("depths"));
  const std::vector<double> score = values_of(json.at("score"));
  probe.nll = values_of(json.at("nll"));
  probe.kl = values_of(json.at("kl"));
  probe.agree = of_marks(json.at("agree"));
  if (right.size() != depths.size() || score.size() != 1 || probe.kl.size() != probe.nll.size() ||
      probe.agree.size() != probe.nll.size()) {
    refuse();
  }
  for (std::size_t i = 0; i < depths.size(); ++i) {
    probe.facts.push_back({right[i] == '1', depths[i]});
  }
  probe.score = score.front();
  probe.answer = json.at("answer");
  probe.leading = json.at("leading");
  probe.characters = json.at("characters");
  return probe;
}

nlohmann::json policy_json(const PassageResult& policy) {
  nlohmann::json probes = nlohmann::json::array();
  for (const ProbeResult& probe : policy.probes) probes.push_back(probe_json(probe));
  return {{"probes", probes},
          {"cold", cost_json(policy.cost.cold)},
          {"warm", cost_json(policy.cost.warm)},
          {"seconds", hex_of({policy.prompt_seconds, policy.answer_seconds})}};
}

PassageResult policy_of(const nlohmann::json& json) {
  PassageResult policy;
  for (const nlohmann::json& probe : json.at("probes")) policy.probes.push_back(probe_of(probe));
  policy.cost = {cost_of(json.at("cold")), cost_of(json.at("warm"))};
  const std::vector<double> seconds = values_of(json.at("seconds"));
  if (seconds.size() != 2) refuse();
  policy.prompt_seconds = seconds[0];
  policy.answer_seconds = seconds[1];
  return policy;
}

}  // namespace

nlohmann::json part_json(const PassageResults& passage) {
  nlohmann::json part = nlohmann::json::array();
  for (const PassageResult& policy : passage) part.push_back(policy_json(policy));
  return part;
}

PassageResults part_of(const nlohmann::json& part, std::size_t policies) {
  try {
    PassageResults passage;
    for (const nlohmann::json& policy : part) passage.push_back(policy_of(policy));
    if (!part.is_array() || passage.size() != policies) refuse();
    for (const PassageResult& policy : passage) {
      if (policy.probes.size() != passage.front().probes.size()) refuse();
    }
    return passage;
  } catch (const nlohmann::json::exception&) {
    refuse();
  }
}

}  // namespace sluice::tools
