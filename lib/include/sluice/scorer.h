// A scorer is a method of estimating which tokens matter: one class, registered under a name that a
// policy's select=NAME says. Sluice's own are registered by themselves; another needs no change of
// Sluice:
//
//   sluice::EngineConfig config;
//   config.scorers.add(std::make_shared<MyScorer>());
//   ...
//   engine.policy("select=mine(width=8) prune=top_k(64)");
//
// A scorer may have memory besides the rows, a fixed size for every page of 128 tokens of a KV
// head, which it fills when the page becomes whole and from which it estimates later. Forked
// sequences share it where they share pages. On a GPU pointers are device memory, and work is
// issued to the call's stream. It may be recorded and replayed: the same call must issue the same
// work, allocate nothing and wait for nothing.
//
// On the host the ledger has what a scorer really read: score() gets keys and its own memory from
// RunScorer::reads only, which counts them. On a GPU it has what bytes_read() declares.
//
// Functions here that say constexpr can be used on a GPU with nvcc's --expt-relaxed-constexpr.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/batch.h"
#include "sluice/policy.h"
#include "sluice/types.h"

namespace sluice {

class Queue;
struct EstimateParams;

// Who computes: the host, at once, or an NVIDIA GPU, some time after the call.
enum class Processor : std::uint8_t { host, cuda };
std::string_view to_string(Processor processor);

// A number that a scorer takes: select=NAME(name=N).
struct ScorerParameter {
  std::string name;
  double least = 0.0;
  double most = std::numeric_limits<std::int32_t>::max();
  bool whole = true;       // no fractions
  std::string range = {};  // in words, for messages: "1 to head_dim"
};

// The description of a scorer, independent of a model.
struct ScorerInfo {
  enum class Kind : std::uint8_t {
    dense,   // every row is attended to, and nothing is chosen; Sluice's own only
    fixed,   // no estimates: only the tokens that are always kept are chosen
    bounds,  // scores that order tokens but are not weights, so no share of their sum exists
    logits,  // estimates of logits, in natural units: their softmax estimates weights
  };

  std::string name;  // of lower-case letters, digits and _
  Kind kind = Kind::logits;
  std::vector<ScorerParameter> parameters = {};

  bool estimates() const { return kind == Kind::bounds || kind == Kind::logits; }
};

// A scorer in use: under a policy, for a model.
struct ScorerUse {
  KvShape shape;
  Parameters parameters;
  int bits = 4;              // per key channel in tiles
  std::int64_t context = 0;  // most tokens of a sequence; 0 in check(), where no plan exists yet

  double parameter(const std::string& name, double otherwise) const {
    const auto found = parameters.find(name);
    return found == parameters.end() ? otherwise : found->second;
  }
};

// The memory that a scorer needs in every selecting layer.
struct IndexNeeds {
  bool tiles = false;   // keys at ScorerUse::bits per channel, for the backend's own estimates
  bool bounds = false;  // the extreme keys of sub-pages, for the same
  // The scorer's memory per page of every KV head, and per sequence; at most 1 GiB each.
  std::size_t page_bytes = 0;
  std::size_t sequence_bytes = 0;

  bool own() const { return page_bytes > 0 || sequence_bytes > 0; }
};

// A scorer's memory in one layer. A page's bytes stay until its slot goes to another page. A new
// sequence's part is zero; a fork gets a copy of it.
struct ScorerMemory {
  static constexpr std::size_t kAlignment = 64;  // of pages and sequences

  std::byte* pages = nullptr;           // [kv_heads, slots, kTilePages, page_bytes]
  std::size_t page_bytes = 0;           // as requested, rounded up to kAlignment
  std::int64_t slots = 0;               // per KV head
  std::byte* sequences = nullptr;       // [sequences, sequence_bytes]
  std::size_t sequence_bytes = 0;       // as requested, rounded up to kAlignment
  const std::int32_t* table = nullptr;  // [sequences, table_stride]: slots of pages
  std::int64_t table_stride = 0;

  constexpr std::byte* page(std::int64_t head, std::int64_t sequence, std::int64_t number) const {
    const std::int64_t slot = table[sequence * table_stride + number / kTilePages];
    const std::int64_t place = (head * slots + slot) * kTilePages + number % kTilePages;
    return pages + place * static_cast<std::int64_t>(page_bytes);
  }
  constexpr std::byte* sequence(std::int64_t number) const {
    return sequences + number * static_cast<std::int64_t>(sequence_bytes);
  }
};

// The parameters common to all calls.
struct ScorerCall {
  ScorerUse use;
  int layer = 0;
  ScorerMemory memory;
  Processor processor = Processor::host;
  void* stream = nullptr;  // a cudaStream_t; null on the host
};

// Pages of one layer that became whole: a run of one sequence's, or those whose last token is in a
// batch. They are numbered [0, count); see exists(), as a number may have no page.
struct WholePages {
  std::int64_t count = 0;
  TokenBatch batch;  // of `count` tokens; `tokens` null: a run
  PagedRows paged;   // of the batch
  // For a run: page `first` and those after it, whose rows are contiguous.
  std::int32_t run_sequence = 0;
  std::int64_t first = 0;
  const std::byte* run_rows = nullptr;  // rows of KV head 0
  std::int64_t head_stride = 0;         // bytes from KV head to KV head

