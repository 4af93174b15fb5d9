#include <algorithm>
#include <bit>

#include "cpu/attention/attend_bf16.h"
#include "cpu/attention/attention.h"
#include "cpu/attention/page_lists.h"
#include "cpu/attention/simd.h"
#include "cpu/attention/tile.h"
#include "lib/check.h"

namespace sluice::cpu {
namespace {

// Queries per tile. Up to kDecodeQueries, rows are streamed. Above, work done once per block of
// rows (unpacking, transposing) is shared by the tile's queries: kManyQueries if there are enough
// to keep all threads busy, else kPrefillQueries.
constexpr std::int64_t kDecodeQueries = 16;
constexpr std::int64_t kPrefillQueries = 256;
constexpr std::int64_t kManyQueries = 512;

// Below these many rows a split costs more to merge than it saves.
constexpr std::int64_t kMinSplitRows = 1024;

// Tasks per thread: several, so that an interrupted thread does not hold up the others.
constexpr std::int64_t kTasksPerThread = 3;

// Tasks are (split, tile, KV head). Rows are split only if heads and tiles are too few for the
// threads; the splits' partials are merged afterwards.
struct Plan {
  AttendKernel kernel = AttendKernel::decode;
  std::int64_t tile_tokens = 1;
  std::int64_t tiles = 1;
  std::int64_t splits = 1;
};

// Sizes that determine a plan.
struct Extent {
  KvShape shape;
  std::int64_t tokens = 0;
  std::int64_t rows = 0;  // of the KV head with the most rows
  bool is_listed = false;
};

Extent extent_of(const AttendParams& p) {
  Extent e = {p.shape, p.tokens, 0, p.listed.exist()};
  for (const RowSpan& span : p.rows) e.rows = std::max(e.rows, span.count);
  return e;
}

AttendKernel choose(const Extent& e) {
  const std::int64_t queries = e.tokens * e.shape.group();
  if (queries <= kDecodeQueries) return AttendKernel::decode;
  for (const AttendKernel kernel : {AttendKernel::amx, AttendKernel::avx512_bf16}) {
    if (attend_supported(kernel, e.shape)) return kernel;
  }
  return AttendKernel::prefill;
}

Plan make_plan(const Extent& e, int threads, AttendKernel kernel) {
  Plan plan;
  plan.kernel = kernel == AttendKernel::automatic ? choose(e) : kernel;
  const std::int64_t wanted = kTasksPerThread * threads;
  const std::int64_t all = e.tokens * e.shape.query_heads;
  std::int64_t queries = all >= wanted * kManyQueries ? kManyQueries : kPrefillQueries;
  if (plan.kernel == AttendKernel::decode) queries = kDecodeQueries;
  plan.tile_tokens = std::max<std::int64_t>(1, queries / e.shape.group());
  // All tokens of a tile share one page list.
  if (e.is_listed) {
    plan.tile_tokens = std::min(
        PageLists::kBlock,
        static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(plan.tile_tokens))));
  }
  plan.tiles = (e.tokens + plan.tile_tokens - 1) / plan.tile_tokens;
  const std::int64_t tasks = plan.tiles * e.shape.kv_heads;
  if (threads == 1 || tasks >= wanted || e.is_listed) return plan;
  plan.splits = std::clamp<std::int64_t>(e.rows / kMinSplitRows, 1, (wanted + tasks - 1) / tasks);
  return plan;
}

// Leaves out the first `count` rows of a tile.
void skip(AttendTile& tile, std::int64_t count) {
  if (count > 0) tile.rows += static_cast<std::size_t>(count) * tile.row_bytes;
  tile.count -= count;
  tile.visible -= count;
}

