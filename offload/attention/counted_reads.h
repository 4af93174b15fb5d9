// Reads of a scorer on the host, counted as they are handed out.
#pragma once

#include <cstdint>
#include <vector>

#include "sluice/scorer.h"
#include "sluice/types.h"

namespace sluice {

class CountedReads : public ScorerReads {
 public:
  // `call`: with rows and memory, and a batch that the host can read. `tier`: where attention
  // reads.
  CountedReads(const RunScorer& call, Tier tier);

  const std::byte* key(std::int64_t token, int head, std::int64_t position) const override;
  const std::byte* page(std::int64_t token, int head, std::int64_t number, std::size_t offset,
                        std::size_t bytes) const override;
  std::byte* sequence(std::int64_t token, int head, std::size_t offset,
                      std::size_t bytes) const override;
  ScorerCount count(std::int64_t token, int head) const override { return at(token, head); }

 private:
  ScorerCount& at(std::int64_t token, int head) const;

  KvShape shape_;
  TokenBatch batch_;
  PagedRows rows_;
  ScorerMemory memory_;
  Tier tier_;
  mutable std::vector<ScorerCount> counts_;  // [tokens, kv_heads]
};

}  // namespace sluice
