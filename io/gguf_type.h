// The element types of tensors in GGUF files: sizes of their blocks, and the weights in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "lib/weight_code.h"
#include "sluice/types.h"

namespace sluice {

// A type stores `block` weights of a row in `bytes` bytes.
struct GgufType {
  // Writes the weights of `blocks` blocks in fp32, in the order of operations of the reference, so
  // that they equal its weights bit for bit.
  using Decode = void (*)(const std::byte* from, std::int64_t blocks, float* to);
  // Writes the codes of one block, as many groups as it has. Their weights equal decoded ones, but
  // scales and offsets that are products are rounded to f16, and of two scales within a group the
  // smaller's codes are rounded to the other's quarter steps (Q6_K).
  using Groups = void (*)(const std::byte* block, CodedGroup* to);

  std::uint32_t id = 0;
  std::string_view name;  // "Q4_K"
  std::int64_t block = 1;
  std::int64_t bytes = 0;
  std::optional<DType> element = std::nullopt;  // of a type without blocks that is a DType
  Decode decode = nullptr;                      // null: Sluice does not decode the type
  WeightCode code = WeightCode::elements;       // the narrowest that has the codes of its blocks
  Groups groups = nullptr;                      // of a type with a code
};

// Null if the format has no type with this id.
// Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, ggml_type; block layouts:
// ggml/src/ggml-common.h and gguf-py/gguf/quants.py of llama.cpp.
const GgufType* find_gguf_type(std::uint32_t id);

// The names of the types that Sluice decodes, for messages.
inline constexpr std::string_view kDecodedGgufTypes =
    "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, IQ4_NL and IQ4_XS";

}  // namespace sluice
