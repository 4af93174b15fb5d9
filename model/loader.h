// Reads tensors of a checkpoint to where they are computed with: in pieces, by several threads,
// each of which reads one piece while the one before is on its way to the device.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "lib/backend.h"
#include "model/checkpoint.h"
#include "model/tensors.h"

namespace sluice {

// Where the rows of a group go: into a weight, or else to memory of the compute tier, one after the
// other in `dtype`.
struct TensorPlace {
  const TensorGroup* group = nullptr;
  Weight* weight = nullptr;
  std::byte* memory = nullptr;
  DType dtype = DType::f32;
};

// Threads that read, of `threads` that may be used (0: as many as can run at the same time). More
// than 16 do not read faster.
int reader_count(int threads);

struct ReadOptions {
  int readers = 1;               // threads
  std::int64_t piece_bytes = 0;  // read at once, but at least a weight's rows; 0: what is fast
};

// Host memory that read_tensors() takes while it runs.
std::uint64_t reading_bytes(const Checkpoint& checkpoint, const Backend& backend,
                            std::span<const TensorPlace> places, const ReadOptions& options);

// `progress` is called by the calling thread with the share begun, 0 to 1. The checkpoint must have
// passed check_tensors. Throws Error{io} if reading fails, Error{memory}, and what the backend and
// `progress` throw; the places hold anything then.
void read_tensors(const Checkpoint& checkpoint, Backend& backend,
                  std::span<const TensorPlace> places, const ReadOptions& options,
                  const std::function<void(double)>& progress);

}  // namespace sluice
