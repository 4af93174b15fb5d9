// The settings of a policy, as a line of text and JSON have them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "sluice/policy.h"

namespace sluice {

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
};

// In the order of writing.
std::span<const Setting> all_settings();
// Their keys, for messages.
std::string setting_keys();
// Throws Error{usage} that quotes `word`, where the key stands.
const Setting& find_setting(std::string_view key, std::string_view word);
// The values that it takes, in words.
std::string accepted_by(const Setting& setting, const Scorers& scorers);
// Throws Error{usage} for a value that is not understood.
void read_setting(Policy& policy, const Setting& setting, std::string_view value,
                  const Scorers& scorers);

}  // namespace sluice
