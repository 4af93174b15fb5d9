// Logits of scorers that keep some tokens and forget the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sluice/scorer.h"

namespace sluice::scorers {

// The logit of what is kept, above that of any newest row, so that prune=top_p keeps all of it and
// nothing else; what is forgotten has -Inf. Small enough for fp32 sums of weights to be exact
// within a hundredth of 1 - p.
inline constexpr float kKept = 512.0f;

// Gives every query head of a group the same logits.
inline void give_group(const RunScorer& call, std::int64_t token, int head,
                       const std::vector<float>& logits) {
  const KvShape& shape = call.use.shape;
  for (int g = 0; g < shape.group(); ++g) {
    std::copy(logits.begin(), logits.end(),
              call.logits.row<float>(token * shape.query_heads + head * shape.group() + g));
  }
}

}  // namespace sluice::scorers
