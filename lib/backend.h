// The interface between Sluice's policy and the processor that computes: CPU or CUDA.
//
// A call per layer and operation crosses it, never one per page or row. Pointers are the
// backend's own ("device") pointers unless a comment says host. Work is issued to a stream in
// order; streams run independently of each other and meet only at events. A backend whose info()
// says synchronous finishes every call before it returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lib/batch.h"
#include "lib/memory_account.h"
#include "lib/sample_token.h"
#include "lib/selection.h"
#include "sluice/scorer.h"
#include "sluice/types.h"

namespace sluice {

class Backend;

// Memory of one tier, owned. Its bytes stay charged to the tier's account while it lives.
// Aligned to 64 bytes and zeroed.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Backend* owner, Tier tier, std::byte* data, std::size_t bytes)
      : owner_(owner), tier_(tier), data_(data), bytes_(bytes) {}
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  std::byte* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  Backend* owner_ = nullptr;
  Tier tier_ = Tier::host;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A queue of work. Compute runs the model, transfer moves rows beside it.
enum class Stream : std::uint8_t { compute, transfer };

// A view of a row-major matrix, [rows, columns] with `stride` elements from row to row.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;
};

// A matrix of weights in the form that the backend computes with, made once by prepare_weight.
class Weight {
 public:
  virtual ~Weight() = default;
  virtual std::int64_t outputs() const = 0;
  virtual std::int64_t inputs() const = 0;
};

// y = x W^T (+ bias), or y += ... when accumulate is set.
struct LinearParams {
  Matrix x;                        // [tokens, inputs], compute dtype
  const Weight* weight = nullptr;  // [outputs, inputs]
  const float* bias = nullptr;     // [outputs] or null
  Matrix y;                        // [tokens, outputs], f32
  bool accumulate = false;
};

// y = x / rms(x) * weight, per row.
struct RmsNormParams {
  Matrix x;                       // [tokens, columns], f32
  const float* weight = nullptr;  // [columns]
  float epsilon = 0.0f;
  Matrix y;  // [tokens, columns], f32 or compute dtype
};

// Normalises (optional, Qwen3) and rotates (RoPE, halves convention) queries and keys in place. An
// angle is the product of a position and a frequency, to 1e-5 radians at any position.
struct RopeParams {
  // [tokens, query_heads + key_heads, head_dim], `stride` floats from token to token
  float* x = nullptr;
  std::int64_t tokens = 0;
  std::int64_t stride = 0;
  int query_heads = 0;
  int key_heads = 0;
  int head_dim = 0;
  TokenBatch batch;                          // of `tokens` tokens; or null, for a run of tokens
  std::int64_t first_position = 0;           // of such a run
  const float* inverse_frequency = nullptr;  // host, [head_dim / 2]
  const float* query_norm = nullptr;         // [head_dim] or null
  const float* key_norm = nullptr;           // likewise
  float norm_epsilon = 0.0f;

  int heads() const { return query_heads + key_heads; }
  const float* norm_of(int head) const { return head < query_heads ? query_norm : key_norm; }
  // For those who reach the batch's tokens.
  std::int64_t position_of(std::int64_t token) const {
    return batch.tokens == nullptr ? first_position + token : batch.tokens[token].position;
  }
};

// y = silu(gate) * up.
struct SwigluParams {
  Matrix gate_up;  // [tokens, 2 * columns], f32: gate then up
  Matrix y;        // [tokens, columns], compute dtype
};

// The same numbers in another dtype.
struct CastParams {
  Matrix from;
  Matrix to;
};

// An array [tokens, heads, head_dim] of any dtype and strides; the elements of a head follow each
// other.
struct HeadArray {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t tokens = 0;
  int heads = 0;
  int head_dim = 0;
  std::int64_t token_stride = 0;  // elements from token to token
  std::int64_t head_stride = 0;   // elements from head to head
};

// Brings an array of a caller's to dense f32, times a factor. Zero stands for what is no number or
// too large a one, and the head that has it is marked.
struct ReadHeadsParams {
  HeadArray from;
  float factor = 1.0f;
  float limit = 0.0f;           // magnitudes are to be below it, after multiplying
  float* to = nullptr;          // [tokens, heads, head_dim]
  std::int32_t* bad = nullptr;  // reported [tokens, heads]: set to 1 for such a head, else left
};

