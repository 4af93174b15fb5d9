// Products with coded weights. Kernels that decode in registers serve few tokens; for many, oneDNN
// multiplies by tiles of outputs widened to the compute dtype, because oneDNN decodes weights
// itself only from version 3.1 on and Debian 12 has 2.6.
#pragma once

#include <memory>

#include "cpu/dense/coded_weights.h"
#include "cpu/dense/onednn.h"
#include "lib/backend/dense_ops.h"
#include "lib/backend/memory.h"

namespace sluice::cpu {

class Threads;

class CodedWeight : public Weight {
 public:
  CodedWeight(const WeightShape& shape, Buffer memory)
      : memory_(std::move(memory)),
        matrix_{memory_.data(), shape.format, shape.outputs, shape.inputs} {}

  std::int64_t outputs() const override { return matrix_.outputs; }
  std::int64_t inputs() const override { return matrix_.inputs; }
  const CodedMatrix& matrix() const { return matrix_; }

 private:
  Buffer memory_;
  CodedMatrix matrix_;
};

class CodedLinear {
 public:
  // `compute` is bf16 or f32: the dtype of the inputs.
  CodedLinear(Threads& threads, DType compute);

  static std::uint64_t bytes(const WeightShape& shape) {
    return CodedMatrix::bytes(shape.format, shape.outputs, shape.inputs);
  }
  // Bytes that all threads together take for widened tiles of such a weight, and keep.
  std::uint64_t widened_bytes(const WeightShape& shape) const;
  // Scratch bytes of all threads together for products with such a weight, in addition.
  std::uint64_t scratch_bytes(const WeightShape& shape) const;

  // Writes rows in the weight's own format; see WriteWeightParams.
  static void write(const CodedWeight& weight, std::int64_t first, const WeightRows& rows);
  // x and y have dense rows.
  void run(const LinearParams& params, const CodedWeight& weight);

 private:
  void multiply_few(const LinearParams& params, const CodedMatrix& weights);
  void multiply_many(const LinearParams& params, const CodedMatrix& weights);

  Threads* threads_;
  DType compute_;
  OneDnn onednn_;
};

}  // namespace sluice::cpu
