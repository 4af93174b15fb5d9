// What `new` has handed out, counted: so that an input that takes much memory, or loses some, is
// seen in every build.
#pragma once

#include <cstdint>

namespace sluice::fuzz {

// Bytes now in use.
std::int64_t heap_bytes();

// From here on the process ends when `bytes` more are in use than now.
void limit_heap(std::int64_t bytes);

}  // namespace sluice::fuzz
