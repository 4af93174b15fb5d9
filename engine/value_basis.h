// The components of values that value tiles of half the channels hold (lib/value_tiles.h), from the
// weights alone: no text takes part, so the same model has the same basis everywhere.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/checkpoint.h"
#include "sluice/policy.h"

namespace sluice {

// Returns true if some layer keeps half of the components of its values under one of the policies.
bool halves_values(std::span<const Policy> policies, int layers);

// Bytes of value_basis(), and of host memory that it takes beside them on `threads` threads.
std::uint64_t value_basis_bytes(const ModelConfig& config);
std::uint64_t value_basis_scratch_bytes(const Checkpoint& checkpoint, int threads);

// Per layer and KV head, the head_dim / 2 eigenvectors of W W^T with the largest eigenvalues, the
// largest first; [layers, kv_heads, head_dim / 2, head_dim]. W, [head_dim, hidden], is the head's
// part of the value projection, so these are the principal components of its values if hidden
// states have no preferred direction. A bias changes only the mean of values, which tiles take from
// elsewhere. Reads the weights as they are stored, whatever format the engine multiplies them in.
// Throws Error{numeric} for weights that are NaN or infinite, and what Checkpoint::read() throws.
std::vector<float> value_basis(const Checkpoint& checkpoint, int threads);

}  // namespace sluice
