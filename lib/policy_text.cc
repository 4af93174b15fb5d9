#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>
#include <utility>

#include "lib/check.h"
#include "lib/text.h"
#include "sluice/errors.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxJson = 1 << 16;

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::usage, "policy: " + why);
}

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = std::min(text.find_first_not_of(' '), text.size());
  return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
}

// At least one part; parts may be empty.
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

// The shortest text that number() reads as the same value.
template <typename T>
std::string digits(T value) {
  std::array<char, 32> text{};
  const auto [end, status] = std::to_chars(text.data(), text.data() + text.size(), value);
  check(status == std::errc{}, "a number is longer than any number can be");
  return {text.data(), end};
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

// How a setting's value is read and written: read_ functions return false for what they do not
// understand, and leave ranges that need no special reading to validate(); write_ functions return
// an empty text for the default.

// The name and number of "r=16".
std::optional<std::pair<std::string, double>> parse_parameter(std::string_view argument) {
  const std::size_t equals = argument.find('=');
  if (equals == std::string_view::npos) return {};
  const auto value = number<double>(trimmed(argument.substr(equals + 1)));
  if (!value) return {};
  return std::pair{std::string(trimmed(argument.substr(0, equals))), *value};
}

// Whether there is such a scorer is left open.
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

// Each of "bits=2,pages=0.9" may be left out.
bool read_values(ValueBits& values, std::span<const std::string_view> arguments) {
  std::vector<std::string> seen;
  for (const std::string_view argument : arguments) {
    const auto parameter = parse_parameter(argument);
    if (!parameter || std::find(seen.begin(), seen.end(), parameter->first) != seen.end()) {
      return false;
    }
    const auto& [name, value] = *parameter;
    if (name == "bits" && (value == 2.0 || value == 3.0 || value == 4.0)) {
      values.bits = static_cast<int>(value);
    } else if (name == "pages") {
      values.pages = value;
    } else {
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
  if (!call || call->name != "zipvl" || call->arguments.empty()) return false;
  const auto tau = number<double>(call->arguments[0]);
  const std::string_view fate = call->arguments.size() > 1 ? call->arguments[1] : "demote";
  policy.prefill = {tau.value_or(0.0), fate == "evict"};
  return tau && call->arguments.size() <= 2 && (fate == "demote" || fate == "evict");
}

std::string write_prefill(const Policy& policy) {
  const SparsePrefill& prefill = policy.prefill;
  if (prefill == SparsePrefill{}) return "";
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
  (policy.*Member).clear();
  if (value == "none") return true;
  for (const std::string_view part : split(value, ',')) {
    const auto layer = number<int>(part);
    if (!layer) return false;
    (policy.*Member).push_back(*layer);
  }
  return true;
}

template <auto Member>
std::string write_layers(const Policy& policy) {
  return join(policy.*Member, ",", digits<int>);
}

bool read_anchors_attend(Policy& policy, std::string_view value) {
  policy.dense_anchors = value == "all";
  return value == "all" || value == "selected";
}

std::string write_anchors_attend(const Policy& policy) { return policy.dense_anchors ? "all" : ""; }

// What a value is in JSON.
enum class Form {
  word,    // a string
  count,   // an integer
  budget,  // an integer, or a string for what is none
  layers,  // an array of integers
};

struct Setting {
  std::string_view key;
  Form form;
  std::string_view meaning;
  std::string_view accepted;
  bool (*read)(Policy& policy, std::string_view value);
  std::string (*write)(const Policy& policy);
};

constexpr std::string_view kLimits =
    "a number of tokens such as 256, a share of the context such as 1/16, or none";
constexpr std::string_view kTokens = "a number of tokens from 0 to 2147483648";
constexpr std::string_view kLayers = "the layers' numbers in ascending order such as 2,7, or none";

// What it takes, the scorers say.
constexpr std::string_view kSelect = "select";

// In the order of writing.
constexpr std::array<Setting, 13> kSettings = {{
    {kSelect, Form::word, "how the weights of tokens are estimated", "", read_select, write_select},
    {"candidates", Form::budget,
     "most tokens that are proposed, then scored again with the whole index", kLimits,
     read_budget<&Policy::candidates>, write_budget<&Policy::candidates>},
    {"prune", Form::word,
     "which tokens are kept: the heaviest N, or the fewest that carry a share P",
     "top_k(N), top_k(1/N), top_p(P) or none, N of 1 or more, P above 0 and up to 1", read_prune,
     write_prune},
    {"cap", Form::budget, "most tokens that top_p keeps, per KV head", kLimits,
     read_budget<&Policy::cap>, write_budget<&Policy::cap>},
    {"sinks", Form::count, "first tokens, always kept", kTokens, read_count<&Policy::sinks>,
     write_count<&Policy::sinks>},
    {"recent", Form::count, "newest tokens, always kept; the unfinished page of 128 always is",
     kTokens, read_count<&Policy::recent>, write_count<&Policy::recent>},
    {"compensate", Form::word, "what stands for the tokens that are not kept",
     "none, mean_value or values(bits=B,pages=P), B 2, 3 or 4, P above 0 and up to 1",
     read_compensate, write_compensate},
    {"dense", Form::layers, "layers that attend to every token", kLayers,
     read_layers<&Policy::dense_layers>, write_layers<&Policy::dense_layers>},
    {"anchors", Form::layers, "layers that select; those after each reuse its selection", kLayers,
     read_layers<&Policy::anchors>, write_layers<&Policy::anchors>},
    {"anchors_attend", Form::word, "what anchors attend to themselves",
     "selected or all, as TidalDecode's do", read_anchors_attend, write_anchors_attend},
    {"correct", Form::budget, "recompute the last T decoded tokens densely, every T",
     "a number of tokens from 1 to 2147483648, or never", read_correct,
     write_count<&Policy::correct>},
    {"prefill", Form::word, "what a prompt's tokens attend to",
     "dense, zipvl(TAU), zipvl(TAU,demote) or zipvl(TAU,evict), TAU from 0 to 1", read_prefill,
     write_prefill},
    {"bits", Form::count, "per key channel, in the key index", "4 or 2", read_count<&Policy::bits>,
     write_count<&Policy::bits>},
}};

std::string setting_keys() {
  return join(kSettings, ", ", [](const Setting& setting) { return setting.key; });
}

std::string preset_names() {
  return join(presets(), ", ", [](const Preset& preset) { return preset.name; });
}

const Setting& find_setting(std::string_view key, std::string_view word) {
  for (const Setting& setting : kSettings) {
    if (setting.key == key) return setting;
  }
  refuse(in_quotes(word) + " is no setting; settings are " + setting_keys());
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
  refuse(in_quotes(key + "=" + std::string(value)) + " is not understood; " + key + " takes " +
         accepted_by(setting, scorers));
}

// Spaces inside parentheses do not end a word.
std::vector<std::string_view> split_words(std::string_view text) {
  std::vector<std::string_view> words;
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || (text[i] == ' ' && depth == 0)) {
      if (i > begin) words.push_back(text.substr(begin, i - begin));
      begin = i + 1;
    } else if (text[i] == '(') {
      ++depth;
    } else if (text[i] == ')' && depth > 0) {
      --depth;
    }
  }
  return words;
}

Policy read_words(Policy policy, std::span<const std::string_view> words, const Scorers& scorers) {
  std::vector<std::string_view> seen;
  for (const std::string_view word : words) {
    const std::size_t equals = word.find('=');
    if (equals == std::string_view::npos) {
      refuse(in_quotes(word) +
             " is not key=value, and only the first word may be a preset's name; " +
             "settings are " + setting_keys());
    }
    const Setting& setting = find_setting(word.substr(0, equals), word);
    if (std::find(seen.begin(), seen.end(), setting.key) != seen.end()) {
      refuse(std::string(setting.key) + " is given twice, again as " + in_quotes(word) +
             "; it may be given once");
    }
    seen.push_back(setting.key);
    read_setting(policy, setting, word.substr(equals + 1), scorers);
  }
  return policy;
}

Policy preset_policy(std::string_view name, const Scorers& scorers) {
  for (const Preset& preset : presets()) {
    if (preset.name == name) {
      return read_words({}, split_words(preset.policy), scorers);
    }
  }
  refuse(in_quotes(name) + " is neither a preset (" + preset_names() +
         ") nor key=value; settings are " + setting_keys());
}

Json json_number(std::string_view text) {
  const auto value = number<std::int64_t>(text);
  return value ? Json(*value) : Json(text);
}

Json json_value(const Setting& setting, const std::string& text) {
  if (setting.form == Form::word) return text;
  if (setting.form != Form::layers) return json_number(text);
  Json layers = Json::array();
  for (const std::string_view layer : split(text, ',')) layers.push_back(json_number(layer));
  return layers;
}

// A JSON value as it would stand in a line of text; nothing if it has the wrong type.
std::optional<std::string> text_value(Form form, const Json& value) {
  if (form == Form::layers) {
    const auto is_integer = [](const Json& layer) { return layer.is_number_integer(); };
    if (!value.is_array() || !std::all_of(value.begin(), value.end(), is_integer)) return {};
    return value.empty() ? "none"
                         : join(value, ",", [](const Json& layer) { return layer.dump(); });
  }
  if (value.is_string() && form != Form::count) return value.get<std::string>();
  if (value.is_number_integer() && form != Form::word) return value.dump();
  return {};
}

std::string_view form_name(Form form) {
  if (form == Form::word) return "a string";
  if (form == Form::count) return "an integer";
  return form == Form::budget ? "an integer or a string" : "an array of integers";
}

// The parser would keep the last of equal keys. It and this take quadratic time in the number of
// objects and keys.
class KeyGuard {
 public:
  void see(int depth, Json::parse_event_t event, const Json& parsed) {
    using Event = Json::parse_event_t;
    const bool counts =
        event == Event::key || event == Event::object_start || event == Event::array_start;
    if (counts && ++parts_ > kMaxParts) {
      refuse("the JSON has more keys, objects and arrays than all settings take; settings are " +
             setting_keys());
    }
    if (event != Event::key || depth != 1) return;
    const auto& key = parsed.get_ref<const std::string&>();
    if (std::find(keys_.begin(), keys_.end(), key) != keys_.end()) {
      refuse("the JSON has the key " + in_quotes(key) + " twice; it may be given once");
    }
    keys_.push_back(key);
  }

 private:
  static constexpr std::size_t kMaxParts = 4 * kSettings.size();

  std::vector<std::string> keys_;
  std::size_t parts_ = 0;
};

Json parse_json(std::string_view text) {
  if (text.size() > kMaxJson) {
    refuse("the JSON has " + std::to_string(text.size()) + " bytes; it may have " +
           std::to_string(kMaxJson));
  }
  // The parser would take a NUL byte for the end.
  if (text.find('\0') != std::string_view::npos) refuse("not JSON: it has a NUL byte");
  KeyGuard guard;
  try {
    return Json::parse(text, [&](int depth, Json::parse_event_t event, const Json& parsed) {
      guard.see(depth, event, parsed);
      return true;
    });
  } catch (const Json::parse_error& error) {
    refuse("not JSON: it breaks off at byte " + std::to_string(error.byte));
  } catch (const Json::exception&) {
    refuse("not JSON: it has a number that no type can hold");
  }
}

}  // namespace

