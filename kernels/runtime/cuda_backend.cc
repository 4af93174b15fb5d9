#include "kernels/runtime/cuda_backend.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/dense/dense.h"
#include "kernels/runtime/copy.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/memory.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/recorder.h"
#include "kernels/runtime/workspace.h"
#include "kernels/scan/channels.h"
#include "kernels/scan/scan.h"
#include "kernels/select/select.h"
#include "lib/check.h"
#include "lib/element.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

// What select() needs for 1.4 million tokens of eight KV heads with four query heads each, the most
// of any kernel. Beyond, it takes several rounds.
constexpr std::size_t kScratchBytes = std::size_t{64} << 20;
// Left to the driver and to cuBLAS if no cap is given.
constexpr std::uint64_t kReserve = std::uint64_t{512} << 20;
// Below this a copy is a kernel's: the copy engine takes 3 microseconds for each piece.
constexpr std::size_t kSmallCopy = std::size_t{64} << 10;
constexpr std::size_t kSampledBytes = kSampleRows * sizeof(SampledToken);

class CudaWeight : public Weight {
 public:
  CudaWeight(Buffer data, std::int64_t outputs, std::int64_t inputs)
      : data_(std::move(data)), outputs_(outputs), inputs_(inputs) {}
  std::int64_t outputs() const override { return outputs_; }
  std::int64_t inputs() const override { return inputs_; }
  const void* data() const { return data_.data(); }

 private:
  Buffer data_;
  std::int64_t outputs_;
  std::int64_t inputs_;
};

int select_device(int ordinal) {
  int count = 0;
  require(cudaGetDeviceCount(&count), "looking for a device (`device` cuda)");
  if (ordinal >= count) {
    throw Error(ErrorCode::unsupported, "`device` cuda:" + std::to_string(ordinal) +
                                            ": this machine has " + std::to_string(count) +
                                            " CUDA device(s)");
  }
  require(cudaSetDevice(ordinal), "selecting the device");
  return ordinal;
}

std::uint64_t cap_of(const CudaOptions& options) {
  if (options.device_cap) return *options.device_cap;
  std::size_t free = 0;
  std::size_t total = 0;
  require(cudaMemGetInfo(&free, &total), "asking for free device memory");
  // The backend's own memory is counted against the cap and has been taken already.
  return (free > kReserve ? free - kReserve : 0) + own_bytes();
}

BackendInfo describe(const CudaOptions& options, const DeviceLimits& limits) {
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, options.ordinal), "the device's properties");
  BackendInfo info;
  info.name = "cuda:" + std::to_string(options.ordinal);
  info.description = std::string(properties.name) + ", compute capability " +
                     std::to_string(limits.capability / 10) + "." +
                     std::to_string(limits.capability % 10) + ", " +
                     std::to_string(limits.multiprocessors) + " multiprocessors";
  info.compute_tier = Tier::device;
  info.compute_dtype = options.compute.value_or(options.weight_dtype);
  info.logits = {DType::f16, kDigestedFrom};
  info.reads = {kTilePages, kMaxQueries, kBunch};
  info.processor = Processor::cuda;
  for (const int head_dim : {32, 64, 80, 96, 128, 256}) {
    if (attend_decode_fits(head_dim, limits)) info.head_dims.push_back(head_dim);
  }
  info.f32_rows = false;
  return info;
}

