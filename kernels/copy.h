// Moving small pieces and single rows with kernels: the copy engine takes microseconds for each.
#pragma once

#include <span>

#include "kernels/heads.h"
#include "kernels/launch.h"
#include "lib/backend.h"
#include "lib/selection.h"

namespace sluice::cuda {

// Pieces of any number and alignment, on the device or in mapped host memory.
void copy_pieces(std::span<const CopyOp> ops, const Launch& launch);

// Rows of every head that are named by ascending positions, into consecutive rows. Ascending
// addresses keep address translation for host memory in its caches, and a few blocks saturate
// PCIe, so that the rest of the device can compute meanwhile.
struct GatherParams {
  std::size_t row_bytes = 0;  // a multiple of 16
  int kv_heads = 0;
  const std::int32_t* positions = nullptr;  // [kv_heads, capacity], from the first row to gather on
  std::int64_t capacity = 0;
  HeadCounts counts;  // rows to gather of each head
  HeadSources sources;
  std::byte* to = nullptr;  // [kv_heads, to_rows, row_bytes]
  std::int64_t to_rows = 0;
  int blocks = 16;
};
void gather(const GatherParams& params, const Launch& launch);

}  // namespace sluice::cuda
