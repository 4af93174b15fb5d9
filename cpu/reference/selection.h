// The reference backend's choice of tokens: fp64, full sorts, one thread. See
// lib/backend/index_ops.h for the operations.
#pragma once

#include "lib/backend/kv_ops.h"

namespace sluice::cpu::reference {

void select(const SelectParams& params);
void column_sums(const ColumnSumsParams& params);
void choose_tokens(const ChooseTokensParams& params);
void pack_tokens(const PackTokensParams& params);
void unpack_tokens(const UnpackTokensParams& params);
void sum_values(const SumValuesParams& params);

}  // namespace sluice::cpu::reference
