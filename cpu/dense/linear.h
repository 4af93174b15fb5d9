// Matrix multiplication by weights: oneDNN's kernels, our threads.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "lib/backend/dense_ops.h"
#include "lib/backend/memory.h"

namespace sluice::cpu {

class Threads;

// Weights are packed once into oneDNN's layout, whose outermost dimension is the outputs: each
// thread has some of them. Few tokens, as in decode steps, are multiplied by kernels of our own.
//
// Weights of 16 bits that are computed with in f32 stay as they are; for many tokens a block of
// outputs at a time is widened.
class Linear {
 public:
  // `compute` is bf16 or f32: the dtype of the inputs. `stored` is what weights are stored in: the
  // same, or 16 bits to compute with in f32.
  Linear(Threads& threads, DType compute, DType stored);
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;
  ~Linear();

  // Bytes of packed weights.
  std::uint64_t packed_bytes(std::int64_t outputs, std::int64_t inputs) const;
  // What all threads together take to widen weights of so many inputs.
  std::uint64_t widened_bytes(std::int64_t inputs) const;
  // What all threads together take besides, for scratch of products by such a weight.
  std::uint64_t scratch_bytes(std::int64_t outputs, std::int64_t inputs) const;
  // The dtype of weights that are not packed; null if they are.
  std::optional<DType> dense_dtype() const;
  // Weights in memory of packed_bytes(), for write() to fill.
  std::unique_ptr<Weight> make_weight(std::int64_t outputs, std::int64_t inputs,
                                      Buffer memory) const;
  // Packs rows of any dtype, on the calling thread; see WriteWeightParams. Several threads
  // may write rows of one weight at a time.
  void write(const WriteWeightParams& params);
  // Outputs that are packed together.
  std::int64_t block_outputs() const;

  // x and y have dense rows.
  void run(const LinearParams& params);

  // Whether this processor multiplies bf16 faster than f32 (AVX512-BF16 or AMX).
  static bool bf16_is_fast();

  // What oneDNN calls its kernel for one token and for many; says "ref" if it has none for this
  // processor.
  std::string kernel_name(std::int64_t tokens, std::int64_t inputs, std::int64_t outputs) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::cpu
