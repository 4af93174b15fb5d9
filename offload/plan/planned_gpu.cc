#include "offload/plan/planned_gpu.h"

#include <algorithm>
#include <functional>

#include "lib/gpu_sizes.h"
#include "lib/memory_account.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported, "a planned GPU computes nothing");
}

BackendInfo describe(const PlannedGpu& gpu) {
  BackendInfo info;
  info.name = "planned";
  info.description = "a GPU that plans are made for";
  info.compute_tier = Tier::device;
  info.compute_dtype = gpu.compute.value_or(gpu.weight_dtype);
  info.logits = gpu::logit_format();
  info.processor = Processor::cuda;
  info.head_dims.assign(gpu::kHeadDims.begin(), gpu::kHeadDims.end());
  info.f32_rows = false;
  info.row_codes.assign(gpu::kRowCodes.begin(), gpu::kRowCodes.end());
  info.windows = false;
  info.codes_weights = true;
  info.most_query_heads = 4096;
  info.memory_bytes = gpu.memory_bytes;
  info.memory_rate = gpu.memory_rate;
  info.link = {gpu.bus_rate, gpu.bus_rate};
  info.cached_bytes = gpu::cached_bytes(gpu.bus_rate);
  info.branch_bytes = gpu::kBranchDeviceBytes;
  info.dense_bytes = gpu::dense_bytes(gpu.memory_rate);
  return info;
}

class PlannedQueue : public Queue {
 public:
  explicit PlannedQueue(Backend& backend)
      : Queue(backend),
        device_(backend.account(Tier::device), gpu::kQueueDeviceBytes),
        host_(backend.account(Tier::host), gpu::kQueueHostBytes) {}
  ~PlannedQueue() override {
    if (has_backend()) return;
    device_.forget();
    host_.forget();
  }

  void submit(const Operation& /*operation*/) override { refuse(); }
  void replay(std::unique_ptr<Recording>& /*recording*/,
              const std::function<void()>& /*issue*/) override {
    refuse();
  }
  void wait_for(Queue& /*other*/) override {}
  void synchronize() override {}

 private:
  Charge device_;
  Charge host_;
};

class PlannedBackend : public Backend {
 public:
  explicit PlannedBackend(const PlannedGpu& gpu)
      : accounts_(
            gpu.device_cap.value_or(gpu.memory_bytes - std::min(gpu.memory_bytes, gpu::kReserve)),
            gpu.host_cap.value_or(MemoryAccount::kNoCap)),
        info_(describe(gpu)) {}

  const BackendInfo& info() const override { return info_; }
  MemoryAccount& account(Tier tier) override { return accounts_.of(tier); }
  void register_host(std::byte* /*data*/, std::size_t /*bytes*/) override {}
  void unregister_host(std::byte* /*data*/) noexcept override {}
  using Backend::make_queue;
  std::unique_ptr<Queue> make_queue(const QueueOptions& /*options*/) override {
    return std::make_unique<PlannedQueue>(*this);
  }
  WeightFormat weight_format() const override { return info_.compute_dtype; }
  bool stores(const WeightFormat& format) const override {
    return gpu::multiplies(format.code) || format == weight_format();
  }
  std::uint64_t weight_bytes(const WeightShape& shape) const override {
    return gpu::weight_bytes(shape);
  }
  std::optional<DType> dense_weights() const override { return info_.compute_dtype; }
  std::int64_t weight_rows(const WeightFormat& format) const override {
    return format.is_coded() ? gpu::kTileOutputs : 1;
  }

 private:
  std::unique_ptr<Weight> take_weight(const WeightShape& /*shape*/) override { refuse(); }
  std::byte* take(Tier /*tier*/, std::size_t /*bytes*/) override { refuse(); }
  void give_back(Tier /*tier*/, std::byte* /*data*/, std::size_t /*bytes*/) noexcept override {}

  TierAccounts accounts_;
  BackendInfo info_;
};

}  // namespace

PlannedGpu planned_like(Backend& real) {
  const BackendInfo& info = real.info();
  PlannedGpu gpu;
  gpu.memory_bytes = info.memory_bytes;
  gpu.memory_rate = info.memory_rate;
  gpu.bus_rate = info.link.read;
  gpu.device_cap = real.account(Tier::device).cap();
  return gpu;
}

std::unique_ptr<Backend> make_planned_gpu(const PlannedGpu& gpu) {
  return std::make_unique<PlannedBackend>(gpu);
}

}  // namespace sluice
