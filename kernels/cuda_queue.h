// Work of the CUDA backend: a stream with its scratch memory.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "kernels/attention/attention.h"
#include "kernels/cuda_device.h"
#include "kernels/dense/dense.h"
#include "kernels/runtime/copy.h"
#include "kernels/runtime/heads.h"
#include "kernels/runtime/recorder.h"
#include "kernels/runtime/workspace.h"
#include "kernels/scan/scan.h"
#include "kernels/select/select.h"
#include "kernels/values/values.h"

namespace sluice::cuda {

class CudaQueue : public Queue {
 public:
  CudaQueue(CudaBackend& backend, const QueueOptions& options);
  ~CudaQueue() override;

  void copy(std::span<const CopyOp> ops) override;
  void embed(const Matrix& table, const TokenId* ids, const Matrix& y) override {
    cuda::embed(table, ids, y, launch());
  }
  void linear(const LinearParams& params) override;
  void write_weight(Weight& weight, std::int64_t first, const Matrix& rows) override;
  void linear_chain(const LinearChain& chain) override;
  void sample(const Matrix& logits, std::span<const TokenDraw> params,
              std::span<SampledToken> tokens) override;
  void rms_norm(const RmsNormParams& params) override { cuda::rms_norm(params, launch()); }
  void rope(const RopeParams& params) override { cuda::rope(params, launch()); }
  void swiglu(const SwigluParams& params) override { cuda::swiglu(params, launch()); }
  void cast(const Matrix& from, const Matrix& to) override { cuda::cast(from, to, launch()); }
  void read_heads(const ReadHeadsParams& params) override { cuda::read_heads(params, launch()); }
  void append(const AppendParams& params) override;
  void append_batch(const AppendBatchParams& params) override {
    cuda::append_batch(params, launch());
  }
  void attend(const AttendParams& params) override { attend_prefill(params, launch()); }
  void attend_batch(const AttendBatchParams& params) override { attend_decode(params, launch()); }
  void build_index(const BuildIndexParams& params) override { cuda::build_index(params, launch()); }
  void build_batch(const BuildBatchParams& params) override { cuda::build_batch(params, launch()); }
  void estimate(const EstimateParams& params) override { cuda::estimate(params, launch()); }
  void select(const SelectParams& params) override;
  void find_rows(const FindRowsParams& params) override { cuda::find_rows(params, launch()); }
  void forget_rows(const ForgetRowsParams& params) override { cuda::forget_rows(params, launch()); }
  void attend_selected(const AttendSelectedParams& params) override;
  void gather(const GatherParams& params) override { cuda::gather(params, launch()); }
  void pack_tokens(const PackTokensParams& params) override { cuda::pack_tokens(params, launch()); }
  void unpack_tokens(const UnpackTokensParams& params) override {
    cuda::unpack_tokens(params, launch());
  }
  void column_sums(const ColumnSumsParams& params) override { cuda::column_sums(params, launch()); }
  void choose_tokens(const ChooseTokensParams& params) override {
    cuda::choose_tokens(params, launch());
  }
  void page_means(const PageMeansParams& params) override { cuda::page_means(params, launch()); }
  void choose_pages(const ChoosePagesParams& params) override {
    cuda::choose_pages(params, launch());
  }
  void sum_values(const SumValuesParams& params) override { cuda::sum_values(params, launch()); }
  void build_values(const BuildValuesParams& params) override {
    cuda::build_values(params, launch());
  }
  void build_values_batch(const BuildValuesBatchParams& params) override {
    cuda::build_values_batch(params, launch());
  }
  void attend_tiles(const AttendTilesParams& params) override;
  // What it waits for may be the host.
  void merge_partials(const MergePartialsParams& params) override {
    merge_joined_partials(params, launch());
  }
  void call_host(HostCall& call) override;
  void note_time(std::uint64_t* to) override { cuda::note_time(to, launch()); }
  void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue) override;
  ReplayCounts replay_counts() const override {
    return recorder_ ? recorder_->counts() : ReplayCounts();
  }
  void wait_for(Queue& other) override;
  void synchronize() override;
  void* native_stream() override { return stream(); }
  // NVTX ranges, for profilers; of a step that is replayed only while it is recorded.
  void begin_range(const QueueRange::Label& label) override;
  void end_range() override;

 private:
  CudaBackend& own() const { return static_cast<CudaBackend&>(backend()); }
  Launch launch() {
    own().use_device();
    attends_selected_ = false;
    return workspace_.launch();
  }
  cudaStream_t stream() { return launch().stream; }
  const void* weight_of(const LinearParams& params) const;

  Charge device_charge_;
  Charge host_charge_;
  Workspace workspace_;
  EventOwner event_;
  std::optional<Gemm> gemm_;
  std::optional<Recorder> recorder_;
  PinnedBlock sampled_;
  bool attends_selected_ = false;  // by the latest operation
};

}  // namespace sluice::cuda
