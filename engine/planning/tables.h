// Machines and shapes of the tables beside this file.
#pragma once

#include <string_view>

#include "engine/config.h"
#include "sluice/planning.h"

namespace sluice::planning {

// The config of one of shape_names(), or that in a file, a model's config.json. Throws Error{usage}
// listing the names, and what read_config() throws.
ModelConfig find_shape(std::string_view name);

}  // namespace sluice::planning
