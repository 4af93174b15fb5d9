// Work of the CPU backend: every call returns when its work is done, so a queue is always idle.
#pragma once

#include <cstdint>
#include <span>

#include "cpu/cpu_backend.h"
#include "cpu/dense/rope_table.h"
#include "lib/backend/queue.h"

namespace sluice::cpu {

class CpuQueue : public Queue {
 public:
  explicit CpuQueue(CpuBackend& backend) : Queue(backend) {}

  void copy(std::span<const CopyOp> ops) override;
  void embed(const Matrix& table, const TokenId* ids, const Matrix& y) override;
  void linear(const LinearParams& params) override;
  void write_weight(Weight& weight, std::int64_t first, const Matrix& rows) override;
  void rms_norm(const RmsNormParams& params) override;
  void rope(const RopeParams& params) override;
  void swiglu(const SwigluParams& params) override;
  void cast(const Matrix& from, const Matrix& to) override;
  void read_heads(const ReadHeadsParams& params) override;
  void sample(const Matrix& logits, std::span<const TokenDraw> params,
              std::span<SampledToken> tokens) override;
  void append(const AppendParams& params) override;
  void append_batch(const AppendBatchParams& params) override;
  void attend(const AttendParams& params) override;
  void attend_batch(const AttendBatchParams& params) override;
  void build_index(const BuildIndexParams& params) override;
  void build_batch(const BuildBatchParams& params) override;
  void estimate(const EstimateParams& params) override;
  void select(const SelectParams& params) override;
  void find_rows(const FindRowsParams& params) override;
  void forget_rows(const ForgetRowsParams& params) override;
  void attend_selected(const AttendSelectedParams& params) override;
  void gather(const GatherParams& params) override;
  void pack_tokens(const PackTokensParams& params) override;
  void unpack_tokens(const UnpackTokensParams& params) override;
  void column_sums(const ColumnSumsParams& params) override;
  void choose_tokens(const ChooseTokensParams& params) override;
  void page_means(const PageMeansParams& params) override;
  void choose_pages(const ChoosePagesParams& params) override;
  void sum_values(const SumValuesParams& params) override;
  void build_values(const BuildValuesParams& params) override;
  void build_values_batch(const BuildValuesBatchParams& params) override;
  void attend_tiles(const AttendTilesParams& params) override;
  void merge_partials(const MergePartialsParams& params) override;
  void wait_for(Queue& /*other*/) override {}
  void synchronize() override { static_cast<void>(backend()); }

 private:
  CpuBackend& own() const { return static_cast<CpuBackend&>(backend()); }
  Threads& threads() const { return own().threads(); }
  // Runs body(row, scratch) for every row, several rows to a task; scratch has `columns` floats.
  void for_rows(std::int64_t rows, std::int64_t columns, const auto& body);

  RopeTable rope_table_;
};

}  // namespace sluice::cpu
