// What whole pages weigh without what is selected of them: the first step of attend_tiles(), unless
// it was done behind select().
#pragma once

#include "kernels/runtime/launch.h"
#include "kernels/runtime/page_weights.h"
#include "lib/backend/index_ops.h"
#include "sluice/batch.h"

namespace sluice::cuda {

// The pages of a batch's tokens, and where what they weigh is to go.
struct WeighedPages {
  KvShape shape;
  TokenBatch batch;
  LogitView logits;
  SelectionView selected;
  const float* lse = nullptr;  // [count, query_heads]: what weights are relative to
  PageWeights to;              // nothing of heads whose selection is bad
  bool is_beside = false;      // the kernel before has nothing to do with it
};

void weigh_pages(const WeighedPages& pages, const Launch& launch);

}  // namespace sluice::cuda
