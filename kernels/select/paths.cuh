// The kernels of a block or a cluster per head, in the order in which select() tries them: see
// select.h. A kernel runs only calls that fit it.
#pragma once

#include "kernels/runtime/launch.h"
#include "kernels/select/call.cuh"
#include "kernels/select/select.h"

namespace sluice::cuda {

void run_fixed(const SelectCall& call, const Launch& launch);

bool fits_few(const SelectCall& call, const DeviceLimits& device);
void run_few(const SelectCall& call, const Launch& launch);

// top_k takes calls of those that fit small.
bool fits_small(const SelectCall& call, const DeviceLimits& device);
void run_small(const SelectCall& call, const Launch& launch);
bool fits_top_k(const SelectCall& call);
void run_top_k(const SelectCall& call, const Launch& launch);

bool fits_digest(const SelectCall& call, const DeviceLimits& device);
void run_digest(const SelectCall& call, const Launch& launch);

bool fits_cluster(const SelectCall& call, const DeviceLimits& device);
void run_cluster(const SelectCall& call, const Launch& launch);

}  // namespace sluice::cuda
