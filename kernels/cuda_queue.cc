#include "kernels/cuda_queue.h"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "kernels/runtime/error.h"
#include "lib/check.h"
#include "lib/gpu_sizes.h"

namespace sluice::cuda {
namespace {

// Scratch that select() needs for 1.4 million tokens of eight KV heads with four query heads each,
// the most of any kernel. Beyond that it takes several rounds.
constexpr std::size_t kScratchBytes = std::size_t{64} << 20;
// Copies below this size use a kernel, because the copy engine takes 3 microseconds for each piece.
constexpr std::size_t kSmallCopy = std::size_t{64} << 10;
constexpr std::size_t kSampledBytes = kSampleRows * sizeof(SampledToken);

// Plans made without a GPU count by these numbers.
static_assert(gpu::kScratchBytes == kScratchBytes && gpu::kDrawnTokens == kSampleRows);
static_assert(gpu::kCounterBytes ==
              Launch::kCounters * sizeof(std::uint32_t) + sizeof(*Launch{}.bus_free_at));
static_assert(gpu::kRecordedNodes * 4096 == Recorder::kDeviceBytes);
static_assert(gpu::kRecordedNodes * 8192 == Recorder::kHostBytes);

std::size_t scratch_of(const QueueOptions& options) { return options.computes ? kScratchBytes : 0; }

bool records(const QueueOptions& options) { return options.computes && options.records; }

std::size_t device_bytes(const QueueOptions& options) {
  return Workspace::bytes(scratch_of(options)) + (records(options) ? Recorder::kDeviceBytes : 0);
}

std::size_t host_bytes(const QueueOptions& options) {
  return (options.computes ? kSampledBytes : 0) + (records(options) ? Recorder::kHostBytes : 0);
}

}  // namespace

CudaQueue::CudaQueue(CudaBackend& backend, const QueueOptions& options)
    : Queue(backend),
      device_charge_(backend.account(Tier::device), device_bytes(options)),
      host_charge_(backend.account(Tier::host), host_bytes(options)),
      workspace_(scratch_of(options), static_cast<cudaStream_t>(options.stream)),
      event_(make_event()) {
  if (records(options)) recorder_.emplace(workspace_.launch().stream);
  if (!options.computes) return;
  gemm_.emplace(workspace_.launch());
  sampled_ = make_pinned_block(kSampledBytes);
}

CudaQueue::~CudaQueue() {
  if (!has_backend() && side_) side_->charge.forget();
  if (has_backend()) {
    if (side_) ignore(cudaStreamSynchronize(side_->workspace.launch().stream));
    ignore(cudaStreamSynchronize(workspace_.launch().stream));
  } else {
    device_charge_.forget();
    host_charge_.forget();
  }
}

void CudaQueue::execute(const CopyParams& params) {
  if (params.way == CopyWay::batched) return own().copy_batched(params.ops, stream());
  std::vector<CopyOp> small;
  for (const CopyOp& op : params.ops) {
    const bool reached =
        own().kernels_reach(op.to, op.bytes) && own().kernels_reach(op.from, op.bytes);
    check(reached || own().recording == 0, "a recorded copy of memory that is not pinned");
    if (op.bytes < kSmallCopy && reached && params.way == CopyWay::fastest) {
      small.push_back(op);
    } else {
      own().copy_large(op, stream());
    }
  }
  if (small.empty()) return;
  copy_pieces(small, launch());
}

const CudaWeight& CudaQueue::weight_of(const LinearParams& params) const {
  check(params.x.dtype == own().info().compute_dtype, "linear: inputs must have the compute dtype");
  return dynamic_cast<const CudaWeight&>(*params.weight);
}

void CudaQueue::execute(const EmbedParams& params) {
  if (params.coded == nullptr) return embed(params, launch());
  embed_coded(params, dynamic_cast<const CudaWeight&>(*params.coded).coded(), launch());
}

void CudaQueue::execute(const LinearParams& params) {
  attends_selected_ = false;
  const Launch own = launch();  // of this device, for cuBLAS, too
  const CudaWeight& weight = weight_of(params);
  if (weight.is_coded()) return multiply_coded(params, weight.coded(), gemm(), own);
  LinearChain chain;
  chain.linear = params;
  if (gemv_supported(chain, workspace_.device())) {
    gemv(chain, weight.data(), own);
  } else {
    gemm().run(params, weight.data());
  }
}

// Page weights that were requested and that select() does not leave are computed after it.
void CudaQueue::execute(const SelectParams& params) {
  const Launch own = launch();
  cuda::select(params, own);
  const bool weighs = params.logits.digest.weights != nullptr;
  if (weighs && !leaves_page_weights(params, *own.device)) weigh_pages(params, own);
}

void CudaQueue::execute(const AttendSelectedParams& params) {
  attend_decode_selected(params, launch().half(false));
  attends_selected_ = params.batch.count > 0;
}

// Tiles are read while selected rows come from the host, if there is enough scratch for both.
void CudaQueue::execute(const AttendTilesParams& params) {
  const bool is_merged = params.merge && attends_selected_;
  const Launch all = launch();
  const Launch half = all.half(true);
  const bool is_beside =
      is_merged && attend_tiles_scratch_bytes(params, *all.device) <= half.scratch_bytes;
  cuda::attend_tiles(params, is_beside ? half : all, is_beside);
}

// Treats the matrix as one row, because a launch has at most 65535 rows of blocks. The caller
// synchronizes before the first product, because products read weights before they wait for the
// kernel before (early_launch.cuh, rule 3).
void CudaQueue::execute(const WriteWeightParams& params) {
  const WeightRows& rows = params.rows;
  const auto& weight = dynamic_cast<const CudaWeight&>(*params.weight);
  if (weight.is_coded() && rows.format.is_coded()) {
    return pack_rows(weight.coded(), params.first, rows, launch());
  }
  if (weight.is_coded()) return code_rows(weight.coded(), params.first, rows, launch());
  check(!rows.format.is_coded(), "write_weight: coded rows of a weight that is not");
  check(params.first + rows.rows <= params.weight->outputs() &&
            rows.inputs == params.weight->inputs(),
        "write_weight: shapes disagree");
  const DType from = rows.format.element;
  const DType dtype = own().info().compute_dtype;
  std::byte* const to =
      weight.data() + static_cast<std::size_t>(params.first * rows.inputs) * size_of(dtype);
  const std::int64_t count = rows.rows * rows.inputs;
  if (from != dtype) {
    cast({{rows.data, from, 1, count, count}, {to, dtype, 1, count, count}}, launch());
    return;
  }
  const CopyOp op = {to, static_cast<const std::byte*>(rows.data),
                     static_cast<std::size_t>(count) * size_of(dtype)};
  copy({&op, 1});
}

void CudaQueue::execute(const LinearChain& chain) {
  const CudaWeight& weight = weight_of(chain.linear);
  const DeviceLimits& device = workspace_.device();
  if (weight.is_coded() && coded_chain_supported(chain, weight.coded(), device)) {
    return coded_chain(chain, weight.coded(), launch());
  }
  if (!weight.is_coded() && gemv_supported(chain, device)) {
    return gemv(chain, weight.data(), launch());
  }
  run_one_by_one(*this, chain);
}

void CudaQueue::execute(const SampleParams& params) {
  auto* const drawn = static_cast<SampledToken*>(sampled_.get());
  Matrix part = params.logits;
  for (std::size_t first = 0; first < params.tokens.size(); first += kSampleRows) {
    const std::size_t count = std::min<std::size_t>(kSampleRows, params.tokens.size() - first);
    part.rows = static_cast<std::int64_t>(count);
    sample(part, params.draws.subspan(first, count), drawn, launch());
    synchronize();
    std::copy_n(drawn, count, params.tokens.data() + first);
    part.data = static_cast<float*>(part.data) + kSampleRows * part.stride;
  }
}

// A kernel writes few rows to device and host memory at once; the copy engine takes many to the
// host.
void CudaQueue::execute(const AppendParams& params) {
  const std::size_t bytes = static_cast<std::size_t>(params.tokens) * params.shape.row_bytes();
  const bool at_once = bytes < kSmallCopy &&
                       std::all_of(params.host.begin(), params.host.end(),
                                   [&](auto* host) { return own().kernels_reach(host, bytes); });
  AppendParams rows = params;
  if (!at_once) rows.host = {};
  cuda::append(rows, launch());
  if (!at_once) copy_to_host(*this, params);
}

// Dispatch of operations: one line for each in lib/backend/operation.h.
struct CudaQueue::Execute {
  CudaQueue& queue;
  Launch launch() const { return queue.launch(); }

