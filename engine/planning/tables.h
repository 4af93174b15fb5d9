// Machines and shapes of the tables beside this file.
#pragma once

#include <string_view>

#include "engine/config.h"
#include "sluice/planning.h"

namespace sluice::planning {

// The config of one of shape_names(). Throws Error{usage} listing the names.
ModelConfig find_shape(std::string_view name);

}  // namespace sluice::planning
