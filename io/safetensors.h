// Reads the tensors of one safetensors file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

#include "io/file.h"
#include "io/safetensors_header.h"

namespace sluice {

// The longest header that the format allows.
inline constexpr std::uint64_t kMaxSafetensorsHeader = 100'000'000;

// Its tensors can be read from several threads.
class SafetensorsFile {
 public:
  // Reads and checks the header; see parse_safetensors_header. Throws Error{corrupt} if the file
  // contradicts the format, and what File throws.
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const TensorMap& tensors() const { return tensors_; }
  // Null if the file has no such tensor. Valid as long as the file, also when that is moved.
  const TensorInfo* find(std::string_view name) const;

  // Throws Error{unsupported} unless the tensor's dtype is F32, F16 or BF16.
  void require_loadable(const TensorInfo& tensor) const;

  // Fills `destination` with a tensor of this file as it is stored, from its byte `first` on.
  // Throws Error{unsupported} unless its dtype is F32, F16 or BF16, Error{io} if reading fails.
  void read(const TensorInfo& tensor, std::uint64_t first, std::span<std::byte> destination) const;
  // The same for a tensor of any dtype.
  void read_stored(const TensorInfo& tensor, std::uint64_t first,
                   std::span<std::byte> destination) const;
  // As File::require_unchanged().
  void require_unchanged() const { file_.require_unchanged(); }

 private:
  SafetensorsFile(File file, TensorMap tensors, std::uint64_t data_offset)
      : file_(std::move(file)), tensors_(std::move(tensors)), data_offset_(data_offset) {}

  File file_;
  TensorMap tensors_;
  std::uint64_t data_offset_;  // where the data section starts in the file
};

}  // namespace sluice
