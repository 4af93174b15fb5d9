// Products with weights in 8 and 4 bits (coded_tile.h).
//
//   coded_rows      rows into tiles, and tiles into elements; embeddings
//   coding          elements into codes, while loading
//   coded_gemv      one or two tokens, and up to 8 whose inputs fit in shared memory. Codes are
//                   exact; a group's scale multiplies the sum over the group in f32.
//   coded_batch     up to 128 tokens, 64 at a time: weights are decoded in registers, rounded to
//                   the inputs' dtype, and multiplied on the tensor cores
//   coded           which way a product takes. More tokens decode parts of the matrix into scratch
//                   memory, for cuBLAS.
#pragma once

#include "kernels/dense/coded_tile.h"
#include "kernels/dense/dense.h"
#include "kernels/runtime/launch.h"
#include "lib/backend/dense_ops.h"

namespace sluice::cuda {

// Stores coded rows, which kernels can read, as the outputs from `first` on, a multiple of
// kTileOutputs.
void pack_rows(const CodedMatrix& to, std::int64_t first, const WeightRows& rows,
               const Launch& launch);
// The same for rows of elements, which it codes to the bits of encode_rows().
void code_rows(const CodedMatrix& to, std::int64_t first, const WeightRows& rows,
               const Launch& launch);
// Decodes outputs [first, first + rows), `first` a multiple of kTileOutputs, into elements
// [rows, inputs].
void unpack_rows(const CodedMatrix& from, std::int64_t first, std::int64_t rows, DType dtype,
                 void* to, const Launch& launch);
void embed_coded(const EmbedParams& params, const CodedMatrix& table, const Launch& launch);

// Returns true if coded_chain() supports this chain: one token in bf16 or f16, aligned to 16
// bytes, whose inputs fit in shared memory.
bool coded_chain_supported(const LinearChain& chain, const CodedMatrix& weight,
                           const DeviceLimits& device);
// Runs the whole chain in one kernel.
void coded_chain(const LinearChain& chain, const CodedMatrix& weight, const Launch& launch);

// Runs a product of any number of tokens. Uses the launch's scratch memory.
void multiply_coded(const LinearParams& params, const CodedMatrix& weight, Gemm& gemm,
                    const Launch& launch);

// The two ways of multiply_coded(), for measurements.
bool multiply_tiles_supported(const LinearParams& params);
void multiply_tiles(const LinearParams& params, const CodedMatrix& weight, const Launch& launch);
void multiply_unpacked(const LinearParams& params, const CodedMatrix& weight, Gemm& gemm,
                       const Launch& launch);

}  // namespace sluice::cuda
