#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/attention/prefill_common.cuh"
#include "kernels/runtime/error.h"
#include "kernels/runtime/rows.cuh"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

constexpr int kMergeWarps = 4;

// One warp for each query: `rows` of [tokens, query_heads].
__global__ void __launch_bounds__(kMergeWarps* kWarp)
    merge_kernel(const __grid_constant__ PrefillArgs args) {
  const std::int64_t rows = static_cast<std::int64_t>(args.tokens) * args.kv_heads * args.group;
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * kMergeWarps + threadIdx.x / kWarp;
  if (row >= rows) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float here = kNoLogit;
  for (int split = 0; split < args.splits; ++split) {
    here = merge_weights(here, args.split_lse[split * rows + row]).lse;
  }
  const float before = args.merge ? args.lse[row] : kNoLogit;
  __syncwarp();
  const bool empty = here == kNoLogit;
  if (empty && args.merge) return;
  const MergeWeights weights = merge_weights(before, here);
  float* const out = args.out + row * args.head_dim;
  for (int c = lane; c < args.head_dim; c += kWarp) {
    float value = weights.before == 0 ? 0.0f : weights.before * out[c];
    for (int split = 0; split < args.splits && !empty; ++split) {
      const float lse = args.split_lse[split * rows + row];
      if (lse == kNoLogit) continue;
      const float weight = expf(lse - weights.lse);
      value = fmaf(weight, args.split_out[(split * rows + row) * args.head_dim + c], value);
    }
    out[c] = value;
  }
  if (lane == 0) args.lse[row] = weights.lse;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The fewest splits that fill the waves of thread blocks about as well as any number does: the idea
// of num_splits_heuristic() in FlashAttention-2.
int choose_splits(std::int64_t items, std::int64_t slots, std::int64_t most) {
  constexpr double kGoodEnough = 0.9;
  if (items * 5 >= slots * 4) return 1;
  const auto efficiency = [&](std::int64_t splits) {
    const std::int64_t blocks = items * splits;
    return static_cast<double>(blocks) / static_cast<double>(ceil_div(blocks, slots) * slots);
  };
  double best = 0;
  for (std::int64_t n = 1; n <= most; ++n) best = std::max(best, efficiency(n));
  std::int64_t splits = 1;
  while (splits < most && efficiency(splits) < kGoodEnough * best) ++splits;
  return static_cast<int>(splits);
}

PrefillArgs args_of(const AttendParams& p) {
  PrefillArgs args;
  args.q = p.q;
  args.out = p.out;
  args.lse = p.lse;
  args.rows = head_rows(p.rows);
  args.q_stride = p.q_stride;
  args.seen = p.seen;
  args.listed = p.listed;
  args.first_page = static_cast<int>(p.first_row_position / kPageTokens);
  args.first_visible = (p.seen != nullptr ? 0 : p.first_query_position + 1) - p.first_row_position;
  args.row_bytes = static_cast<int>(p.shape.row_bytes());
  args.head_dim = p.shape.head_dim;
  args.tokens = static_cast<int>(p.tokens);
  args.kv_heads = p.shape.kv_heads;
  args.group = p.shape.group();
  args.scale = p.scale * kLog2E;
  args.q_aligned = reinterpret_cast<std::uintptr_t>(p.q) % 16 == 0 && p.q_stride % 4 == 0 &&
                   p.shape.head_dim % 4 == 0;
  args.merge = p.merge;
  return args;
}

void check_params(const AttendParams& p) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;
  check(p.shape.kv_heads > 0 && p.shape.query_heads % p.shape.kv_heads == 0,
        "attend_prefill: query heads in groups");
  check(p.rows.size() == static_cast<std::size_t>(p.shape.kv_heads),
        "attend_prefill: rows of every KV head");
  check(p.window == 0, "attend_prefill: a window");
  check(p.scale > 0.0f, "attend_prefill: the scale");  // hidden logits are -inf and stay so
  check(p.tokens * p.shape.group() <= kMost, "attend_prefill: too many tokens");
  check(!p.listed.exist() || (p.seen == nullptr && p.first_row_position % kPageTokens == 0 &&
                              p.listed.blocks == PageLists::blocks_of(p.tokens)),
        "attend_prefill: lists of pages");
  check(p.rows[0].count <= kMost, "attend_prefill: too many rows");
  for (const RowSpan& span : p.rows) {
    check(reinterpret_cast<std::uintptr_t>(span.rows) % 16 == 0, "attend_prefill: unaligned rows");
  }
  check(reinterpret_cast<std::uintptr_t>(p.out) % 8 == 0, "attend_prefill: unaligned output");
}

}  // namespace

void divide_prefill(PrefillArgs& args, const PrefillTile& shape, const Launch& launch) {
  constexpr std::int64_t kSectionBytes = 16 << 20;  // of rows, to stay in the L2 cache
  constexpr std::int64_t kSplitBlocks = 4;          // that a split has at least
  constexpr std::int64_t kMostSplits = 64;
  const std::int64_t rows = args.rows.count;
  const std::int64_t queries = static_cast<std::int64_t>(args.tokens) * args.kv_heads * args.group;
  args.tiles = static_cast<int>(args.listed.exist()
                                    ? args.listed.blocks *
                                          ceil_div(PageLists::kBlock * args.group, shape.rows)
                                    : ceil_div(args.tokens * args.group, shape.rows));
  args.section_heads = static_cast<int>(std::clamp<std::int64_t>(
      kSectionBytes / std::max<std::int64_t>(1, rows * args.row_bytes), 1, args.kv_heads));
  const std::int64_t visible =
      args.seen != nullptr
          ? rows
          : std::clamp<std::int64_t>(args.first_visible + args.tokens - 1, 0, rows);
  const std::int64_t split_bytes =
      queries * (args.head_dim + 1) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t most =
      std::min({kMostSplits, visible / (kSplitBlocks * shape.keys),
                static_cast<std::int64_t>(launch.scratch_bytes) / split_bytes});
  const std::int64_t items = static_cast<std::int64_t>(args.tiles) * args.kv_heads;
  args.splits = choose_splits(items, launch.device->multiprocessors * shape.blocks_per_sm,
                              std::max<std::int64_t>(1, most));
  check(items * args.splits <= std::numeric_limits<std::int32_t>::max() / 2,
        "attend_prefill: too many tiles");
  args.split_out = reinterpret_cast<float*>(launch.scratch);
  args.split_lse = args.split_out + queries * args.head_dim * args.splits;
}

