// Per-page digest of logits (LogitDigest) that a scan of tiles writes on the CPU.
//
// The scan replaces a page's logits x by e^(x - level), where level is the page's largest logit.
// Weights then need no second exponential, and most pages are not read again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/backend/index_ops.h"

namespace sluice::cpu {

struct PageDigest {
  // [tokens * query_heads, pages]. -Inf if all logits of a page are -Inf. select() replaces a level
  // by the factor that turns the page's entries into weights: e^(level - lse), or 1 where it
  // already turned all logits into weights. select() itself adds the page of the newest rows.
  float* levels = nullptr;
  float* sums = nullptr;   // same shape: sums of e^(x - level); NaN if a logit was NaN or +Inf
  std::int64_t pages = 0;  // per row

  static constexpr std::size_t kPageBytes = 2 * sizeof(float);

  // Digest of the query heads from `row` on, [pages] each.
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
