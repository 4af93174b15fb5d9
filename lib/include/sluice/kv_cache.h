// The KV cache by itself, for callers who run their own model: append a layer's keys and values,
// attend to all of them, under a cap on the device tier and with an exact account of bytes.
//
//   sluice::KvConfig config;
//   config.shape = {32, 32, 8, 128, sluice::DType::bf16};  // layers, query and KV heads, head_dim
//   config.context = 32768;
//   sluice::KvCache cache(config);
//   sluice::KvSequence sequence = cache.new_sequence();
//   sluice::KvStep step = sequence.begin_step(sluice::Phase::prefill, tokens);
//   for (int layer = 0; layer < 32; ++layer) {
//     step.append(layer, keys, values);  // [tokens, 8, 128], after RoPE
//     step.attend(layer, queries, out);  // [tokens, 32, 128]
//   }
//   step.end();
//
// Misuse throws Error{usage} and changes nothing. Any thread may call any of it: calls wait for
// each other, and all but those of the step itself until the step under way is over. Threads that
// use the same sequence must agree on the order themselves; the thread that begins a step ends it.
// On a GPU a call leaves the cache's device the thread's current one. An object that was moved from
// can only be assigned to or destroyed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/errors.h"
#include "sluice/ledger.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"
#include "sluice/selection.h"
#include "sluice/types.h"

namespace sluice {

// What a cache is asked to be.
struct KvConfig {
  KvShape shape;
  std::int64_t context = 0;  // tokens that a sequence must be able to hold
  // "cpu"; "cuda" or "cuda:N", an NVIDIA GPU; or "reference", the slow fp32 backend for checking.
  std::string device = "cpu";
  // On a GPU: a cudaStream_t of that device, which outlives the cache, its sequences and steps and
  // is not being captured; CUDA's default stream is cudaStreamLegacy. append() and attend() of
  // arrays in the GPU's memory then use them in the stream's order and return once their work is
  // issued, so a NaN among them is found by end(), which waits. Null: work runs on a stream of the
  // cache's own; arrays are ready when they are passed and no longer in use when a call returns.
  void* stream = nullptr;
  int threads = 0;  // of a CPU; 0: Topology::threads
  int chunk = 512;  // most tokens per step; a small cap may force fewer, see KvPlan
  // Sequences that may exist at a time; up to 64 of them can take a decode step together.
  int sequences = 1;
  // Tokens of all of them, what forks share counted once; 0: `sequences` times `context`.
  std::int64_t tokens = 0;
  int decode_batch = 1;            // most tokens of one sequence per decode step
  bool reports_positions = false;  // see SessionOptions
  // That KvSequence::use() may be called with; the first is in force. None: dense. They say how
  // decode steps attend, and with `prefill=pages` how steps of a prompt do; no other sparse
  // prefill. `correct` is left to the caller: truncate(), and a step of Phase::correction.
  std::vector<Policy> policies;
  std::optional<double> scale;  // of the logits, up to 1e6; unset: 1/sqrt(head_dim)
  // Caps in bytes. Without a device cap a backend that shares the host's memory attends rows
  // where they lie and copies nothing, and a GPU's free memory is the cap.
  std::optional<std::uint64_t> device_memory;
  std::optional<std::uint64_t> host_memory;
  // Of device_memory at most so many bytes for the row cache; 0: there is none. Unset: as many as
  // pay. It changes what is moved, and answers by no more than rounding.
  std::optional<std::uint64_t> row_cache;
  Scorers scorers;  // that the policies may name: Sluice's own, and what was added
};

// Where the rows will live and what that takes, worked out before anything is allocated.
struct KvPlan {
  KvShape shape;
  std::int64_t context = 0;    // tokens of one sequence
  std::int64_t sequences = 1;  // that may exist at a time
  std::int64_t tokens = 0;     // of all sequences together; what forks share counts once
  std::int64_t blocks = 0;     // of kPageTokens tokens, for all sequences
  std::int64_t chunk = 0;      // most tokens per step of a prompt
  bool in_place = false;       // rows are attended in host memory; no device tier
  // Of every (layer, KV head), kept on the device: the first ones.
  std::int64_t resident_tokens = 0;
  // But for these layers, which attend to all rows in every step while others select some: of what
  // a cap leaves they get theirs first, as each of these rows is one less to fetch per step.
  std::vector<int> dense_layers;  // ascending
  std::int64_t dense_resident_tokens = 0;
  bool tails = false;              // the newest page of every sequence is kept, too
  std::int64_t window_tokens = 0;  // room for the rows of one step of one layer, per KV head
  std::int64_t stream_tokens = 0;  // rows per KV head in each of the two streaming buffers
  // Rows per KV head, of all layers, that stay on the device because steps select them again.
  std::int64_t cache_rows = 0;
  std::int64_t placed_rows = 0;   // selected rows per KV head looked up there at a time
  std::int64_t compact_rows = 0;  // rows per KV head that a sparse prefill brings together
  // Blocks of queries whose pages are listed at a time; 0: no policy's prefill lists pages.
  std::int64_t listed_blocks = 0;
  // Of the rows that are only in host memory, the host attends to part in layers of decode steps
  // that attend to all; see EngineConfig.
  bool host_attention = false;
  std::int64_t decode_batch = 1;    // most tokens per decode step, of one sequence or of several
  bool reports_positions = false;   // that decode steps selected
  std::uint64_t index_bytes = 0;    // key index and sums of values; part of the tier's bytes
  std::uint64_t work_bytes = 0;     // of selecting: logits, positions; part of the tier's bytes
  std::uint64_t table_bytes = 0;    // which pages sequences have; part of the tier's bytes
  std::uint64_t staging_bytes = 0;  // of a KvCache: arrays on their way in and out; likewise
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;

