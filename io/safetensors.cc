#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>

#include "lib/check.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::uint64_t kLengthBytes = 8;

[[noreturn]] void throw_corrupt(const File& file, const std::string& what) {
  throw Error(ErrorCode::corrupt, file.path().string() + ": " + what + "; download it again");
}

// The first 8 bytes: the length of the header, little-endian.
std::uint64_t header_length(const File& file) {
  if (file.size() < kLengthBytes) {
    throw_corrupt(file,
                  "has " + std::to_string(file.size()) + " bytes, too few for a safetensors file");
  }
  std::array<std::byte, kLengthBytes> bytes{};
  file.read(0, bytes);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::to_integer<std::uint64_t>(bytes.at(i)) << (8 * i);
  }
  if (length > kMaxSafetensorsHeader) {
    std::string start(static_cast<std::size_t>(std::min<std::uint64_t>(file.size(), 32)), '\0');
    file.read(0, std::as_writable_bytes(std::span(start)));
    require_not_lfs_pointer(file.path(), start);
    throw_corrupt(file, "is not a safetensors file: its header would have " +
                            std::to_string(length) + " bytes, more than the format allows");
  }
  if (length > file.size() - kLengthBytes) {
    throw_corrupt(file, "ends inside its header of " + std::to_string(length) + " bytes");
  }
  return length;
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  File file = File::open(path);
  const std::uint64_t length = header_length(file);
  std::string header(static_cast<std::size_t>(length), '\0');
  file.read(kLengthBytes, std::as_writable_bytes(std::span(header)));
  const std::uint64_t data_offset = kLengthBytes + length;
  TensorMap tensors = parse_safetensors_header(header, file.size() - data_offset, path);
  return {std::move(file), std::move(tensors), data_offset};
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

void SafetensorsFile::require_loadable(const TensorInfo& tensor) const {
  if (tensor.dtype) return;
  throw Error(ErrorCode::unsupported, path().string() + ": tensor " + in_quotes(tensor.name) +
                                          " is " + tensor.stored_dtype +
                                          "; convert it to F32, F16 or BF16, which Sluice loads");
}

void SafetensorsFile::read(const TensorInfo& tensor, std::uint64_t first,
                           std::span<std::byte> destination) const {
  require_loadable(tensor);
  read_stored(tensor, first, destination);
}

void SafetensorsFile::read_stored(const TensorInfo& tensor, std::uint64_t first,
                                  std::span<std::byte> destination) const {
  check(find(tensor.name) == &tensor, "a tensor of another file");
  check(first <= tensor.bytes() && destination.size() <= tensor.bytes() - first,
        "more than the tensor was to be read");
  file_.read(data_offset_ + tensor.begin + first, destination);
}

}  // namespace sluice
