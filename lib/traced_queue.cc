#include "lib/traced_queue.h"

#include <utility>

#include "lib/check.h"

namespace sluice {
namespace {

// The label of an operation; some names depend on its parameters.
OperationLabel traced_label(const Operation& operation) {
  OperationLabel label = label_of(operation);
  if (const auto* chain = params_of<LinearChain>(operation)) {
    label.name = chain->swiglu ? "norm, linear, swiglu"
                 : chain->norm ? "norm, linear"
                               : "cast, linear";
  } else if (const auto* scan = params_of<EstimateParams>(operation)) {
    if (scan->candidates != nullptr) label.name = "scan candidates";
  }
  return label;
}

// Bytes moved, counted for copies only: other operations move only what they compute with.
std::uint64_t bytes_of(const Operation& operation) {
  std::uint64_t bytes = 0;
  if (const auto* copy = params_of<CopyParams>(operation)) {
    for (const CopyOp& op : copy->ops) bytes += op.bytes;
  }
  return bytes;
}

}  // namespace

TracedQueue::TracedQueue(std::unique_ptr<Queue> queue, std::shared_ptr<Trace> trace)
    : Queue(queue->backend()), queue_(std::move(queue)), trace_(std::move(trace)) {}

void TracedQueue::add(const OperationLabel& label, std::uint64_t bytes,
                      const std::function<void()>& work) {
  const int layer = ranges_.empty() ? -1 : ranges_.back().label.layer;
  const double begin = trace_->now();
  work();
  queue_->synchronize();
  trace_->add({label.name, label.kind, layer, begin, trace_->now() - begin, bytes});
}

void TracedQueue::submit(const Operation& operation) {
  add(traced_label(operation), bytes_of(operation), [&] { queue_->submit(operation); });
}

void TracedQueue::call_host(HostCall& call) {
  add({"attend on the host", TraceKind::attend}, 0, [&] { queue_->call_host(call); });
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
