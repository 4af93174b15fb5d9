// A basis of components for pools without a model, for policies that keep half of them.
#pragma once

#include <map>
#include <tuple>
#include <vector>

#include "offload/attention/key_index.h"
#include "sluice/types.h"
#include "tests/support/value_cases.h"

namespace sluice::testing {

// The same numbers for every call with the same shape; they stay to the end of the process.
inline ValueBasis value_basis_of(const KvShape& shape) {
  static std::map<std::tuple<int, int, int>, std::vector<float>> all;
  std::vector<float>& bases = all[{shape.layers, shape.kv_heads, shape.head_dim}];
  if (bases.empty() && shape.head_dim % 2 == 0) {
    Random random(17);
    bases = random_bases(random, shape.layers * shape.kv_heads, shape.head_dim);
  }
  return {bases.data(), 17};
}

}  // namespace sluice::testing
