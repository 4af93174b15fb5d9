// Logits of rows in full precision, or of page bounds: a matrix of keys times a few queries.
#pragma once

#include "kernels/runtime/launch.h"
#include "kernels/scan/channels.h"

namespace sluice::cuda {

struct PrepareArgs;

// The rows of every token's own page. The same launch makes ready a scan of tiles, if `prepare` is
// not null.
void scan_rows(const ScanPass& pass, const PrepareArgs* prepare, const Launch& launch);
// The rows of all tokens, for `exact`.
void scan_all_rows(const ScanPass& pass, const Launch& launch);
// The rows of candidates, for `exact`.
void scan_candidate_rows(const ScanPass& pass, const Launch& launch);
// Upper bounds of sub-pages, for `quest`.
void scan_bounds(const ScanPass& pass, const Launch& launch);

}  // namespace sluice::cuda