  // Layers are of one set, or of two if there are dense_layers: those are set 1, others set 0.
  int sets() const { return dense_layers.empty() ? 1 : 2; }
  int set_of(int layer) const;
  // Rows of every (layer, KV head) that there is room for, at home and, by set, on the device.
  std::int64_t home_rows() const;
  std::int64_t device_rows(int set = 0) const;
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

// How an array [tokens, heads, head_dim] of the caller's lies in memory. The elements of a head
// follow each other; what the heads and tokens of an array occupy does not overlap.
struct ArrayLayout {
  DType dtype = DType::f32;
  std::int64_t token_stride = 0;  // elements from token to token; 0: heads * head_stride
  std::int64_t head_stride = 0;   // elements from head to head; 0: head_dim
  Tier tier = Tier::host;         // or device, a GPU's memory
};

// Such an array to read, or to write; dense f32 in host memory is a pointer to float.
struct KvInput {
  KvInput(const float* array) : data(array) {}  // NOLINT(google-explicit-constructor)
  KvInput(const void* array, const ArrayLayout& how) : data(array), layout(how) {}

  const void* data;
  ArrayLayout layout;
};
struct KvOutput {
  KvOutput(float* array) : data(array) {}  // NOLINT(google-explicit-constructor)
  KvOutput(void* array, const ArrayLayout& how) : data(array), layout(how) {}

  void* data;
  ArrayLayout layout;
};

class KvSequence;
class KvStep;

// Memory for the rows of a number of sequences. Sequences keep it alive.
class KvCache {
 public:
  // Throws Error{usage} for an impossible shape or a stream of another device, Error{unsupported}
  // for a device that there is not or that has no attention for the shape, and Error{memory} if a
  // cap is too small, with the smallest that would do.
  explicit KvCache(const KvConfig& config);
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;
  ~KvCache();

  // An empty sequence. Throws Error{memory} if there are as many as were planned for.
  KvSequence new_sequence();
  // A decode step of several sequences, which have one policy in force: a token of each, in this
  // order. Every sequence gets what it would get by itself, but for rounding. Throws Error{usage},
  // or Error{memory} if there is no room, and Error{internal} for a sequence that failed.
  KvStep begin_step(std::span<KvSequence* const> sequences);

  const KvPlan& plan() const;
  MemoryUse memory() const;

  struct Impl;  // opaque

 private:
  std::shared_ptr<Impl> impl_;
};

// The rows of one sequence of tokens. After a failure (a NaN in its keys, memory that ran out, a
// step that was not ended) it refuses further use until reset(); other sequences are not affected.
class KvSequence {
 public:
  KvSequence(KvSequence&&) noexcept;
  KvSequence& operator=(KvSequence&&) noexcept;
  ~KvSequence();

  // A step adds `tokens` (1 to plan().chunk, or to decode_room()) to every layer. Throws
  // Error{prompt} for more than the context holds, Error{memory} if the cache is full. With
  // prefill=pages queries choose pages 128 tokens together, counted from the step's first: where
  // steps of a prompt end at multiples of 128 positions, answers do not depend on their number.
  KvStep begin_step(Phase phase, std::int64_t tokens);
  // Most tokens of the next step of Phase::decode; 0 at the end of the context.
  std::int64_t decode_room() const;

  // A sequence with the same tokens and policy, which shares this one's memory until either writes:
  // it costs what it adds. Its ledger begins anew. Throws what KvCache::new_sequence() throws.
  KvSequence fork();
  // The policy from the next step on; one of KvConfig::policies.
  void use(const Policy& policy);
  // Forgets all tokens from `length` on.
  void truncate(std::int64_t length);
  // Forgets everything, a failure and the ledger as well; the policy stays in force.
  void reset();

  std::int64_t length() const;
  const Policy& policy() const;
  const Ledger& ledger() const;
  // Of the last step; empty if it was dense.
  const StepSelection& selection() const;
  // What it failed with.
  const std::optional<Error>& failure() const;

  struct Impl;  // opaque

 private:
  friend class KvCache;
  explicit KvSequence(std::shared_ptr<Impl> impl);
  Impl& impl() const;

  std::shared_ptr<Impl> impl_;
};

// A step under way, from begin_step() to end(). A step that is destroyed before it ends has failed,
// and its sequences with it.
//
// A sequence whose keys, values or queries have a NaN, an infinity or a number too large fails by
// itself, too large being what rows of f16 cannot hold, and 2^59 for others, whose logits would
// overflow; a step in which none is left throws Error{numeric}, naming layer and head.
class KvStep {
 public:
  KvStep(KvStep&&) noexcept;
  KvStep& operator=(KvStep&&) noexcept;
  ~KvStep();

  // For every layer append, then attend; in any order of layers, but a layer that reuses another's
  // selection comes after that one. What is appended may stay unattended, but not in decode steps.
  // Keys (after RoPE) and values, [tokens, kv_heads, head_dim].
  void append(int layer, const KvInput& keys, const KvInput& values);
  // Causal attention of the step's queries [tokens, query_heads, head_dim] over what came before
  // them and themselves. `lse`, if not null, gets the natural log-sum-exp of the logits that were
  // attended, [tokens, query_heads], dense, where `out` is.
  void attend(int layer, const KvInput& queries, const KvOutput& out, float* lse = nullptr);
  // Throws the error of the first sequence that failed; those that did not have their tokens.
  void end();

  struct Impl;  // opaque

 private:
  friend class KvCache;
  friend class KvSequence;
  explicit KvStep(std::unique_ptr<Impl> impl);
  Impl& impl() const;

  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
