// The two matrix products of attention with bf16 operands and fp32 sums: on Intel AMX tiles, or
// with the AVX512-BF16 dot products that AMD processors have as well.
//
// Queries are stored in panels of two columns of kTileSide queries. Operands that are multiplied
// along their first index store it in pairs: [pair, query, 2].
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/attention/amx.h"

namespace sluice::cpu {

// Rows per block. 96 is as fast as any multiple of kTileDepth up to 512.
inline constexpr std::size_t kBf16Rows = 96;

// scores = K Q^T of one panel.
struct KeyProduct {
  const std::uint16_t* k = nullptr;  // [rows, head_dim], `stride` elements from row to row
  std::size_t stride = 0;
  std::size_t rows = 0;              // a multiple of kTileDepth, up to kBf16Rows
  std::size_t head_dim = 0;          // a multiple of kTileDepth
  const std::uint16_t* q = nullptr;  // [2, head_dim / 2, kTileSide, 2]
  float* scores = nullptr;           // [2, kBf16Rows, kTileSide]
};

// values += V^T P of one panel.
struct ValueProduct {
  // [head_dim / kTileSide, kBf16Rows / kTileDepth] tiles, each [kTileSide channels, kTileDepth
  // rows]
  const std::uint16_t* values_t = nullptr;
  std::size_t rows = 0;                    // as above
  std::size_t head_dim = 0;                // as above
  const std::uint16_t* weights = nullptr;  // [2, kBf16Rows / 2, kTileSide, 2]
  float* values = nullptr;                 // [2, head_dim, kTileSide]
};

struct Bf16Products {
  bool uses_tiles = false;  // needs a live AmxTiles
  void (*keys)(const KeyProduct& product) = nullptr;
  void (*values)(const ValueProduct& product) = nullptr;
};

// Null if this processor lacks the instructions.
const Bf16Products* amx_products();
const Bf16Products* avx512_products();

}  // namespace sluice::cpu
