// The cells of `sluice bench` as JSON, as a table and as CSV. docs/comparing.md has the schema.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "sluice/bus.h"
#include "sluice/errors.h"
#include "tools/bench_cell.h"

namespace sluice::tools {

// The members that identify a cell.
nlohmann::json json_of(const CellKey& key);
// A finished cell. Steps are compared with `buses` by the median of the measured steps.
nlohmann::json cell_json(const CellKey& key, const std::string& line, const CellResult& result,
                         std::span<const Bus> buses);
// A cell that could not run, or whose check failed.
nlohmann::json cell_json(const CellKey& key, const std::string& line, int exit_code,
                         const std::string& why);

// The value that a share of `values` does not exceed, nearest rank: 0.5 is the median.
double percentile(std::vector<double> values, double share);

// From the JSON of cells, so that those of an earlier run are shown alike.
std::string bench_table(const nlohmann::json& cells);
std::string bench_csv(const nlohmann::json& cells);

}  // namespace sluice::tools
