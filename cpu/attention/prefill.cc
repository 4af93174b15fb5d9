// Attention of many queries is compute-bound, so rows are converted to fp32 once per block and all
// products use one register-blocked multiply.
#include "cpu/attention/simd.h"

// Old instruction sets get the portable code; everything else is worth a variant.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/prefill.cc"
#include <hwy/foreach_target.h>
// Highway compiles what follows once per instruction set.
#include "cpu/attention/prefill-inl.h"

#if HWY_ONCE
namespace sluice::cpu {

HWY_EXPORT(prefill_tile);
HWY_EXPORT(scratch_floats);

void attend_prefill(const AttendTile& tile) { HWY_DYNAMIC_DISPATCH(prefill_tile)(tile); }

std::size_t prefill_scratch(const AttendTile& tile) {
  return HWY_DYNAMIC_DISPATCH(scratch_floats)(tile);
}

}  // namespace sluice::cpu
#endif  // HWY_ONCE
