// The names of tensors in GGUF files and in Hugging Face checkpoints.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace sluice::gguf {

inline constexpr std::string_view kEmbedding = "token_embd.weight";
inline constexpr std::string_view kHead = "output.weight";
inline constexpr std::string_view kRopeFactors = "rope_freqs.weight";

// The tensor `part` ("attn_q.bias") of a layer.
std::string layer_tensor(int layer, std::string_view part);

// The other format's name for a tensor; nothing if it has none.
// Source: gguf-py/gguf/tensor_mapping.py of llama.cpp.
std::optional<std::string> folder_name(std::string_view gguf_name);
std::optional<std::string> gguf_name(std::string_view folder_name);

}  // namespace sluice::gguf
