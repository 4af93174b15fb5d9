// Prefill attention with products of bf16, for bf16 rows.
#pragma once

#include "cpu/attention/bf16_products.h"
#include "cpu/attention/tile.h"

namespace sluice::cpu {

// As attend_prefill(), for rows of bf16; queries and softmax weights are rounded to bf16, sums are
// fp32. Needs what `products` need.
void attend_bf16(const AttendTile& tile, const Bf16Products& products);

// Floats of scratch that the calling thread takes for it.
std::size_t bf16_scratch(const AttendTile& tile);

}  // namespace sluice::cpu
