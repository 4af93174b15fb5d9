// The settings of a policy, as a line of text and JSON have them.
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

// Layers with settings of their own, at most: reading their JSON takes quadratic time.
inline constexpr std::size_t kMostOwnLayers = 256;

// Throws Error{usage} about a policy.
[[noreturn]] void refuse_policy(const std::string& why);

// What a value is in JSON.
enum class Form : std::uint8_t {
  word,    // a string
  count,   // an integer
  budget,  // an integer, or a string for what is none
  layers,  // an array of integers
};

// Values are text. read() returns false for what it does not understand, and leaves ranges that
// need no special reading to validate(); write() returns an empty text for the default.
struct Setting {
  std::string_view key;
  Form form;
  std::string_view meaning;
  std::string_view accepted;
  bool (*read)(Policy& policy, std::string_view value);
  std::string (*write)(const Policy& policy);
  // Of those that layers may have of their own, else null: takes the policy's for the layer's, and
  // the other way round, if the layer has one.
  void (*take)(LayerSettings& layer, const Policy& policy) = nullptr;
  bool (*give)(const LayerSettings& layer, Policy& policy) = nullptr;
};

// In the order of writing.
std::span<const Setting> all_settings();
// Their keys, for messages.
std::string setting_keys();
// The values that it takes, in words.
std::string accepted_by(const Setting& setting, const Scorers& scorers);
// A setting, and of which layers if not of all.
struct Place {
  const Setting* setting = nullptr;
  std::vector<int> layers;
};
// Reads "cap" or "0,3:cap". Throws Error{usage} that quotes `word`, where the key stands.
Place find_place(std::string_view key, std::string_view word);
// The keys of what layers have of their own, with their values.
std::vector<std::pair<std::string, std::string>> write_layers(const Policy& policy,
                                                              const Setting& setting);

// Settings that were read, each of which may be given once, for all layers and for each.
class GivenOnce {
 public:
  // The first key of the place ("cap", or "3:cap") that was noted before; nothing: it is new.
  std::optional<std::string> note(const Place& place);

 private:
  std::set<std::string> keys_;
};

// Throw Error{usage} for a value that is not understood.
void read_place(Policy& policy, const Place& place, std::string_view value, const Scorers& scorers);
void read_setting(Policy& policy, const Setting& setting, std::string_view value,
                  const Scorers& scorers);

}  // namespace sluice
