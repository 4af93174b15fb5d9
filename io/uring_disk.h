#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "io/disk.h"

namespace sluice {

// A disk by io_uring, with the file registered, for up to `depth` operations at a time. Reads into
// and writes from `arenas` skip the mapping of user pages on every operation, provided that
// RLIMIT_MEMLOCK allows registering them; without it they work as any other memory does. File and
// arenas stay valid while the object lives.
// Throws Error{unsupported} if the program was built without liburing, or if the kernel (too old,
// or told so by seccomp or kernel.io_uring_disabled) refuses.
std::unique_ptr<Disk> make_uring_disk(int descriptor, std::size_t depth,
                                      std::span<const std::span<std::byte>> arenas);

}  // namespace sluice
