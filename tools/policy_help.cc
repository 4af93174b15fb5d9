#include "tools/policy_help.h"

#include <cstddef>
#include <string_view>

#include "sluice/policy.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

constexpr std::size_t kIndent = 14;  // column of the text beside a name

std::string entry(std::string_view name, std::string_view text) {
  return wrapped("  " + std::string(name), kIndent, text);
}

}  // namespace

std::string policy_help() {
  std::string text = "Policies: a preset, settings, or a preset with changes: 'sluice cap=512'.\n";
  for (const Preset& preset : presets()) text += entry(preset.name, preset.description);
  text += "Settings of a policy, key=value with spaces between them:\n";
  std::string by_layer;
  for (const PolicySetting& setting : policy_settings()) {
    text += entry(setting.key, std::string(setting.meaning) + ": " + setting.accepted);
    if (setting.by_layer) by_layer += (by_layer.empty() ? "" : ", ") + std::string(setting.key);
  }
  return text + wrapped("Layers may differ in", 0, by_layer + ": 'sluice 0,3:cap=64 3:bits=2'.");
}

}  // namespace sluice::tools
