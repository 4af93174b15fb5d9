// A batch of work as one launch: issued to a capturing stream, replayed as a graph.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

#include "kernels/owners.h"

namespace sluice::cuda {

// From step to step the batches of a slot have the same kernels with other arguments, so that the
// graph of the last one is only updated; a batch of another make is a new graph.
class Recorder {
 public:
  explicit Recorder(cudaStream_t stream);

  void begin(int slot);
  // Begins again in the slot that was submitted last.
  void resume();
  // Launches what was recorded.
  void submit();
  void cancel() noexcept;
  bool is_recording() const { return recording_; }

  static constexpr std::size_t kKeptBytes = std::size_t{4} << 20;
  // A copy of pageable memory, which may change or end before the batch runs; it lasts until the
  // next batch of slot 0 begins. There must be room for it.
  const std::byte* keep(const std::byte* data, std::size_t bytes);
  bool has_room(std::size_t bytes) const { return bytes <= kKeptBytes - used_; }
  bool keeps(const std::byte* data) const {
    const auto* const base = static_cast<const std::byte*>(kept_.get());
    return data >= base && data < base + kKeptBytes;
  }

 private:
  cudaStream_t stream_;
  bool recording_ = false;
  std::size_t slot_ = 0;
  std::vector<GraphExecOwner> graphs_;  // by slot
  EventOwner launched_;                 // after the last batch
  PinnedBlock kept_;
  std::size_t used_ = 0;
};

}  // namespace sluice::cuda