  void operator()(const CopyParams* p) const { queue.execute(*p); }

  void operator()(const EmbedParams* p) const { queue.execute(*p); }
  void operator()(const WriteWeightParams* p) const { queue.execute(*p); }
  void operator()(const LinearParams* p) const { queue.execute(*p); }
  void operator()(const LinearChain* p) const { queue.execute(*p); }
  void operator()(const RmsNormParams* p) const { rms_norm(*p, launch()); }
  void operator()(const RopeParams* p) const { rope(*p, launch()); }
  void operator()(const SwigluParams* p) const { swiglu(*p, launch()); }
  void operator()(const CastParams* p) const { cast(*p, launch()); }
  void operator()(const ReadHeadsParams* p) const { read_heads(*p, launch()); }
  void operator()(const SampleParams* p) const { queue.execute(*p); }

  void operator()(const AppendParams* p) const { queue.execute(*p); }
  void operator()(const AppendBatchParams* p) const { append_batch(*p, launch()); }
  void operator()(const AttendParams* p) const { attend_prefill(*p, launch()); }
  void operator()(const AttendBatchParams* p) const { attend_decode(*p, launch()); }
  void operator()(const FindRowsParams* p) const { find_rows(*p, launch()); }
  void operator()(const ForgetRowsParams* p) const { forget_rows(*p, launch()); }
  void operator()(const AttendSelectedParams* p) const { queue.execute(*p); }
  void operator()(const GatherParams* p) const { gather(*p, launch()); }
  void operator()(const PackTokensParams* p) const { pack_tokens(*p, launch()); }
  void operator()(const UnpackTokensParams* p) const { unpack_tokens(*p, launch()); }
  void operator()(const SumValuesParams* p) const { sum_values(*p, launch()); }

