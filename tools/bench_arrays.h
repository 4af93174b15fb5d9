// The files of `bench --arrays`: q, k and v of any model.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sluice/dtype.h"
#include "tools/bench_rows.h"

namespace sluice::tools {

// One array of four dimensions in a file.
struct ArrayFile {
  std::string name;  // for messages: the file and the tensor in it
  DType dtype = DType::f32;
  std::array<std::int64_t, 4> shape{};  // [layers, steps or tokens, heads, head_dim]
  std::function<void(std::uint64_t first, std::span<std::byte> to)> read;
};

// The arrays of a safetensors file with the tensors `q`, `k` and `v`, or of a folder with q.npy,
// k.npy and v.npy. Threads may share it.
class BenchArrays : public BenchRows {
 public:
  // Reads and checks headers. Throws Error{corrupt} naming file and tensor for missing tensors and
  // for shapes that are wrong or disagree, Error{unsupported} for dtypes and heads that Sluice does
  // not have, and what opening the files throws.
  static std::unique_ptr<BenchArrays> open(const std::filesystem::path& path);

  KvShape shape() const override;
  DType dtype(RowPart part) const override { return array(part).dtype; }
  void read(RowPart part, int layer, std::int64_t first, std::int64_t count,
            std::span<std::byte> to) const override;

  std::int64_t steps() const { return array(RowPart::q).shape[1]; }
  std::int64_t tokens() const { return array(RowPart::k).shape[1]; }
  // Tokens before the first step.
  std::int64_t context() const { return tokens() - steps(); }

  // A checksum of all elements and sizes, while `progress` gets the share done, 0 to 1. Throws
  // Error{numeric} naming tensor, layer and token of the first NaN or infinity.
  std::uint64_t check(const std::function<void(double)>& progress) const;

 private:
  explicit BenchArrays(std::vector<ArrayFile> files);
  const ArrayFile& array(RowPart part) const { return files_[static_cast<std::size_t>(part)]; }
  void require_shapes() const;

  std::vector<ArrayFile> files_;  // q, k, v
};

}  // namespace sluice::tools
