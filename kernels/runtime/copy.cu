#include <cstdint>

#include "kernels/runtime/copy.h"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/error.h"
#include "kernels/runtime/paged.cuh"

namespace sluice::cuda {
namespace {

constexpr int kPieces = 64;  // per launch: 1.5 KiB of arguments
constexpr int kCopyThreads = 256;
constexpr std::size_t kPieceBytes = 32 << 10;  // per block
constexpr int kGatherThreads = 512;
constexpr int kGatherAhead = 2;  // loads in flight per thread

struct Pieces {
  CopyOp ops[kPieces];
  int blocks_before[kPieces + 1];  // blocks of the pieces before each
  int count = 0;
};

__device__ bool aligned_16(const CopyOp& op) {
  return ((reinterpret_cast<std::uintptr_t>(op.to) | reinterpret_cast<std::uintptr_t>(op.from) |
           op.bytes) &
          15) == 0;
}

template <typename Word>
__device__ void copy_words(const CopyOp& op, std::size_t first, std::size_t last) {
  auto* const to = reinterpret_cast<Word*>(op.to);
  const auto* const from = reinterpret_cast<const Word*>(op.from);
  for (std::size_t i = first / sizeof(Word) + threadIdx.x; i < last / sizeof(Word);
       i += kCopyThreads) {
    to[i] = from[i];
  }
}

// The next kernel does not begin early, because it may read the copied data before it waits for
// others, as kernels of a step do with data that stays the same during the step.
__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const __grid_constant__ Pieces pieces) {
  const int block = static_cast<int>(blockIdx.x);
  int piece = 0;
  while (pieces.blocks_before[piece + 1] <= block) ++piece;
  const CopyOp& op = pieces.ops[piece];
  const std::size_t first =
      static_cast<std::size_t>(block - pieces.blocks_before[piece]) * kPieceBytes;
  const std::size_t last = min(op.bytes, first + kPieceBytes);
  wait_for_kernel_before();
  if (aligned_16(op)) {
    copy_words<uint4>(op, first, last);
  } else {
    copy_words<std::uint8_t>(op, first, last);
  }
}

void launch_pieces(Pieces& pieces, const Launch& launch) {
  if (pieces.count == 0) return;
  launch_early("a copy of small pieces", copy_kernel,
               dim3(static_cast<unsigned>(pieces.blocks_before[pieces.count])), kCopyThreads, 0,
               launch, pieces);
  pieces.count = 0;
}

struct GatherArgs {
  std::int64_t row_bytes = 0;  // a multiple of 16
  int kv_heads = 0;
  PagedRows rows;
  std::int32_t sequence = 0;
  const std::int32_t* positions = nullptr;  // [count]
  std::int64_t count = 0;
  std::byte* to = nullptr;  // [kv_heads, to_rows, row_bytes]
  std::int64_t to_rows = 0;
};

__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ GatherArgs p) {
  wait_for_kernel_before();
  allow_next_kernel();
  const PageSlots* const table = page_table_of(p.rows, p.sequence);
  const std::int64_t chunks_of_row = p.row_bytes / static_cast<std::int64_t>(sizeof(uint4));
  const std::int64_t chunks = p.count * p.kv_heads * chunks_of_row;
  const std::int64_t stride = std::int64_t{kGatherThreads} * gridDim.x;
  const std::int64_t self = std::int64_t{kGatherThreads} * blockIdx.x + threadIdx.x;
  for (std::int64_t first = self; first < chunks; first += stride * kGatherAhead) {
    uint4 data[kGatherAhead];
    std::byte* to[kGatherAhead];
#pragma unroll
    for (int i = 0; i < kGatherAhead; ++i) {
      const std::int64_t chunk = first + i * stride;
      to[i] = nullptr;
      if (chunk >= chunks) continue;
      const std::int64_t row = chunk / chunks_of_row;
      const std::int64_t column = chunk % chunks_of_row * static_cast<std::int64_t>(sizeof(uint4));
      const int head = static_cast<int>(row / p.count);
      const std::int64_t number = row % p.count;
      const std::int32_t position = p.positions[number];
      const PageSlots page = table[position / kPageTokens];
      const std::byte* const from = row_of(p.rows, page, head, position, p.row_bytes);
      data[i] = __ldcs(reinterpret_cast<const uint4*>(from + column));
      to[i] = p.to + (head * p.to_rows + number) * p.row_bytes + column;
    }
#pragma unroll
    for (int i = 0; i < kGatherAhead; ++i) {
      if (to[i] != nullptr) *reinterpret_cast<uint4*>(to[i]) = data[i];
    }
  }
}

