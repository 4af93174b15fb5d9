// Measured passages as JSON, of a task that is not finished: a later run goes on behind them.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>

#include "tools/eval_runner.h"

namespace sluice::tools {

// One passage under all policies. Numbers are kept to the bit, in hexadecimal, so that a task ends
// with the same report whether it was interrupted or not.
nlohmann::json part_json(const PassageResults& passage);

// Throws Error{corrupt} unless part_json() could have written it for a task of `policies` policies.
PassageResults part_of(const nlohmann::json& part, std::size_t policies);

}  // namespace sluice::tools