// Tile `tile` of KV head `head`, with all rows that it sees through its window.
AttendTile make_tile(const AttendParams& p, const Plan& plan, std::int64_t tile, int head) {
  const KvShape& shape = p.shape;
  const std::int64_t token = tile * plan.tile_tokens;
  const std::int64_t first_head = static_cast<std::int64_t>(head) * shape.group();
  const RowSpan& span = p.rows[static_cast<std::size_t>(head)];
  AttendTile t;
  t.q = p.q + token * p.q_stride + first_head * shape.head_dim;
  t.q_stride = p.q_stride;
  t.group = shape.group();
  t.queries = static_cast<int>(std::min(plan.tile_tokens, p.tokens - token)) * t.group;
  t.head_dim = shape.head_dim;
  t.scale = p.scale;
  t.rows = span.rows;
  t.row_bytes = shape.row_bytes();
  t.format = shape.rows;
  t.count = span.count;
  if (p.seen != nullptr) t.seen = p.seen + token;
  t.visible = (p.seen != nullptr ? 0 : p.first_query_position + token + 1) - p.first_row_position;
  t.out_stride = static_cast<std::int64_t>(shape.query_heads) * shape.head_dim;
  t.out = p.out + token * t.out_stride + first_head * shape.head_dim;
  t.lse_stride = shape.query_heads;
  t.lse = p.lse + token * t.lse_stride + first_head;
  t.merge = p.merge;
  t.window = p.window;
  skip(t, t.first_of(0));
  return t;
}

// Narrows a tile to split `split` of the rows that it sees.
void narrow(AttendTile& tile, std::int64_t split, std::int64_t splits) {
  constexpr std::int64_t kAlign = 64;
  const std::int64_t seen = tile.visible_to(tile.queries - 1);
  const std::int64_t begin = split * seen / splits / kAlign * kAlign;
  const std::int64_t end =
      split + 1 == splits ? seen : (split + 1) * seen / splits / kAlign * kAlign;
  skip(tile, begin);
  tile.count = end - begin;
}

void run(AttendKernel kernel, const AttendTile& tile) {
  switch (kernel) {
    case AttendKernel::prefill:
      return attend_prefill(tile);
    case AttendKernel::avx512_bf16:
      return attend_bf16(tile, *avx512_products());
    case AttendKernel::amx:
      return attend_bf16(tile, *amx_products());
    default:
      const RowSpan rows = {tile.rows, tile.count};
      return attend_decode(tile, {&rows, 1});
  }
}

// Rows of listed pages are copied together, this many at a time, so that they stay in a core's
// cache.
constexpr std::int64_t kListedRows = 1024;

void run_listed(const AttendParams& p, AttendKernel kernel, AttendTile tile, std::int64_t token,
                std::int64_t head) {
  const ListedRows rows(p, token / PageLists::kBlock, head);
  const std::size_t floats = kListedRows * tile.row_bytes / sizeof(float);
  auto* const arena = reinterpret_cast<std::byte*>(thread_scratch(Scratch::rows, floats));
  tile.rows = arena;
  std::int64_t first = 0;
  do {
    tile.count = std::min(kListedRows, rows.count() - first);
    tile.visible = rows.visible(token) - first;
    rows.copy(first, tile.count, arena);
    run(kernel, tile);
    tile.merge = true;
  } while ((first += kListedRows) < rows.count());
}

// Partials of all splits except the first, which writes to the output. Kept in scratch of the
// calling thread.
class Partials {
 public:
  Partials(const AttendParams& p, const Plan& plan)
      : heads_(p.tokens * p.shape.query_heads),
        head_dim_(p.shape.head_dim),
        data_(thread_scratch(Scratch::partials, floats(extent_of(p), plan))) {}

  static std::size_t floats(const Extent& e, const Plan& plan) {
    return static_cast<std::size_t>((plan.splits - 1) * e.tokens * e.shape.query_heads *
                                    (e.shape.head_dim + 1));
  }

  void redirect(AttendTile& tile, const AttendParams& p, std::int64_t split) const {
    if (split == 0) return;
    tile.out = values(split) + (tile.out - p.out);
    tile.lse = lse(split) + (tile.lse - p.lse);
    tile.merge = false;
  }

  // Merges all partials of query head `index`, in [tokens, query_heads], into the output.
  void merge(const AttendParams& p, std::int64_t splits, std::int64_t index) const {
    for (std::int64_t split = 1; split < splits; ++split) {
      merge_partial(values(split) + index * head_dim_, lse(split)[index], p.shape.head_dim,
                    p.out + index * head_dim_, p.lse + index);
    }
  }

 private:
  float* values(std::int64_t split) const { return data_ + (split - 1) * heads_ * (head_dim_ + 1); }
  float* lse(std::int64_t split) const { return values(split) + heads_ * head_dim_; }