// A product with what comes right before and after it: rms_norm or cast, if there is one, linear,
// and swiglu, if there is one. The result of each is the input of the next, but only the last one
// is sure to be written: a backend may take all in one go.
struct LinearChain {
  std::optional<RmsNormParams> norm;
  std::optional<CastParams> cast;  // not both
  LinearParams linear;
  std::optional<SwigluParams> swiglu;
};

// Turns keys and values into rows: K then V, in the cache's dtype.
struct AppendParams {
  const float* k = nullptr;  // [tokens, kv_heads, head_dim], `stride` floats from token to token
  const float* v = nullptr;  // likewise
  std::int64_t tokens = 0;
  std::int64_t stride = 0;
  KvShape shape;
  std::span<std::byte* const> rows;  // host array [kv_heads]: where each head's first row goes
  // Host array [kv_heads] or empty: host memory that gets the same rows, written through.
  std::span<std::byte* const> home = {};
};

// The same for the tokens of a batch: each row goes to every place that its page has. Values are
// added to running sums as the rows have them, rounded, token by token.
struct AppendBatchParams {
  const float* k = nullptr;  // [count, kv_heads, head_dim], `stride` floats from token to token
  const float* v = nullptr;  // likewise
  std::int64_t stride = 0;
  KvShape shape;
  TokenBatch batch;
  PagedRows rows;
  float* sums = nullptr;        // [sequences, kv_heads, head_dim], or null
  float* token_sums = nullptr;  // [count, kv_heads, head_dim]: the sums as each token sees them,
                                // itself included; or null, as it is without `sums`
};

// A run of consecutive rows of one KV head.
struct RowSpan {
  const std::byte* rows = nullptr;  // [count, row_bytes]
  std::int64_t count = 0;
};

// Attention of queries over one run of rows per KV head, as a partial: the output over these rows
// and the log-sum-exp of their logits. Partials over disjoint rows merge into attention over all.
// Source: FlashDecoding; Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
struct AttendParams {
  const float* q = nullptr;  // [tokens, query_heads, head_dim], `q_stride` floats between tokens
  std::int64_t tokens = 0;
  std::int64_t q_stride = 0;
  std::int64_t first_query_position = 0;
  KvShape shape;
  std::span<const RowSpan> rows;        // host array [kv_heads]
  std::int64_t first_row_position = 0;  // rows after a query's position are masked for it
  float scale = 0.0f;                   // of the logits, 1 / sqrt(head_dim)
  float* out = nullptr;                 // [tokens, query_heads, head_dim]
  float* lse = nullptr;                 // [tokens, query_heads]; -inf where no row was visible
  bool merge = false;                   // merge with the partial already in out and lse
};

// Copies what append() wrote to its home.
void copy_home(Backend& backend, const AppendParams& params);

// Attention of decoded tokens to all rows of their sequences up to their own.
//
// To a backend that computes in host memory the device is a bounded part of it: rows that are only
// at home are copied to `arena` before they are attended. Without an arena, and by other backends,
// they are attended where they lie.
struct AttendBatchParams {
  const float* q = nullptr;  // [count, query_heads, head_dim], `q_stride` floats between tokens
  std::int64_t q_stride = 0;
  KvShape shape;
  TokenBatch batch;
  PagedRows rows;
  float scale = 0.0f;
  float* out = nullptr;        // [count, query_heads, head_dim]
  float* lse = nullptr;        // [count, query_heads]
  std::byte* arena = nullptr;  // [kv_heads, arena_rows, row_bytes] or null
  std::int64_t arena_rows = 0;
};

// One copy of contiguous bytes. Which of the two sides is host memory follows from the call.
struct CopyOp {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t bytes = 0;
};

// What a backend keeps of work that it replays. It ends before the memory that the work uses.
class Recording {
 public:
  virtual ~Recording() = default;
};

struct ReplayCounts {
  std::int64_t recordings = 0;  // made
  std::int64_t launches = 0;    // of recordings
};

// How a backend reads, for the account of reads: what a KV head's queries share is read once for
// each part of them.
struct ReadPattern {
  static constexpr int kAll = std::numeric_limits<int>::max();

  int tile_pages = 1;           // a tile is read whole: so many pages
  int estimate_queries = kAll;  // of a part, where estimates are made
  int attend_queries = kAll;    // of a part, where decoded tokens attend

  static int parts(int group, int queries) { return (group - 1) / queries + 1; }
};

