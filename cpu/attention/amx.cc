#include "cpu/attention/amx.h"

#include "lib/check.h"

#if defined(__x86_64__)

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "cpu/runtime/intrinsics.h"

namespace sluice::cpu {
namespace {

bool ask_for_amx() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("amx-bf16") || !__builtin_cpu_supports("amx-tile") ||
      !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return false;
  }
  // Linux hands out the 8 KiB of tile state per thread only to processes that ask for it.
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// The operand of ldtilecfg.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

__attribute__((target("amx-tile"))) void load_config(const TileConfig& config) {
  order_tile_memory();
  _tile_loadconfig(&config);
}

__attribute__((target("amx-tile"))) void release_config() { _tile_release(); }

}  // namespace

bool amx_available() {
  static const bool available = ask_for_amx();
  return available;
}

AmxTiles::AmxTiles() { load_config({}); }
AmxTiles::~AmxTiles() { release_config(); }

}  // namespace sluice::cpu

#else

namespace sluice::cpu {

bool amx_available() { return false; }
AmxTiles::AmxTiles() { check(false, "this processor has no AMX"); }
AmxTiles::~AmxTiles() = default;

}  // namespace sluice::cpu

#endif
