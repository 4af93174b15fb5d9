// A queue of a backend's work: every operation is asked of a queue, and is done in its order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "lib/backend/operation.h"

namespace sluice {

class Backend;

// What a backend keeps of work that it replays. It ends before the memory that the work uses.
class Recording {
 public:
  virtual ~Recording() = default;
};

struct ReplayCounts {
  std::int64_t recordings = 0;  // made
  std::int64_t launches = 0;    // of recordings
};

// Work of the host's in a queue's order. It stays where it is as long as the queue, or a recording,
// may come to it. It asks nothing of the queue's backend.
class HostCall {
 public:
  virtual ~HostCall() = default;
  virtual void run() noexcept = 0;
};

struct QueueOptions {
  // A stream of a caller's, a cudaStream_t, which outlives the queue; null: one of its own.
  void* stream = nullptr;
  // Whether it computes, or only copies and gathers, which takes no memory.
  bool computes = true;
  // Whether replay() of one that computes is to record, which may take memory.
  bool records = true;
};

class Queue;

// Work that is issued while one lives belongs together, for profilers and traces. Ranges nest.
class QueueRange {
 public:
  struct Label {
    std::string_view name;    // lasts as long as the program
    int layer = -1;           // of the model; -1: of none
    std::int64_t tokens = 0;  // of a step
  };
  QueueRange(Queue& queue, const Label& label);
  QueueRange(const QueueRange&) = delete;
  QueueRange& operator=(const QueueRange&) = delete;
  ~QueueRange();

 private:
  Queue& queue_;
};

// Stream, scratch memory and what else work needs that is under way: queues share nothing, so work
// of one runs beside that of others and meets it only at wait_for(). One thread at a time may use a
// queue.
class Queue {
 public:
  explicit Queue(Backend& backend);
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  virtual ~Queue() = default;

  // Throws Error{usage} once the backend has ended, as operations that need it do.
  Backend& backend() const;
  bool has_backend() const { return !life_.expired(); }

  // Does an operation after all work issued before it. Throws Error{usage} once the backend has
  // ended, and Error{unsupported} for parameters that the backend has no code for.
  template <class Params>
  void run(const Params& params) {
    submit(Operation(&params));
  }
  void copy(std::span<const CopyOp> ops) { run(CopyParams{ops}); }
  // The same for an operation of any kind: the one function that backends implement and that
  // wrappers forward.
  virtual void submit(const Operation& operation) = 0;

  // Issues what issue() issues. A backend may record that the first time, when `recording` is null,
  // and from then on only start the recording, which spares what each launch costs. So issue()
  // issues the same with the same pointers every time; it allocates nothing, waits for nothing and
  // copies only between memory that the backend has allocated or registered. The tokens and page
  // tables of a batch are written before, not by issue(). Another queue takes part between its
  // wait_for() this one and this one's wait_for() it. If issue() throws, nothing is recorded;
  // whether something was issued is left open.
  virtual void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue);
  // So far.
  virtual ReplayCounts replay_counts() const { return {}; }

  // Runs `call` when the queue comes to it, on any thread; what is behind it waits.
  virtual void call_host(HostCall& call) { call.run(); }
  // Writes when the queue comes to it: nanoseconds of a clock of the backend's.
  virtual void note_time(std::uint64_t* to);

  // Work issued from now on starts after all work issued to `other` so far.
  virtual void wait_for(Queue& other) = 0;
  // Returns when the queue is idle. Errors of earlier work surface here at the latest.
  virtual void synchronize() = 0;

  // For work that others issue: a cudaStream_t; null if there is no such thing.
  virtual void* native_stream() { return nullptr; }

  // Another queue, that this one may wait for and that may wait for this one.
  virtual std::unique_ptr<Queue> make_sibling(const QueueOptions& options);

  // By QueueRange.
  virtual void begin_range(const QueueRange::Label& /*label*/) {}
  virtual void end_range() {}

 private:
  Backend* backend_;
  std::weak_ptr<const void> life_;
};

// For backends that do not fuse: the operations of a chain one by one.
void run_one_by_one(Queue& queue, const LinearChain& chain);
// Copies rows that `append` wrote on the device to host memory.
void copy_to_host(Queue& queue, const AppendParams& params);

}  // namespace sluice
