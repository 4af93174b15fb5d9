// Distances between distributions of the next token.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace sluice::tools {

// Log-softmax with an fp64 sum, [vocabulary] nats.
std::vector<float> log_probabilities(std::span<const float> logits);

// KL(dense || other) in nats, of two log_probabilities() of one vocabulary.
double divergence(std::span<const float> dense, std::span<const float> other);

// The index of the largest; the first of equals.
std::ptrdiff_t likeliest(std::span<const float> values);

}  // namespace sluice::tools
