// Built instead of uring_disk.cc where liburing is missing.
#include "io/uring_disk.h"
#include "sluice/errors.h"

namespace sluice {

std::unique_ptr<Disk> make_uring_disk(int, std::size_t, std::span<const std::span<std::byte>>) {
  throw Error(ErrorCode::unsupported, "io_uring: built without liburing");
}

}  // namespace sluice
