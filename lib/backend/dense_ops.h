// What a decoder computes besides attention: products with weights, norms, RoPE, drawing tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "lib/batch.h"
#include "lib/sample_token.h"
#include "sluice/types.h"

namespace sluice {

// A view of a row-major matrix, [rows, columns] with `stride` elements from row to row.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;
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
// angle is the product of a position and a frequency, to 1e-5 radians at any position. What is
// rotated is multiplied by `factor` (YaRN).
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
  float factor = 1.0f;

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

// Brings an array of a caller's to dense f32, times a factor. Zero stands for what is NaN or
// too large, and the head that has it is marked.
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

class DenseOps {
 public:
  virtual ~DenseOps() = default;

  // y[i] = table[ids[i]]; `table` [vocabulary, columns] in its own dtype, `ids` [y.rows]. A row is
  // zero if the table has none for its id.
  virtual void embed(const Matrix& table, const TokenId* ids, const Matrix& y) = 0;
  virtual void linear(const LinearParams& params) = 0;
  // Rows [first, first + rows.rows) of a weight: `rows` [., inputs] of any dtype, dense, in host
  // memory that the backend has allocated or registered, which stays as it is until then. Both
  // numbers are multiples of Backend::weight_rows(), but for the weight's last row. Several queues
  // may write rows of one weight at a time.
  virtual void write_weight(Weight& weight, std::int64_t first, const Matrix& rows) = 0;
  virtual void rms_norm(const RmsNormParams& params) = 0;
  virtual void rope(const RopeParams& params) = 0;
  virtual void swiglu(const SwigluParams& params) = 0;
  virtual void cast(const Matrix& from, const Matrix& to) = 0;
  virtual void read_heads(const ReadHeadsParams& params) = 0;
  // One part after the other, unless a backend knows better.
  virtual void linear_chain(const LinearChain& chain);
  // Draws a token from each row of `logits` [n, vocabulary], f32, by its params, host arrays [n];
  // waits for them. See token_of(). Where weights are summed in f32, a draw within rounding of two
  // tokens' border may give either.
  virtual void sample(const Matrix& logits, std::span<const TokenDraw> params,
                      std::span<SampledToken> tokens) = 0;
};

}  // namespace sluice
