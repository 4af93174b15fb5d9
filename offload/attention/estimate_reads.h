// Bytes that estimating token weights reads, for the ledger: from what scorers declare and from
// the backend's read pattern.
#pragma once

#include "lib/backend.h"
#include "sluice/batch.h"
#include "sluice/ledger.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"

namespace sluice {

// Traffic of one KV head of a token; rows are tokens that were estimated.
struct EstimateTraffic {
  Traffic near;  // where attention reads
  Traffic far;   // keys whose rows are in host memory only

  EstimateTraffic& operator+=(const EstimateTraffic& other);
};

// The extent of scans by a backend; `pages` is not set.
ScanExtent extent_of(const ReadPattern& pattern, const KvShape& shape);

class EstimateReads {
 public:
  EstimateReads(const ReadPattern& pattern, const Policy& policy, const KvShape& shape,
                std::int64_t context, const Scorer& scorer);

  // Reads for a token that selects. `resident`: tokens before its own page whose rows are where
  // attention reads. `scored`: the newest rows, those of its own page, are estimated, too. Without
  // `whole`, only those are counted.
  EstimateTraffic scan(const BatchToken& token, std::int64_t resident, bool scored,
                       bool whole = true) const;
  // What a scorer was seen to read for a token; rows are those that its memory stands for, too.
  EstimateTraffic counted(const BatchToken& token, const ScorerCount& count) const;
  // Reads for scoring `candidates` again, which read `pages_read` pages of tiles or, for a scorer
  // that reads rows, the keys of `resident` candidates where attention reads.
  EstimateTraffic rescore(const BatchToken& token, std::int64_t candidates, std::int64_t pages_read,
                          std::int64_t resident, bool scored) const;

 private:
  Traffic keys(std::int64_t rows) const;

  const Scorer* scorer_;
  ScorerUse use_;
  ScanExtent extent_;  // without pages
};

}  // namespace sluice