  // Callable only where the batch's `tokens` can be dereferenced.
  constexpr bool exists(std::int64_t i) const {
    return batch.tokens == nullptr || batch.tokens[i].count() % kPageTokens == 0;
  }
  constexpr std::int32_t sequence(std::int64_t i) const {
    return batch.tokens == nullptr ? run_sequence : batch.tokens[i].sequence;
  }
  constexpr std::int64_t number(std::int64_t i) const {
    return batch.tokens == nullptr ? first + i : batch.tokens[i].pages();
  }
  // The page's first row; the others follow.
  constexpr const std::byte* rows(std::int64_t i, std::int64_t head, std::int64_t row_bytes) const {
    return batch.tokens == nullptr
               ? run_rows + head * head_stride + i * kPageTokens * row_bytes
               : paged.row(sequence(i), head, number(i) * kPageTokens, row_bytes);
  }
};

struct BuildScorer : ScorerCall {
  WholePages pages;
};

// A sequence forgets its tokens [length, from).
struct TruncateScorer : ScorerCall {
  std::int32_t sequence = 0;
  std::int64_t from = 0;
  std::int64_t length = 0;
  PagedRows rows;  // still has the rows
};

class ScorerReads;

// Tokens [first, first + count) of a prompt, whose rows the layer has.
struct ObserveScorer : ScorerCall {
  std::int32_t sequence = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;
  const float* q = nullptr;  // [count, query_heads, head_dim], `q_stride` floats between tokens
  std::int64_t q_stride = 0;
  // The keys of positions up to the last of these tokens, and the sequence's memory, as token 0.
  // What is read counts with the prompt's step. On the host; null on a GPU.
  const ScorerReads* reads = nullptr;
};

// Rows of logits, one per position.
struct LogitRows {
  std::byte* data = nullptr;  // [count, query_heads, stride]
  DType dtype = DType::f32;   // f16 on a GPU
  std::int64_t stride = 0;

  template <typename T>
  constexpr T* row(std::int64_t query) const {
    return reinterpret_cast<T*>(data) + query * stride;
  }
};

// The extent of one token's scan, for one KV head.
struct ScanExtent {
  std::int64_t pages = 0;  // whole pages before the token's own
  // The backend's own operations read whole tiles of `tile_pages` pages, and read everything
  // `passes` times, once for each part of the query heads.
  int tile_pages = 1;
  int passes = 1;
};

// What score() read for one KV head of a token, or observe() for one KV head.
struct ScorerCount {
  std::uint64_t near_keys = 0;  // keys of rows where attention reads
  std::uint64_t far_keys = 0;   // of rows that are in host memory only
  std::uint64_t bytes = 0;      // of the scorer's memory

  std::uint64_t all_bytes(const KvShape& shape) const {
    return (near_keys + far_keys) * shape.value_offset() + bytes;
  }
  ScorerCount& operator+=(const ScorerCount& other) {
    near_keys += other.near_keys;
    far_keys += other.far_keys;
    bytes += other.bytes;
    return *this;
  }
};

// Everything that score() may read on the host besides queries, and what observe() may read of
// keys. What is handed out counts as read, each time that it is; keep the pointer to read it again.
// `token` is a number in the call's batch, and `head` the KV head for which it is read. Not to be
// called by several threads at once. All throw Error{unsupported} for what is out of range.
class ScorerReads {
 public:
  ScorerReads() = default;
  ScorerReads(const ScorerReads&) = delete;
  ScorerReads& operator=(const ScorerReads&) = delete;
  virtual ~ScorerReads() = default;

  // The key of a position before the token's own, for read_element(): KvShape::value_offset()
  // bytes. Error{unsupported} also for a row that is neither on the device nor in host memory.
  virtual const std::byte* key(std::int64_t token, int head, std::int64_t position) const = 0;
  // Bytes [offset, offset + bytes) of the scorer's memory of a whole page before the token's own.
  virtual const std::byte* page(std::int64_t token, int head, std::int64_t number,
                                std::size_t offset, std::size_t bytes) const = 0;
  // The same of the memory of the token's sequence, which score() may write, too.
  virtual std::byte* sequence(std::int64_t token, int head, std::size_t offset,
                              std::size_t bytes) const = 0;

