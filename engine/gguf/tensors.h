// The tensors of GGUF files as a Hugging Face checkpoint has them: under its names, decoded to one
// element type, and with the rows of queries and keys in its order.
#pragma once

#include <memory>
#include <vector>

#include "engine/config.h"
#include "engine/tensor_source.h"
#include "io/gguf.h"

namespace sluice::gguf {

// Matrices that are F32, F16 or BF16 in the file decide the dtype of all: their own, or f32 if they
// differ. Blocks are decoded to it, to bf16 in a file that has nothing else. Vectors keep theirs.
std::unique_ptr<const TensorSource> make_tensor_source(
    std::shared_ptr<const std::vector<GgufFile>> parts, const ModelConfig& config);

}  // namespace sluice::gguf
