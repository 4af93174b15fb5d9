#include "kernels/runtime/recorder.h"

#include <utility>

#include "kernels/runtime/error.h"
#include "lib/check.h"

namespace sluice::cuda {

// Owners may destroy it after the queue that made it.
class GraphRecording : public Recording {
 public:
  explicit GraphRecording(std::shared_ptr<Recordings> all) : all_(std::move(all)) {}
  GraphRecording(const GraphRecording&) = delete;
  GraphRecording& operator=(const GraphRecording&) = delete;
  ~GraphRecording() override { drop(); }

  bool exists() const { return exec_.get() != nullptr; }
  void make(cudaGraph_t graph) {
    std::size_t nodes = 0;
    require(cudaGraphGetNodes(graph, nullptr, &nodes), "the nodes of a graph");
    all_->used.push_front(this);
    all_->nodes += nodes;
    nodes_ = nodes;
    while (all_->nodes > Recorder::kMostNodes && all_->used.size() > 1) all_->used.back()->drop();
    cudaGraphExec_t exec = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
    exec_ = GraphExecOwner(exec);
    if (status != cudaSuccess) drop();
    require(status, "a graph");
  }
  // Marks the graph as most recently used.
  cudaGraphExec_t use() {
    all_->used.remove(this);
    all_->used.push_front(this);
    return exec_.get();
  }

 private:
  void drop() {
    all_->used.remove(this);
    all_->nodes -= nodes_;
    nodes_ = 0;
    exec_ = GraphExecOwner();  // may still run
  }

  std::shared_ptr<Recordings> all_;
  GraphExecOwner exec_;
  std::size_t nodes_ = 0;
};

void Recorder::replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue) {
  check(!is_recording_, "a replay within a recording");
  std::unique_ptr<Recording> fresh;
  if (recording == nullptr) fresh = std::make_unique<GraphRecording>(recordings_);
  auto& own = dynamic_cast<GraphRecording&>(fresh != nullptr ? *fresh : *recording);
  if (!own.exists()) {
    const GraphOwner graph = record(issue);
    own.make(graph.get());
    ++counts_.recordings;
  }
  if (fresh != nullptr) recording = std::move(fresh);
  require(cudaGraphLaunch(own.use(), stream_), "a step");
  ++counts_.launches;
}

GraphOwner Recorder::record(const std::function<void()>& issue) {
  require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "recording a step");
  is_recording_ = true;
  GraphOwner graph;
  try {
    issue();
  } catch (...) {
    ignore(end(graph));
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
