// The values of --policy, for --help.
#pragma once

#include <string>

namespace sluice::tools {

// The presets and the settings, in lines of up to 80 columns.
std::string policy_help();

}  // namespace sluice::tools
