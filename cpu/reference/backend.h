// The slow, obvious backend: fp32, one thread, plain loops. Faster backends are tested against it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "cpu/reference/index.h"
#include "cpu/reference/reads.h"
#include "cpu/reference/values.h"
#include "cpu/runtime/memory.h"
#include "lib/backend.h"

namespace sluice::cpu {

class ReferenceBackend : public Backend {
 public:
  explicit ReferenceBackend(std::uint64_t device_cap = MemoryAccount::kNoCap,
                            std::uint64_t host_cap = MemoryAccount::kNoCap);

  // Reports reads as a backend with this pattern would make them.
  void read_like(const ReadPattern& pattern) { info_.reads = pattern; }

  const BackendInfo& info() const override { return info_; }
  MemoryAccount& account(Tier tier) override { return memory_.account(tier); }
  void register_host(std::byte* /*data*/, std::size_t /*bytes*/) override {}
  void unregister_host(std::byte* /*data*/) noexcept override {}
  using Backend::make_queue;
  std::unique_ptr<Queue> make_queue(const QueueOptions& options) override;

  std::optional<DType> dense_weights() const override { return DType::f32; }
  WeightFormat weight_format() const override { return DType::f32; }
  bool stores(const WeightFormat& format) const override {
    return format.is_coded() || format == weight_format();
  }
  std::uint64_t weight_bytes(const WeightShape& shape) const override {
    return static_cast<std::uint64_t>(shape.outputs) * shape.format.row_bytes(shape.inputs);
  }

 protected:
  std::unique_ptr<Weight> take_weight(const WeightShape& shape) override;
  std::byte* take(Tier tier, std::size_t bytes) override { return memory_.take(tier, bytes); }
  void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept override {
    memory_.give_back(tier, data, bytes);
  }

 private:
  BackendInfo info_;
  CpuMemory memory_;
};

// Work is done when a call returns. Override on_*_read() to observe reads.
class ReferenceQueue : public Queue, public ReferenceReads {
 public:
  explicit ReferenceQueue(ReferenceBackend& backend) : Queue(backend) {}

  int attend_queries() const override { return backend().info().reads.attend_queries; }

  void submit(const Operation& operation) override;
  void wait_for(Queue& /*other*/) override {}
  void synchronize() override { static_cast<void>(backend()); }

 protected:
  friend struct ReferenceExecute;
  // Called for every page of the key index that an operation reads, once per KV head.
  virtual void on_index_read(const PageRead& /*read*/) {}
  // Called for every page of value tiles that an operation reads, once per KV head.
  virtual void on_values_read(const PageRead& /*read*/) {}
  // Called for every row whose key an estimate reads, once per KV head.
  virtual void on_key_read(const std::byte* /*row*/, std::size_t /*bytes*/) {}
};

}  // namespace sluice::cpu