  void operator()(const BuildIndexParams* p) const { build_index(*p, launch()); }
  void operator()(const BuildBatchParams* p) const { build_batch(*p, launch()); }
  void operator()(const EstimateParams* p) const { estimate(*p, launch()); }
  void operator()(const SelectParams* p) const { queue.execute(*p); }
  void operator()(const ColumnSumsParams* p) const { column_sums(*p, launch()); }
  void operator()(const ChooseTokensParams* p) const { choose_tokens(*p, launch()); }
  void operator()(const PageMeansParams* p) const { page_means(*p, launch()); }
  void operator()(const ChoosePagesParams* p) const { choose_pages(*p, launch()); }

  void operator()(const BuildValuesParams* p) const { build_values(*p, launch()); }
  void operator()(const BuildValuesBatchParams* p) const { build_values_batch(*p, launch()); }
  void operator()(const AttendTilesParams* p) const { queue.execute(*p); }
  void operator()(const MergePartialsParams* p) const { merge_partials(*p, launch()); }
};

void CudaQueue::submit(const Operation& operation) { std::visit(Execute{*this}, operation); }

void CudaQueue::replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue) {
  own().use_device();
  attends_selected_ = false;
  if (!recorder_) return issue();
  recorder_->replay(recording, [&] {
    ++own().recording;
    try {
      issue();
    } catch (...) {
      --own().recording;
      if (side_) side_->is_open = {};  // their events are of a recording that is gone
      throw;
    }
    --own().recording;
  });
  attends_selected_ = false;
}

CudaQueue::Side::Side(MemoryAccount& account)
    : charge(account, gpu::kBranchDeviceBytes),
      workspace(gpu::kBranchScratchBytes),
      gemm(workspace.launch()),
      begun(make_event()),
      ended{make_event(), make_event()} {}

void CudaQueue::prepare_branches() {
  check(own().recording == 0, "branches are prepared before they are recorded");
  own().use_device();
  if (!side_) side_.emplace(backend().account(Tier::device));
}

// In a recording both streams are captured into one graph, whose branches the events fork and join.
void CudaQueue::branch(int number, const std::function<void()>& issue) {
  if (!side_) return issue();
  check(!is_on_branch_, "a branch of a branch");
  const cudaStream_t side = side_->workspace.launch().stream;
  require(cudaEventRecord(side_->begun.get(), stream()), "an event");
  require(cudaStreamWaitEvent(side, side_->begun.get()), "waiting for an event");
  const auto at = static_cast<std::size_t>(number);
  is_on_branch_ = true;
  const auto end = [&] {
    is_on_branch_ = attends_selected_ = false;
    side_->is_open[at] = true;
    return cudaEventRecord(side_->ended[at].get(), side);
  };
  try {
    fence(launch());
    issue();
  } catch (...) {
    ignore(end());  // what was issued is under way, and joined before the next step
    throw;
  }
  require(end(), "an event");
}

void CudaQueue::join(int number) {
  const auto at = static_cast<std::size_t>(number);
  if (!side_ || !side_->is_open[at]) return;
  require(cudaStreamWaitEvent(stream(), side_->ended[at].get()), "waiting for an event");
  side_->is_open[at] = false;
  fence(launch());
}

void CudaQueue::call_host(HostCall& call) {
  const auto run = [](void* work) { static_cast<HostCall*>(work)->run(); };
  require(cudaLaunchHostFunc(stream(), run, &call), "a call of the host");
}

void CudaQueue::wait_for(Queue& other) {
  auto& from = dynamic_cast<CudaQueue&>(other);
  require(cudaEventRecord(from.event_.get(), from.stream()), "an event");
  require(cudaStreamWaitEvent(stream(), from.event_.get()), "waiting for an event");
}

void CudaQueue::synchronize() {
  check(own().recording == 0, "work that is recorded waits for itself");
  require(cudaStreamSynchronize(stream()), "work on the device");
  if (!side_ || side_->is_open == std::array<bool, 2>{}) return;
  require(cudaStreamSynchronize(side_->workspace.launch().stream), "work on the device");
}

void CudaQueue::begin_range(const QueueRange::Label& label) {
  std::string name(label.name);
  if (label.layer >= 0) name += " " + std::to_string(label.layer);
  nvtxRangePushA(name.c_str());
}

void CudaQueue::end_range() { nvtxRangePop(); }

std::uint64_t queue_bytes() { return device_bytes({}); }

}  // namespace sluice::cuda
