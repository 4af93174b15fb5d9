// The KV cache alone, for callers who run their own model: append a layer's keys and values, then
// attend to all of them, under a cap on the device tier and with an exact count of bytes.
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
// Misuse throws Error{usage} and changes nothing. Every function may be called from any thread:
// calls wait for each other, and calls outside the current step wait until the step ends. Threads
// that use the same sequence must agree on the order themselves; the thread that begins a step must
// end it. On a GPU a call leaves the cache's device as the thread's current device. A moved-from
// object can only be assigned to or destroyed.
#pragma once

#include <cstdint>
#include <filesystem>
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
#include "sluice/traffic_counter.h"
#include "sluice/types.h"

namespace sluice {

// Disk space for rows, used only if host memory cannot hold them all. Every page is written once it
// is complete and checked by its checksums when it is read. The files have no names and vanish with
// the process.
struct DiskConfig {
  // On local disks, which take pages in turns. File systems in memory or on a network are refused.
  std::vector<std::filesystem::path> directories;
  std::optional<std::uint64_t> bytes;  // most bytes in all; unset: as many as the rows take
};

// The configuration of a cache.
struct KvConfig {
  KvShape shape;
  std::int64_t context = 0;  // tokens that a sequence must be able to hold
  // "cpu"; "cuda" or "cuda:N", an NVIDIA GPU; or "reference", the slow fp32 backend for checking.
  std::string device = "cpu";
  // On a GPU: a cudaStream_t of that device, which must outlive the cache, its sequences and steps
  // and must not be under capture; pass cudaStreamLegacy for CUDA's default stream. append() and
  // attend() then access arrays in GPU memory in stream order and return once their work is issued,
  // so only end(), which waits, reports a NaN in them. Null: work runs on the cache's stream;
  // arrays must be ready when they are passed, and are no longer in use when a call returns.
  void* stream = nullptr;
  int threads = 0;  // on a CPU; 0: Topology::threads
  int chunk = 512;  // most tokens per step; a small cap may force fewer, see KvPlan
  // Sequences that may exist at a time, 1 to 4096; up to 64 of them can take a decode step
  // together.
  int sequences = 1;
  // Tokens of all of them, counting tokens that forks share once; 0: `sequences` times `context`.
  std::int64_t tokens = 0;
  int decode_batch = 1;            // most tokens of one sequence per decode step, 1 to 64
  bool reports_positions = false;  // see SessionOptions
  // Policies that KvSequence::use() accepts; the first is in force. None: dense. They decide how
  // decode steps attend, and with `prefill=pages` how prefill steps do; no other sparse prefill is
  // supported. The caller does `correct`, by truncate() and a step of Phase::correction.
  std::vector<Policy> policies;
  std::optional<double> scale;  // multiplies logits, up to 1e6; unset: 1/sqrt(head_dim)
  // Caps in bytes. Without a device cap a backend that shares the host's memory attends rows
  // where they lie and copies nothing, and a GPU's free memory is the cap.
  std::optional<std::uint64_t> device_memory;
  std::optional<std::uint64_t> host_memory;
  // Most bytes of device_memory that the row cache takes; 0: no row cache. Unset: as many as pay.
  // It changes which rows are moved, and answers only by rounding.
  std::optional<std::uint64_t> row_cache;
  // Where rows go that host_memory does not hold; see DiskConfig.
  std::optional<DiskConfig> disk;
  Scorers scorers;  // scorers that the policies may name: Sluice's own and added ones
  // Counts rows and bytes of decode steps while it is started.
  std::shared_ptr<TrafficCounter> counter;
  // For policies with components=half, such as `compact` and `tiny`: the vectors of every layer and
  // KV head, [layers, kv_heads, head_dim / 2, head_dim], from sluice/value_basis.h. Empty: such
  // policies are refused. Vectors must be orthonormal to 1e-3.
  std::vector<float> value_basis;
};

struct IndexLayout;

// The placement of rows and the bytes it takes, computed before anything is allocated.
struct KvPlan {
  KvShape shape;
  std::int64_t context = 0;    // tokens of one sequence
  std::int64_t sequences = 1;  // most sequences at a time
  std::int64_t tokens = 0;     // of all sequences; tokens that forks share count once
  std::int64_t blocks = 0;     // of kPageTokens tokens, for all sequences
  std::int64_t chunk = 0;      // most tokens per prefill step
  bool in_place = false;       // rows are attended in host memory; no device tier
  // The first tokens of every (layer, KV head) that are resident on the device.
  std::int64_t resident_tokens = 0;
  // Layers with dense_resident_tokens instead, because they attend to all rows in every step while
  // others select some: they get the memory under a cap first, as each of their resident rows saves
  // a fetch per step.
  std::vector<int> dense_layers;  // ascending
  std::int64_t dense_resident_tokens = 0;
  // By layer: the newest tokens that it attends to, under every policy; 0: all. Empty: all layers
  // attend to all, or to what their policy selects.
  std::vector<std::int64_t> windows;
  bool tails = false;              // the newest page of every sequence is resident, too
  std::int64_t window_tokens = 0;  // room for the rows of one step of one layer, per KV head
  std::int64_t stream_tokens = 0;  // rows per KV head in each of the two streaming buffers
  // Rows per KV head in the row cache, shared by all layers.
  std::int64_t cache_rows = 0;
  // Rows that are not resident lie on disk, but for those of host_blocks blocks in host memory,
  // which also has rows on their way and, per KV head and shared by all layers, a cache of
  // host_cache_rows selected rows from the disk.
  bool on_disk = false;
  std::int64_t host_blocks = 0;
  std::int64_t host_cache_rows = 0;
  int disk_directories = 0;
  // Selected rows per KV head looked up in the row cache at a time; if some layer chooses its rows
  // early, half of them are that layer's and half the layer's before.
  std::int64_t placed_rows = 0;
  bool chooses_early = false;
  std::int64_t compact_rows = 0;  // rows per KV head that a sparse prefill gathers
  // Some policy's prefill evicts (`prefill=zipvl(TAU,evict)`), so every layer has a page table of
  // its own, and blocks are pages of one layer. A prompt's rows of one layer at a time are staged
  // in `prompt_rows` rows per KV head; only those that stay get pages.
  bool ragged = false;
  std::int64_t prompt_rows = 0;
  // Blocks of queries whose pages are listed at a time; 0: no policy's prefill lists pages.
  std::int64_t listed_blocks = 0;
  // The CPU attends to part of the rows only in host memory, in layers of decode steps that attend
  // to everything; see EngineConfig.
  bool host_attention = false;
  std::int64_t decode_batch = 1;   // most tokens per decode step, of one sequence or of several
  bool reports_positions = false;  // decode steps report the positions that they selected
  // Tokens of all sequences whose index is on the device at a time, see SessionOptions; 0: all.
  std::int64_t indexed_tokens = 0;
  std::uint64_t index_bytes = 0;  // key index and sums of values; part of the tier's bytes
  std::uint64_t work_bytes = 0;   // selection: logits, positions; part of the tier's bytes
  std::uint64_t table_bytes = 0;  // page tables of sequences; part of the tier's bytes
  // Of a KvCache: input and output arrays, value_basis and, on a GPU, scratch memory of kernels;
  // part of the tier's bytes.
  std::uint64_t staging_bytes = 0;
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
  std::uint64_t parked_bytes = 0;  // of the index that is not on the device; part of host_bytes
  std::uint64_t disk_bytes = 0;
  // Without a GPU and a device cap, a plan on disk has its device tier in host memory: host_bytes
  // includes device_bytes.
  bool device_in_host = false;

