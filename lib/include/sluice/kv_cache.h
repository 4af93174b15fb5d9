// The KV cache by itself, for callers who run their own model: append a layer's keys and values,
// attend to all of them, under a cap on the device tier and with an exact account of bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "sluice/ledger.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"
#include "sluice/selection.h"
#include "sluice/types.h"

namespace sluice {

// What a cache is asked to be.
struct KvConfig {
  KvShape shape;
  std::int64_t context = 0;  // tokens that it must be able to hold
  int chunk = 512;           // most tokens per step; a small cap may force fewer, see KvPlan
  // Caps in bytes. Without a device cap a backend that shares the host's memory attends rows
  // where they lie and copies nothing.
  std::optional<std::uint64_t> device_memory;
  std::optional<std::uint64_t> host_memory;
  int threads = 0;  // 0: one per core
  // How decode steps attend; prefill is dense. Selecting policies take one token per step.
  Policy policy;
  Scorers scorers;  // that the policy may name
};

// Where the rows will live and what that takes, worked out before anything is allocated.
struct KvPlan {
  KvShape shape;
  std::int64_t context = 0;          // tokens of one sequence
  std::int64_t sequences = 1;        // that may exist at a time
  std::int64_t tokens = 0;           // of all sequences together; what forks share counts once
  std::int64_t blocks = 0;           // of kPageTokens tokens, for all sequences
  std::int64_t chunk = 0;            // most tokens per step of a prompt
  bool in_place = false;             // rows are attended in host memory; no device tier
  std::int64_t resident_tokens = 0;  // of every (layer, KV head), kept on the device: the first ones
  bool tails = false;                // the newest page of every sequence is kept, too
  std::int64_t window_tokens = 0;    // room for the rows of one step of one layer, per KV head
  std::int64_t stream_tokens = 0;    // rows per KV head in each of the two streaming buffers
  std::int64_t decode_batch = 1;     // most tokens per decode step, of one sequence or of several
  std::uint64_t index_bytes = 0;     // key index and sums of values; part of the tier's bytes
  std::uint64_t work_bytes = 0;      // of selecting: logits, positions; part of the tier's bytes
  std::uint64_t table_bytes = 0;     // which pages sequences have; part of the tier's bytes
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;

  // Rows of every (layer, KV head) that there is room for, at home and on the device.
  std::int64_t home_rows() const;
  std::int64_t device_rows() const;
  // What holding every row on the device would take: the cache that Sluice replaces.
  std::uint64_t dense_bytes() const;
};

// Memory that a cache or a session holds, as its allocators counted it.
struct MemoryUse {
  std::uint64_t device_bytes = 0;
  std::uint64_t device_peak = 0;
  std::uint64_t host_bytes = 0;
  std::uint64_t host_peak = 0;
};

class KvCache {
 public:
  // Throws Error{usage} for an impossible shape and Error{memory} if a cap is too small, with the
  // smallest that would do.
  explicit KvCache(const KvConfig& config);
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;
  ~KvCache();

  // One step adds `tokens` (1 to plan().chunk) to every layer. Between begin_step and end_step
  // call append and then attend once per layer, in any order of layers. A step that an error
  // interrupted leaves the cache unusable, and later calls say so.
  void begin_step(Phase phase, std::int64_t tokens);
  // Keys (after RoPE) and values, [tokens, kv_heads, head_dim], in host memory.
  void append(int layer, const float* keys, const float* values);
  // Causal attention of the step's queries [tokens, query_heads, head_dim] over the context and
  // the step itself; `out` has the same shape. Logits are scaled by 1/sqrt(head_dim).
  void attend(int layer, const float* queries, float* out);
  void end_step();

  std::int64_t length() const;
  const KvPlan& plan() const;
  const Ledger& ledger() const;
  // Of the last step; empty if it was dense.
  const StepSelection& selection() const;
  MemoryUse memory() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
