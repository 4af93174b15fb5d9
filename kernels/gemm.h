// Matrices of weights times many tokens: cuBLAS.
#pragma once

#include <memory>

#include "kernels/gemv.h"
#include "kernels/launch.h"

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

  // The same as gemv() for any number of tokens. Its scratch memory is the launch's.
  void run(const GemvParams& params);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::cuda
