// The state of a server as Prometheus' text and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "sluice/batcher.h"
#include "sluice/kv_cache.h"

namespace sluice::tools {

// Source: Prometheus' text format 0.0.4.
std::string metrics_text(const BatcherStats& stats, const MemoryUse& memory);
nlohmann::json stats_json(const BatcherStats& stats, const MemoryUse& memory);

}  // namespace sluice::tools
