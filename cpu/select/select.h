// Choice of tokens on the CPU. Operations and parameters are defined in lib/backend/index_ops.h;
// every pointer is host memory.
#pragma once

#include "cpu/runtime/threads.h"
#include "lib/backend/index_ops.h"

namespace sluice::cpu {

void select(const SelectParams& params, Threads& threads);
void choose_tokens(const ChooseTokensParams& params);

}  // namespace sluice::cpu