// A host matrix with dense rows in another dtype.
std::vector<std::byte> converted(const Matrix& host, DType dtype) {
  std::vector<std::byte> result(static_cast<std::size_t>(host.rows * host.columns) *
                                size_of(dtype));
  std::byte* to = result.data();
  for (std::int64_t row = 0; row < host.rows; ++row) {
    const auto* from = static_cast<const std::byte*>(host.data) +
                       static_cast<std::size_t>(row * host.stride) * size_of(host.dtype);
    for (std::int64_t column = 0; column < host.columns; ++column) {
      write_element(to, dtype, read_element(from, host.dtype));
      to += size_of(dtype);
      from += size_of(host.dtype);
    }
  }
  return result;
}

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const CudaOptions& options);
  ~CudaBackend() override { static_cast<void>(cudaDeviceSynchronize()); }
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  const BackendInfo& info() const override { return info_; }
  MemoryAccount& account(Tier tier) override { return memory_.account(tier); }
  void register_host(std::byte* data, std::size_t bytes) override {
    use_device();
    memory_.register_host(data, bytes);
  }
  void unregister_host(std::byte* data) noexcept override { memory_.unregister_host(data); }

  void* native_stream(Stream which) override { return stream(which); }
  std::uint64_t weight_bytes(std::int64_t outputs, std::int64_t inputs) const override {
    return static_cast<std::uint64_t>(outputs * inputs) * size_of(info_.compute_dtype);
  }
  std::unique_ptr<Weight> prepare_weight(const Matrix& host) override;
  void copy(std::span<const CopyOp> ops, Stream stream) override;
  void embed(const Matrix& table, const TokenId* ids, const Matrix& y) override {
    cuda::embed(table, ids, y, launch());
  }
  void linear(const LinearParams& params) override;
  void linear_chain(const LinearChain& chain) override;
  void sample(const Matrix& logits, std::span<const SampleParams> params,
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
  void select(const SelectParams& params) override { cuda::select(params, launch()); }
  void attend_selected(const AttendSelectedParams& params) override {
    attend_decode_selected(params, launch());
  }
  void gather(const GatherParams& params) override { cuda::gather(params, launch()); }
  void column_sums(const ColumnSumsParams& params) override { cuda::column_sums(params, launch()); }
  void sum_values(const SumValuesParams& params) override { cuda::sum_values(params, launch()); }
  void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue) override {
    use_device();
    recorder_.replay(recording, issue);
  }
  ReplayCounts replay_counts() const override { return recorder_.counts(); }
  void order(Stream signalling, Stream waiting) override;
  void synchronize() override;

 private:
  std::byte* take(Tier tier, std::size_t bytes) override {
    check(!recorder_.is_recording(), "memory taken by work that is recorded");
    use_device();
    return memory_.take(tier, bytes);
  }
  void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept override {
    check(!recorder_.is_recording(), "memory given back by work that is recorded");
    memory_.give_back(tier, data, bytes);
  }
  // Whoever calls may have used another device in between, or be another thread.
  void use_device() const { require(cudaSetDevice(ordinal_), "selecting the device"); }
  Launch launch() const {
    use_device();
    return workspace_.launch();
  }
  cudaStream_t compute() const { return launch().stream; }
  cudaStream_t stream(Stream which) const {
    return which == Stream::compute ? compute() : transfer_.get();
  }
  bool kernels_reach(const std::byte* data, std::size_t bytes) const {
    return memory_.device().covers(data, bytes) || memory_.host().covers(data, bytes);
  }
  const void* weight_of(const LinearParams& params) const;
  void copy_large(CopyOp op, cudaStream_t stream);

  int ordinal_;
  Workspace workspace_;
  StreamOwner transfer_;
  std::array<EventOwner, 2> events_;  // by signalling stream
  CudaMemory memory_;
  BackendInfo info_;
  Gemm gemm_;
  Recorder recorder_;
  PinnedBlock sampled_;
};

CudaBackend::CudaBackend(const CudaOptions& options)
    : ordinal_(select_device(options.ordinal)),
      workspace_(kScratchBytes),
      transfer_(make_stream()),
      events_{make_event(), make_event()},
      memory_(ordinal_, cap_of(options), options.host_cap, compute()),
      info_(describe(options, workspace_.device())),
      gemm_(workspace_.launch()),
      recorder_(compute()),
      sampled_(make_pinned_block(kSampledBytes)) {
  memory_.account(Tier::device).charge(own_bytes());
  memory_.account(Tier::host).charge(kSampledBytes);
}

std::unique_ptr<Weight> CudaBackend::prepare_weight(const Matrix& host) {
  Buffer data = allocate(Tier::device, weight_bytes(host.rows, host.columns));
  std::vector<std::byte> other;
  const auto* from = static_cast<const std::byte*>(host.data);
  if (host.dtype != info_.compute_dtype || host.stride != host.columns) {
    other = converted(host, info_.compute_dtype);
    from = other.data();
  }
  copy_large({data.data(), from, data.bytes()}, compute());
  // The host's matrix may be freed from here on.
  require(cudaStreamSynchronize(compute()), "uploading weights");
  return std::make_unique<CudaWeight>(std::move(data), host.rows, host.columns);
}

