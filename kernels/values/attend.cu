#include <algorithm>
#include <string>

#include "kernels/values/call.cuh"
#include "kernels/values/values.h"
#include "kernels/values/weigh.h"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

constexpr std::int64_t kMostHeads = 4096;  // per launch
constexpr int kPagesOfBlock = 8;           // read at the same time
static_assert(kMostHeads <= Launch::kHalfCounters);

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Returns `pointer` + `count`, or null for null.
template <typename T>
T* advanced(T* pointer, std::int64_t count) {
  return pointer == nullptr ? nullptr : pointer + count;
}

// The call for tokens [first, first + count) alone.
AttendTilesParams part_of(AttendTilesParams p, std::int64_t first, std::int64_t count) {
  const std::int64_t heads = first * p.shape.kv_heads;
  const std::int64_t queries = first * p.shape.query_heads;
  const std::int64_t d = p.shape.head_dim;
  p.batch.tokens += first;
  p.batch.count = count;
  p.logits.data += queries * p.logits.stride * static_cast<std::int64_t>(sizeof(std::uint16_t));
  p.logits.digest.first += queries;
  p.estimated_lse += queries;
  p.selected.positions += heads * p.selected.capacity;
  p.selected.heads += heads;
  p.value_sums += heads * d;
  p.out += queries * d;
  p.lse += queries;
  p.pages_read = advanced(p.pages_read, heads);
  return p;
}

TilesCall call_of(const AttendTilesParams& p, const DeviceLimits& device) {
  TilesCall c;
  c.tokens = p.batch.tokens;
  c.selections = p.selected.heads;
  c.logits = reinterpret_cast<const __half*>(p.logits.data);
  c.stride = p.logits.stride;
  c.lse = p.estimated_lse;
  c.values = TilePool(p.values, p.shape.head_dim);
  c.bits = p.values.tiles.bits;
  c.kv_heads = p.shape.kv_heads;
  c.heads = static_cast<int>(p.batch.count * p.shape.kv_heads);
  c.group = p.shape.group();
  c.head_dim = p.shape.head_dim;
  c.channels = p.values.tiles.channels(c.head_dim);
  c.basis = p.values.tiles.basis;
  c.share = p.share;
  c.value_sums = p.value_sums;
  c.out = p.out;
  c.out_lse = p.lse;
  c.merge = p.merge;
  c.pages_read = p.pages_read;

  const std::int64_t pages = std::max<std::int64_t>((p.batch.capacity - 1) / kPageTokens, 1);
  c.most_pages = static_cast<std::int32_t>(pages);
  c.weights = PageWeights::of(p.logits.digest, c.group);
  c.query_parts = static_cast<std::int32_t>(ceil_div(c.group, kTileQueries));
  // At most two blocks per multiprocessor, because a third would begin when others are done, and as
  // long as every warp may have a page.
  const std::int64_t blocks =
      std::max<std::int64_t>(1, 2 * device.multiprocessors / (c.heads * c.query_parts));
  c.splits = static_cast<std::int32_t>(std::min(blocks, ceil_div(pages, kPagesOfBlock)));
  return c;
}

// Places the call's arrays in scratch, each aligned to 16 bytes; returns the bytes they take.
std::size_t place(TilesCall& c, std::byte* scratch) {
  const auto base = reinterpret_cast<std::uintptr_t>(scratch);
  std::size_t used = 0;
  const auto take = [&](auto*& array, std::int64_t count) {
    array = reinterpret_cast<std::decay_t<decltype(array)>>(base + used);
    used += (static_cast<std::size_t>(count) * sizeof(*array) + 15) / 16 * 16;
  };
  const std::int64_t heads = c.heads;
  if (c.weights.masks == nullptr) {
    const std::int64_t pages = LogitDigest::pages_of(c.most_pages * std::int64_t{kPageTokens});
    std::byte* weights = nullptr;
    take(weights, heads * pages * static_cast<std::int64_t>(PageWeights::kPageBytes));
    c.weights = PageWeights::in(weights, heads, pages, c.group);
  }
  take(c.partials, heads * c.query_parts * c.splits * partial_floats(c.channels));
  return used;
}

std::size_t scratch_of(const AttendTilesParams& p, std::int64_t tokens,
                       const DeviceLimits& device) {
  TilesCall c = call_of(part_of(p, 0, tokens), device);
  return place(c, nullptr);
}

std::int64_t most_tokens_at_once(const AttendTilesParams& p) {
  const std::int64_t heads = p.shape.kv_heads * ceil_div(p.shape.group(), kTileQueries);
  check(heads <= kMostHeads, "attend_tiles: heads");
  return std::clamp<std::int64_t>(kMostHeads / heads, 1, std::max<std::int64_t>(p.batch.count, 1));
}

// Tokens per round that fit in scratch. Fewer tokens take less, except that each then has more
// blocks.
std::int64_t tokens_at_once(const AttendTilesParams& p, const Launch& launch) {
  std::int64_t tokens = most_tokens_at_once(p);
  while (tokens > 1 && scratch_of(p, tokens, *launch.device) > launch.scratch_bytes) {
    tokens = (tokens + 1) / 2;
  }
  return tokens;
}

}  // namespace

std::size_t attend_tiles_scratch_bytes(const AttendTilesParams& p, const DeviceLimits& device) {
  const std::int64_t tokens = most_tokens_at_once(p);
  const std::int64_t rest = p.batch.count % tokens;
  return std::max(scratch_of(p, tokens, device), rest == 0 ? 0 : scratch_of(p, rest, device));
}

void attend_tiles(const AttendTilesParams& p, const Launch& launch, bool is_beside) {
  check(p.values.tiles.channels(p.shape.head_dim) % 4 == 0 && p.shape.head_dim <= 256,
        "attend_tiles: head_dim");
  check(!p.weighed, "attend_tiles: the device keeps logits");
  check(p.logits.stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(p.logits.data) % 16 == 0,
        "attend_tiles: rows of logits that are not aligned");
  if (p.batch.count == 0) return;
  const std::int64_t step = tokens_at_once(p, launch);
  for (std::int64_t first = 0; first < p.batch.count; first += step) {
    const AttendTilesParams part = part_of(p, first, std::min(step, p.batch.count - first));
    TilesCall c = call_of(part, *launch.device);
    const std::size_t needed = place(c, launch.scratch);
    if (needed > launch.scratch_bytes) {
      throw Error(ErrorCode::unsupported,
                  "attending value tiles of " + std::to_string(p.batch.capacity) +
                      " tokens takes " + std::to_string(needed) +
                      " bytes of scratch on the device and there are " +
                      std::to_string(launch.scratch_bytes) + "; shorten the context");
    }
    c.tickets = launch.counters;
    const bool weighs = part.logits.digest.weights == nullptr;
    c.is_beside = is_beside && first == 0 && !weighs;
    if (weighs) {
      weigh_pages({part.shape, part.batch, part.logits, part.selected, c.lse, c.weights,
                   is_beside && first == 0},
                  launch);
    }
    run_read(c, launch);
  }
}

}  // namespace sluice::cuda
