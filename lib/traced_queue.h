// A queue that notes in a trace when each of its operations began and how long it took.
//
// Measuring takes waiting for every operation, so nothing overlaps and nothing is recorded for
// replay. Results are the same.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "lib/backend/queue.h"
#include "sluice/trace.h"

namespace sluice {

class TracedQueue : public Queue {
 public:
  TracedQueue(std::unique_ptr<Queue> queue, std::shared_ptr<Trace> trace);

  void submit(const Operation& operation) override;
  void call_host(HostCall& call) override;
  void note_time(std::uint64_t* to) override { queue_->note_time(to); }

  // `other` has to be a traced queue, too.
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

  // Runs `work` on the queue and adds it to the trace.
  void add(const OperationLabel& label, std::uint64_t bytes, const std::function<void()>& work);

  std::unique_ptr<Queue> queue_;
  std::shared_ptr<Trace> trace_;
  std::vector<Range> ranges_;  // innermost last
};

}  // namespace sluice
