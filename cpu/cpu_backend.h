// The CPU backend: oneDNN for matrix multiplication, SIMD for everything else, oneTBB threads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "cpu/linear.h"
#include "cpu/memory.h"
#include "cpu/rope_table.h"
#include "cpu/threads.h"
#include "lib/backend.h"

namespace sluice::cpu {

struct CpuOptions {
  int threads = 0;                   // 0: one per core
  std::optional<DType> compute;      // bf16 or f32; unset: what loses nothing of the weights and
  DType weight_dtype = DType::bf16;  // is fast: bf16 for bf16 weights if the processor has it
  std::uint64_t device_cap = MemoryAccount::kNoCap;
  std::uint64_t host_cap = MemoryAccount::kNoCap;
};

// Synchronous: every call returns when its work is done, so streams are always idle.
class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const CpuOptions& options);

  const BackendInfo& info() const override { return info_; }
  MemoryAccount& account(Tier tier) override { return memory_.account(tier); }
  void register_host(std::byte* /*data*/, std::size_t /*bytes*/) override {}
  void unregister_host(std::byte* /*data*/) noexcept override {}

  std::uint64_t weight_bytes(std::int64_t outputs, std::int64_t inputs) const override {
    return linear_.packed_bytes(outputs, inputs);
  }
  std::unique_ptr<Weight> prepare_weight(const Matrix& host) override;
  void copy(std::span<const CopyOp> ops, Stream stream) override;
  void embed(const Matrix& table, const TokenId* ids, const Matrix& y) override;
  void linear(const LinearParams& params) override;
  void rms_norm(const RmsNormParams& params) override;
  void rope(const RopeParams& params) override;
  void swiglu(const SwigluParams& params) override;
  void cast(const Matrix& from, const Matrix& to) override;
  void sample(const Matrix& logits, std::span<const SampleParams> params,
              std::span<SampledToken> tokens) override;
  void append(const AppendParams& params) override;
  void append_batch(const AppendBatchParams& params) override;
  void attend(const AttendParams& params) override;
  void attend_batch(const AttendBatchParams& params) override;
  void build_index(const BuildIndexParams& params) override;
  void build_batch(const BuildBatchParams& params) override;
  void estimate(const EstimateParams& params) override;
  void select(const SelectParams& params) override;
  void attend_selected(const AttendSelectedParams& params) override;
  void gather(const GatherParams& params) override;
  void column_sums(const ColumnSumsParams& params) override;
  void sum_values(const SumValuesParams& params) override;
  void order(Stream /*signalling*/, Stream /*waiting*/) override {}
  void synchronize() override {}

  Threads& threads() { return threads_; }

 private:
  std::byte* take(Tier tier, std::size_t bytes) override { return memory_.take(tier, bytes); }
  void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept override {
    memory_.give_back(tier, data, bytes);
  }
  // Runs body(row, scratch) for every row, several rows to a task; scratch has `columns` floats.
  void for_rows(std::int64_t rows, std::int64_t columns, const auto& body);

  CpuMemory memory_;
  Threads threads_;
  BackendInfo info_;
  Linear linear_;
  RopeTable rope_table_;
};

}  // namespace sluice::cpu
