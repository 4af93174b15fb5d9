// A queue of a backend's work: every operation is issued to a queue and runs in its order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "lib/backend/operation.h"

namespace sluice {

class Backend;

// Work that a backend has recorded for replay. It is destroyed before the memory that the work
// uses.
class Recording {
 public:
  virtual ~Recording() = default;
};

struct ReplayCounts {
  std::int64_t recordings = 0;  // recordings made
  std::int64_t launches = 0;    // launches of recordings
};

// Host work in a queue's order. The object stays at its address as long as the queue or a recording
// may run it. run() must not call the queue's backend.
class HostCall {
 public:
  virtual ~HostCall() = default;
  virtual void run() noexcept = 0;
};

struct QueueOptions {
  // The caller's stream, a cudaStream_t, which outlives the queue; null: the queue makes one.
  void* stream = nullptr;
  // False: the queue only copies and gathers, which takes no memory.
  bool computes = true;
  // True: replay() records if the queue computes; a recording may take memory.
  bool records = true;
};

class Queue;

// A scope that groups the work issued in it, for profilers and traces. Ranges nest.
class QueueRange {
 public:
  struct Label {
    std::string_view name;    // lives as long as the program
    int layer = -1;           // of the model; -1: none
    std::int64_t tokens = 0;  // of a step
  };
  QueueRange(Queue& queue, const Label& label);
  QueueRange(const QueueRange&) = delete;
  QueueRange& operator=(const QueueRange&) = delete;
  ~QueueRange();

 private:
  Queue& queue_;
};

// A stream with its scratch memory and all other state of work in flight. Queues share nothing, so
// they run concurrently and synchronise only at wait_for(). One thread at a time may use a queue.
class Queue {
 public:
  explicit Queue(Backend& backend);
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  virtual ~Queue() = default;

  // Throws Error{usage} once the backend has ended, as operations that need it do.
  Backend& backend() const;
  bool has_backend() const { return !life_.expired(); }

  // Runs an operation after all work issued before it. Throws Error{usage} once the backend has
  // ended, and Error{unsupported} for parameters that the backend has no code for.
  template <class Params>
  void run(const Params& params) {
    submit(Operation(&params));
  }
  void copy(std::span<const CopyOp> ops) { run(CopyParams{ops}); }
  // The same for an operation of any kind: the one function that backends implement and that
  // wrappers forward.
  virtual void submit(const Operation& operation) = 0;

  // Runs the work of issue(). A backend may record it the first time, when `recording` is null, and
  // from then on only launch the recording, which saves a launch per operation. So issue() issues
  // the same operations with the same pointers every time; it allocates nothing, waits for nothing
  // and copies only between memory that the backend has allocated or registered. The tokens and
  // page tables of a batch are written before, not by issue(). Work of another queue is part of the
  // recording between that queue's wait_for() this one and this one's wait_for() that queue. If
  // issue() throws, nothing is recorded, but part of the work may have been issued.
  virtual void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue);
  // Counts since the queue was made.
  virtual ReplayCounts replay_counts() const { return {}; }

  // Runs `call` in the queue's order, on any thread; later work waits for it.
  virtual void call_host(HostCall& call) { call.run(); }
  // Writes the time to `to` in the queue's order: nanoseconds of the backend's clock.
  virtual void note_time(std::uint64_t* to);

  // Makes branches run beside the queue, if the backend can; else they run in its order. Takes
  // BackendInfo::branch_bytes of device memory the first time. Throws what Backend::allocate()
  // throws. Not within replay().
  virtual void prepare_branches() {}
  // Runs the work that `issue` issues to this queue after all work issued before, beside work
  // issued later, up to join() of the same number, 0 or 1. Branches have scratch memory of their
  // own and run one after the other. A recording joins every branch that it begins.
  virtual void branch(int number, const std::function<void()>& issue);
  // Work issued from now on starts after that of the branch, if there was one.
  virtual void join(int /*number*/) {}

  // Work issued from now on starts after all work issued to `other` so far.
  virtual void wait_for(Queue& other) = 0;
  // Returns when the queue and its branches are idle. Errors of earlier work surface here at the
  // latest.
  virtual void synchronize() = 0;

  // The cudaStream_t, for work that callers issue themselves; null if the queue has none.
  virtual void* native_stream() { return nullptr; }

  // Makes another queue; each of the two may wait for the other.
  virtual std::unique_ptr<Queue> make_sibling(const QueueOptions& options);

  // Called by QueueRange only.
  virtual void begin_range(const QueueRange::Label& /*label*/) {}
  virtual void end_range() {}

 private:
  Backend* backend_;
  std::weak_ptr<const void> life_;
};

// Runs the operations of a chain one by one, for backends that do not fuse them.
void run_one_by_one(Queue& queue, const LinearChain& chain);
// Copies rows that `append` wrote on the device to host memory.
void copy_to_host(Queue& queue, const AppendParams& params);

}  // namespace sluice
