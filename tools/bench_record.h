// Records what a model's attention gets, in the format that `bench --arrays` reads.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "io/file_draft.h"
#include "sluice/row_observer.h"
#include "sluice/types.h"
#include "tools/bench_rows.h"

namespace sluice::tools {

// Throws Error{usage} for a file that is there already unless `force`, and Error{io} if it cannot
// be written.
void require_recordable_to(const std::string& path, const std::string& flag, bool force);

// The keys and values of one sequence's context and steps, and the queries of its steps, in a
// safetensors file: queries in f32, keys and values as rows have them, or in f32 if rows are coded.
// Each is written to its place when it comes, so the recorder keeps a layer's rows of a step at
// most. The file replaces `path` in finish(); without it nothing stays.
class RowRecorder : public RowObserver {
 public:
  // Takes the disk space at once. Throws Error{io} if there is too little.
  RowRecorder(const std::filesystem::path& path, const KvShape& shape, std::int64_t context,
              std::int64_t steps);

  void observe(const ObservedRows& rows) override;
  void finish();

 private:
  // One tensor, [layers, rows, heads, head_dim].
  struct Tensor {
    DType dtype = DType::f32;
    int heads = 0;
    std::int64_t rows = 0;
    std::uint64_t offset = 0;  // in the file
  };

  std::uint64_t row_bytes(const Tensor& tensor) const;
  std::uint64_t bytes(const Tensor& tensor) const;
  // Places the tensors, and returns what stands before them.
  std::string place_tensors();
  void write(RowPart part, int layer, std::int64_t first, std::int64_t count, const float* from,
             std::int64_t stride);

  KvShape shape_;
  std::int64_t context_;
  std::array<Tensor, 3> tensors_;      // q, k, v
  std::vector<std::int64_t> written_;  // tokens, by layer
  std::vector<std::byte> buffer_;
  FileDraft draft_;
};

}  // namespace sluice::tools
