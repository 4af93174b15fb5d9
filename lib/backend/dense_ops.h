// Decoder operations besides attention: products with weights, norms, RoPE, sampling.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "lib/backend/operation_label.h"
#include "lib/sample_token.h"
#include "sluice/batch.h"
#include "sluice/types.h"
#include "sluice/weight_format.h"

namespace sluice {

// A view of a row-major matrix, [rows, columns] with `stride` elements from row to row.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;
};

// A matrix of weights to make room for, [outputs, inputs].
struct WeightShape {
  std::int64_t outputs = 0;
  std::int64_t inputs = 0;
  WeightFormat format;
  bool operator==(const WeightShape&) const = default;
};

// Rows of weights on their way into a weight, one after the other.
struct WeightRows {
  void* data = nullptr;
  WeightFormat format;
  std::int64_t rows = 0;
  std::int64_t inputs = 0;

  std::size_t bytes() const { return static_cast<std::size_t>(rows) * format.row_bytes(inputs); }
};

// A matrix of weights in the form that the backend computes with: see Backend::make_weight().
class Weight {
 public:
  virtual ~Weight() = default;
  virtual std::int64_t outputs() const = 0;
  virtual std::int64_t inputs() const = 0;
  // [outputs, inputs] in the compute tier, where that is how it is stored
  // (Backend::dense_weights()); else without data.
  virtual Matrix dense_rows() const { return {}; }
};

// y[i] = table[ids[i]]. A row is zero if the table has none for its id.
struct EmbedParams {
  static constexpr OperationLabel kLabel = {"embed", TraceKind::dense};
  Matrix table;                   // [vocabulary, columns], in its own dtype
  const TokenId* ids = nullptr;   // [y.rows]
  Matrix y;                       // [tokens, columns], f32
  const Weight* coded = nullptr;  // the table, if it is a coded weight; `table` has no data then
};

// Rows [first, first + rows.rows) of a weight. Several queues may write rows of one weight at once.
struct WriteWeightParams {
  static constexpr OperationLabel kLabel = {"write_weight", TraceKind::copy};
  Weight* weight = nullptr;
  // `first` and the number of rows are multiples of Backend::weight_rows(), except at the end.
  std::int64_t first = 0;
  // Coded as the weight is, or elements of any dtype (of coded weights:
  // BackendInfo::codes_weights); in registered host memory or the backend's own, which must not
  // change before this is done.
  WeightRows rows;
};

// y = x W^T (+ bias), or y += ... when accumulate is set.
struct LinearParams {
  static constexpr OperationLabel kLabel = {"linear", TraceKind::dense};
  Matrix x;                        // [tokens, inputs], compute dtype
  const Weight* weight = nullptr;  // [outputs, inputs]
  const float* bias = nullptr;     // [outputs] or null
  Matrix y;                        // [tokens, outputs], f32
  bool accumulate = false;
};

// y = x / rms(x) * weight, per row.
struct RmsNormParams {
  static constexpr OperationLabel kLabel = {"rms_norm", TraceKind::dense};
  Matrix x;                       // [tokens, columns], f32
  const float* weight = nullptr;  // [columns]
  float epsilon = 0.0f;
  Matrix y;  // [tokens, columns], f32 or compute dtype
};

// Normalises (optional, Qwen3) and rotates (RoPE, halves convention) queries and keys in place. An
// angle is the product of a position and a frequency, to 1e-5 radians at any position. Rotated
// elements are multiplied by `factor` (YaRN).
struct RopeParams {
  static constexpr OperationLabel kLabel = {"rope", TraceKind::dense};
  // [tokens, query_heads + key_heads, head_dim], `stride` floats from token to token
  float* x = nullptr;
  std::int64_t tokens = 0;
  std::int64_t stride = 0;
  int query_heads = 0;
  int key_heads = 0;
  int head_dim = 0;
  TokenBatch batch;                          // `tokens` tokens; or null, for a run of tokens
  std::int64_t first_position = 0;           // of such a run
  const float* inverse_frequency = nullptr;  // host, [head_dim / 2]
  const float* query_norm = nullptr;         // [head_dim] or null
  const float* key_norm = nullptr;           // [head_dim] or null
  float norm_epsilon = 0.0f;
  float factor = 1.0f;

  int heads() const { return query_heads + key_heads; }
  const float* norm_of(int head) const { return head < query_heads ? query_norm : key_norm; }
  // Callable only where the batch's `tokens` can be dereferenced.
  std::int64_t position_of(std::int64_t token) const {
    return batch.tokens == nullptr ? first_position + token : batch.tokens[token].position;
  }
};

// y = silu(gate) * up.
struct SwigluParams {
  static constexpr OperationLabel kLabel = {"swiglu", TraceKind::dense};
  Matrix gate_up;  // [tokens, 2 * columns], f32: gate then up
  Matrix y;        // [tokens, columns], compute dtype
};

// Converts numbers to another dtype.
struct CastParams {
  static constexpr OperationLabel kLabel = {"cast", TraceKind::dense};
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

// Converts a caller's array to dense f32, times a factor. NaN and too large elements become zero,
// and their head is marked.
struct ReadHeadsParams {
  static constexpr OperationLabel kLabel = {"read_heads", TraceKind::dense};
  HeadArray from;
  float factor = 1.0f;
  float limit = 0.0f;           // magnitudes have to be below it after multiplying
  float* to = nullptr;          // [tokens, heads, head_dim]
  std::int32_t* bad = nullptr;  // reported [tokens, heads]: 1 for a marked head, else unchanged
};

// A product and the operations right before and after it: rms_norm or cast, linear, swiglu. The
// result of each is the input of the next. Only the last result is guaranteed to be written,
// because a backend may fuse the chain into one kernel.
struct LinearChain {
  static constexpr OperationLabel kLabel = {"linear_chain", TraceKind::dense};
  std::optional<RmsNormParams> norm;
  std::optional<CastParams> cast;  // not together with norm
  LinearParams linear;
  std::optional<SwigluParams> swiglu;
};

// Draws a token from each row of logits and waits for the tokens; see token_of(). The noise of an
// id is that of lib/gumbel.h on every backend. On a backend that computes weights in f32, rounding
// decides if a token at the border of top-p or min-p is in.
struct SampleParams {
  static constexpr OperationLabel kLabel = {"sample", TraceKind::sample};
  Matrix logits;                     // [n, vocabulary], f32
  std::span<const TokenDraw> draws;  // host array [n]
  std::span<SampledToken> tokens;    // host array [n]
};

}  // namespace sluice
