#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "lib/policy_settings.h"
#include "lib/text.h"
#include "sluice/policy.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxJson = 1 << 16;  // bytes
// Most keys, objects and arrays: more than a valid policy has.
constexpr std::size_t kMostParts = 4 * kMostOwnLayers + 64;

// A number if it is one: a budget may also be 1/16.
Json json_number(const std::string& text) {
  Json value = Json::parse(text, nullptr, false);
  return value.is_number_integer() ? std::move(value) : Json(text);
}

Json json_value(const Setting& setting, const std::string& text) {
  if (setting.form == Form::word) return text;
  return setting.form == Form::layers ? Json::parse("[" + text + "]") : json_number(text);
}

// A JSON value as it is written in a line of text; nullopt if it has the wrong type.
std::optional<std::string> text_value(Form form, const Json& value) {
  if (form == Form::layers) {
    const auto is_integer = [](const Json& layer) { return layer.is_number_integer(); };
    if (!value.is_array() || !std::all_of(value.begin(), value.end(), is_integer)) return {};
    if (value.empty()) return "none";
    const std::string list = value.dump();
    return list.substr(1, list.size() - 2);  // without brackets
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

// Refuses equal keys, because the parser would keep the last, and too many parts, because this and
// the parser take quadratic time in the number of objects and keys.
class KeyGuard {
 public:
  void see(int depth, Json::parse_event_t event, const Json& parsed) {
    using Event = Json::parse_event_t;
    const bool counts =
        event == Event::key || event == Event::object_start || event == Event::array_start;
    if (counts && ++parts_ > kMostParts) {
      refuse_policy(
          "the JSON has more keys, objects and arrays than all settings take; settings are " +
          setting_keys());
    }
    if (event != Event::key || depth != 1) return;
    const auto& key = parsed.get_ref<const std::string&>();
    if (std::find(keys_.begin(), keys_.end(), key) != keys_.end()) {
      refuse_policy("the JSON has the key " + in_quotes(key) + " twice; it may be given once");
    }
    keys_.push_back(key);
  }

 private:
  std::vector<std::string> keys_;
  std::size_t parts_ = 0;
};

Json parse_json(std::string_view text) {
  if (text.size() > kMaxJson) {
    refuse_policy("the JSON has " + std::to_string(text.size()) + " bytes; it may have " +
                  std::to_string(kMaxJson));
  }
  // The parser would take a NUL byte for the end.
  if (text.find('\0') != std::string_view::npos) refuse_policy("not JSON: it has a NUL byte");
  KeyGuard guard;
  try {
    return Json::parse(text, [&](int depth, Json::parse_event_t event, const Json& parsed) {
      guard.see(depth, event, parsed);
      return true;
    });
  } catch (const Json::parse_error& error) {
    refuse_policy("not JSON: " + json_fault(error.byte, text.size()));
  } catch (const Json::exception&) {
    refuse_policy("not JSON: it has a number that no type can hold");
  }
}

}  // namespace

std::string to_json(const Policy& policy) {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  for (const Setting& setting : all_settings()) {
    const std::string value = setting.write(policy);
    if (!value.empty()) root[std::string(setting.key)] = json_value(setting, value);
  }
  for (const Setting& setting : all_settings()) {
    for (const auto& [key, value] : write_layers(policy, setting)) {
      root[key] = json_value(setting, value);
    }
  }
  return root.dump();
}

Policy policy_from_json(std::string_view json, const Scorers& scorers) {
  const Json root = parse_json(json);
  if (!root.is_object()) {
    refuse_policy("the JSON is not an object; its keys may be " + setting_keys());
  }
  Policy policy;
  GivenOnce given;
  for (const auto& [key, value] : root.items()) {
    const Place place = find_place(key, key);
    const Setting& setting = *place.setting;
    const auto text = text_value(setting.form, value);
    if (!text) {
      refuse_policy("the JSON's " + key + " is " +
                    in_quotes(value.is_structured() ? value.type_name() : value.dump()) +
                    "; it has to be " + std::string(form_name(setting.form)) + ": " +
                    accepted_by(setting, scorers));
    }
    if (const auto repeated = given.note(place)) {
      refuse_policy("the JSON has " + *repeated + " twice; it may be given once");
    }
    read_place(policy, place, *text, scorers);
  }
  validate(policy, scorers);
  return policy;
}

}  // namespace sluice
