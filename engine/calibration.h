// Calibrated policies of a checkpoint, which replace presets of the same name; stored in
// sluice.json in the model's folder, or beside MODEL.gguf in MODEL.sluice.json.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "sluice/policy.h"

namespace sluice {

inline constexpr std::string_view kCalibrationFile = "sluice.json";

// The policy stored for preset `name`, or nothing. Throws Error{corrupt} naming the file if it
// cannot be understood or does not fit a model of this shape.
std::optional<Policy> calibrated_policy(const std::filesystem::path& model, std::string_view name,
                                        const KvShape& shape, const Scorers& scorers);

// Throws what store_calibration (sluice/engine.h) would throw. Call before the work whose result is
// to be stored.
void require_storable(const std::filesystem::path& model);

}  // namespace sluice
