#include "lib/traced_queue.h"

#include <utility>

#include "lib/check.h"

namespace sluice {

TracedQueue::TracedQueue(std::unique_ptr<Queue> queue, std::shared_ptr<Trace> trace)
    : Queue(queue->backend()), queue_(std::move(queue)), trace_(std::move(trace)) {}

void TracedQueue::run(std::string_view name, TraceKind kind, const auto& work,
                      std::uint64_t bytes) {
  const int layer = ranges_.empty() ? -1 : ranges_.back().label.layer;
  const double begin = trace_->now();
  work(*queue_);
  queue_->synchronize();
  trace_->add({name, kind, layer, begin, trace_->now() - begin, bytes});
}

void TracedQueue::copy(std::span<const CopyOp> ops) {
  std::uint64_t bytes = 0;
  for (const CopyOp& op : ops) bytes += op.bytes;
  run(
      "copy", TraceKind::copy, [&](Queue& queue) { queue.copy(ops); }, bytes);
}

void TracedQueue::embed(const Matrix& table, const TokenId* ids, const Matrix& y) {
  run("embed", TraceKind::dense, [&](Queue& queue) { queue.embed(table, ids, y); });
}

void TracedQueue::linear(const LinearParams& params) {
  run("linear", TraceKind::dense, [&](Queue& queue) { queue.linear(params); });
}

void TracedQueue::write_weight(Weight& weight, std::int64_t first, const Matrix& rows) {
  run("write_weight", TraceKind::copy,
      [&](Queue& queue) { queue.write_weight(weight, first, rows); });
}

void TracedQueue::linear_chain(const LinearChain& chain) {
  const std::string_view name = chain.swiglu ? "norm, linear, swiglu"
                                : chain.norm ? "norm, linear"
                                             : "cast, linear";
  run(name, TraceKind::dense, [&](Queue& queue) { queue.linear_chain(chain); });
}

void TracedQueue::rms_norm(const RmsNormParams& params) {
  run("rms_norm", TraceKind::dense, [&](Queue& queue) { queue.rms_norm(params); });
}

void TracedQueue::rope(const RopeParams& params) {
  run("rope", TraceKind::dense, [&](Queue& queue) { queue.rope(params); });
}

void TracedQueue::swiglu(const SwigluParams& params) {
  run("swiglu", TraceKind::dense, [&](Queue& queue) { queue.swiglu(params); });
}

void TracedQueue::cast(const Matrix& from, const Matrix& to) {
  run("cast", TraceKind::dense, [&](Queue& queue) { queue.cast(from, to); });
}

void TracedQueue::read_heads(const ReadHeadsParams& params) {
  run("read_heads", TraceKind::dense, [&](Queue& queue) { queue.read_heads(params); });
}

void TracedQueue::sample(const Matrix& logits, std::span<const TokenDraw> params,
                         std::span<SampledToken> tokens) {
  run("sample", TraceKind::sample, [&](Queue& queue) { queue.sample(logits, params, tokens); });
}

void TracedQueue::append(const AppendParams& params) {
  run("append", TraceKind::append, [&](Queue& queue) { queue.append(params); });
}

void TracedQueue::append_batch(const AppendBatchParams& params) {
  run("append", TraceKind::append, [&](Queue& queue) { queue.append_batch(params); });
}

void TracedQueue::attend(const AttendParams& params) {
  run("attend to a run of rows", TraceKind::attend, [&](Queue& queue) { queue.attend(params); });
}

void TracedQueue::attend_batch(const AttendBatchParams& params) {
  run("attend to all rows", TraceKind::attend, [&](Queue& queue) { queue.attend_batch(params); });
}

void TracedQueue::find_rows(const FindRowsParams& params) {
  run("find rows", TraceKind::select, [&](Queue& queue) { queue.find_rows(params); });
}

void TracedQueue::forget_rows(const ForgetRowsParams& params) {
  run("forget rows", TraceKind::copy, [&](Queue& queue) { queue.forget_rows(params); });
}

void TracedQueue::attend_selected(const AttendSelectedParams& params) {
  run("attend to selected rows", TraceKind::attend,
      [&](Queue& queue) { queue.attend_selected(params); });
}

void TracedQueue::gather(const GatherParams& params) {
  run("gather", TraceKind::gather, [&](Queue& queue) { queue.gather(params); });
}

void TracedQueue::pack_tokens(const PackTokensParams& params) {
  run("pack tokens", TraceKind::copy, [&](Queue& queue) { queue.pack_tokens(params); });
}

void TracedQueue::unpack_tokens(const UnpackTokensParams& params) {
  run("unpack tokens", TraceKind::copy, [&](Queue& queue) { queue.unpack_tokens(params); });
}

void TracedQueue::sum_values(const SumValuesParams& params) {
  run("sum_values", TraceKind::index, [&](Queue& queue) { queue.sum_values(params); });
}

void TracedQueue::build_index(const BuildIndexParams& params) {
  run("build_index", TraceKind::index, [&](Queue& queue) { queue.build_index(params); });
}

void TracedQueue::build_batch(const BuildBatchParams& params) {
  run("build_index", TraceKind::index, [&](Queue& queue) { queue.build_batch(params); });
}

void TracedQueue::estimate(const EstimateParams& params) {
  run(params.candidates != nullptr ? "scan candidates" : "scan", TraceKind::scan,
      [&](Queue& queue) { queue.estimate(params); });
}

void TracedQueue::select(const SelectParams& params) {
  run("select", TraceKind::select, [&](Queue& queue) { queue.select(params); });
}

void TracedQueue::column_sums(const ColumnSumsParams& params) {
  run("column_sums", TraceKind::scan, [&](Queue& queue) { queue.column_sums(params); });
}

void TracedQueue::choose_tokens(const ChooseTokensParams& params) {
  run("choose_tokens", TraceKind::select, [&](Queue& queue) { queue.choose_tokens(params); });
}

void TracedQueue::page_means(const PageMeansParams& params) {
  run("page_means", TraceKind::index, [&](Queue& queue) { queue.page_means(params); });
}

void TracedQueue::choose_pages(const ChoosePagesParams& params) {
  run("choose_pages", TraceKind::select, [&](Queue& queue) { queue.choose_pages(params); });
}

void TracedQueue::build_values(const BuildValuesParams& params) {
  run("build_values", TraceKind::index, [&](Queue& queue) { queue.build_values(params); });
}

void TracedQueue::build_values_batch(const BuildValuesBatchParams& params) {
  run("build_values", TraceKind::index, [&](Queue& queue) { queue.build_values_batch(params); });
}

void TracedQueue::attend_tiles(const AttendTilesParams& params) {
  run("attend to value tiles", TraceKind::attend,
      [&](Queue& queue) { queue.attend_tiles(params); });
}

void TracedQueue::merge_partials(const MergePartialsParams& params) {
  run("merge partials", TraceKind::attend, [&](Queue& queue) { queue.merge_partials(params); });
}

void TracedQueue::call_host(HostCall& call) {
  run("attend on the host", TraceKind::attend, [&](Queue& queue) { queue.call_host(call); });
}

void TracedQueue::wait_for(Queue& other) {
  auto* const traced = dynamic_cast<TracedQueue*>(&other);
  check(traced != nullptr, "a traced queue waits for one that is not");
  queue_->wait_for(*traced->queue_);
}

std::unique_ptr<Queue> TracedQueue::make_sibling(const QueueOptions& options) {
  return std::make_unique<TracedQueue>(queue_->make_sibling(options), trace_);
}

void TracedQueue::begin_range(const QueueRange::Label& label) {
  queue_->begin_range(label);
  ranges_.push_back({label, trace_->now()});
}

void TracedQueue::end_range() {
  queue_->end_range();
  const Range range = ranges_.back();
  ranges_.pop_back();
  const bool is_layer = range.label.layer >= 0;
  trace_->add({range.label.name, is_layer ? TraceKind::layer : TraceKind::step, range.label.layer,
               range.begin, trace_->now() - range.begin, 0,
               static_cast<std::uint64_t>(range.label.tokens)});
}

}  // namespace sluice
