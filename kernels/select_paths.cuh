// The ways of selecting, by what holds a head's logits; select() takes the first that fits. Which
// one does follows from sizes alone, the batch's capacity among them, never from a position.
//
// fixed: there are no logits. One block per head walks over what is always kept.
// top_k_of_row: few logits of one query head per KV head. They stay in the registers of up to four
//   warps: bounds by the vectors' maxima, a short list, the k-th largest of it by bisection.
// select_small: one block per head holds all of its logits in shared memory: maxima and sums, a
//   histogram for top_p's thresholds, a radix search for a cut, positions, kept weights.
// select_digest: few are kept of many logits that a scan has digested. A cluster of blocks per head
//   holds the digest: sums, bounds of what may be kept, the few sectors that reach them, a cut.
// select_cluster: a cluster per head holds all of its logits: sums, histograms for thresholds and
//   bounds, candidates, a cut.
// Else a chain of kernels that share the rows out and leave what they find in scratch: see
//   select_large.cuh. Of as many heads at a time as there is scratch for.
#pragma once

#include "kernels/launch.h"
#include "kernels/select_call.cuh"

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