  virtual ScorerCount count(std::int64_t token, int head) const = 0;
};

struct RunScorer : ScorerCall {
  // [count, query_heads, head_dim], `q_stride` floats between tokens; where rows are chosen early
  // (Policy::early), estimates of the queries.
  const float* q = nullptr;
  std::int64_t q_stride = 0;
  TokenBatch batch;
  // On a GPU; where rows are chosen early, without those of the step's tokens. On the host these
  // and `memory` have null pointers, and `reads` is there instead.
  PagedRows rows;
  const ScorerReads* reads = nullptr;
  ScanExtent extent;  // of the backend's operations, for bytes_read(); `pages` is not set
  // Output: for every token a logit per position of the whole pages before its own, in the first
  // page_first() elements of its query heads' rows. Write nothing beyond them, because the tokens
  // of its own page are scored from their rows. NaN and +Inf end the session's step with an error;
  // -Inf means weight zero: such a token ranks after all others, and is kept only if fewer of those
  // exist than the pruner keeps.
  LogitRows logits;
  // The backend's queue and parameters, for Sluice's own scorers only; see lib/.
  Queue* queue = nullptr;
  const EstimateParams* estimate = nullptr;
};

// One object serves all layers, sequences and sessions, so its state must be in ScorerMemory.
class Scorer {
 public:
  explicit Scorer(ScorerInfo info) : info_(std::move(info)) {}
  Scorer(const Scorer&) = delete;
  Scorer& operator=(const Scorer&) = delete;
  virtual ~Scorer() = default;

  const ScorerInfo& info() const { return info_; }
  virtual bool runs_on(Processor processor) const { return processor == Processor::host; }
  // Throws Error{usage} for parameters that this model does not allow.
  virtual void check(const ScorerUse& /*use*/) const {}

  virtual IndexNeeds needs(const ScorerUse& /*use*/) const { return {}; }
  // Called for every page of a layer that becomes whole, in order.
  virtual void build(const BuildScorer& /*call*/) const {}
  // For memory of sequences only, because pages are built again.
  virtual void truncate(const TruncateScorer& /*call*/) const {}
  // True for a scorer that needs observe(), which is called for every layer of a prompt's step
  // after build(), in the order of positions. Policies with prefill=zipvl are refused then. Rows
  // that are loaded from a saved session have no queries and are not observed.
  virtual bool observes() const { return false; }
  virtual void observe(const ObserveScorer& /*call*/) const {}
  virtual void score(const RunScorer& call) const = 0;
  // Most bytes of keys, of its memory, tiles or bounds that score() reads for one KV head of a
  // token: on a GPU those of the ledger. On the host reading more is Error{unsupported}.
  virtual std::uint64_t bytes_read(const ScorerUse& use, const ScanExtent& extent) const = 0;

  // For Sluice's own scorers. by_backend(): true if score() leaves the work to an operation of the
  // backend, which also estimates the newest rows; reads_rows(): true if estimates, also of
  // candidates, come from the rows themselves; digests(): true if they come from a tile scan that
  // writes a LogitDigest; reads_channels(): true if they come from single channels of tiles, which
  // are not rotated then.
  virtual bool by_backend() const { return false; }
  virtual bool reads_rows() const { return false; }
  virtual bool digests() const { return false; }
  virtual bool reads_channels() const { return false; }

 private:
  ScorerInfo info_;
};

// The scorers that policies may name. A value: copies share the scorers, and adding to one does not
// change another.
class Scorers {
 public:
  // Sluice's own.
  Scorers();

  // Throws Error{usage} for a name that is taken or has invalid characters.
  void add(std::shared_ptr<const Scorer> scorer);
  // Null if there is none of that name.
  const Scorer* find(std::string_view name) const;
  // Throws Error{usage} saying what select takes.
  const Scorer& at(const Method& method) const;
  bool has(const Scorer& scorer) const { return find(scorer.info().name) == &scorer; }
  // Returns true if a scorer of this name takes these parameters.
  bool accepts(const Method& method) const;
  // The values of select=, for messages: "dense, ..., sparq or sparq(r=1..head_dim)".
  std::string accepted() const;
  // Names of the scorers of these kinds: "exact, int4 or sparq".
  std::string names(std::initializer_list<ScorerInfo::Kind> kinds) const;

 private:
  friend const Scorers& own_scorers();
  explicit Scorers(std::vector<std::shared_ptr<const Scorer>> all);

  std::vector<std::shared_ptr<const Scorer>> all_;
};

}  // namespace sluice
