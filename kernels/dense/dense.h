// Operations of a decoder besides attention.
//
//   elementwise   embeddings; then, per layer, norms, rotations, conversions and activations of
//                 their own, where a product does not take them along
//   gemv          weights times one token, with the norm or cast before it and the activation after
//                 it in the same launch: reading the weights once is all that takes time
//   gemm          weights times more tokens, or shapes that gemv does not take: cuBLAS
//   sample        draws the next tokens from the logits
#pragma once

#include <memory>
#include <span>

#include "kernels/runtime/launch.h"
#include "lib/backend/dense_ops.h"

namespace sluice::cuda {

void embed(const EmbedParams& params, const Launch& launch);
void rms_norm(const RmsNormParams& params, const Launch& launch);
void rope(const RopeParams& params, const Launch& launch);
void swiglu(const SwigluParams& params, const Launch& launch);
void cast(const CastParams& params, const Launch& launch);
void read_heads(const ReadHeadsParams& params, const Launch& launch);
// y[row] = bias, or y[row] += bias.
void add_bias(const float* bias, const Matrix& y, bool accumulate, const Launch& launch);

// Returns true if gemv() takes this chain: one token, rows in units of 16 bytes, inputs that fit a
// multiprocessor beside the weights under way.
bool gemv_supported(const LinearChain& chain, const DeviceLimits& device);
// The whole chain. `weight` [outputs, inputs], in the dtype of the product's inputs, stands for the
// chain's own.
void gemv(const LinearChain& chain, const void* weight, const Launch& launch);

// cuBLAS is loaded when the first of these is made, so that a program that was built with CUDA
// starts without it.
class Gemm {
 public:
  // Throws Error{unsupported} if cuBLAS is not installed.
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

inline constexpr int kSampleRows = 64;  // of one launch: 2.5 KiB of arguments

// As draw_token() of each row, with top-p and min-p in f32: up to kSampleRows. `results` are
// reported, `params` host arrays.
void sample(const Matrix& logits, std::span<const TokenDraw> params, SampledToken* results,
            const Launch& launch);

}  // namespace sluice::cuda