  // The key index and the work space of the policies that were planned for; Sluice's own.
  std::shared_ptr<const IndexLayout> layout;

  // True if attention finds every row where it reads.
  bool all_resident() const;
  std::int64_t window(int layer) const {
    return windows.empty() ? 0 : windows[static_cast<std::size_t>(layer)];
  }
  // Layers form one set, or two if there are dense_layers: those are set 1, others set 0. If
  // ragged, every layer is a set.
  int sets() const { return ragged ? shape.layers : dense_layers.empty() ? 1 : 2; }
  int set_of(int layer) const;
  // Room in rows of every (layer, KV head): in host memory and, by set, on the device. If ragged,
  // the average over layers, which share it.
  std::int64_t host_rows() const;
  std::int64_t device_rows(int set = 0) const;
  // Bytes of a cache with every row on the device, which Sluice replaces.
  std::uint64_t dense_bytes() const;
};

// Memory that a cache or a session holds, as counted by its allocators.
struct MemoryUse {
  std::uint64_t device_bytes = 0;
  std::uint64_t device_peak = 0;
  std::uint64_t host_bytes = 0;
  std::uint64_t host_peak = 0;
};

// The memory layout of a caller's array [tokens, heads, head_dim]. The elements of a head are
// contiguous; heads and tokens do not overlap.
struct ArrayLayout {
  DType dtype = DType::f32;
  std::int64_t token_stride = 0;  // elements from token to token; 0: heads * head_stride
  std::int64_t head_stride = 0;   // elements from head to head; 0: head_dim
  Tier tier = Tier::host;         // or device, for GPU memory
};

// A caller's array to read, or to write; a plain float pointer means dense f32 in host memory.
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

// Memory for the rows of several sequences. Sequences keep it alive.
class KvCache {
 public:
  // Throws Error{usage} for an impossible shape or a stream of another device, Error{unsupported}
  // for a missing device or one without attention for the shape, and Error{memory} if a cap is too
  // small, naming the smallest that suffices.
  explicit KvCache(const KvConfig& config);
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;
  ~KvCache();

