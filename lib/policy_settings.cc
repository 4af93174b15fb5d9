#include "lib/policy_settings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "lib/text.h"
#include "sluice/errors.h"
#include "sluice/scorer.h"

namespace sluice {
namespace {

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = std::min(text.find_first_not_of(' '), text.size());
  return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
}

// Returns at least one part; parts may be empty.
std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

template <typename Range, typename Name>
std::string join(const Range& range, std::string_view separator, Name name) {
  std::string text;
  for (const auto& item : range) {
    if (!text.empty()) text += separator;
    text += name(item);
  }
  return text;
}

// The whole of `text` as a number that T can hold.
template <typename T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// "name" or "name(argument,argument)".
struct Call {
  std::string_view name;
  std::vector<std::string_view> arguments;
};

std::optional<Call> parse_call(std::string_view text) {
  const std::size_t open = text.find('(');
  if (open == std::string_view::npos) return Call{text, {}};
  if (text.back() != ')') return std::nullopt;
  Call call{text.substr(0, open), split(text.substr(open + 1, text.size() - open - 2), ',')};
  for (std::string_view& argument : call.arguments) argument = trimmed(argument);
  return call;
}

// 128 or 1/8.
std::optional<Budget> parse_limit(std::string_view text) {
  Budget budget;
  const bool share = text.starts_with("1/");
  const auto count = number<std::int64_t>(share ? text.substr(2) : text);
  if (!count || *count < 1) return std::nullopt;
  (share ? budget.divisor : budget.tokens) = *count;
  return budget;
}

std::string write_limit(const Budget& budget) {
  return budget.tokens > 0 ? digits(budget.tokens) : "1/" + digits(budget.divisor);
}

// Numbers with commas between them.
std::optional<std::vector<int>> parse_layers(std::string_view text) {
  std::vector<int> layers;
  for (const std::string_view part : split(text, ',')) {
    const auto layer = number<int>(part);
    if (!layer) return std::nullopt;
    layers.push_back(*layer);
  }
  return layers;
}

// The name and number of "r=16".
std::optional<std::pair<std::string, double>> parse_parameter(std::string_view argument) {
  const std::size_t equals = argument.find('=');
  if (equals == std::string_view::npos) return {};
  const auto value = number<double>(trimmed(argument.substr(equals + 1)));
  if (!value) return {};
  return std::pair{std::string(trimmed(argument.substr(0, equals))), *value};
}

// The scorer need not exist; validate() checks that.
bool read_select(Policy& policy, std::string_view value) {
  const auto call = parse_call(value);
  if (!call) return false;
  policy.select = {std::string(call->name), {}};
  for (const std::string_view argument : call->arguments) {
    const auto parameter = parse_parameter(argument);
    if (!parameter || !policy.select.parameters.insert(*parameter).second) return false;
  }
  return true;
}

std::string write_select(const Policy& policy) { return to_string(policy.select); }

bool read_prune(Policy& policy, std::string_view value) {
  policy.k = {};
  policy.p = 0.0;
  policy.prune = Pruner::none;
  if (value == "none") return true;
  const auto call = parse_call(value);
  if (!call || call->arguments.size() != 1) return false;
  const bool top_p = call->name == "top_p";
  const auto k = parse_limit(call->arguments[0]);
  const auto p = number<double>(call->arguments[0]);
  if (top_p ? !p : call->name != "top_k" || !k) return false;
  policy.prune = top_p ? Pruner::top_p : Pruner::top_k;
  policy.k = top_p ? Budget{} : *k;
  policy.p = top_p ? *p : 0.0;
  return true;
}

std::string write_prune(const Policy& policy) {
  if (policy.prune == Pruner::none) return "none";
  if (policy.prune == Pruner::top_p) return "top_p(" + digits(policy.p) + ")";
  return policy.k.limited() ? "top_k(" + write_limit(policy.k) + ")" : "";
}

bool read_value_setting(ValueBits& values, std::string_view name, std::string_view text) {
  if (name == "components") {
    values.half = text == "half";
    return values.half || text == "all";
  }
  const auto value = number<double>(text);
  if (!value) return false;
  if (name == "bits" && *value >= 1.0 && *value <= 4.0 && *value == std::floor(*value)) {
    values.bits = static_cast<int>(*value);
    return true;
  }
  if (name == "pages") values.pages = *value;
  return name == "pages";
}

// Reads "bits=2,pages=0.9,components=half"; each may be left out.
bool read_values(ValueBits& values, std::span<const std::string_view> arguments) {
  std::vector<std::string_view> seen;
  for (const std::string_view argument : arguments) {
    const std::size_t equals = argument.find('=');
    if (equals == std::string_view::npos) return false;
    const std::string_view name = trimmed(argument.substr(0, equals));
    const bool is_new = std::find(seen.begin(), seen.end(), name) == seen.end();
    if (!is_new || !read_value_setting(values, name, trimmed(argument.substr(equals + 1)))) {
      return false;
    }
    seen.push_back(name);
  }
  return true;
}

bool read_compensate(Policy& policy, std::string_view value) {
  policy.values = {};
  policy.compensate = value == "none" ? Compensation::none : Compensation::mean_value;
  if (value == "none" || value == "mean_value") return true;
  policy.compensate = Compensation::values;
  const auto call = parse_call(value);
  return call && call->name == "values" && read_values(policy.values, call->arguments);
}

std::string write_values(const ValueBits& values) {
  std::vector<std::string> parts;
  if (values.bits != ValueBits{}.bits) parts.push_back("bits=" + digits(values.bits));
  if (values.half) parts.emplace_back("components=half");
  if (values.pages != ValueBits{}.pages) parts.push_back("pages=" + digits(values.pages));
  const std::string list = join(parts, ",", [](const std::string& part) { return part; });
  return "values" + (list.empty() ? "" : "(" + list + ")");
}

std::string write_compensate(const Policy& policy) {
  switch (policy.compensate) {
    case Compensation::none:
      return "";
    case Compensation::mean_value:
      return "mean_value";
    case Compensation::values:
      return write_values(policy.values);
  }
  return "";
}

bool read_prefill(Policy& policy, std::string_view value) {
  policy.prefill = {};
  if (value == "dense") return true;
  const auto call = parse_call(value);
  if (!call || call->arguments.empty()) return false;
  if (call->name == "pages") {
    const auto share = number<double>(call->arguments[0]);
    policy.prefill.pages = share.value_or(0.0);
    return share && *share != 0.0 && call->arguments.size() == 1;
  }
  if (call->name != "zipvl") return false;
  const auto tau = number<double>(call->arguments[0]);
  const std::string_view fate = call->arguments.size() > 1 ? call->arguments[1] : "demote";
  policy.prefill.tau = tau.value_or(0.0);
  policy.prefill.evict = fate == "evict";
  return tau && *tau != 0.0 && call->arguments.size() <= 2 && (fate == "demote" || fate == "evict");
}

std::string write_prefill(const Policy& policy) {
  const SparsePrefill& prefill = policy.prefill;
  if (prefill == SparsePrefill{}) return "";
  if (prefill.pages > 0.0) return "pages(" + digits(prefill.pages) + ")";
  return "zipvl(" + digits(prefill.tau) + (prefill.evict ? ",evict)" : ")");
}

template <auto Member>
bool read_budget(Policy& policy, std::string_view value) {
  const auto limit = value == "none" ? Budget{} : parse_limit(value);
  policy.*Member = limit.value_or(Budget{});
  return limit.has_value();
}

template <auto Member>
std::string write_budget(const Policy& policy) {
  return (policy.*Member).limited() ? write_limit(policy.*Member) : "";
}

template <auto Member>
bool read_count(Policy& policy, std::string_view value) {
  using Count = std::remove_reference_t<decltype(policy.*Member)>;
  const auto count = number<Count>(value);
  policy.*Member = count.value_or(0);
  return count.has_value();
}

template <auto Member>
std::string write_count(const Policy& policy) {
  return policy.*Member == Policy{}.*Member ? "" : digits(policy.*Member);
}

bool read_correct(Policy& policy, std::string_view value) {
  return read_count<&Policy::correct>(policy, value == "never" ? "0" : value);
}

template <auto Member>
bool read_layers(Policy& policy, std::string_view value) {
  const auto layers = value == "none" ? std::vector<int>() : parse_layers(value);
  policy.*Member = layers.value_or(std::vector<int>());
  return layers.has_value();
}

template <auto Member>
std::string write_list(const Policy& policy) {
  return join(policy.*Member, ",", digits<int>);
}

bool read_anchors_attend(Policy& policy, std::string_view value) {
  policy.dense_anchors = value == "all";
  return value == "all" || value == "selected";
}

std::string write_anchors_attend(const Policy& policy) { return policy.dense_anchors ? "all" : ""; }

bool read_early(Policy& policy, std::string_view value) {
  policy.early = value == "half" ? Early::half : value == "layer" ? Early::layer : Early::none;
  return policy.early != Early::none || value == "none";
}

std::string write_early(const Policy& policy) {
  if (policy.early == Early::none) return "";
  return policy.early == Early::half ? "half" : "layer";
}

void take_pruning(LayerSettings& layer, const Policy& policy) {
  layer.prune = {policy.prune, policy.k, policy.p};
}

bool give_pruning(const LayerSettings& layer, Policy& policy) {
  if (!layer.prune) return false;
  policy.prune = layer.prune->prune;
  policy.k = layer.prune->k;
  policy.p = layer.prune->p;
  return true;
}

void take_compensation(LayerSettings& layer, const Policy& policy) {
  layer.compensate = {policy.compensate, policy.values};
}

bool give_compensation(const LayerSettings& layer, Policy& policy) {
  if (!layer.compensate) return false;
  policy.compensate = layer.compensate->by;
  policy.values = layer.compensate->values;
  return true;
}

template <auto Own, auto Member>
void take_member(LayerSettings& layer, const Policy& policy) {
  layer.*Own = policy.*Member;
}

template <auto Own, auto Member>
bool give_member(const LayerSettings& layer, Policy& policy) {
  if (layer.*Own) policy.*Member = *(layer.*Own);
  return (layer.*Own).has_value();
}

constexpr std::string_view kLimits =
    "a number of tokens such as 256, a share of the context such as 1/16, or none";
constexpr std::string_view kTokens = "a number of tokens from 0 to 2147483648";
constexpr std::string_view kLayerList = "the layers' numbers in ascending order such as 2,7";
constexpr std::string_view kLayers = "the layers' numbers in ascending order such as 2,7, or none";

// The setting whose accepted values come from the scorers.
constexpr std::string_view kSelect = "select";

constexpr std::array<Setting, 14> kSettings = {{
    {kSelect, Form::word, "how the weights of tokens are estimated", "", read_select, write_select},
    {"candidates", Form::budget,
     "most tokens that are proposed, then scored again with the whole index", kLimits,
     read_budget<&Policy::candidates>, write_budget<&Policy::candidates>},
    {"prune", Form::word,
     "which tokens are kept: the heaviest N, or the fewest that carry a share P",
     "top_k(N), top_k(1/N), top_p(P) or none, N of 1 or more, P above 0 and up to 1", read_prune,
     write_prune, take_pruning, give_pruning},
    {"cap", Form::budget, "most tokens that top_p keeps, per KV head", kLimits,
     read_budget<&Policy::cap>, write_budget<&Policy::cap>,
     take_member<&LayerSettings::cap, &Policy::cap>,
     give_member<&LayerSettings::cap, &Policy::cap>},
    {"sinks", Form::count, "first tokens, always kept", kTokens, read_count<&Policy::sinks>,
     write_count<&Policy::sinks>},
    {"recent", Form::count, "newest tokens, always kept; the unfinished page of 128 always is",
     kTokens, read_count<&Policy::recent>, write_count<&Policy::recent>},
    {"compensate", Form::word, "what stands for the tokens that are not kept",
     "none, mean_value or values(bits=B,components=C,pages=P), B from 1 to 4, C all or half, P "
     "above 0 and up to 1",
     read_compensate, write_compensate, take_compensation, give_compensation},
    {"dense", Form::layers, "layers that attend to every token", kLayers,
     read_layers<&Policy::dense_layers>, write_list<&Policy::dense_layers>},
    {"anchors", Form::layers, "layers that select; those after each reuse its selection", kLayers,
     read_layers<&Policy::anchors>, write_list<&Policy::anchors>},
    {"anchors_attend", Form::word, "what anchors attend to themselves",
     "selected or all, as TidalDecode's do", read_anchors_attend, write_anchors_attend},
    {"correct", Form::budget, "recompute the last T decoded tokens densely, every T",
     "a number of tokens from 1 to 2147483648, or never", read_correct,
     write_count<&Policy::correct>},
    {"prefill", Form::word,
     "what a prompt's tokens attend to; evict loses facts that are asked for only after the "
     "prompt, "
     "and gives back the memory of all other tokens than it keeps",
     "dense, pages(SHARE), zipvl(TAU), zipvl(TAU,demote) or zipvl(TAU,evict), SHARE and TAU above "
     "0 and up to 1",
     read_prefill, write_prefill},
    {"early", Form::word,
     "from which earlier hidden state a layer chooses its rows, so that they are fetched before "
     "its turn",
     "none, half (after the previous layer's attention) or layer (the previous layer's input)",
     read_early, write_early, take_member<&LayerSettings::early, &Policy::early>,
     give_member<&LayerSettings::early, &Policy::early>},
    {"bits", Form::count, "per key channel, in the key index", "4, 3, 2 or 1",
     read_count<&Policy::bits>, write_count<&Policy::bits>,
     take_member<&LayerSettings::bits, &Policy::bits>,
     give_member<&LayerSettings::bits, &Policy::bits>},
}};

// The text of a setting's default, which write() leaves out.
std::string default_of(const Setting& setting) {
  return setting.form == Form::count ? digits(Policy{}.bits) : "none";
}

std::string layer_keys() {
  std::vector<std::string_view> keys;
  for (const Setting& setting : kSettings) {
    if (setting.take != nullptr) keys.push_back(setting.key);
  }
  return join(keys, ", ", [](std::string_view key) { return key; });
}

}  // namespace

