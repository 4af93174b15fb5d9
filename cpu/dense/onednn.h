// Linear's use of oneDNN: packed weights and products, each on the calling thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <dnnl.hpp>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "sluice/types.h"

namespace sluice::cpu {

inline constexpr std::int64_t kBlockOutputs = 64;  // outputs of a block of oneDNN's packed layouts
inline constexpr std::int64_t kMaxTokens = 256;    // tokens of one product

// y = x W^T (+ bias), or y += ...
struct Product {
  std::int64_t tokens = 0;
  std::int64_t inputs = 0;
  std::int64_t outputs = 0;
  std::int64_t y_stride = 0;     // floats from token to token
  std::byte* x = nullptr;        // [tokens, inputs], compute dtype
  std::byte* weights = nullptr;  // of the outputs, as OneDnn::Weights says
  const float* bias = nullptr;   // [outputs] or null
  float* y = nullptr;            // [tokens, outputs]
  bool accumulate = false;
};

class OneDnn {
 public:
  // Products of x and weights in `compute`, bf16 or f32. Weights are packed if `packs` is set and
  // oneDNN's layout stores blocks of outputs consecutively.
  enum class Weights { packed, rows, columns };

  // Products of x and weights in `compute`, bf16 or f32.
  OneDnn(DType compute, Weights weights);

  // Outputs that are packed together; 1 if weights are not packed.
  std::int64_t block() const { return block_; }
  std::uint64_t packed_bytes(std::int64_t outputs, std::int64_t inputs) const;
  // Packs dense rows in the compute dtype: one block; the last block may be short.
  void pack(std::byte* rows, std::int64_t inputs, std::int64_t outputs, std::byte* to);
  // Returns true if whole blocks are [inputs * bytes / 4, kBlockOutputs] words of 4 bytes; a word
  // of bf16 holds two consecutive inputs.
  bool transposes(std::int64_t inputs);

  void multiply(const Product& product);
  // Bytes of scratch that the calling thread takes and keeps for a product: oneDNN's, and room for
  // results if `scatters` (y_stride differs from `outputs`).
  std::uint64_t scratch_bytes(std::int64_t tokens, std::int64_t inputs, std::int64_t outputs,
                              bool scatters) const;

  // oneDNN's name of its kernel.
  std::string kernel_name(std::int64_t tokens, std::int64_t inputs, std::int64_t outputs) const;

 private:
  // Key of a primitive: oneDNN specialises it for this shape.
  struct Shape {
    std::int64_t tokens, inputs, outputs;
    bool bias, accumulate;
    auto operator<=>(const Shape&) const = default;
  };
  struct Primitive {
    explicit Primitive(const dnnl::matmul::primitive_desc& d)
        : matmul(d),
          x(d.src_desc()),
          weights(d.weights_desc()),
          bias(d.bias_desc()),
          y(d.dst_desc()),
          scratch(d.scratchpad_desc()) {}
    dnnl::matmul matmul;
    dnnl::memory::desc x, weights, bias, y, scratch;
  };
  // Packing of dense rows of weights.
  struct Packing {
    explicit Packing(const dnnl::reorder::primitive_desc& d)
        : reorder(d), plain(d.src_desc()), packed(d.dst_desc()), scratch(d.scratchpad_desc()) {}
    dnnl::reorder reorder;
    dnnl::memory::desc plain, packed, scratch;
    bool transposes = false;  // a transpose of words; transpose() is many times faster
  };

  dnnl::matmul::primitive_desc describe(const Shape& shape) const;
  dnnl::memory::desc layout(std::int64_t inputs, std::int64_t outputs) const;
  const Packing& packing(std::int64_t inputs, std::int64_t outputs);
  bool is_transpose(const Packing& packing, std::int64_t inputs, std::int64_t outputs) const;
  bool is_consecutive();
  void reorder(const Packing& packing, std::byte* plain, std::byte* to) const;
  const Primitive& primitive(const Shape& shape);
  void multiply_dense(const Product& product);

  DType compute_;
  Weights weights_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  std::int64_t block_ = kBlockOutputs;
  std::mutex mutex_;  // guards the maps
  std::map<Shape, Primitive> primitives_;
  std::map<std::pair<std::int64_t, std::int64_t>, Packing> packings_;  // by inputs and outputs
};

}  // namespace sluice::cpu