// The driver wants each side of a copy within one allocation or registration.
void CudaBackend::copy_large(CopyOp op, cudaStream_t stream) {
  const auto within = [&](const std::byte* data, std::size_t bytes) {
    const std::size_t part = memory_.host().reach(data, bytes);
    return part > 0 ? part : bytes;
  };
  while (op.bytes > 0) {
    const std::size_t bytes = std::min(within(op.to, op.bytes), within(op.from, op.bytes));
    require(cudaMemcpyAsync(op.to, op.from, bytes, cudaMemcpyDefault, stream), "a copy");
    op.to += bytes;
    op.from += bytes;
    op.bytes -= bytes;
  }
}

void CudaBackend::copy(std::span<const CopyOp> ops, Stream which) {
  std::vector<CopyOp> small;
  for (const CopyOp& op : ops) {
    const bool reached = kernels_reach(op.to, op.bytes) && kernels_reach(op.from, op.bytes);
    check(reached || !recorder_.is_recording(), "a recorded copy of memory that is not pinned");
    if (op.bytes < kSmallCopy && reached) {
      small.push_back(op);
    } else {
      copy_large(op, stream(which));
    }
  }
  if (small.empty()) return;
  Launch on = launch();
  on.stream = stream(which);
  copy_pieces(small, on);
}

const void* CudaBackend::weight_of(const LinearParams& params) const {
  check(params.x.dtype == info_.compute_dtype, "linear: inputs must have the compute dtype");
  return dynamic_cast<const CudaWeight&>(*params.weight).data();
}

void CudaBackend::linear(const LinearParams& params) {
  LinearChain chain;
  chain.linear = params;
  if (gemv_supported(chain, workspace_.device())) {
    gemv(chain, weight_of(params), launch());
  } else {
    gemm_.run(params, weight_of(params));
  }
}

void CudaBackend::linear_chain(const LinearChain& chain) {
  if (!gemv_supported(chain, workspace_.device())) return Backend::linear_chain(chain);
  gemv(chain, weight_of(chain.linear), launch());
}

void CudaBackend::sample(const Matrix& logits, std::span<const SampleParams> params,
                         std::span<SampledToken> tokens) {
  auto* const drawn = static_cast<SampledToken*>(sampled_.get());
  Matrix part = logits;
  for (std::size_t first = 0; first < tokens.size(); first += kSampleRows) {
    const std::size_t count = std::min<std::size_t>(kSampleRows, tokens.size() - first);
    part.rows = static_cast<std::int64_t>(count);
    cuda::sample(part, params.subspan(first, count), drawn, launch());
    synchronize();
    std::copy_n(drawn, count, tokens.data() + first);
    part.data = static_cast<float*>(part.data) + kSampleRows * part.stride;
  }
}

// Few rows are written to both places at once, many by the copy engine.
void CudaBackend::append(const AppendParams& params) {
  const std::size_t bytes = static_cast<std::size_t>(params.tokens) * params.shape.row_bytes();
  const bool at_once =
      bytes < kSmallCopy && std::all_of(params.home.begin(), params.home.end(),
                                        [&](auto* home) { return kernels_reach(home, bytes); });
  AppendParams rows = params;
  if (!at_once) rows.home = {};
  cuda::append(rows, launch());
  if (!at_once) copy_home(*this, params);
}

void CudaBackend::order(Stream signalling, Stream waiting) {
  const cudaEvent_t event = events_[static_cast<std::size_t>(signalling)].get();
  require(cudaEventRecord(event, stream(signalling)), "an event");
  require(cudaStreamWaitEvent(stream(waiting), event), "waiting for an event");
}

void CudaBackend::synchronize() {
  check(!recorder_.is_recording(), "work that is recorded waits for itself");
  require(cudaStreamSynchronize(transfer_.get()), "work on the transfer stream");
  require(cudaStreamSynchronize(compute()), "work on the device");
}

}  // namespace

std::uint64_t own_bytes() { return Workspace::bytes(kScratchBytes); }

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
  return std::make_unique<CudaBackend>(options);
}

}  // namespace sluice::cuda