Policy parse_policy(std::string_view text, const Scorers& scorers) {
  const std::vector<std::string_view> words = split_words(text);
  if (words.empty()) {
    refuse("the text is empty; write a preset (" + preset_names() + ") or select=dense");
  }
  const bool named = words[0].find('=') == std::string_view::npos;
  const Policy base = named ? preset_policy(words[0], scorers) : Policy{};
  Policy policy = read_words(base, std::span(words).subspan(named ? 1 : 0), scorers);
  validate(policy, scorers);
  return policy;
}

Policy change_policy(const Policy& base, std::string_view settings, const Scorers& scorers) {
  Policy policy = read_words(base, split_words(settings), scorers);
  validate(policy, scorers);
  return policy;
}

std::string to_string(const Method& method) {
  const std::string list = join(method.parameters, ",", [](const auto& parameter) {
    // Whole numbers as such, not as 1e+05.
    const auto whole = static_cast<std::int64_t>(std::clamp(parameter.second, -1e15, 1e15));
    const bool is_whole = static_cast<double>(whole) == parameter.second;
    return parameter.first + "=" + (is_whole ? digits(whole) : digits(parameter.second));
  });
  return method.name + (list.empty() ? "" : "(" + list + ")");
}

std::string to_string(const Policy& policy) {
  std::string line;
  for (const Setting& setting : kSettings) {
    const std::string value = setting.write(policy);
    if (value.empty()) continue;
    line += (line.empty() ? "" : " ") + std::string(setting.key) + "=" + value;
  }
  return line;
}

