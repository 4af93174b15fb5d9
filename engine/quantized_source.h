// Weights of a quantised Hugging Face checkpoint, decoded while they are read.
#pragma once

#include <memory>

#include "engine/quantization.h"
#include "engine/tensor_source.h"

namespace sluice {

// Has the weights that the tensors of `stored` stand for, in the place of those tensors, in the
// element type that the checkpoints are computed in: that of the scales, or bf16 if these are fp32.
// A weight is the product of its scale and its code less its zero in fp32, rounded once.
// `stored` must read tensors of any type. Throws Error{corrupt} naming a tensor that is missing or
// has another shape, a scale that is NaN or infinite, and Error{unsupported} for groups whose order
// is not that of the inputs. Reads scales and orders, but no codes.
std::unique_ptr<const TensorSource> make_quantized_source(
    std::unique_ptr<const TensorSource> stored, const Quantization& how);

}  // namespace sluice
