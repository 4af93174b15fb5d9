// Prefill attention on Intel AMX tiles, for bf16 rows.
#pragma once

#include "cpu/attention_tile.h"

namespace sluice::cpu {

// As attend_prefill(), for rows of bf16; queries and softmax weights are rounded to bf16, sums are
// fp32. Needs amx_available().
void attend_amx(const AttendTile& tile);

}  // namespace sluice::cpu
