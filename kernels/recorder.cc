#include "kernels/recorder.h"

#include <algorithm>
#include <cstring>

#include "kernels/error.h"
#include "lib/check.h"

namespace sluice::cuda {

Recorder::Recorder(cudaStream_t stream)
    : stream_(stream), launched_(make_event()), kept_(make_pinned_block(kKeptBytes)) {}

void Recorder::begin(int slot) {
  check(!recording_, "a batch within a batch");
  slot_ = static_cast<std::size_t>(slot);
  if (graphs_.size() <= slot_) graphs_.resize(slot_ + 1);
  if (slot == 0 && used_ > 0) {
    // What was kept is read until the last batch is over.
    require(cudaEventSynchronize(launched_.get()), "the batches before");
    used_ = 0;
  }
  resume();
}

void Recorder::resume() {
  require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "recording a batch");
  recording_ = true;
}

void Recorder::submit() {
  check(recording_, "a batch that was not begun");
  recording_ = false;
  cudaGraph_t recorded = nullptr;
  require(cudaStreamEndCapture(stream_, &recorded), "recording a batch");
  const GraphOwner graph(recorded);
  cudaGraphExecUpdateResultInfo result{};
  GraphExecOwner& exec = graphs_[slot_];
  if (exec.get() == nullptr || cudaGraphExecUpdate(exec.get(), recorded, &result) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    cudaGraphExec_t made = nullptr;
    require(cudaGraphInstantiate(&made, recorded, 0), "a graph");
    exec = GraphExecOwner(made);
  }
  require(cudaGraphLaunch(exec.get(), stream_), "a batch");
  require(cudaEventRecord(launched_.get(), stream_), "an event");
}

void Recorder::cancel() noexcept {
  if (!recording_) return;
  recording_ = false;
  cudaGraph_t recorded = nullptr;
  static_cast<void>(cudaStreamEndCapture(stream_, &recorded));
  if (recorded != nullptr) static_cast<void>(cudaGraphDestroy(recorded));
  static_cast<void>(cudaGetLastError());
}

const std::byte* Recorder::keep(const std::byte* data, std::size_t bytes) {
  check(has_room(bytes), "a batch that copies too much pageable memory");
  std::byte* const to = static_cast<std::byte*>(kept_.get()) + used_;
  std::memcpy(to, data, bytes);
  used_ = std::min(kKeptBytes, used_ + (bytes + 15) / 16 * 16);
  return to;
}

}  // namespace sluice::cuda