void refuse_policy(const std::string& why) { throw Error(ErrorCode::usage, "policy: " + why); }

std::span<const Setting> all_settings() { return kSettings; }

std::string setting_keys() {
  return join(kSettings, ", ", [](const Setting& setting) { return setting.key; });
}

Place find_place(std::string_view key, std::string_view word) {
  const std::size_t colon = key.find(':');
  const bool is_own = colon != std::string_view::npos;
  const std::string_view name = is_own ? key.substr(colon + 1) : key;
  const auto* const found =
      std::find_if(kSettings.begin(), kSettings.end(),
                   [&](const Setting& setting) { return setting.key == name; });
  if (found == kSettings.end()) {
    refuse_policy(in_quotes(word) + " is no setting; settings are " + setting_keys());
  }
  Place place{found, {}};
  if (!is_own) return place;
  const auto layers = parse_layers(key.substr(0, colon));
  if (!layers) {
    refuse_policy(in_quotes(word) + " is about no layers; before the colon stand " +
                  std::string(kLayerList));
  }
  if (found->take == nullptr) {
    refuse_policy(in_quotes(word) + " is for all layers alike; of their own layers may have " +
                  layer_keys());
  }
  place.layers = *layers;
  return place;
}

std::string accepted_by(const Setting& setting, const Scorers& scorers) {
  return setting.key == kSelect ? scorers.accepted() : std::string(setting.accepted);
}

