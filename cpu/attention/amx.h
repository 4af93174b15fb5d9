// Intel's AMX tile registers.
#pragma once

#include <cstddef>

namespace sluice::cpu {

// Returns true if the processor has AMX-bf16 and AVX512-BF16 and Linux lets this process use them.
// The first call asks Linux for permission; later calls return the same answer.
bool amx_available();

// A tile: 16 rows of 64 bytes, 32 bf16 or 16 fp32.
inline constexpr std::size_t kTileSide = 16;
inline constexpr std::size_t kTileDepth = 32;
inline constexpr std::size_t kTileElements = kTileSide * kTileDepth;  // bf16

// Configures the calling thread's eight tile registers as whole tiles for the lifetime of the
// object. Needs amx_available(). oneDNN, which uses AMX in the same threads, configures the
// registers before each of its calls, as this does, so neither relies on a configuration that
// outlives a call.
class AmxTiles {
 public:
  AmxTiles();
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles();
};

// Compiler barrier between tile loads or stores and other accesses to the same memory, because the
// compiler does not know that tile instructions touch memory.
inline void order_tile_memory() { asm volatile("" ::: "memory"); }

}  // namespace sluice::cpu