struct BackendInfo {
  std::string name;                  // "cpu", "reference", "cuda:0"
  std::string description;           // processor and instruction sets, for people
  bool attends_host_rows = false;    // rows in host memory can be attended where they lie
  bool synchronous = false;          // every call finishes before it returns
  Tier compute_tier = Tier::host;    // where weights and activations live
  DType compute_dtype = DType::f32;  // of the inputs of linear()
  LogitFormat logits;                // of estimates
  ReadPattern reads;
  Processor processor = Processor::host;
  std::vector<int> head_dims;        // that attention has kernels for; empty: all even up to 256
  bool f32_rows = true;              // besides f16 and bf16
  int threads = 1;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const BackendInfo& info() const = 0;
  virtual MemoryAccount& account(Tier tier) = 0;

  // Throws Error{memory} past the tier's cap or when the machine has no more.
  Buffer allocate(Tier tier, std::size_t bytes);

  // Makes host memory reachable for transfers (pins it); release before unmapping.
  virtual void register_host(std::byte* data, std::size_t bytes) = 0;
  virtual void unregister_host(std::byte* data) noexcept = 0;

  // For work that others issue: a cudaStream_t; null if there is no such thing.
  virtual void* native_stream(Stream /*stream*/) { return nullptr; }

  // What prepare_weight will charge for a matrix of this shape.
  virtual std::uint64_t weight_bytes(std::int64_t outputs, std::int64_t inputs) const = 0;
  // Takes host weights [outputs, inputs] of any dtype, dense rows. `host` may be freed after.
  virtual std::unique_ptr<Weight> prepare_weight(const Matrix& host) = 0;

  // Moves or copies rows; `from` and `to` may be in any tier but disk. Regions do not overlap.
  virtual void copy(std::span<const CopyOp> ops, Stream stream) = 0;

  // y[i] = table[ids[i]]; `table` [vocabulary, columns] in its own dtype, `ids` [y.rows]. A row is
  // zero if the table has none for its id.
  virtual void embed(const Matrix& table, const TokenId* ids, const Matrix& y) = 0;
  virtual void linear(const LinearParams& params) = 0;
  virtual void rms_norm(const RmsNormParams& params) = 0;
  virtual void rope(const RopeParams& params) = 0;
  virtual void swiglu(const SwigluParams& params) = 0;
  virtual void cast(const Matrix& from, const Matrix& to) = 0;
  // One head after the other in host memory, unless a backend knows better.
  virtual void read_heads(const ReadHeadsParams& params);
  // One part after the other, unless a backend knows better.
  virtual void linear_chain(const LinearChain& chain);
  // Draws a token from each row of `logits` [n, vocabulary], f32, by its params, host arrays [n];
  // waits for them. See token_of(). Where weights are summed in f32, a draw within rounding of two
  // tokens' border may give either.
  virtual void sample(const Matrix& logits, std::span<const SampleParams> params,
                      std::span<SampledToken> tokens);
  virtual void append(const AppendParams& params) = 0;
  virtual void append_batch(const AppendBatchParams& params) = 0;
  virtual void attend(const AttendParams& params) = 0;
  virtual void attend_batch(const AttendBatchParams& params) = 0;

  // Choosing tokens: see lib/selection.h.
  virtual void build_index(const BuildIndexParams& params) = 0;
  virtual void build_batch(const BuildBatchParams& params) = 0;
  virtual void estimate(const EstimateParams& params) = 0;
  virtual void select(const SelectParams& params) = 0;
  virtual void attend_selected(const AttendSelectedParams& params) = 0;
  virtual void gather(const GatherParams& params) = 0;
  virtual void column_sums(const ColumnSumsParams& params) = 0;
  virtual void sum_values(const SumValuesParams& params) = 0;

  // Issues work to the compute stream: what issue() issues. A backend may record that the first
  // time, when `recording` is null, and from then on only start the recording, which spares what
  // each launch costs. So issue() issues the same with the same pointers every time; it allocates
  // nothing, waits for nothing and copies only between memory that the backend has allocated or
  // registered. The tokens and page tables of a batch are written before, not by issue().
  // The transfer stream takes part between order(compute, transfer) and order(transfer, compute).
  // If issue() throws, nothing is recorded; whether something was issued is left open.
  virtual void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue);
  // So far.
  virtual ReplayCounts replay_counts() const { return {}; }

  // Work issued to `waiting` from now on starts after all work issued to `signalling` so far.
  virtual void order(Stream signalling, Stream waiting) = 0;
  // Returns when both streams are idle. Errors of earlier work surface here at the latest.
  virtual void synchronize() = 0;

 private:
  friend class Buffer;
  virtual std::byte* take(Tier tier, std::size_t bytes) = 0;
  virtual void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept = 0;
};

}  // namespace sluice
