// Matrix multiplication by weights: oneDNN's kernels on our threads.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "lib/backend/dense_ops.h"
#include "lib/backend/memory.h"

namespace sluice::cpu {

class Threads;

// Weights are packed once into oneDNN's layout, whose outermost dimension is the outputs, so
// threads divide the outputs. Few tokens, as in decode steps, use our own kernels.
//
// 16-bit weights used for f32 products stay unpacked; for many tokens they are widened one block of
// outputs at a time.
class Linear {
 public:
  // `compute` is the dtype of the inputs, bf16 or f32. `stored` is the dtype of stored weights: the
  // same, or a 16-bit type if `compute` is f32.
  Linear(Threads& threads, DType compute, DType stored);
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;
  ~Linear();

  // The format of weights: elements that are stored as `stored`.
  WeightFormat format() const;
  // Bytes of packed weights.
  std::uint64_t packed_bytes(const WeightShape& shape) const;
  // Bytes that all threads together take to widen weights with `inputs` inputs.
  std::uint64_t widened_bytes(const WeightShape& shape) const;
  // Bytes that all threads together take as scratch for products with such a weight, in addition.
  std::uint64_t scratch_bytes(const WeightShape& shape) const;
  // The dtype of unpacked weights; nullopt if weights are packed.
  std::optional<DType> dense_dtype() const;
  // Weights in memory of packed_bytes(), for write() to fill.
  std::unique_ptr<Weight> make_weight(const WeightShape& shape, Buffer memory) const;
  // Packs rows of any dtype, on the calling thread; see WriteWeightParams. Several threads
  // may write rows of one weight at a time.
  void write(const WriteWeightParams& params);
  // Outputs that are packed together.
  std::int64_t block_outputs(const WeightFormat& format) const;

  // x and y have dense rows.
  void run(const LinearParams& params);

  // Returns true if this processor multiplies bf16 faster than f32 (AVX512-BF16 or AMX).
  static bool bf16_is_fast();

  // oneDNN's name of its kernel for this shape; contains "ref" if it has none for this processor.
  std::string kernel_name(std::int64_t tokens, std::int64_t inputs, std::int64_t outputs) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::cpu
