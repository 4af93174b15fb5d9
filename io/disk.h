// The device under the page store: one file, read and written in 4 KiB sectors. Operations are
// asynchronous and finish in any order. io/uring_disk.h and io/pool_disk.h are the two real ones;
// tests put a simulated one with faults here.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace sluice {

// The unit of offsets, sizes and alignments in memory: O_DIRECT needs no more on any common disk.
inline constexpr std::size_t kSectorBytes = 4096;

enum class DiskAction : std::uint8_t { read, write, flush };

struct DiskOperation {
  DiskAction action = DiskAction::read;
  std::uint64_t tag = 0;           // comes back with the result
  std::uint64_t offset = 0;        // bytes from the start of the file; a multiple of kSectorBytes
  std::span<const iovec> buffers;  // [1 .. 16], sectors each; stay valid until the result is there
};

struct DiskResult {
  std::uint64_t tag = 0;
  std::int64_t result = 0;  // bytes moved, maybe fewer than asked for; or minus an errno
};

// Used by one thread, which has also created it, except for wake().
class Disk {
 public:
  Disk() = default;
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;
  virtual ~Disk() = default;

  // Accepts an operation. Returns false if there is no room until another one has been retired.
  virtual bool start(const DiskOperation& operation) = 0;

  // Hands over accepted operations, fills `results` with finished ones and returns their number.
  // With `wait`, sleeps until there is one or wake() is called; may return 0 without reason.
  // Throws Error{io} if the device can no longer be used at all.
  virtual std::size_t retire(std::span<DiskResult> results, bool wait) = 0;

  // Ends a sleep in retire(): the current one, or else the next. Any thread may call it. The device
  // may finish up to a sixteenth of the operations in flight before.
  virtual void wake() = 0;
};

}  // namespace sluice
