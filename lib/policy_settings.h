// The settings of a policy, as written in a line of text and in JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sluice/policy.h"

namespace sluice {

// Most layers with own settings. Limited because reading their JSON takes quadratic time.
inline constexpr std::size_t kMostOwnLayers = 256;

// Throws Error{usage} about a policy.
[[noreturn]] void refuse_policy(const std::string& why);

// The JSON type of a value.
enum class Form : std::uint8_t {
  word,    // a string
  count,   // an integer
  budget,  // an integer, else a string
  layers,  // an array of integers
};

// One setting, with its value as text. read() returns false for text that it does not understand
// and leaves simple range checks to validate(); write() returns an empty text for the default.
struct Setting {
  std::string_view key;
  Form form;
  std::string_view meaning;
  std::string_view accepted;
  bool (*read)(Policy& policy, std::string_view value);
  std::string (*write)(const Policy& policy);
  // Null, unless a layer may override the setting: take() copies the policy's value to the layer,
  // give() copies the layer's value, if it has one, to the policy.
  void (*take)(LayerSettings& layer, const Policy& policy) = nullptr;
  bool (*give)(const LayerSettings& layer, Policy& policy) = nullptr;
};

// All settings, in the order of writing.
std::span<const Setting> all_settings();
// The keys of all settings, for messages.
std::string setting_keys();
// The values that a setting accepts, in words.
std::string accepted_by(const Setting& setting, const Scorers& scorers);
// A setting and the layers that it is for; no layers: all.
struct Place {
  const Setting* setting = nullptr;
  std::vector<int> layers;
};
// Reads "cap" or "0,3:cap". Throws Error{usage} that quotes `word`, which contains the key.
Place find_place(std::string_view key, std::string_view word);
// The keys and values of the layers that override a setting.
std::vector<std::pair<std::string, std::string>> write_layers(const Policy& policy,
                                                              const Setting& setting);

// Settings read so far. Each may be given once for all layers and once per layer.
class GivenOnce {
 public:
  // The first key of the place ("cap" or "3:cap") that was noted before; nullopt: all are new.
  std::optional<std::string> note(const Place& place);

 private:
  std::set<std::string> keys_;
};

// Read a value into a policy. Throw Error{usage} for one that is not understood.
void read_place(Policy& policy, const Place& place, std::string_view value, const Scorers& scorers);
void read_setting(Policy& policy, const Setting& setting, std::string_view value,
                  const Scorers& scorers);

}  // namespace sluice
