// Basis of values: policies with components=half keep a value as its products with these vectors;
// see docs/policies.md. An Engine finds them by itself; KvConfig::value_basis takes them from
// callers who run a model of their own.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "sluice/types.h"

namespace sluice {

// The basis of one KV head, [head_dim / 2, head_dim]: the eigenvectors of W W^T with the largest
// eigenvalues, the largest first. `weights` are W, [head_dim, hidden] of `dtype`, the head's rows
// of the value projection, so the vectors are the principal components of its values if hidden
// states have no preferred direction. They are orthonormal, and the same on every machine.
//
// Throws Error{usage} if head_dim is odd or not 2 to 256, or weights are not head_dim rows of the
// same length, and Error{numeric} if one is NaN or infinite.
std::vector<float> value_basis(std::span<const std::byte> weights, DType dtype, int head_dim);

}  // namespace sluice
