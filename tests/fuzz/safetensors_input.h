// Safetensors files among the inputs of fuzzers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace sluice::fuzz {

// The same file with the header length that fits if the header ends at the last '}' of the file:
// most changes would otherwise be refused for the length alone.
inline std::string with_length(std::string_view file) {
  constexpr std::size_t kLengthBytes = 8;
  std::string right(file);
  if (right.size() < kLengthBytes) return right;
  const std::size_t end = right.rfind('}');
  std::uint64_t length =
      end == std::string::npos || end < kLengthBytes ? 0 : end + 1 - kLengthBytes;
  for (std::size_t i = 0; i < kLengthBytes; ++i, length >>= 8) {
    right[i] = static_cast<char>(length & 0xFFu);
  }
  return right;
}

}  // namespace sluice::fuzz
