#include "kernels/runtime/recorder.h"

#include "kernels/runtime/error.h"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

class GraphRecording : public Recording {
 public:
  explicit GraphRecording(cudaGraph_t graph) {
    cudaGraphExec_t exec = nullptr;
    require(cudaGraphInstantiate(&exec, graph, 0), "a graph");
    exec_ = GraphExecOwner(exec);
  }
  cudaGraphExec_t get() const { return exec_.get(); }

 private:
  GraphExecOwner exec_;  // may end while it still runs
};

}  // namespace

void Recorder::replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue) {
  check(!is_recording_, "a replay within a recording");
  if (recording == nullptr) {
    const GraphOwner graph = record(issue);
    recording = std::make_unique<GraphRecording>(graph.get());
    ++counts_.recordings;
  }
  require(cudaGraphLaunch(dynamic_cast<GraphRecording&>(*recording).get(), stream_), "a step");
  ++counts_.launches;
}

GraphOwner Recorder::record(const std::function<void()>& issue) {
  require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "recording a step");
  is_recording_ = true;
  GraphOwner graph;
  try {
    issue();
  } catch (...) {
    static_cast<void>(end(graph));
    static_cast<void>(cudaGetLastError());
    throw;
  }
  require(end(graph), "recording a step");
  return graph;
}

cudaError_t Recorder::end(GraphOwner& graph) {
  is_recording_ = false;
  cudaGraph_t recorded = nullptr;
  const cudaError_t status = cudaStreamEndCapture(stream_, &recorded);
  graph = GraphOwner(recorded);
  return status;
}

}  // namespace sluice::cuda
