// Prefill attention with products of bf16, for rows of bf16 and coded rows.
#pragma once

#include "cpu/attention/bf16_products.h"
#include "cpu/attention/tile.h"

namespace sluice::cpu {

// attend_prefill() for these rows. Queries, and softmax weights times the scales of coded values,
// are rounded to bf16; sums are fp32.
// If products.uses_tiles, an AmxTiles must be alive.
void attend_bf16(const AttendTile& tile, const Bf16Products& products);

// Scratch of attend_bf16() in the calling thread, in floats.
std::size_t bf16_scratch(const AttendTile& tile);

}  // namespace sluice::cpu