__global__ void fence_kernel() {}

__global__ void note_time_kernel(std::uint64_t* to) {
  std::uint64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  *to = now;
}

constexpr int kPackThreads = 256;

// One block per token.
struct PackArgs {
  const std::int32_t* positions = nullptr;  // [count]
  std::int64_t first = 0;
  std::int64_t width = 0;
  const float* from = nullptr;
  float* to = nullptr;
  std::int64_t stride = 0;  // of the piece
};

template <bool kPacks>
__global__ void __launch_bounds__(kPackThreads) pack_kernel(const __grid_constant__ PackArgs p) {
  const std::int64_t packed = static_cast<std::int64_t>(blockIdx.x) * p.width;
  const std::int64_t piece = (p.positions[blockIdx.x] - p.first) * p.stride;
  const float* const from = p.from + (kPacks ? piece : packed);
  float* const to = p.to + (kPacks ? packed : piece);
  for (std::int64_t i = threadIdx.x; i < p.width; i += kPackThreads) to[i] = from[i];
}

}  // namespace

void pack_tokens(const PackTokensParams& p, const Launch& launch) {
  if (p.count == 0) return;
  const PackArgs args = {p.positions, p.first, p.width, p.piece, p.packed, p.stride};
  pack_kernel<true><<<static_cast<unsigned>(p.count), kPackThreads, 0, launch.stream>>>(args);
  require_launch("pack_tokens");
}

void unpack_tokens(const UnpackTokensParams& p, const Launch& launch) {
  const std::size_t bytes = static_cast<std::size_t>(p.tokens * p.width) * sizeof(float);
  if (p.clear) require(cudaMemsetAsync(p.piece, 0, bytes, launch.stream), "memset");
  if (p.count == 0) return;
  const PackArgs args = {p.positions, p.first, p.width, p.packed, p.piece, p.width};
  pack_kernel<false><<<static_cast<unsigned>(p.count), kPackThreads, 0, launch.stream>>>(args);
  require_launch("unpack_tokens");
}

void fence(const Launch& launch) {
  fence_kernel<<<1, 1, 0, launch.stream>>>();
  require_launch("a fence");
}

// Launched in plain order: kernels before it are over, and those after it have not begun.
void note_time(std::uint64_t* to, const Launch& launch) {
  note_time_kernel<<<1, 1, 0, launch.stream>>>(to);
  require_launch("note_time");
}

void copy_pieces(std::span<const CopyOp> ops, const Launch& launch) {
  Pieces pieces;
  pieces.blocks_before[0] = 0;
  for (const CopyOp& op : ops) {
    if (op.bytes == 0) continue;
    pieces.ops[pieces.count] = op;
    const auto blocks = static_cast<int>((op.bytes + kPieceBytes - 1) / kPieceBytes);
    pieces.blocks_before[pieces.count + 1] = pieces.blocks_before[pieces.count] + blocks;
    if (++pieces.count == kPieces) launch_pieces(pieces, launch);
  }
  launch_pieces(pieces, launch);
}

void gather(const GatherParams& p, const Launch& launch, int blocks) {
  if (p.count == 0) return;
  GatherArgs args;
  args.row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
  args.kv_heads = p.shape.kv_heads;
  args.rows = p.rows;
  args.sequence = p.sequence;
  args.positions = p.positions;
  args.count = p.count;
  args.to = p.to;
  args.to_rows = p.to_rows;
  launch_early("gather", gather_kernel, dim3(static_cast<unsigned>(blocks)), kGatherThreads, 0,
               launch, args);
}

}  // namespace sluice::cuda
