#include <algorithm>

#include "kernels/runtime/error.h"
#include "kernels/scan/tile_few.cuh"
#include "kernels/scan/tiles.h"
#include "lib/backend/index_ops.h"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

constexpr int kScanThreads = kScanWarps * kWarp;
constexpr int kTableThreads = 256;
constexpr int kTableBlocks = 16;  // of a multiprocessor

// One block a head.
__global__ void __launch_bounds__(kQueryThreads)
    prepare_kernel(const __grid_constant__ PrepareArgs a) {
  __shared__ Queries queries;
  const auto token = static_cast<int>(blockIdx.y);
  const auto kv_head = static_cast<int>(blockIdx.x);
  // In this order: a scan of tiles that begins early may copy tiles at once.
  wait_for_kernel_before();
  allow_next_kernel();
  load_queries(a.queries, a.queries.of(token, kv_head), queries);
  prepare_tiles(queries, a, token * static_cast<int>(gridDim.x) + kv_head, token);
}

// Notes where the candidates of every tile begin, and counts the pages of these tiles.
__global__ void __launch_bounds__(kTableThreads)
    table_kernel(const std::int32_t* positions, std::int64_t position_capacity,
                 const __grid_constant__ TileQueries to, std::int64_t most_tiles) {
  const auto head = static_cast<std::int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  wait_for_kernel_before();
  allow_next_kernel();
  const std::int32_t count = to.counts[head];
  const std::int32_t* const list = positions + head * position_capacity;
  const auto step = static_cast<std::int32_t>(gridDim.x * kTableThreads);
  std::int32_t tiles = 0;
  for (auto i = static_cast<std::int32_t>(blockIdx.x * kTableThreads + threadIdx.x); i < count;
       i += step) {
    const std::int32_t tile = list[i] / kTileTokens;
    if (i > 0 && list[i - 1] / kTileTokens == tile) continue;
    to.first[head * most_tiles + tile] = i;
    ++tiles;
  }
  if (to.read == nullptr) return;
  tiles = __reduce_add_sync(~0u, tiles);
  if (lane_id() == 0 && tiles > 0) atomicAdd(&to.read[head], tiles * kTilePages);
}

template <int kBits, TileScan kScan, int kQueries>
__global__ void __launch_bounds__(kScanThreads, kQueries <= 8 ? kScanBlocks : 2)
    scan_kernel(const __grid_constant__ TileScanArgs a) {
  constexpr bool kListed = kScan == TileScan::listed;
  constexpr int kColumns = kColumnTiles<kQueries>;
  using Shape = TileShape<kBits, kListed>;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ ScanTokens tokens;
  __shared__ std::uint64_t full[kScanWarps][Shape::kStages];
  find_tokens(a, Shape::kStaticEighths, tokens);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::uint32_t tables = table_bytes<kListed, kColumns>(a.pairs);
  std::byte* const mine =
      shared + kScanWarps * Shape::kRingBytes + static_cast<unsigned>(warp) * tables;
  WarpMemory memory{};
  memory.ring = shared + static_cast<unsigned>(warp) * Shape::kRingBytes;
  memory.fragments = reinterpret_cast<uint4*>(mine);
  memory.places = memory.fragments + a.pairs * kColumns * kWarp;
  memory.selectors = memory.places + a.pairs * kWarp;
  memory.scales = reinterpret_cast<std::uint32_t*>(memory.selectors + a.pairs * 4);
  memory.staged = reinterpret_cast<__half*>(shared + kScanWarps * (Shape::kRingBytes + tables)) +
                  warp * a.query_count * kTileTokens;
  memory.full = full[warp];
  scan_tiles<kBits, kScan, kQueries>(a, tokens, memory);
}

template <int kSteps>
__global__ void __launch_bounds__(kScanThreads, kScanBlocks)
    scan_few_kernel(const __grid_constant__ TileScanArgs a) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ ScanTokens tokens;
  find_tokens(a, FewShape::kStaticEighths, tokens);
  scan_few<kSteps>(a, tokens, few_memory(shared + threadIdx.x / kWarp * kFewBytes));
}

