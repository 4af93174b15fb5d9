// Reads the array of one file in numpy's format, as numpy.save() writes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "io/file.h"
#include "sluice/dtype.h"

namespace sluice {

struct NpyHeader {
  DType dtype = DType::f32;         // f32 or f16: numpy has no bf16
  std::vector<std::int64_t> shape;  // row-major; empty for a scalar

  std::uint64_t bytes() const;  // of the array
};

// Reads the text of a header, a Python dict of a dtype, an order and a shape. Throws Error{corrupt}
// naming `path` if it contradicts the format or if the bytes of its shape overflow;
// Error{unsupported} for a dtype other than little-endian f4 and f2, and for Fortran order.
// Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
NpyHeader parse_npy_header(std::string_view text, const std::filesystem::path& path);

// Its array can be read from several threads.
class NpyFile {
 public:
  // Reads and checks the header, in format 1.0, 2.0 or 3.0. Throws what parse_npy_header() and File
  // throw, and Error{corrupt} unless the file has as many bytes as its shape takes.
  static NpyFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  DType dtype() const { return header_.dtype; }
  std::span<const std::int64_t> shape() const { return header_.shape; }
  std::uint64_t bytes() const { return header_.bytes(); }  // of the array

  // Fills `destination` with bytes of the array, from its byte `first` on. Throws Error{io} if
  // reading fails.
  void read(std::uint64_t first, std::span<std::byte> destination) const;
  // As File::require_unchanged().
  void require_unchanged() const { file_.require_unchanged(); }

 private:
  NpyFile(File file, NpyHeader header, std::uint64_t data_offset)
      : file_(std::move(file)), header_(std::move(header)), data_offset_(data_offset) {}

  File file_;
  NpyHeader header_;
  std::uint64_t data_offset_;  // where the array starts in the file
};

}  // namespace sluice
