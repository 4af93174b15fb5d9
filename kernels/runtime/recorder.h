// A step of work as one launch: issued to a capturing stream once, replayed as a graph.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <memory>

#include "kernels/runtime/owners.h"
#include "lib/backend/queue.h"

namespace sluice::cuda {

class Recorder {
 public:
  explicit Recorder(cudaStream_t stream) : stream_(stream) {}

  // Launches `recording`, which is made from what issue() issues if it is null. What issue() throws
  // is passed on, and nothing launched.
  void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue);
  bool is_recording() const { return is_recording_; }
  const ReplayCounts& counts() const { return counts_; }

 private:
  GraphOwner record(const std::function<void()>& issue);
  cudaError_t end(GraphOwner& graph);

  cudaStream_t stream_;
  bool is_recording_ = false;
  ReplayCounts counts_;
};

}  // namespace sluice::cuda