void read_setting(Policy& policy, const Setting& setting, std::string_view value,
                  const Scorers& scorers) {
  if (setting.read(policy, value) && (setting.key != kSelect || scorers.accepts(policy.select))) {
    return;
  }
  const std::string key(setting.key);
  refuse_policy(in_quotes(key + "=" + std::string(value)) + " is not understood; " + key +
                " takes " + accepted_by(setting, scorers));
}

std::optional<std::string> GivenOnce::note(const Place& place) {
  std::vector<std::string> prefixes;
  for (const int layer : place.layers) prefixes.push_back(digits(layer) + ":");
  if (prefixes.empty()) prefixes.emplace_back();
  for (const std::string& prefix : prefixes) {
    const auto [key, is_new] = keys_.insert(prefix + std::string(place.setting->key));
    if (!is_new) return *key;
  }
  return std::nullopt;
}

void read_place(Policy& policy, const Place& place, std::string_view value,
                const Scorers& scorers) {
  if (place.layers.empty()) return read_setting(policy, *place.setting, value, scorers);
  Policy own;
  read_setting(own, *place.setting, value, scorers);
  for (const int layer : place.layers) place.setting->take(policy.layers[layer], own);
}

std::vector<std::pair<std::string, std::string>> write_layers(const Policy& policy,
                                                              const Setting& setting) {
  std::vector<std::pair<std::string, std::string>> written;  // layers, value
  if (setting.give == nullptr) return written;
  for (const auto& [layer, settings] : policy.layers) {
    Policy own;
    if (!setting.give(settings, own)) continue;
    const std::string text = setting.write(own);
    const std::string value = !text.empty() ? text : default_of(setting);
    const auto same = std::find_if(written.begin(), written.end(),
                                   [&](const auto& pair) { return pair.second == value; });
    if (same == written.end()) {
      written.emplace_back(digits(layer), value);
    } else {
      same->first += "," + digits(layer);
    }
  }
  for (auto& [layers, value] : written) layers += ":" + std::string(setting.key);
  return written;
}

std::string to_string(const Method& method) {
  const std::string list = join(method.parameters, ",", [](const auto& parameter) {
    // Whole numbers are written with all digits, not as 1e+05.
    const auto whole = static_cast<std::int64_t>(std::clamp(parameter.second, -1e15, 1e15));
    const bool is_whole = static_cast<double>(whole) == parameter.second;
    return parameter.first + "=" + (is_whole ? digits(whole) : digits(parameter.second));
  });
  return method.name + (list.empty() ? "" : "(" + list + ")");
}

std::vector<PolicySetting> policy_settings(const Scorers& scorers) {
  std::vector<PolicySetting> settings;
  for (const Setting& setting : kSettings) {
    settings.push_back(
        {setting.key, setting.meaning, accepted_by(setting, scorers), setting.take != nullptr});
  }
  return settings;
}

}  // namespace sluice