  // An empty sequence. Throws Error{memory} if KvConfig::sequences exist.
  KvSequence new_sequence();
  // A decode step of several sequences, one token of each in this order; all must have the same
  // policy in force. Every sequence gets the result that it would get by itself, except for
  // rounding. Throws Error{usage}, Error{memory} if there is no room, and Error{internal} for a
  // sequence that failed. Throws Error{io} or Error{corrupt} if a page that one of them goes on in
  // cannot be read from disk: that sequence has failed then, and the others can step without it.
  KvStep begin_step(std::span<KvSequence* const> sequences);

  const KvPlan& plan() const;
  MemoryUse memory() const;

  struct Impl;  // opaque

 private:
  std::shared_ptr<Impl> impl_;
};

// The rows of one sequence of tokens. After a failure (a NaN in its keys, memory that ran out, a
// step that was not ended) it refuses further use until reset(); other sequences are unaffected.
class KvSequence {
 public:
  KvSequence(KvSequence&&) noexcept;
  KvSequence& operator=(KvSequence&&) noexcept;
  ~KvSequence();

  // A step adds `tokens` (1 to plan().chunk, or to decode_room()) to every layer. Throws
  // Error{prompt} for more than the context holds, Error{memory} if the cache is full. With
  // prefill=pages blocks of 128 queries, counted from the step's first, choose their pages
  // together: if prefill steps end at multiples of 128 positions, answers do not depend on the
  // number of steps.
  KvStep begin_step(Phase phase, std::int64_t tokens);
  // Most tokens of the next step of Phase::decode; 0 at the end of the context.
  std::int64_t decode_room() const;

  // A sequence with the same tokens and policy, which shares this one's memory until either writes,
  // so it costs only what it adds. Its ledger starts empty. Throws what KvCache::new_sequence()
  // throws.
  KvSequence fork();
  // Sets the policy from the next step on. Throws Error{usage} unless it is one of
  // KvConfig::policies.
  void use(const Policy& policy);
  // Forgets all tokens from `length` on. Throws Error{usage} unless `length` is 0 to length().
  void truncate(std::int64_t length);
  // Forgets all tokens, a failure and the ledger; the policy stays in force.
  void reset();

  std::int64_t length() const;
  const Policy& policy() const;
  const Ledger& ledger() const;
  // Selection of the last step; empty if it was dense.
  const StepSelection& selection() const;
  // The error with which the sequence failed.
  const std::optional<Error>& failure() const;

  struct Impl;  // opaque

 private:
  friend class KvCache;
  explicit KvSequence(std::shared_ptr<Impl> impl);
  Impl& impl() const;

  std::shared_ptr<Impl> impl_;
};

// A step from begin_step() to end(). A step destroyed before end() fails, and so do its sequences.
//
// A sequence whose keys, values or queries have a NaN, an infinity or a number too large fails
// alone. Too large is a number that f16 rows cannot hold, or 2^59 for other rows, because logits
// would overflow. A step whose sequences have all failed throws Error{numeric}, naming layer and
// head.
class KvStep {
 public:
  KvStep(KvStep&&) noexcept;
  KvStep& operator=(KvStep&&) noexcept;
  ~KvStep();

  // For every layer append, then attend. Layers may come in any order, except that a layer that
  // reuses another's selection comes after it. Only decode steps must attend what they append.
  // Keys (after RoPE) and values, [tokens, kv_heads, head_dim].
  void append(int layer, const KvInput& keys, const KvInput& values);
  // Causal attention of the step's queries [tokens, query_heads, head_dim] over all earlier tokens
  // and their own. `lse`, if not null, gets the natural log-sum-exp of the attended logits, dense
  // [tokens, query_heads], in the same memory as `out`.
  void attend(int layer, const KvInput& queries, const KvOutput& out, float* lse = nullptr);
  // Throws the error of the first sequence that failed; the others keep their tokens.
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