void merge_prefill_splits(const PrefillArgs& args, const Launch& launch) {
  if (args.splits == 1) return;
  const std::int64_t queries = static_cast<std::int64_t>(args.tokens) * args.kv_heads * args.group;
  const auto blocks = static_cast<unsigned>(ceil_div(queries, kMergeWarps));
  merge_kernel<<<blocks, kMergeWarps * kWarp, 0, launch.stream>>>(args);
  require_launch("merge_prefill_splits");
}

namespace {

// Rows of elements.
void attend_elements(const AttendParams& params, const Launch& launch) {
  check_params(params);
  const PrefillArgs args = args_of(params);
  if (attend_prefill_hopper(args, params.shape.rows.element, launch)) return;
  attend_prefill_generic(args, params.shape.rows.element, launch);
}

constexpr int kWidenThreads = 256;

// Writes rows [first, first + count) of a KV head as rows of bf16; a thread writes 8 elements.
struct WidenArgs {
  HeadRows from;            // [kv_heads][count, row_bytes]
  std::byte* to = nullptr;  // [kv_heads, count, to_row_bytes]
  std::int64_t first = 0;
  std::int64_t count = 0;  // at most, of a KV head
  int row_bytes = 0;
  int to_row_bytes = 0;
  int head_dim = 0;
};

template <typename Rows>
__global__ void __launch_bounds__(kWidenThreads)
    widen_rows_kernel(const __grid_constant__ WidenArgs a) {
  const auto head = static_cast<int>(blockIdx.y);
  const int of_part = a.head_dim / 8;
  const std::int64_t i = std::int64_t{blockIdx.x} * kWidenThreads + threadIdx.x;
  const std::int64_t row = i / (2 * of_part);
  const auto vector = static_cast<int>(i % (2 * of_part));
  if (row >= a.count || a.first + row >= a.from.count) return;
  const std::byte* const from = a.from[head] + (a.first + row) * a.row_bytes;
  auto* const to =
      reinterpret_cast<uint4*>(a.to + (head * a.count + row) * a.to_row_bytes) + vector;
  *to = vector < of_part
            ? rounded_elements(typename Rows::Key(), from, vector)
            : rounded_elements(typename Rows::Value(),
                               from + part_bytes<typename Rows::Key>(a.head_dim), vector - of_part);
}

// Attends to coded rows by way of scratch: as many at a time as three quarters of it hold as rows
// of bf16. That costs a read and a write of rows, and a merge of all results for each time but the
// first, where prompts of many tokens compute for far longer.
void attend_coded(const AttendParams& p, const Launch& launch) {
  AttendParams part = p;
  part.shape.rows = DType::bf16;
  const std::size_t token_bytes =
      part.shape.row_bytes() * static_cast<std::size_t>(p.shape.kv_heads);
  WidenArgs args;
  args.from = head_rows(p.rows);
  args.to = launch.scratch;
  args.row_bytes = static_cast<int>(p.shape.row_bytes());
  args.to_row_bytes = static_cast<int>(part.shape.row_bytes());
  args.head_dim = p.shape.head_dim;
  const std::int64_t rows = args.from.count;
  const auto most = static_cast<std::int64_t>(launch.scratch_bytes / 4 * 3 / token_bytes) /
                    kPageTokens * kPageTokens;
  check(most > 0, "attend_prefill: too many KV heads for the scratch memory");
  args.count = std::min(most, rows);
  const std::size_t used = static_cast<std::size_t>(args.count) * token_bytes;
  Launch rest = launch;
  rest.scratch += (used + 255) / 256 * 256;
  rest.scratch_bytes -= (used + 255) / 256 * 256;
  std::vector<RowSpan> spans(p.rows.size());
  part.rows = spans;
  do {
    for (std::size_t head = 0; head < spans.size(); ++head) {
      spans[head] = {args.to + head * used / spans.size(), std::min(rows - args.first, args.count)};
    }
    const std::int64_t threads = args.count * (p.shape.head_dim / 4);
    const dim3 grid(
        static_cast<unsigned>(ceil_div(std::max<std::int64_t>(threads, 1), kWidenThreads)),
        static_cast<unsigned>(p.shape.kv_heads));
    dispatch_coded_rows(p.shape.rows, [&](auto types) {
      widen_rows_kernel<decltype(types)><<<grid, kWidenThreads, 0, launch.stream>>>(args);
    });
    require_launch("attend_prefill: rows as bf16");
    attend_elements(part, rest);
    part.merge = true;
    part.first_row_position += args.count;
    args.first += args.count;
  } while (args.first < rows);
}

}  // namespace

void attend_prefill(const AttendParams& params, const Launch& launch) {
  if (params.tokens == 0) return;
  params.shape.rows.is_coded() ? attend_coded(params, launch) : attend_elements(params, launch);
}

}  // namespace sluice::cuda
