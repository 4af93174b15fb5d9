// State shared by KvCache, KvSequence and KvStep: see sluice/kv_cache.h.
#pragma once

#include <condition_variable>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "lib/backend.h"
#include "offload/kv_cache/caller_arrays.h"
#include "offload/step/kv_batch.h"
#include "offload/step/kv_pool.h"
#include "offload/step/kv_session.h"
#include "offload/step/solo_step.h"
#include "sluice/errors.h"
#include "sluice/kv_cache.h"

namespace sluice {

// Backend, work space and tables serve one call at a time, and one step from begin to end.
struct KvCache::Impl {
  std::unique_ptr<Backend> backend;
  Buffer value_basis;  // KvConfig::value_basis, in the compute tier
  std::shared_ptr<KvPool> pool;
  CallerArrays arrays;
  bool waits;  // for every call's work, whatever the memory of its arrays

  std::mutex mutex{};
  std::condition_variable step_over{};
  std::optional<std::thread::id> stepping{};  // the thread whose step is under way
  std::vector<KvSession> leaving{};           // ended during a step; closed after it

  Impl(const KvConfig& config, std::unique_ptr<Backend> owned, std::unique_ptr<Queue> queue,
       const KvPlan& plan);

  // Locks the mutex once no step is under way. Throws Error{usage} if the calling thread's own step
  // is under way.
  std::unique_lock<std::mutex> between_steps();
  // Ends the step and wakes waiting threads. The caller holds the mutex.
  void end_step();
};

struct KvSequence::Impl {
  std::shared_ptr<KvCache::Impl> cache;
  std::optional<KvSession> kv;  // empty only if reset() failed
  std::optional<Error> failure{};

  Impl(std::shared_ptr<KvCache::Impl> owner, KvSession session);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  // Throws Error{internal} after a failure.
  KvSession& usable();
  const KvSession& session() const;
};

struct KvStep::Impl {
  std::shared_ptr<KvCache::Impl> cache;
  std::vector<std::shared_ptr<KvSequence::Impl>> sequences;
  Phase phase = Phase::decode;
  std::int64_t tokens = 0;
  std::optional<SoloStep> solo{};  // of one sequence; else
  std::optional<KvBatch> batch{};  // of several
  std::vector<bool> appended{};    // by layer
  std::vector<bool> attended{};
  int latest = -1;  // the layer whose rows came last
  bool is_under_way = false;

  // A step of several sequences, or of `tokens` tokens of one.
  static KvStep begin(std::shared_ptr<KvCache::Impl> cache,
                      std::vector<std::shared_ptr<KvSequence::Impl>> sequences, Phase phase,
                      std::optional<std::int64_t> tokens);
  Impl(std::shared_ptr<KvCache::Impl> owner,
       std::vector<std::shared_ptr<KvSequence::Impl>> of_sequences, Phase of_phase);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  KvSession& session() const { return *sequences.front()->kv; }
  void require_under_way() const;
  void append(int layer, const KvInput& keys, const KvInput& values);
  void attend(int layer, const KvInput& queries, const KvOutput& out, float* lse);
  // The first failure.
  std::optional<Error> end();

 private:
  const KvShape& shape() const { return cache->pool->plan().shape; }
  void require_layer(int layer) const;
  void require_selection(int layer) const;
  void require_complete() const;
  std::optional<Error> failure_of_all() const;
  void fail_all(const Error& error);
  // An error in `work` ends all sequences of the step.
  void do_or_fail(const auto& work);
  // Returns true if a call must wait for its work and check the numbers that it read.
  bool waits(std::initializer_list<Tier> arrays) const;
  // Bad input of a token ends its sequence.
  void fail_bad(int layer, std::int64_t token, const std::optional<CallerArrays::Bad>& bad);
  void fail_bad_rows(int layer);
  void fail_bad_queries(int layer);
  void fail_bad_of_all();
};

}  // namespace sluice
