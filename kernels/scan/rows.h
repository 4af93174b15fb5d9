// Logits of rows in full precision or of page bounds: a matrix of keys times a few queries.
#pragma once

#include "kernels/runtime/launch.h"
#include "kernels/scan/channels.h"

namespace sluice::cuda {

struct PrepareArgs;

// Scans the rows of every token's own page. If `prepare` is not null, the same launch prepares a
// scan of tiles.
void scan_rows(const ScanPass& pass, const PrepareArgs* prepare, const Launch& launch);
// Scans the rows of all tokens, for `exact`.
void scan_all_rows(const ScanPass& pass, const Launch& launch);
// Scans the rows of candidates, for `exact`.
void scan_candidate_rows(const ScanPass& pass, const Launch& launch);
// Scans the upper bounds of sub-pages, for `quest`.
void scan_bounds(const ScanPass& pass, const Launch& launch);

}  // namespace sluice::cuda
