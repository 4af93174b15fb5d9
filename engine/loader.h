// Reads tensors of a checkpoint into the memory they are computed from. Several threads read them
// in pieces; each reads one piece while the previous one is copied to the device.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "engine/checkpoint.h"
#include "engine/tensors.h"
#include "lib/backend.h"

namespace sluice {

// Destination of a group's rows: a weight of `format`, or else memory of the compute tier,
// contiguous elements in `format`.
struct TensorPlace {
  const TensorGroup* group = nullptr;
  Weight* weight = nullptr;
  std::byte* memory = nullptr;
  WeightFormat format = DType::f32;
  bool has_codes = false;  // of the files; else those of `format` are found while reading
};

// Number of threads that read, at most `threads` (0: as many as can run at the same time) and at
// most 16, because more do not read faster.
int reader_count(int threads);

struct ReadOptions {
  int readers = 1;               // threads
  std::int64_t piece_bytes = 0;  // per read, but at least Backend::weight_rows() rows; 0: default
};

// Host memory that read_tensors() takes while it runs.
std::uint64_t reading_bytes(const Checkpoint& checkpoint, const Backend& backend,
                            std::span<const TensorPlace> places, const ReadOptions& options);

// `progress` is called by the calling thread with the share begun, 0 to 1. The checkpoint must have
// passed check_tensors. Throws Error{io} if reading fails, Error{memory}, and what the backend and
// `progress` throw; the contents of the places are unspecified then.
void read_tensors(const Checkpoint& checkpoint, Backend& backend,
                  std::span<const TensorPlace> places, const ReadOptions& options,
                  const std::function<void(double)>& progress);

}  // namespace sluice
