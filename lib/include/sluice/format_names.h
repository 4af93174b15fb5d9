// The names that flags, options and plan files have for element types, row formats and weight
// codes: those that to_string() gives for each.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sluice/dtype.h"
#include "sluice/row_format.h"
#include "sluice/weight_format.h"

namespace sluice {

std::vector<std::string> dtype_names();
std::vector<std::string> row_format_names();
std::vector<std::string> weight_code_names();  // that weights can be asked for in

// The format of a name. Throws Error{usage} that names `setting` and what it takes.
DType parse_dtype(std::string_view name, std::string_view setting);
RowFormat parse_row_format(std::string_view name, std::string_view setting);
WeightFormat parse_weight_code(std::string_view name, std::string_view setting);

}  // namespace sluice
