// The model's shape and features, from the metadata of a GGUF file and the list of its tensors.
#pragma once

#include <vector>

#include "engine/config.h"
#include "io/gguf.h"

namespace sluice::gguf {

// `parts`: see open_gguf(). Reads the tensor rope_freqs.weight, if there is one, and no other.
// Throws Error{corrupt} naming the key, also where metadata contradicts a tensor, and
// Error{unsupported} naming an architecture or a feature that the decoder does not compute.
ModelConfig read_config(const std::vector<GgufFile>& parts);

// Returns true if the file has rows of q_proj and k_proj in pairs of channels (0, d/2, 1, d/2 + 1,
// ...), for a RoPE that turns neighbours, and not in halves as a folder has them.
bool has_paired_rows(const ModelConfig& config);

}  // namespace sluice::gguf
