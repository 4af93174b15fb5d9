// The batcher's thread: which sequence runs, whose prompt goes on, and who gives way.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/batch/meter.h"
#include "engine/batch/pace.h"
#include "engine/batch/prefix_cache.h"
#include "engine/batch/sequence.h"
#include "engine/batch/wake.h"
#include "sluice/batcher.h"

namespace sluice::batch {

class Scheduler {
 public:
  // `root`: an empty session of the pool.
  Scheduler(Engine& engine, const BatcherOptions& options, Session root, std::shared_ptr<Wake> wake,
            Meter& meter);

  // From any thread. What cannot be made of the request throws here, and not in run().
  void submit(const std::shared_ptr<Job>& job);
  void stop();  // cancels everything; run() returns then
  void cancel_all() {
    cancels_all_ = true;
    wake_->call();
  }
  // Runs `work` in run()'s thread between two rounds and waits for it; from any other thread.
  // Throws what it throws.
  void call(const std::function<void()>& work);
  SavedPrefixes load_prefixes(const std::filesystem::path& directory);
  SavedPrefixes save_prefixes(const std::filesystem::path& directory);
  // Sequences that have not ended.
  std::int64_t left() const { return left_; }

  // Serves until stop().
  void run();

 private:
  using Sequences = std::vector<std::unique_ptr<Sequence>>;
  // A running or cached sequence to begin with.
  struct Source {
    Session* session = nullptr;
    std::int64_t tokens = 0;  // that it has in common
    bool later = false;       // a longer one is being computed; wait for it
  };

  // A round of the loop; false: there is nothing left to serve, and never will be.
  bool serve();
  void end_all() noexcept;
  void run_calls();
  void take_arrivals();
  void end_cancelled();
  void admit();
  enum class Admission : std::uint8_t { admitted, full, later };
  Admission admit(Sequence& sequence);
  Source find_source(const Sequence& sequence);
  Session begin(const Sequence& sequence, const Source& source);
  // Tokens of a sequence's session that others with its prompt may use.
  std::int64_t reusable(const Sequence& sequence, std::int64_t length) const;

  bool run_prompt();
  void run_prompt(Sequence& sequence, bool others_decode);
  bool goes_on(const Sequence& sequence) const;
  void replay(Sequence& sequence, std::int64_t most);
  bool run_steps();
  // Leaves out the last sequences in the order of service, if not all have their index on the
  // device together: changing places in every step would take longer than waiting.
  void leave_out_unindexed(std::vector<Sequence*>& sequences) const;
  void step(std::vector<Sequence*>& batch);
  void step_with_drafts(Sequence& sequence);
  void note_step(Clock::time_point start);

  // Returns true if the index of all running sequences and of one more, with all their tokens, fits
  // the device.
  bool is_indexed_beside_others(const Sequence& sequence) const;
  // Frees blocks for a sequence that needs them now. Returns false if there are none to free.
  // `sequence` itself may have given way: then it does not run any more.
  bool make_room();
  void preempt(Sequence& sequence);
  bool is_running(const Sequence* sequence) const;
  std::int64_t free_tokens() const { return root_.room().free; }

  void settle(Sequence& sequence, std::optional<FinishReason> reason);
  void finish(Sequence& sequence, FinishReason reason);
  // Lets a running sequence whose rows a disk has lost begin anew from its tokens, once; other
  // errors end its request.
  void repeat_or_fail(Sequence& sequence, const Error& error);
  // Ends a whole request.
  void fail(Sequence& sequence, const Error& error);
  // Calls `work`; errors end the sequence's request, but Error{memory} of the pool makes room and
  // tries again. Returns false if the sequence does not run any more.
  bool guarded(Sequence& sequence, const std::function<void()>& work);
  void close_session(Sequence& sequence);
  void publish(bool now);
  void publish();
  std::optional<Clock::time_point> next_deadline() const;

  Engine* engine_;
  BatcherOptions options_;
  const Tokenizer* tokenizer_ = nullptr;
  Session root_;
  std::shared_ptr<Wake> wake_;
  Meter* meter_;
  std::size_t most_at_once_;

  std::mutex arrivals_mutex_;
  Sequences arrivals_;
  std::atomic<bool> has_arrivals_ = false;
  std::vector<std::packaged_task<void()>> calls_;  // with arrivals_
  std::atomic<bool> stops_ = false;
  std::atomic<bool> cancels_all_ = false;
  std::atomic<std::int64_t> left_ = 0;

  Sequences waiting_;  // in the order of service
  Sequences running_;
  PrefixCache cache_;
  TrafficSum ended_traffic_;
  Clock::time_point published_;
  Pace pace_;
};

}  // namespace sluice::batch
