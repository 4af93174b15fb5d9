// State that the queues of a CUDA backend share: the device, its memory, and whether work is
// recorded.
#pragma once

#include <memory>
#include <span>

#include "kernels/cuda_backend.h"
#include "kernels/dense/coded_tile.h"
#include "kernels/runtime/launch.h"
#include "kernels/runtime/memory.h"
#include "kernels/runtime/owners.h"
#include "lib/gpu_sizes.h"

namespace sluice::cuda {

class CudaWeight : public Weight {
 public:
  CudaWeight(Buffer data, const WeightShape& shape) : data_(std::move(data)), shape_(shape) {}
  std::int64_t outputs() const override { return shape_.outputs; }
  std::int64_t inputs() const override { return shape_.inputs; }
  Matrix dense_rows() const override {
    if (is_coded()) return {};
    return {data(), shape_.format.element, outputs(), inputs(), inputs()};
  }
  std::byte* data() const { return data_.data(); }
  bool is_coded() const { return shape_.format.is_coded(); }
  // Only of a coded weight.
  CodedMatrix coded() const { return {data(), shape_.format.code, shape_.outputs, shape_.inputs}; }

 private:
  Buffer data_;
  WeightShape shape_;
};

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const CudaOptions& options);
  ~CudaBackend() override;

  const BackendInfo& info() const override { return info_; }
  MemoryAccount& account(Tier tier) override { return memory_.account(tier); }
  void register_host(std::byte* data, std::size_t bytes) override;
  void unregister_host(std::byte* data) noexcept override;
  using Backend::make_queue;
  std::unique_ptr<Queue> make_queue(const QueueOptions& options) override;
  WeightFormat weight_format() const override { return info_.compute_dtype; }
  bool stores(const WeightFormat& format) const override {
    return gpu::multiplies(format.code) || format == weight_format();
  }
  std::uint64_t weight_bytes(const WeightShape& shape) const override;
  std::int64_t weight_rows(const WeightFormat& format) const override {
    return format.is_coded() ? kTileOutputs : 1;
  }
  std::optional<DType> dense_weights() const override { return info_.compute_dtype; }

  // For queues, because the caller may have used another device in between or be another thread.
  void use_device() const;
  const DeviceLimits& limits() const { return limits_; }
  // Issues a copy of any size. The driver wants each side of it within one allocation.
  void copy_large(const CopyOp& op, cudaStream_t stream) const;
  // The same for many copies as one request. Throws Error{unsupported} if built with CUDA 12.
  void copy_batched(std::span<const CopyOp> ops, cudaStream_t stream) const;
  bool kernels_reach(const std::byte* data, std::size_t bytes) const {
    return memory_.device().covers(data, bytes) || memory_.host().covers(data, bytes);
  }
  // Queues that record; nothing may be allocated while one does.
  int recording = 0;

 private:
  void require_usable(cudaStream_t stream) const;
  // Calls part(CopyOp) for the parts of a copy whose sides are within one allocation each.
  template <class Part>
  void for_parts(CopyOp op, const Part& part) const;
  std::unique_ptr<Weight> take_weight(const WeightShape& shape) override;
  std::byte* take(Tier tier, std::size_t bytes) override;
  void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept override;

  int ordinal_;
  DeviceLimits limits_;
  StreamOwner stream_;  // of memory
  CudaMemory memory_;
  BackendInfo info_;
};

}  // namespace sluice::cuda
