// --plan FILE: runs with the settings of a plan that `sluice plan` saved.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sluice/planning.h"
#include "tools/model_flags.h"

namespace sluice::tools {

// Adds the flag. Call after the command's other flags: those that a plan decides are refused beside
// it.
void add_plan_flag(CLI::App& app, ModelFlags& flags);

// The plan of --plan; none without the flag. Throws what read_plan() throws, and Error{usage} for a
// plan of another kind of device.
std::optional<PlanSettings> plan_of(const ModelFlags& flags);

// flags.config() with what the plan decides.
EngineConfig config_of(const ModelFlags& flags, const std::optional<PlanSettings>& plan);

}  // namespace sluice::tools
