// Tells whether rows of two checkpoints are alike.
#pragma once

#include <cstdint>

#include "engine/checkpoint.h"

namespace sluice {

// A checksum of what keys and values are computed from: the parts of the config that the decoder
// uses, the tensors' names, shapes and dtypes, and the first and last 4 KiB of each. Reading all of
// the weights would take as long as loading them. The same for all weight formats and devices,
// whose rows differ by rounding. Throws what Checkpoint::read() throws.
std::uint64_t fingerprint_of(const Checkpoint& checkpoint);

}  // namespace sluice
