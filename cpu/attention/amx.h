// Use of Intel's AMX tile registers.
#pragma once

#include <cstddef>

namespace sluice::cpu {

// Whether the processor has AMX-bf16 and AVX512-BF16 and the kernel lets this process use them;
// asks it once.
bool amx_available();

// A tile: 16 rows of 64 bytes, 32 bf16 or 16 fp32.
inline constexpr std::size_t kTileSide = 16;
inline constexpr std::size_t kTileDepth = 32;
inline constexpr std::size_t kTileElements = kTileSide * kTileDepth;  // bf16

// While one lives, the calling thread's eight tile registers are whole tiles. Needs
// amx_available(). Other users of AMX in the same threads (oneDNN) configure the registers before
// each use of their own, as this does; nobody's configuration outlives its call.
class AmxTiles {
 public:
  AmxTiles();
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles();
};

// The compiler does not know that loads and stores of tiles touch memory: goes between them and
// other accesses to the same memory.
inline void order_tile_memory() { asm volatile("" ::: "memory"); }

}  // namespace sluice::cpu
