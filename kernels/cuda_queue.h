// Work of the CUDA backend: a stream with its scratch memory.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>

#include "kernels/attention/attention.h"
#include "kernels/cuda_device.h"
#include "kernels/dense/coded.h"
#include "kernels/dense/dense.h"
#include "kernels/runtime/copy.h"
#include "kernels/runtime/heads.h"
#include "kernels/runtime/recorder.h"
#include "kernels/runtime/workspace.h"
#include "kernels/scan/scan.h"
#include "kernels/select/select.h"
#include "kernels/values/values.h"
#include "lib/memory_account.h"

namespace sluice::cuda {

class CudaQueue : public Queue {
 public:
  CudaQueue(CudaBackend& backend, const QueueOptions& options);
  ~CudaQueue() override;

  void submit(const Operation& operation) override;
  void call_host(HostCall& call) override;
  void note_time(std::uint64_t* to) override { cuda::note_time(to, launch()); }
  void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue) override;
  ReplayCounts replay_counts() const override {
    return recorder_ ? recorder_->counts() : ReplayCounts();
  }
  void prepare_branches() override;
  void branch(int number, const std::function<void()>& issue) override;
  void join(int number) override;
  void wait_for(Queue& other) override;
  void synchronize() override;
  void* native_stream() override { return stream(); }
  // NVTX ranges, for profilers. A replayed step has them only while it is recorded.
  void begin_range(const QueueRange::Label& label) override;
  void end_range() override;

 private:
  CudaBackend& own() const { return static_cast<CudaBackend&>(backend()); }
  Launch launch() {
    own().use_device();
    attends_selected_ = false;
    return is_on_branch_ ? side_->launch(workspace_) : workspace_.launch();
  }
  Gemm& gemm() { return is_on_branch_ ? side_->gemm : *gemm_; }
  cudaStream_t stream() { return launch().stream; }
  struct Execute;
  // The stream of branches. It shares nothing with the queue's own but the simulated bus.
  struct Side {
    explicit Side(MemoryAccount& account);
    Launch launch(const Workspace& queue) const {
      Launch launch = workspace.launch();
      launch.bus_free_at = queue.launch().bus_free_at;
      return launch;
    }

    Charge charge;
    Workspace workspace;
    Gemm gemm;
    EventOwner begun;
    std::array<EventOwner, 2> ended;   // by branch
    std::array<bool, 2> is_open = {};  // begun and not joined
  };
  const CudaWeight& weight_of(const LinearParams& params) const;
  void execute(const CopyParams& params);
  void execute(const EmbedParams& params);
  void execute(const WriteWeightParams& params);
  void execute(const LinearParams& params);
  void execute(const LinearChain& chain);
  void execute(const SampleParams& params);
  void execute(const AppendParams& params);
  void execute(const SelectParams& params);
  void execute(const AttendSelectedParams& params);
  void execute(const AttendTilesParams& params);

  Charge device_charge_;
  Charge host_charge_;
  Workspace workspace_;
  EventOwner event_;
  std::optional<Gemm> gemm_;
  std::optional<Recorder> recorder_;
  PinnedBlock sampled_;
  // True from attend_decode_selected() to the next launch(), which clears it: only value tiles that
  // follow directly may run beside it.
  bool attends_selected_ = false;
  std::optional<Side> side_;
  bool is_on_branch_ = false;  // work is issued to a branch
};

}  // namespace sluice::cuda