  std::int64_t heads_;
  std::int64_t head_dim_;
  float* data_;  // [splits - 1], each [heads, head_dim] values, then [heads] lse
};

}  // namespace

bool attend_supported(AttendKernel kernel, const KvShape& shape) {
  if (kernel != AttendKernel::amx && kernel != AttendKernel::avx512_bf16) return true;
  const Bf16Products* const products =
      kernel == AttendKernel::amx ? amx_products() : avx512_products();
  const bool fits = shape.rows.is_coded() || shape.rows.element == DType::bf16;
  return fits && products != nullptr;
}

namespace {

// Scratch in floats of a thread that runs tiles of a plan.
std::size_t tile_floats(const Extent& e, const Plan& plan) {
  AttendTile tile;
  tile.group = e.shape.group();
  tile.queries = static_cast<int>(std::min(plan.tile_tokens, e.tokens)) * tile.group;
  tile.head_dim = e.shape.head_dim;
  tile.row_bytes = e.shape.row_bytes();
  tile.format = e.shape.rows;
  const std::size_t listed =
      e.is_listed ? static_cast<std::size_t>(kListedRows) * tile.row_bytes / sizeof(float) : 0;
  if (plan.kernel == AttendKernel::decode) return listed + decode_scratch(tile);
  return listed +
         (plan.kernel == AttendKernel::prefill ? prefill_scratch(tile) : bf16_scratch(tile));
}

}  // namespace

// Maximum over all steps up to `tokens`, because shorter steps have smaller tiles, but more splits.
// Among steps with the same number of tiles the longest has the most partials.
std::uint64_t attend_scratch_bytes(const KvShape& shape, std::int64_t tokens, std::int64_t rows,
                                   bool is_listed, int threads) {
  const auto plan_of = [&](const Extent& e) {
    return make_plan(e, threads, AttendKernel::automatic);
  };
  const Extent longest = {shape, tokens, rows, is_listed};
  std::size_t tile = tile_floats(longest, plan_of(longest));
  std::size_t partials = Partials::floats(longest, plan_of(longest));
  std::int64_t step = 1;
  for (std::int64_t some = 1; some < tokens; some += step) {
    const Extent e = {shape, some, rows, is_listed};
    const Plan plan = plan_of(e);
    tile = std::max(tile, tile_floats(e, plan));
    partials = std::max(partials, Partials::floats(e, plan));
    // From here on only steps of whole tiles are tried.
    if (some % plan.tile_tokens == 0) step = plan.tile_tokens;
  }
  return (tile * static_cast<std::size_t>(threads) + partials) * sizeof(float);
}

void attend(const AttendParams& params, Threads& threads, AttendKernel kernel) {
  const KvShape& shape = params.shape;
  check(params.rows.size() == static_cast<std::size_t>(shape.kv_heads),
        "attention needs one run of rows per KV head");
  check(attend_supported(kernel, shape), "this attention kernel cannot run here");
  check(params.window == 0 || (params.seen == nullptr && !params.listed.exist()),
        "a window of rows that are chosen already");
  const Plan plan = make_plan(extent_of(params), threads.count(), kernel);
  const std::int64_t pairs = plan.tiles * shape.kv_heads;
  const Partials partials(params, plan);
  threads.for_each(pairs * plan.splits, [&](std::int64_t task) {
    const std::int64_t split = task / pairs;
    // Later tiles see more rows under a causal mask, so they go first.
    const std::int64_t tile_index = plan.tiles - 1 - task % pairs / shape.kv_heads;
    const auto head = static_cast<int>(task % shape.kv_heads);
    AttendTile tile = make_tile(params, plan, tile_index, head);
    if (params.listed.exist()) {
      return run_listed(params, plan.kernel, tile, tile_index * plan.tile_tokens, head);
    }
    if (plan.splits > 1) narrow(tile, split, plan.splits);
    partials.redirect(tile, params, split);
    run(plan.kernel, tile);
  });
  if (plan.splits == 1) return;
  threads.for_each(params.tokens, [&](std::int64_t token) {
    for (int head = 0; head < shape.query_heads; ++head) {
      partials.merge(params, plan.splits, token * shape.query_heads + head);
    }
  });
}

}  // namespace sluice::cpu
