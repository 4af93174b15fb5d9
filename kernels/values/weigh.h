// Summed weights of the unselected tokens of whole pages: the first step of attend_tiles(), unless
// it was done in or after select().
#pragma once

#include "kernels/runtime/launch.h"
#include "kernels/runtime/page_weights.h"
#include "lib/backend/index_ops.h"
#include "sluice/batch.h"

namespace sluice::cuda {

// The pages of a batch's tokens, and the destination of their weights.
struct WeighedPages {
  KvShape shape;
  TokenBatch batch;
  LogitView logits;
  SelectionView selected;
  const float* lse = nullptr;  // [count, query_heads]: the base of the weights
  PageWeights to;              // nothing of heads whose selection is bad
  bool is_beside = false;      // independent of the preceding kernel
};

void weigh_pages(const WeighedPages& pages, const Launch& launch);

}  // namespace sluice::cuda
