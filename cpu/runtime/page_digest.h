// What a scan of tiles leaves of whole pages' logits (LogitDigest) on the CPU.
//
// Logits x of a page become e^(x - level) in their places, for the largest of them, its level. So
// weights need no second exponential, and most pages no second look.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/backend/index_ops.h"

namespace sluice::cpu {

struct PageDigest {
  // [tokens * query_heads, pages]. -Inf if all of a page's logits are. select() leaves what 1 in
  // the page weighs: e^(level - lse) or, where it made weights of all logits, 1. It notes the page
  // of the newest rows for itself.
  float* levels = nullptr;
  float* sums = nullptr;   // likewise: of e^(x - level); NaN if a logit was NaN or +Inf
  std::int64_t pages = 0;  // of a row

  static constexpr std::size_t kPageBytes = 2 * sizeof(float);

  // Of query heads from `row` on, [pages] each.
  static PageDigest of(const LogitDigest& digest, std::int64_t row) {
    auto* const levels = reinterpret_cast<float*>(digest.data);
    float* const sums = levels + digest.rows * digest.pages;
    const std::int64_t first = (digest.first + row) * digest.pages;
    return {levels + first, sums + first, digest.pages};
  }
  float* levels_of(std::int64_t query) const { return levels + query * pages; }
  float* sums_of(std::int64_t query) const { return sums + query * pages; }
};

}  // namespace sluice::cpu
