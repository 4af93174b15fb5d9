// The CPU backend: oneDNN for matrix multiplication, SIMD for everything else, oneTBB threads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "cpu/dense/linear.h"
#include "cpu/runtime/memory.h"
#include "cpu/runtime/threads.h"
#include "lib/backend.h"

namespace sluice::cpu {

struct CpuOptions {
  int threads = 0;  // 0: Topology::threads
  // bf16 or f32. Unset: the fastest that is lossless for the weights, which is bf16 for bf16
  // weights if the processor multiplies bf16 fast, else f32.
  std::optional<DType> compute;
  // The widest dtype of the weights that will be written; f32 products keep the weights in it.
  DType weight_dtype = DType::f32;
  std::uint64_t device_cap = MemoryAccount::kNoCap;
  std::uint64_t host_cap = MemoryAccount::kNoCap;
};

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const CpuOptions& options);

  const BackendInfo& info() const override { return info_; }
  MemoryAccount& account(Tier tier) override { return memory_.account(tier); }
  void register_host(std::byte* /*data*/, std::size_t /*bytes*/) override {}
  void unregister_host(std::byte* /*data*/) noexcept override {}
  std::uint64_t thread_bytes(const ThreadWork& work) const override;
  using Backend::make_queue;
  std::unique_ptr<Queue> make_queue(const QueueOptions& options) override;

  WeightFormat weight_format() const override { return linear_.format(); }
  bool stores(const WeightFormat& format) const override {
    return format.is_coded() || format == weight_format();
  }
  std::uint64_t weight_bytes(const WeightShape& shape) const override {
    return linear_.packed_bytes(shape);
  }
  std::uint64_t product_bytes(const WeightShape& shape) const override {
    return linear_.widened_bytes(shape);
  }
  std::optional<DType> dense_weights() const override { return linear_.dense_dtype(); }
  std::int64_t weight_rows(const WeightFormat& format) const override {
    return linear_.block_outputs(format);
  }

  // Used by the queues.
  Threads& threads() { return threads_; }
  Linear& products() { return linear_; }

 protected:
  std::unique_ptr<Weight> take_weight(const WeightShape& shape) override;
  std::byte* take(Tier tier, std::size_t bytes) override { return memory_.take(tier, bytes); }
  void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept override {
    memory_.give_back(tier, data, bytes);
  }

 private:
  CpuMemory memory_;
  Threads threads_;
  BackendInfo info_;
  Linear linear_;
  std::uint64_t widened_bytes_ = 0;  // charged so far
};

}  // namespace sluice::cpu