// A kernel that scans with `shared` bytes of shared memory a block.
void launch_kernel(void (*kernel)(TileScanArgs), std::size_t shared, const TileScanArgs& a,
                   const Launch& launch) {
  allow_shared_memory("tile scan", kernel, shared, *launch.device);  // also to be asked about
  int resident = 0;
  require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kScanThreads, shared),
          "tile scan");
  check(resident > 0, "tile scan: no block fits");
  const std::int64_t most = a.most_tiles * a.kv_heads * a.token_count;
  check(most <= kMostTiles, "tile scan: tiles");
  const std::int64_t useful = (most + kScanWarps - 1) / kScanWarps;
  const std::int64_t blocks =
      std::min<std::int64_t>(std::int64_t{launch.device->multiprocessors} * resident, useful);
  launch_early("tile scan", kernel, dim3(static_cast<unsigned>(blocks)), kScanThreads, shared,
               launch, a);
}

template <int kBits, TileScan kScan, int kQueries>
void launch_scan(const TileScanArgs& a, const Launch& launch) {
  constexpr bool kListed = kScan == TileScan::listed;
  std::size_t shared = kScanWarps * (TileShape<kBits, kListed>::kRingBytes +
                                     table_bytes<kListed, kColumnTiles<kQueries>>(a.pairs));
  if (a.has_candidates) {
    shared += kScanWarps * kTileTokens * sizeof(__half) * static_cast<unsigned>(a.query_count);
  }
  launch_kernel(scan_kernel<kBits, kScan, kQueries>, shared, a, launch);
}

// Whether scan_few() can do it.
bool is_few(const TileScanArgs& a, int bits) {
  return bits == 4 && a.pairs == 1 && a.query_count <= kSharedQueries && !a.has_candidates &&
         a.aligned;
}

void launch_few(const TileScanArgs& a, const Launch& launch) {
  const auto kernel = a.steps == 1 ? scan_few_kernel<1> : scan_few_kernel<2>;
  launch_kernel(kernel, kScanWarps * kFewBytes, a, launch);
}

// Whether a kernel is for 8 queries. Kernels take long to compile, so at 3 bits there is but one
// for what is scanned most, all channels of every tile; other scans take the next larger kernel, of
// whose columns half are idle then.
constexpr bool has_eight(int bits, TileScan scan) { return bits != 3 || scan == TileScan::all; }

// For how many queries the kernel is that scans for so many.
constexpr int width_of(int bits, TileScan scan, int queries) {
  if (queries <= kSharedQueries) return kSharedQueries;
  return queries <= 8 && has_eight(bits, scan) ? 8 : kMaxQueries;
}

template <int kBits, TileScan kScan>
void dispatch_queries(const TileScanArgs& a, const Launch& launch) {
  const int width = width_of(kBits, kScan, a.query_count);
  if (width == kSharedQueries) return launch_scan<kBits, kScan, kSharedQueries>(a, launch);
  if constexpr (has_eight(kBits, kScan)) {
    if (width == 8) return launch_scan<kBits, kScan, 8>(a, launch);
  }
  launch_scan<kBits, kScan, kMaxQueries>(a, launch);
}

template <int kBits>
void dispatch_scan(const TileScanArgs& a, TileScan scan, const Launch& launch) {
  if (scan == TileScan::listed) {
    dispatch_queries<kBits, TileScan::listed>(a, launch);
  } else if (scan == TileScan::candidates) {
    dispatch_queries<kBits, TileScan::candidates>(a, launch);
  } else {
    dispatch_queries<kBits, TileScan::all>(a, launch);
  }
}

int steps_of(const EstimateParams& p) {
  return (channels_of(p) + kStepChannels - 1) / kStepChannels;
}

// Whole steps of channels lie side by side; anything else is listed.
bool is_listed(const EstimateParams& p) {
  return channels_of(p) != p.shape.head_dim || p.shape.head_dim % kStepChannels != 0;
}

TileScan kind_of(const EstimateParams& p) {
  if (is_listed(p)) return TileScan::listed;
  return p.candidates != nullptr ? TileScan::candidates : TileScan::all;
}

// Takes pieces of the scratch memory; a first pass without memory counts them.
class Pieces {
 public:
  explicit Pieces(std::byte* base) : base_(base) {}

