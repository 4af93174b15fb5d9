// The ways of selecting, by what holds a head's logits; select() takes the first that fits. Which
// one does follows from sizes alone, the batch's capacity among them, never from a position. What
// each finds comes in the order in which it finds it.
//
// select_fixed: there are no logits. One block per head walks over what is always kept.
// Where a block's shared memory could hold a head's logits, and those are few or heads are many:
//   top_k_of_row: top_k of one query head, which stays in the registers of up to four warps. Sums;
//     a bound of the k-th largest from the vectors' maxima; the few that reach it, in order; the
//     k-th largest of these by bisection; positions.
//   select_small: any other. One block per head: maxima and sums of its rows; top_p's thresholds
//     from histograms; a cut by radix; positions; kept weights.
// Where a cluster of blocks per head could hold, in their shared memories,
//   select_digest: its digest, and few are kept: sums; a bound of the lightest kept weight; the few
//     sectors that reach it and the candidates there; a cut; positions and kept weights.
//   select_cluster: its logits: sums; thresholds and bounds from histograms; candidates; a cut;
//     positions and kept weights.
// Else a chain of kernels that share the rows out, of as many heads at a time as there is scratch
//   for: see large.cuh.
#pragma once

#include "kernels/runtime/launch.h"
#include "kernels/select/call.cuh"

namespace sluice::cuda {

inline constexpr int kMostGroup = 64;

void run_fixed(const SelectCall& call, const Launch& launch);

bool fits_top_k(const SelectCall& call);
void run_top_k(const SelectCall& call, const Launch& launch);

bool fits_small(const SelectCall& call, const DeviceLimits& device);
void run_small(const SelectCall& call, const Launch& launch);

bool fits_digest(const SelectCall& call, const DeviceLimits& device);
void run_digest(const SelectCall& call, const Launch& launch);

bool fits_cluster(const SelectCall& call, const DeviceLimits& device);
void run_cluster(const SelectCall& call, const Launch& launch);

}  // namespace sluice::cuda
