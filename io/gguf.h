// Reads the metadata and the tensors of one GGUF file (version 3, little-endian).
//
//   "GGUF", version, number of tensors, number of keys
//   keys and values
//   tensors: name, dimensions (fastest first), type, offset in the data
//   padding, and the data from a multiple of general.alignment on
//
// Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"
#include "io/gguf_metadata.h"
#include "io/gguf_type.h"

namespace sluice {

struct GgufTensor {
  std::string name;
  const GgufType* type = nullptr;
  std::vector<std::int64_t> shape;  // row-major, the reverse of the file's order
  std::uint64_t begin = 0;          // byte of the file
  std::uint64_t bytes = 0;

  std::int64_t elements() const;  // the product of the shape
};

using GgufTensors = std::map<std::string, GgufTensor, std::less<>>;

// The longest header that is read: metadata, which has the vocabulary, and the list of tensors.
// Those in use have up to 20 MiB.
inline constexpr std::uint64_t kMaxGgufHeader = std::uint64_t{64} << 20;

// Its tensors can be read from several threads.
class GgufFile {
 public:
  // Reads and checks everything before the data; memory grows only with what has been checked.
  // Throws Error{corrupt} if the file contradicts the format, tensors overlap, run past the end or
  // are not aligned, Error{unsupported} for another version, a big-endian file or a type that the
  // format does not have, and what File throws.
  static GgufFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const GgufMetadata& metadata() const { return metadata_; }
  const GgufTensors& tensors() const { return tensors_; }

  // Fills `destination` with a tensor of this file as it is stored, from its byte `first` on.
  // Throws Error{io} if reading fails.
  void read(const GgufTensor& tensor, std::uint64_t first, std::span<std::byte> destination) const;
  // As File::require_unchanged().
  void require_unchanged() const { file_.require_unchanged(); }

 private:
  GgufFile(File file, GgufMetadata metadata, GgufTensors tensors)
      : file_(std::move(file)), metadata_(std::move(metadata)), tensors_(std::move(tensors)) {}

  File file_;
  GgufMetadata metadata_;
  GgufTensors tensors_;
};

// The file, or all files of a model that was split ("x-00001-of-00003.gguf"), in their order.
// `path` is the first. Throws as GgufFile::open(), Error{not_found} if a part is missing, and
// Error{corrupt} if the parts contradict each other or two have a tensor of the same name.
std::vector<GgufFile> open_gguf(const std::filesystem::path& path);

}  // namespace sluice
