// Operations of a decoder besides attention.
//
//   elementwise   embeddings; per layer, the norms, rotations, conversions and activations that are
//                 not part of a product's launch
//   gemv          weights times one token, with the norm or cast before it and the activation after
//                 it in the same launch, so that it takes as long as reading the weights once
//   gemm          weights times more tokens, or shapes that gemv does not take: cuBLAS
//   coded         weights in 8 and 4 bits: coded.h
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

// Returns true if gemv() supports this chain: one token, rows in units of 16 bytes, inputs that fit
// in shared memory beside the weights in flight.
bool gemv_supported(const LinearChain& chain, const DeviceLimits& device);
// Runs the whole chain. `weight` [outputs, inputs], in the dtype of the product's inputs, replaces
// the chain's own.
void gemv(const LinearChain& chain, const void* weight, const Launch& launch);

// cuBLAS is loaded when the first Gemm is constructed, so that a program built with CUDA starts
// without it.
class Gemm {
 public:
  // Throws Error{unsupported} if cuBLAS is not installed.
  explicit Gemm(const Launch& launch);
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  ~Gemm();

  // `weight` [outputs, inputs], in the dtype of the inputs, replaces the params' own. Uses the
  // workspace: all of the launch's scratch memory, if no other was set.
  void run(const LinearParams& params, const void* weight);
  void set_workspace(std::byte* data, std::size_t bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

inline constexpr int kSampleRows = 64;  // per launch: 2.5 KiB of arguments

// Draws like draw_token() for each of up to kSampleRows rows, with top-p and min-p in f32.
// `results` are reported; `params` are host arrays.
void sample(const Matrix& logits, std::span<const TokenDraw> params, SampledToken* results,
            const Launch& launch);

}  // namespace sluice::cuda