  template <typename T>
  T* take(std::int64_t count) {
    std::byte* const piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(piece);
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

TileQueries take_queries(const EstimateParams& p, Pieces& pieces) {
  const std::int64_t heads = p.batch.count * p.shape.kv_heads;
  TileQueries to{};
  const std::int64_t pairs = (steps_of(p) + 1) / 2;
  to.fragments = pieces.take<uint4>(heads * pairs * (kMaxQueries / 8) * kWarp);
  to.factors = pieces.take<float>(heads * kMaxQueries);
  to.places = pieces.take<uint4>(heads * pairs * kWarp);
  to.scales = pieces.take<std::uint32_t>(heads * pairs * kWarp);
  to.selectors = pieces.take<uint4>(heads * pairs * 4);
  to.counters = pieces.take<std::uint32_t>(kRunCounters);
  if (p.candidates != nullptr) {
    to.counts = pieces.take<std::int32_t>(heads);
    to.first = pieces.take<std::int32_t>(heads * most_tiles(p));
    to.read = p.pages_read;
  }
  return to;
}

void make_table(const EstimateParams& p, const TileQueries& to, const Launch& launch) {
  const std::int64_t heads = p.batch.count * p.shape.kv_heads;
  const std::int64_t useful = (p.candidates->capacity + kTableThreads - 1) / kTableThreads;
  const std::int64_t fit = kTableBlocks * launch.device->multiprocessors / heads;
  const std::int64_t blocks = std::clamp<std::int64_t>(fit, 1, std::max<std::int64_t>(useful, 1));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.shape.kv_heads),
                  static_cast<unsigned>(p.batch.count));
  launch_early("candidate table", table_kernel, grid, kTableThreads, 0, launch,
               p.candidates->positions, p.candidates->capacity, to, most_tiles(p));
}

TileScanArgs scan_args(const ScanPass& pass, const TileQueries& queries) {
  const EstimateParams& p = *pass.estimate;
  TileScanArgs a{};
  a.tokens = p.batch.tokens;
  a.token_count = static_cast<int>(p.batch.count);
  a.table = p.index.slots;
  a.table_stride = p.index.table_stride;
  a.kv_heads = p.shape.kv_heads;
  a.queries = queries;
  a.codes = p.index.tiles.codes;
  a.scales = p.index.tiles.scales;
  if (p.candidates != nullptr) {
    a.has_candidates = true;
    a.positions = p.candidates->positions;
    a.position_capacity = p.candidates->capacity;
  }
  a.logits = reinterpret_cast<__half*>(p.logits.data);
  a.digest = PageDigest::of(p.logits.digest);
  a.slots = p.index.tiles.slots;
  a.stride = p.logits.stride;
  a.most_tiles = most_tiles(p);
  a.head_dim = p.shape.head_dim;
  a.steps = steps_of(p);
  a.pairs = (a.steps + 1) / 2;
  a.group = p.shape.group();
  a.first_query = pass.first_query;
  a.query_count = pass.queries;
  a.aligned = p.logits.stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(p.logits.data) % 16 == 0;
  return a;
}

}  // namespace

std::int64_t most_tiles(const EstimateParams& p) {
  return (most_pages(p.batch) + kTilePages - 1) / kTilePages;
}

std::size_t tile_scan_scratch_bytes(const EstimateParams& p) {
  Pieces pieces(nullptr);
  take_queries(p, pieces);
  return pieces.used();
}

PrepareArgs prepare_args(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  PrepareArgs a{};
  a.queries = query_args(pass);
  check(tile_scan_scratch_bytes(p) <= launch.scratch_bytes, "tile scan: scratch");
  Pieces pieces(launch.scratch);
  a.to = take_queries(p, pieces);
  a.tokens = p.batch.tokens;
  a.candidates = p.candidates != nullptr ? p.candidates->heads : nullptr;
  a.most_tiles = most_tiles(p);
  a.steps = steps_of(p);
  const int width = width_of(p.index.tiles.bits, kind_of(p), pass.queries);
  a.column_tiles = width <= 8 ? 1 : 2;
  a.columns = std::min(width, 8);
  a.units = ListedUnits::of_bits(p.index.tiles.bits);
  a.listed = is_listed(p);
  return a;
}

void prepare_scan(const ScanPass& pass, const PrepareArgs& args, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(pass.estimate->shape.kv_heads),
                  static_cast<unsigned>(pass.estimate->batch.count));
  launch_early("prepare tile scan", prepare_kernel, grid, kQueryThreads, 0, launch, args);
}

void scan_tiles(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  Pieces pieces(launch.scratch);
  const TileQueries queries = take_queries(p, pieces);
  if (p.candidates != nullptr) make_table(p, queries, launch);
  const TileScanArgs a = scan_args(pass, queries);
  const TileScan kind = kind_of(p);
  if (kind == TileScan::listed && is_few(a, p.index.tiles.bits)) {
    launch_few(a, launch);
  } else if (p.index.tiles.bits == 4) {
    dispatch_scan<4>(a, kind, launch);
  } else if (p.index.tiles.bits == 3) {
    dispatch_scan<3>(a, kind, launch);
  } else {
    dispatch_scan<2>(a, kind, launch);
  }
}

}  // namespace sluice::cuda
