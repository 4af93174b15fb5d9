// Matrices of weights times many tokens: cuBLAS.
#pragma once

#include <memory>

#include "kernels/runtime/launch.h"
#include "lib/backend.h"

namespace sluice::cuda {

// cuBLAS is loaded when the first of these is made, so that a program that was built with CUDA
// starts without it.
class Gemm {
 public:
  // Throws Error{unsupported} if cuBLAS is not there.
  explicit Gemm(const Launch& launch);
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  ~Gemm();

  // `weight` [outputs, inputs], in the dtype of the inputs, stands for the params' own. Scratch
  // memory is the launch's.
  void run(const LinearParams& params, const void* weight);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::cuda
