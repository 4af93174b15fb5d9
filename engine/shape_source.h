// A checkpoint without files: the tensors that a config calls for, in bf16, with no values. Plans
// need no more.
#pragma once

#include <memory>

#include "engine/checkpoint_source.h"

namespace sluice {

// Reading tensors, the tokenizer or the chat template throws Error{unsupported}.
std::unique_ptr<const CheckpointSource> make_shape_source(const ModelConfig& config);

}  // namespace sluice
