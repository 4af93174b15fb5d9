// The value basis of rows without a model, for policies with components=half.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/bench_rows.h"

namespace sluice::tools {

// KvConfig::value_basis of rows whose weights nobody has: in their place the principal components
// of the values of up to 1,024 tokens from `first` on, of `tokens`.
std::vector<float> basis_of_rows(const BenchRows& rows, std::int64_t first, std::int64_t tokens);

}  // namespace sluice::tools
