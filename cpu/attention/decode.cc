// Attention of few queries is memory-bound, so every row is read once, in order, and fully
// processed while it is in the L1 cache.
#include "cpu/attention/simd.h"

// Old instruction sets get the portable code; everything else is worth a variant.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/decode.cc"
#include <hwy/foreach_target.h>
// Highway compiles what follows once per instruction set.
#include "cpu/attention/decode-inl.h"

#if HWY_ONCE
namespace sluice::cpu {

HWY_EXPORT(decode_tile);
HWY_EXPORT(scratch_floats);

void attend_decode(const AttendTile& tile, std::span<const RowSpan> runs) {
  HWY_DYNAMIC_DISPATCH(decode_tile)(tile, runs);
}

std::size_t decode_scratch(const AttendTile& tile) {
  return HWY_DYNAMIC_DISPATCH(scratch_floats)(tile);
}

}  // namespace sluice::cpu
#endif  // HWY_ONCE
