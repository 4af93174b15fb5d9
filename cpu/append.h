// New rows of the tokens of a batch, and the running sums of their values.
#pragma once

#include "cpu/threads.h"
#include "lib/backend/kv_ops.h"

namespace sluice::cpu {

void append_batch(const AppendBatchParams& params, Threads& threads);

}  // namespace sluice::cpu