std::string to_json(const Policy& policy) {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  for (const Setting& setting : kSettings) {
    const std::string value = setting.write(policy);
    if (!value.empty()) root[std::string(setting.key)] = json_value(setting, value);
  }
  return root.dump();
}

Policy policy_from_json(std::string_view json, const Scorers& scorers) {
  const Json root = parse_json(json);
  if (!root.is_object()) {
    refuse("the JSON is not an object; its keys may be " + setting_keys());
  }
  Policy policy;
  for (const auto& [key, value] : root.items()) {
    const Setting& setting = find_setting(key, key);
    const auto text = text_value(setting.form, value);
    if (!text) {
      refuse("the JSON's " + key + " is " +
             in_quotes(value.is_structured() ? value.type_name() : value.dump()) +
             "; it has to be " + std::string(form_name(setting.form)) + ": " +
             accepted_by(setting, scorers));
    }
    read_setting(policy, setting, *text, scorers);
  }
  validate(policy, scorers);
  return policy;
}

std::vector<PolicySetting> policy_settings(const Scorers& scorers) {
  std::vector<PolicySetting> settings;
  for (const Setting& setting : kSettings) {
    settings.push_back({setting.key, setting.meaning, accepted_by(setting, scorers)});
  }
  return settings;
}

}  // namespace sluice
