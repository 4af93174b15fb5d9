#include <span>
#include <string>
#include <vector>

#include "lib/policy_settings.h"
#include "lib/text.h"
#include "sluice/policy.h"

namespace sluice {
namespace {

std::string preset_names() {
  std::string names;
  for (const Preset& preset : presets()) {
    names += (names.empty() ? "" : ", ") + std::string(preset.name);
  }
  return names;
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
  GivenOnce given;
  for (const std::string_view word : words) {
    const std::size_t equals = word.find('=');
    if (equals == std::string_view::npos) {
      refuse_policy(in_quotes(word) +
                    " is not key=value, and only the first word may be a preset's name; " +
                    "settings are " + setting_keys());
    }
    const Place place = find_place(word.substr(0, equals), word);
    if (const auto key = given.note(place)) {
      refuse_policy(*key + " is given twice, again as " + in_quotes(word) +
                    "; it may be given once");
    }
    read_place(policy, place, word.substr(equals + 1), scorers);
  }
  return policy;
}

Policy preset_policy(std::string_view name, const Scorers& scorers) {
  for (const Preset& preset : presets()) {
    if (preset.name == name) {
      return read_words({}, split_words(preset.policy), scorers);
    }
  }
  refuse_policy(in_quotes(name) + " is neither a preset (" + preset_names() +
                ") nor key=value; settings are " + setting_keys());
}

}  // namespace

Policy parse_policy(std::string_view text, const Scorers& scorers) {
  const std::vector<std::string_view> words = split_words(text);
  if (words.empty()) {
    refuse_policy("the text is empty; write a preset (" + preset_names() + ") or select=dense");
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

std::string to_string(const Policy& policy) {
  std::string line;
  for (const Setting& setting : all_settings()) {
    const std::string value = setting.write(policy);
    if (value.empty()) continue;
    line += (line.empty() ? "" : " ") + std::string(setting.key) + "=" + value;
  }
  for (const Setting& setting : all_settings()) {
    for (const auto& [key, value] : write_layers(policy, setting)) {
      line += ' ';
      line += key;
      line += '=';
      line += value;
    }
  }
  return line;
}

}  // namespace sluice
