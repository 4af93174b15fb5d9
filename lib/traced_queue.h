// A queue that notes in a trace when each of its operations began and how long it took.
//
// To know that, it waits for every operation: work that would overlap does not, and nothing is
// recorded for replay. What is computed is the same.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "lib/backend/queue.h"
#include "sluice/trace.h"

namespace sluice {

class TracedQueue : public Queue {
 public:
  TracedQueue(std::unique_ptr<Queue> queue, std::shared_ptr<Trace> trace);

  void copy(std::span<const CopyOp> ops) override;
  void embed(const Matrix& table, const TokenId* ids, const Matrix& y) override;
  void linear(const LinearParams& params) override;
  void write_weight(Weight& weight, std::int64_t first, const Matrix& rows) override;
  void linear_chain(const LinearChain& chain) override;
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
  void find_rows(const FindRowsParams& params) override;
  void forget_rows(const ForgetRowsParams& params) override;
  void attend_selected(const AttendSelectedParams& params) override;
  void gather(const GatherParams& params) override;
  void pack_tokens(const PackTokensParams& params) override;
  void unpack_tokens(const UnpackTokensParams& params) override;
  void sum_values(const SumValuesParams& params) override;
  void build_index(const BuildIndexParams& params) override;
  void build_batch(const BuildBatchParams& params) override;
  void estimate(const EstimateParams& params) override;
  void select(const SelectParams& params) override;
  void column_sums(const ColumnSumsParams& params) override;
  void choose_tokens(const ChooseTokensParams& params) override;
  void page_means(const PageMeansParams& params) override;
  void choose_pages(const ChoosePagesParams& params) override;
  void build_values(const BuildValuesParams& params) override;
  void build_values_batch(const BuildValuesBatchParams& params) override;
  void attend_tiles(const AttendTilesParams& params) override;
  void merge_partials(const MergePartialsParams& params) override;
  void call_host(HostCall& call) override;
  void note_time(std::uint64_t* to) override { queue_->note_time(to); }

  // `other` is traced, too.
  void wait_for(Queue& other) override;
  void synchronize() override { queue_->synchronize(); }
  void* native_stream() override { return queue_->native_stream(); }
  std::unique_ptr<Queue> make_sibling(const QueueOptions& options) override;
  void begin_range(const QueueRange::Label& label) override;
  void end_range() override;

 private:
  struct Range {
    QueueRange::Label label;
    double begin = 0.0;
  };

  // Does `work`, of the queue, as an event.
  void run(std::string_view name, TraceKind kind, const auto& work, std::uint64_t bytes = 0);

  std::unique_ptr<Queue> queue_;
  std::shared_ptr<Trace> trace_;
  std::vector<Range> ranges_;  // the innermost last
};

}  // namespace sluice
