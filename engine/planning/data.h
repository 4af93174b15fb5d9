// The tables of losses, machines and shapes: losses.json, machines.json and shapes.json beside this
// file, which are part of the program.
#pragma once

#include <string_view>

namespace sluice::planning {

std::string_view losses_json();
std::string_view machines_json();
std::string_view shapes_json();

}  // namespace sluice::planning
