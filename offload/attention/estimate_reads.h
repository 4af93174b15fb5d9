// What estimating the weights of tokens reads, for the ledger: as scorers say it, and as the
// backend reads.
#pragma once

#include "lib/backend.h"
#include "sluice/batch.h"
#include "sluice/ledger.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"

namespace sluice {

// Of one KV head of a token; rows are tokens that were estimated.
struct EstimateTraffic {
  Traffic near;  // where attention reads
  Traffic far;   // keys whose rows are at home only

  EstimateTraffic& operator+=(const EstimateTraffic& other);
};

class EstimateReads {
 public:
  EstimateReads(const ReadPattern& pattern, const Policy& policy, const KvShape& shape,
                const Scorer& scorer);

  // A token that selects. `resident`: tokens before its own page whose rows are where attention
  // reads. The newest rows, of its own page, are `scored` or not.
  EstimateTraffic scan(const BatchToken& token, std::int64_t resident, bool scored) const;
  // The second look at candidates, for which so many pages of tiles were read.
  EstimateTraffic rescore(const BatchToken& token, const HeadSelection& candidates,
                          std::int64_t pages_read) const;

 private:
  Traffic keys(std::int64_t rows) const;

  const Scorer* scorer_;
  ScorerUse use_;
  ScanExtent extent_;  // without pages
};

}  // namespace sluice
