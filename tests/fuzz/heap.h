// Counts the bytes handed out by `new`, so that every build detects an input that takes or leaks
// much memory.
#pragma once

#include <cstdint>

namespace sluice::fuzz {

// Bytes now in use.
std::int64_t heap_bytes();

// Ends the process once `bytes` more are in use than now.
void limit_heap(std::int64_t bytes);

}  // namespace sluice::fuzz
