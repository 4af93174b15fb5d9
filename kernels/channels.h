// What scans of a call are told: which of its query heads they serve.
#pragma once

#include "lib/selection.h"

namespace sluice::cuda {

// One pass over the keys of every KV head, for up to kMaxQueries of its query heads.
struct ScanPass {
  const EstimateParams* estimate = nullptr;
  int first_query = 0;  // of the query heads of a KV head
  int queries = 0;
};

}  // namespace sluice::cuda
