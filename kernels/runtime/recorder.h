// A step of work as one launch: issued to a capturing stream once, replayed as a graph.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <list>
#include <memory>

#include "kernels/runtime/owners.h"
#include "lib/backend/queue.h"

namespace sluice::cuda {

class GraphRecording;

// Resident graphs, most recently used first, and their number of kernels and copies.
struct Recordings {
  std::list<GraphRecording*> used;
  std::size_t nodes = 0;
};

// Graphs take memory that no allocator hands out: on an H100 with a driver of CUDA 13, 2.7 KiB of
// the device and 6 KiB of the host for a small kernel, more for one with many parameters. So the
// number of nodes is limited, to about 13 steps of a model of 32 layers, and their memory is
// charged beforehand. The least recently used graph is dropped and recorded again when it comes
// next.
class Recorder {
 public:
  static constexpr std::size_t kMostNodes = 6144;
  static constexpr std::size_t kDeviceBytes = kMostNodes * 4096;
  static constexpr std::size_t kHostBytes = kMostNodes * 8192;

  explicit Recorder(cudaStream_t stream) : stream_(stream) {}

  // Launches `recording`; if it is null or was dropped, records it from the work that issue()
  // issues. Passes on exceptions of issue() and then launches nothing.
  void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue);
  const ReplayCounts& counts() const { return counts_; }

 private:
  GraphOwner record(const std::function<void()>& issue);
  cudaError_t end(GraphOwner& graph);

  cudaStream_t stream_;
  bool is_recording_ = false;
  ReplayCounts counts_;
  std::shared_ptr<Recordings> recordings_ = std::make_shared<Recordings>();
};

}  // namespace sluice::cuda
