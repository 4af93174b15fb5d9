// The header of a safetensors file: which tensors it has and where they lie.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/types.h"

namespace sluice {

struct TensorInfo {
  std::string name;
  std::string stored_dtype;         // as the file spells it: "BF16", "I64"
  std::optional<DType> dtype;       // empty for a dtype that Sluice does not load
  std::vector<std::int64_t> shape;  // row-major; empty for a scalar
  std::uint64_t begin = 0;          // bytes [begin, end) of the data section
  std::uint64_t end = 0;

  std::uint64_t bytes() const { return end - begin; }
  std::int64_t elements() const;  // the product of the shape
};

using TensorMap = std::map<std::string, TensorInfo, std::less<>>;

// Reads the JSON of a header whose data section has `data_bytes`. What it returns is consistent:
// every tensor's byte range has the size that dtype and shape give, and the ranges cover the data
// section without overlap or hole. Memory grows only with what has been checked.
// Throws Error{corrupt} naming `file` and the tensor.
// Source: https://github.com/huggingface/safetensors#format
TensorMap parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                   const std::filesystem::path& file);

}  // namespace sluice
