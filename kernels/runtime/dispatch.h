// Turns run-time element types and head dimensions into constants.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>
#include <type_traits>

#include "sluice/errors.h"
#include "sluice/types.h"

namespace sluice::cuda {

// Calls body(T()) with the element type of rows, __nv_bfloat16 or __half.
template <typename Body>
void dispatch_rows(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::bf16:
      return body(__nv_bfloat16());
    case DType::f16:
      return body(__half());
    case DType::f32:
      break;
  }
  throw Error(ErrorCode::unsupported, "the CUDA backend keeps rows in bf16 or f16, not f32");
}

// Calls body(std::integral_constant<int, d>()).
template <typename Body>
void dispatch_head_dim(int head_dim, const Body& body) {
  switch (head_dim) {
    case 32:
      return body(std::integral_constant<int, 32>());
    case 64:
      return body(std::integral_constant<int, 64>());
    case 80:
      return body(std::integral_constant<int, 80>());
    case 96:
      return body(std::integral_constant<int, 96>());
    case 128:
      return body(std::integral_constant<int, 128>());
    case 256:
      return body(std::integral_constant<int, 256>());
    default:
      break;
  }
  throw Error(ErrorCode::unsupported, "the CUDA backend has no attention for head_dim " +
                                          std::to_string(head_dim) +
                                          "; it has 32, 64, 80, 96, 128 and 256");
}

}  // namespace sluice::cuda
