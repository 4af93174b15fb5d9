// A queue that counts the rows that its operations read and write; see sluice/traffic_counter.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "lib/backend/queue.h"
#include "sluice/traffic_counter.h"

namespace sluice {

// While the counter does not count, everything is only forwarded, recordings and branches too.
class CountedQueue : public Queue {
 public:
  CountedQueue(std::unique_ptr<Queue> queue, std::shared_ptr<TrafficCounter> counter);

  void submit(const Operation& operation) override;
  void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue) override;
  ReplayCounts replay_counts() const override { return queue_->replay_counts(); }
  void call_host(HostCall& call) override { queue_->call_host(call); }
  void note_time(std::uint64_t* to) override { queue_->note_time(to); }
  void prepare_branches() override { queue_->prepare_branches(); }
  void branch(int number, const std::function<void()>& issue) override;
  void join(int number) override;

  // `other` has to be a counted queue, too.
  void wait_for(Queue& other) override;
  void synchronize() override { queue_->synchronize(); }
  void* native_stream() override { return queue_->native_stream(); }
  std::unique_ptr<Queue> make_sibling(const QueueOptions& options) override;
  void begin_range(const QueueRange::Label& label) override { queue_->begin_range(label); }
  void end_range() override { queue_->end_range(); }

 private:
  std::unique_ptr<Queue> queue_;
  std::shared_ptr<TrafficCounter> counter_;
};

}  // namespace sluice
