#include "offload/plan/planner.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "lib/backend/kv_ops.h"
#include "lib/backend/row_cache.h"
#include "lib/bytes.h"
#include "lib/process_limits.h"
#include "offload/plan/disk_layout.h"
#include "offload/plan/index_layout.h"
#include "offload/plan/prefill_bytes.h"
#include "sluice/batch.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::int64_t kMaxContext = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMaxChunk = 1 << 16;
// Streaming buffers of at least 64 rows keep a transfer above 8 KiB per head; past 4 MiB
// a larger one gains nothing (8192 rows of 512 bytes; 512 KiB cost a fifth of PCIe's bandwidth).
constexpr std::int64_t kMinStreamTokens = 64;
constexpr std::int64_t kMaxStreamTokens = 8192;
// Streaming buffers take at most this part (1 / kStreamShare) of the free device memory, because
// resident rows are worth more.
constexpr std::uint64_t kStreamShare = 4;
constexpr std::int64_t kMinChunk = 16;
// With smaller chunks prefill streams so often that tails are a poor use of memory.
constexpr std::int64_t kMinChunkBesideTails = 64;
constexpr std::uint64_t kHostPage = 4096;
// Important rows that a sparse prefill gathers at a time: with fewer they are gathered again for
// every chunk of a prompt, which costs little in host memory.
constexpr std::int64_t kMinCompactRows = 1024;
constexpr std::int64_t kHostCompactRows = 8192;
constexpr std::int64_t kMaxSequences = 4096;
// A row cache larger than this many steps' selections finds few more rows
// (bench/results/row_cache_*.json).
constexpr std::int64_t kCacheSteps = 8;
constexpr std::int64_t kUsualShare = 8;
constexpr std::int64_t kMostCacheRows = std::int64_t{1} << 30;

void validate(const KvRequest& request) {
  const KvShape& shape = request.shape;
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw Error(ErrorCode::usage, "KV cache: " + message);
  };
  if (!is_known(shape.rows)) {
    throw Error(ErrorCode::unsupported, "KV cache: dtype of rows must be f32, f16, bf16 or int8");
  }
  require(shape.layers >= 1 && shape.layers <= 4096, "layers must be 1 to 4096");
  require(shape.kv_heads >= 1 && shape.kv_heads <= 4096, "kv_heads must be 1 to 4096");
  require(shape.query_heads >= shape.kv_heads && shape.query_heads % shape.kv_heads == 0,
          "query_heads must be a multiple of kv_heads");
  require(shape.head_dim >= 2 && shape.head_dim <= 256 && shape.head_dim % 2 == 0,
          "head_dim must be even and 2 to 256");
  require_context(request.context);
  require(request.chunk >= 1 && request.chunk <= kMaxChunk, "chunk must be 1 to 65536 tokens");
  require(request.sequences >= 1 && request.sequences <= kMaxSequences,
          "sequences must be 1 to 4096");
  require(request.decode_batch >= 1 && request.decode_batch <= kMostBatch,
          "a decode step takes 1 to 64 tokens");
  const std::int64_t most = request.sequences * request.context;
  // Below this bound, sums of several such sizes do not overflow.
  require(static_cast<double>(shape.token_bytes()) * static_cast<double>(most) < 0x1p56,
          "the rows of " + std::to_string(most) + " tokens have more bytes than any machine");
  require(
      request.windows.empty() || request.windows.size() == static_cast<std::size_t>(shape.layers),
      "`windows` needs one entry per layer");
  for (const std::int64_t window : request.windows) {
    require(window >= 0 && window <= kMaxContext, "a window has 0 (all) to 2^31 - 1 tokens");
  }
  require(request.tokens >= 0 && request.tokens <= most,
          "`tokens` must be 0 (all that the sequences may have) to " + std::to_string(most) +
              ", not " + std::to_string(request.tokens));
  if (request.indexed_tokens == 0 || request.indexed_tokens >= request.context) return;
  throw Error(ErrorCode::usage, "`indexed_tokens` must be 0 (all) or at least the context of " +
                                    std::to_string(request.context) + " tokens, not " +
                                    std::to_string(request.indexed_tokens));
}

void require_windows(const KvRequest& request) {
  if (request.on.windows || request.windows.empty()) return;
  throw Error(ErrorCode::unsupported,
              "device " + request.on.name + " has no attention to a window of the newest tokens");
}

std::uint64_t regions_of(const KvShape& shape) {
  return static_cast<std::uint64_t>(shape.layers) * static_cast<std::uint64_t>(shape.kv_heads);
}

// Device bytes of a plan.
std::uint64_t total_of(const KvPlan& plan) {
  return plan.index_bytes + plan.work_bytes + plan.table_bytes + DeviceRowBytes(plan).sum();
}

// The part of the device cap that `beside` leaves.
std::uint64_t room_of(const KvRequest& request) {
  const std::uint64_t cap = request.device_cap.value_or(UINT64_MAX);
  return cap - std::min(cap, request.beside);
}

// A layout that streams, with the smallest streaming buffers and nothing resident.
KvPlan smallest(KvPlan plan, bool tails, std::int64_t chunk) {
  plan.tails = tails;
  plan.chunk = chunk;
  // The step's rows are attended together with the unfinished page before them.
  plan.window_tokens = chunk + (tails ? kPageTokens - 1 : 0);
  // Page lists need whole pages, and so do reads from disk.
  plan.stream_tokens = plan.listed_blocks > 0 || plan.on_disk ? kPageTokens : kMinStreamTokens;
  return plan;
}

// A chunk holds whole blocks of queries that list pages, so that lists do not depend on it.
std::int64_t least_chunk(const KvPlan& plan, bool tails) {
  const std::int64_t least = tails ? kMinChunkBesideTails : kMinChunk;
  return std::min(plan.chunk, plan.listed_blocks > 0 ? PageLists::kBlock : least);
}

// Selecting attention needs the unfinished page on the device.
bool needs_tails(const KvPlan& plan) { return plan.work_bytes > 0; }

std::optional<KvPlan> fit_streaming(const KvPlan& base, std::uint64_t cap) {
  for (const bool tails : {true, false}) {
    if (!tails && needs_tails(base)) break;
    const std::int64_t least = least_chunk(base, tails);
    for (std::int64_t chunk = base.chunk; chunk >= least; chunk = std::max(chunk / 2, least)) {
      KvPlan plan = smallest(base, tails, chunk);
      if (total_of(plan) <= cap) return plan;
      if (chunk == least) break;
    }
  }
  return std::nullopt;
}

// Gathers all rows of a prompt in up to `room` bytes, or as many as fit.
KvPlan compact_in(KvPlan plan, std::uint64_t room) {
  const std::uint64_t of_row =
      static_cast<std::uint64_t>(plan.shape.kv_heads) * plan.shape.row_bytes();
  const auto more = static_cast<std::int64_t>(
      std::min(room / of_row, static_cast<std::uint64_t>(plan.context - plan.compact_rows)));
  if (plan.compact_rows > 0) plan.compact_rows += more;
  return plan;
}

// Limits of a plan's row cache.
struct CacheWish {
  std::int64_t rows = 0;  // per KV head; 0: steps do not gain by it
  // Share of the free device memory; the rest is for layers that attend to everything under other
  // policies.
  double share = 1.0;
};

CacheWish cache_wish(const KvPlan& plan, const KvRequest& request, const IndexLayout& layout) {
  const std::uint64_t fetched =
      static_cast<std::uint64_t>(layout.batch * layout.selected * plan.shape.kv_heads) *
      plan.shape.row_bytes();
  // An explicit `row_cache` is always honoured. Above a disk the host's processor finds each row
  // that is not cached, and may have to read it, which takes far longer than its way over the bus.
  const bool pays =
      plan.on_disk || request.cache_memory.has_value() || fetched >= request.on.cached_bytes;
  const auto layers = std::count(layout.selecting.begin(), layout.selecting.end(), true);
  // Ragged tables number the rows of all layers together, in 31 bits.
  const bool fits = RowCacheView::fits(plan.shape.layers, plan.host_rows()) &&
                    (!plan.ragged || plan.shape.layers * plan.host_rows() <= INT32_MAX);
  if (layers == 0 || fetched == 0 || !pays || !fits) return {};
  // An uncapped share of the weight is usually reached by far fewer tokens.
  const std::int64_t usual = std::min(layout.selected, plan.context / kUsualShare + 1);
  const std::int64_t of_step = usual * layers * plan.sequences;
  const std::int64_t all = plan.host_rows() * layers;
  CacheWish wish;
  // Twice as many above a disk, whose cache in host memory sees only what this one lacks.
  const std::int64_t steps = plan.on_disk ? 2 * kCacheSteps : kCacheSteps;
  wish.rows = std::min({steps * std::min(of_step, all), all, kMostCacheRows});
  std::int64_t dense = 0;
  for (std::size_t layer = 0; layer < layout.selecting.size(); ++layer) {
    if (layout.selecting[layer] && layout.attending_all[layer]) ++dense;
  }
  const auto of_dense = static_cast<double>(dense * plan.context);
  const auto of_others = static_cast<double>(usual * layers);
  wish.share = of_others / (of_others + of_dense);
  return wish;
}

// Adds a row cache of up to `wanted` rows per KV head in up to `room` bytes; or none.
KvPlan cached_in(KvPlan plan, std::int64_t wanted, std::uint64_t room) {
  KvPlan least = plan;
  least.cache_rows = RowCacheView::kWays;
  const std::uint64_t fixed = RowCacheBytes(least).sum();
  if (wanted < RowCacheView::kWays || fixed > room) return plan;
  least.cache_rows = 2 * RowCacheView::kWays;
  const std::uint64_t of_set = RowCacheBytes(least).sum() - fixed;
  const auto sets = static_cast<std::int64_t>(std::min(
      (room - fixed) / of_set, static_cast<std::uint64_t>(wanted / RowCacheView::kWays - 1)));
  plan.cache_rows = (1 + sets) * RowCacheView::kWays;
  return plan;
}

std::uint64_t page_bytes(const KvShape& shape) {
  return static_cast<std::uint64_t>(kPageTokens * shape.kv_heads) * shape.row_bytes();
}

// Adds resident pages of layers that attend to every row, in up to `room` bytes.
KvPlan dense_in(KvPlan plan, std::uint64_t room) {
  if (plan.dense_layers.empty()) return plan;
  KvPlan whole = plan;
  whole.dense_resident_tokens = whole.host_rows();
  const std::uint64_t before = DeviceRowBytes(plan).resident;
  if (DeviceRowBytes(whole).resident - before <= room) return whole;
  const auto pages = static_cast<std::int64_t>(
      room / (page_bytes(plan.shape) * static_cast<std::uint64_t>(plan.dense_layers.size())));
  plan.dense_resident_tokens = std::min(pages, plan.blocks - 1) * kPageTokens;
  return plan;
}

// Spends the rest of the cap: first on larger streaming buffers, then half of it on the important
// rows of a sparse prefill, which then cross the bus once instead of once per chunk. Dense layers'
// rows come before the row cache, because each saves a fetch in every step and a cached row only in
// some; an explicit `row_cache` comes first.
KvPlan widen(KvPlan plan, std::uint64_t cap, const CacheWish& wish,
             std::optional<std::uint64_t> cache_memory) {
  // The disk's streaming buffers were chosen together with their host memory.
  const std::int64_t most = plan.on_disk ? 0 : kMaxStreamTokens;
  for (std::int64_t tokens = most; tokens > kMinStreamTokens; tokens /= 2) {
    KvPlan wider = plan;
    wider.stream_tokens = tokens;
    if (total_of(wider) - total_of(plan) > (cap - total_of(plan)) / kStreamShare) continue;
    plan = wider;
    break;
  }
  plan = compact_in(plan, (cap - total_of(plan)) / 2);
  if (!cache_memory) plan = dense_in(plan, cap - total_of(plan));
  const auto for_cache =
      static_cast<std::uint64_t>(wish.share * static_cast<double>(cap - total_of(plan)));
  plan = cached_in(plan, wish.rows, std::min(for_cache, cache_memory.value_or(cap)));
  if (cache_memory) plan = dense_in(plan, cap - total_of(plan));
  const auto layers = static_cast<std::uint64_t>(plan.shape.layers) - plan.dense_layers.size();
  const auto pages =
      static_cast<std::int64_t>((cap - total_of(plan)) / (page_bytes(plan.shape) * layers));
  plan.resident_tokens = std::min(pages, plan.blocks - 1) * kPageTokens;
  return plan;
}

}  // namespace

std::uint64_t KvPlan::dense_bytes() const {
  return shape.token_bytes() * static_cast<std::uint64_t>(tokens);
}

// A single sequence fills its blocks in order, so its last block needs rows only up to `context`.
std::int64_t KvPlan::host_rows() const {
  return sequences == 1 && !ragged ? std::min(context, blocks * kPageTokens) : blocks * kPageTokens;
}

bool KvPlan::all_resident() const { return in_place || resident_tokens >= host_rows(); }

int KvPlan::set_of(int layer) const {
  if (ragged) return layer;
  return std::binary_search(dense_layers.begin(), dense_layers.end(), layer) ? 1 : 0;
}

std::int64_t KvPlan::device_rows(int set) const {
  if (in_place) return 0;
  const std::int64_t pinned = tails ? sequences * kPageTokens : 0;
  const std::int64_t resident = set == 0 || ragged ? resident_tokens : dense_resident_tokens;
  return std::min(host_rows(), resident + pinned);
}

DeviceRowBytes::DeviceRowBytes(const KvPlan& plan) {
  const std::uint64_t row = plan.shape.row_bytes();
  const std::uint64_t of_heads = static_cast<std::uint64_t>(plan.shape.kv_heads) * row;
  const auto dense = static_cast<std::int64_t>(plan.dense_layers.size());
  const std::int64_t rows =
      (plan.shape.layers - dense) * plan.device_rows() + dense * plan.device_rows(1);
  resident = of_heads * static_cast<std::uint64_t>(rows);
  window = of_heads * static_cast<std::uint64_t>(plan.window_tokens);
  stream = of_heads * static_cast<std::uint64_t>(2 * plan.stream_tokens);
  compact = of_heads * static_cast<std::uint64_t>(plan.compact_rows);
  prompt = of_heads * static_cast<std::uint64_t>(plan.prompt_rows);
  cache = RowCacheBytes(plan).sum();
}

RowCacheBytes::RowCacheBytes(const KvPlan& plan) {
  if (plan.cache_rows == 0) return;
  const auto heads = static_cast<std::size_t>(plan.shape.kv_heads);
  const std::size_t ways = heads * static_cast<std::size_t>(plan.cache_rows);
  rows = ways * plan.shape.row_bytes();
  tags = ways * sizeof(RowCacheView::Tag);
  heat = ways * sizeof(std::int32_t);
  clock = sizeof(std::int32_t);
  places = heads * static_cast<std::size_t>(plan.placed_rows) * sizeof(PlacedRow);
}

HostAttentionBytes::HostAttentionBytes(const KvPlan& plan) {
  const auto batch = static_cast<std::size_t>(plan.decode_batch);
  const auto heads = static_cast<std::size_t>(plan.shape.query_heads);
  const std::int64_t pages = (plan.context + kPageTokens - 1) / kPageTokens;
  gaps = static_cast<std::size_t>(plan.sets()) * batch * sizeof(PositionGap);
  tokens = batch * sizeof(BatchToken);
  table = static_cast<std::size_t>(plan.sequences * pages) * sizeof(PageSlots);
  queries = batch * heads * static_cast<std::size_t>(plan.shape.head_dim) * sizeof(float);
  lse = batch * heads * sizeof(float);
  times = static_cast<std::size_t>(plan.shape.layers) * 2 * sizeof(std::uint64_t);
}

std::uint64_t host_region_bytes(const KvShape& shape, std::int64_t rows) {
  return round_up(static_cast<std::uint64_t>(rows) * shape.row_bytes(), kHostPage);
}

namespace {

std::uint64_t host_row_bytes(const KvPlan& plan) {
  if (!plan.ragged) return regions_of(plan.shape) * host_region_bytes(plan.shape, plan.host_rows());
  // One region per KV head, from which all layers take their pages.
  return static_cast<std::uint64_t>(plan.shape.kv_heads) *
         host_region_bytes(plan.shape, plan.shape.layers * plan.host_rows());
}

// Ragged tables number the pages of all layers together.
void require_pages_numbered(const KvPlan& plan) {
  if (plan.shape.layers * plan.blocks <= INT32_MAX) return;
  throw Error(ErrorCode::unsupported,
              "a prefill that evicts takes fewer tokens than " + std::to_string(plan.tokens) +
                  " in " + std::to_string(plan.shape.layers) + " layers; shorten `context`");
}

// Blocks for sequences with `tokens` distinct tokens in total.
std::int64_t blocks_for(std::int64_t context, std::int64_t sequences, std::int64_t tokens) {
  const auto whole = [](std::int64_t count) { return (count + kPageTokens - 1) / kPageTokens; };
  // A fork's first block of its own begins with shared tokens, and its last block is not full.
  return std::min(sequences * whole(context), whole(tokens) + 2 * (sequences - 1));
}

// The parts of a plan that do not depend on the caps.
KvPlan uncapped(const KvRequest& request, std::shared_ptr<const IndexLayout> carried) {
  const IndexLayout& layout = *carried;
  KvPlan plan;
  plan.layout = std::move(carried);
  plan.shape = request.shape;
  plan.windows = request.windows;
  plan.context = request.context;
  plan.sequences = request.sequences;
  plan.tokens = request.tokens > 0 ? request.tokens : request.sequences * request.context;
  plan.blocks = blocks_for(request.context, request.sequences, plan.tokens);
  if (layout.evicts) {
    plan.ragged = true;
    plan.prompt_rows = request.context;
    require_pages_numbered(plan);
  }
  plan.chunk = std::min(request.chunk, request.context);
  plan.decode_batch = layout.batch;
  plan.reports_positions = request.reports_positions;
  plan.chooses_early = layout.early;
  plan.placed_rows = (layout.early ? 2 * layout.batch : layout.wave) * layout.selected;
  plan.dense_layers = layout.dense_layers();
  plan.index_bytes = layout.index_bytes();
  plan.work_bytes = layout.selection_bytes().sum() + (layout.early ? request.on.branch_bytes : 0);
  plan.table_bytes = layout.table_bytes();
  plan.indexed_tokens = layout.parked_tiles() > 0 ? request.indexed_tokens : 0;
  plan.parked_bytes = layout.parked_bytes();
  plan.host_bytes = host_row_bytes(plan) + layout.host_bytes() + plan.parked_bytes;
  if (layout.lists_pages) {
    plan.listed_blocks = PageLists::blocks_of(plan.chunk);
    const ListedPageBytes bytes(plan);
    plan.index_bytes += bytes.means;
    plan.work_bytes += bytes.work();
    plan.host_bytes += bytes.listed;
  }
  if (layout.zipvl) {
    const ImportantTokenBytes bytes(layout);
    plan.work_bytes += bytes.work();
    plan.host_bytes += bytes.host();
    plan.compact_rows = std::min(kMinCompactRows, request.context);
  }
  return plan;
}

// Adds host attention if some layer attends to all rows.
KvPlan shared_with_host(KvPlan plan, const KvRequest& request, const IndexLayout& layout) {
  const std::vector<bool>& all = layout.attending_all;
  const bool attends_all = !plan.ragged && std::find(all.begin(), all.end(), true) != all.end();
  if (!request.host_attention || !(attends_all || request.policies.empty())) return plan;
  if (!request.windows.empty()) return plan;  // rows of a window are few
  const HostAttentionBytes bytes(plan);
  plan.host_attention = true;
  plan.table_bytes += bytes.gaps;
  plan.host_bytes += bytes.host();
  return plan;
}

KvPlan all_resident(KvPlan plan) {
  plan.resident_tokens = plan.dense_resident_tokens = plan.host_rows();
  return plan;
}

// Throws for a cap that neither holds every row nor suffices for streaming.
[[noreturn]] void throw_too_small(const KvRequest& request, const KvPlan& whole,
                                  const KvPlan& plan) {
  const bool selects = needs_tails(plan);
  const std::uint64_t streamed = total_of(smallest(plan, selects, least_chunk(plan, selects)));
  const std::uint64_t least = std::min(streamed, total_of(whole)) + request.beside;
  const std::string beside =
      request.beside > 0 ? "; other memory on the device takes " + format_bytes(request.beside)
                         : "";
  const std::string index = selects ? "; the policy's key index and work space take " +
                                          format_bytes(plan.index_bytes + plan.work_bytes) +
                                          "; a dense `policy` needs none"
                                    : "";
  throw Error(ErrorCode::memory, "`device_memory` " + format_bytes(*request.device_cap) +
                                     " is too small for this model; give at least " +
                                     std::to_string(least) + "B (" + format_bytes(least) + ")" +
                                     beside + index);
}

// Throws for policies that read rows where only a disk may have them.
void require_rows_may_leave(const KvRequest& request) {
  const auto require = [](bool holds, const Policy& policy, const std::string& why) {
    if (holds) return;
    throw Error(ErrorCode::unsupported, "the policy '" + to_string(policy) + "' " + why +
                                            ", so its rows cannot lie on disk; raise "
                                            "`host_memory` or take another policy");
  };
  for (const Policy& policy : request.policies) {
    require(policy.prefill.tau == 0.0, policy, "gathers rows of a whole prompt");
    const Scorer& scorer = request.scorers->at(policy.select);
    require(!scorer.reads_rows(), policy, "reads the keys of all rows to select");
    require(scorer.by_backend(), policy, "has a scorer that may read any row");
  }
}

// The caps of a plan on disk. The device tier may be a part of host memory.
struct DiskCaps {
  std::uint64_t host = 0;
  std::uint64_t device = 0;
  bool is_shared = false;  // the host's cap covers both

  std::uint64_t device_left(std::uint64_t host_bytes) const {
    return is_shared ? host - std::min(host, host_bytes) : device;
  }
};

std::uint64_t host_total(const KvPlan& base, const KvPlan& plan) {
  return base.host_bytes + DiskHostBytes(plan).sum();
}

// The longest steps, then the longest reads, whose buffers leave half of the caps to rows; else the
// largest that fit; nothing if none do. Every step of a prompt reads all earlier rows again, so its
// length decides how much is read.
std::optional<KvPlan> fit_on_disk(const KvPlan& base, const DiskCaps& caps) {
  std::optional<KvPlan> largest;
  const std::int64_t least = least_chunk(base, true);
  for (std::int64_t chunk = base.chunk;; chunk = std::max(chunk / 2, least)) {
    KvPlan plan = smallest(base, true, chunk);
    if (needs_tails(plan)) plan.cache_rows = RowCacheView::kWays;
    for (plan.stream_tokens = kMaxStreamTokens; plan.stream_tokens >= kPageTokens;
         plan.stream_tokens /= 2) {
      const std::uint64_t host = host_total(base, plan);
      const std::uint64_t device = total_of(plan);
      if (host > caps.host || device > caps.device_left(host)) continue;
      if (!largest) largest = plan;
      if (host <= caps.host / 2 && device <= caps.device_left(host) / 2) return plan;
    }
    if (chunk == least) return largest;
  }
}

// Steps whose selected rows the cache in host memory holds before blocks get the rest. With 32 and
// a device cache of 16 steps, 255 steps behind 386K tokens read 250,136 rows from disk; with 16 and
// 8, 281,680.
constexpr std::int64_t kCachedSteps = 32;

// Rows per KV head that a step selects in all layers, at most.
std::int64_t rows_selected(const KvPlan& plan) {
  return plan.placed_rows / fetches_at_once(plan) * plan.shape.layers;
}

// Adds cached rows, whole sets, up to `wanted` in all.
void cache_on_host(KvPlan& plan, std::uint64_t room, std::int64_t wanted) {
  if (plan.placed_rows == 0) return;
  const std::uint64_t before = DiskHostBytes(plan).sum();
  KvPlan more = plan;
  more.host_cache_rows += RowCacheView::kWays;
  const std::uint64_t of_set = DiskHostBytes(more).sum() - before;
  const std::int64_t lacking = std::max<std::int64_t>(wanted - plan.host_cache_rows, 0);
  const std::int64_t sets = std::min(static_cast<std::int64_t>(room / of_set),
                                     (lacking + RowCacheView::kWays - 1) / RowCacheView::kWays);
  plan.host_cache_rows += sets * RowCacheView::kWays;
}

// Adds blocks, but leaves the disk one: a store has no empty regions.
void keep_blocks_on_host(KvPlan& plan, std::uint64_t room) {
  const DiskLayout layout(plan);
  const std::uint64_t of_block = layout.regions * host_region_bytes(plan.shape, kPageTokens);
  const std::int64_t below = plan.blocks - std::max<std::int64_t>(layout.first_in_host, 1);
  plan.host_blocks = std::clamp<std::int64_t>(static_cast<std::int64_t>(room / of_block), 0,
                                              std::max<std::int64_t>(below, 0));
}

// Spends the rest of the host cap: on a cache of as many selected rows as kCachedSteps steps
// select, at most half, then on whole blocks, which spare every step of a prompt a read, and at
// last on more of the cache.
KvPlan kept_on_host(KvPlan plan, std::uint64_t room) {
  const std::uint64_t before = DiskHostBytes(plan).sum();
  const auto left = [&] { return room - (DiskHostBytes(plan).sum() - before); };
  cache_on_host(plan, left() / 2, kCachedSteps * rows_selected(plan));
  keep_blocks_on_host(plan, left());
  cache_on_host(plan, left(), plan.blocks * kPageTokens * plan.shape.layers);
  return plan;
}

// Throws for caps under which a session does not run with all rows on disk either.
[[noreturn]] void throw_no_memory(const KvPlan& base, const KvRequest& request,
                                  const DiskCaps& caps) {
  KvPlan plan = smallest(base, true, least_chunk(base, true));
  if (needs_tails(plan)) plan.cache_rows = RowCacheView::kWays;
  const std::uint64_t device = total_of(plan);
  const std::uint64_t host = host_total(base, plan) + (caps.is_shared ? device : 0);
  const HostRoom& room = request.disk->host;
  std::string short_of;
  const auto name = [&](const std::string& cap, std::uint64_t bytes, std::uint64_t least) {
    short_of += (short_of.empty() ? "" : "; ") + cap + " " + format_bytes(bytes) +
                " is too small, give at least " + std::to_string(least) + "B (" +
                format_bytes(least) + ")";
  };
  if (host > caps.host) name("`host_memory`", room.cap, host + room.taken);
  if (!caps.is_shared && device > caps.device) {
    name("`device_memory`", *request.device_cap, device + request.beside);
  }
  throw Error(ErrorCode::memory, "with all rows on disk, too, " + short_of);
}

// Sets the bytes on disk.
void require_disk(KvPlan& plan, const DiskRoom& disk) {
  plan.disk_bytes = DiskLayout(plan).bytes();
  if (plan.disk_bytes <= disk.bytes) return;
  throw Error(ErrorCode::memory, "`disk` " + format_bytes(disk.bytes) +
                                     " is too small: of the rows of " +
                                     std::to_string(plan.tokens) + " tokens it has to hold " +
                                     format_bytes(plan.disk_bytes));
}

KvPlan plan_on_disk(KvPlan base, const KvRequest& request, const IndexLayout& layout) {
  require_rows_may_leave(request);
  base.host_bytes -= host_row_bytes(base);
  base.on_disk = true;
  base.disk_directories = request.disk->directories;
  if (!RowCacheView::fits(base.shape.layers, base.blocks * kPageTokens)) {
    throw Error(ErrorCode::unsupported, "the rows of " + std::to_string(base.tokens) +
                                            " tokens are more than 2^32, too many for a disk");
  }
  const DiskCaps caps = {request.disk->host.left(), room_of(request), !request.device_cap};
  const std::optional<KvPlan> fitted = fit_on_disk(base, caps);
  if (!fitted) throw_no_memory(base, request, caps);
  const std::uint64_t host = host_total(base, *fitted);
  CacheWish wish = cache_wish(base, request, layout);
  wish.rows = std::max<std::int64_t>(wish.rows, fitted->cache_rows);
  KvPlan plan = widen(*fitted, caps.device_left(host), wish, request.cache_memory);
  if (!caps.is_shared) plan = kept_on_host(plan, caps.host - host);
  require_disk(plan, *request.disk);
  plan.device_bytes = total_of(plan);
  plan.device_in_host = caps.is_shared;
  plan.host_bytes = host_total(base, plan) + (caps.is_shared ? plan.device_bytes : 0);
  return plan;
}

}  // namespace

DiskRoom disk_room(const DiskConfig& disk, const std::optional<HostRoom>& host,
                   std::uint64_t taken) {
  if (disk.directories.empty()) throw Error(ErrorCode::usage, "`disk` names no directory");
  std::uint64_t left = UINT64_MAX;
  for (const MemoryLimit& limit : process_limits().memory) left = std::min(left, limit.left);
  DiskRoom room;
  room.directories = static_cast<int>(disk.directories.size());
  room.bytes = disk.bytes.value_or(UINT64_MAX);
  room.host = host.value_or(HostRoom{(left - std::min(left, taken)) / 2, 0});
  return room;
}

void require_context(std::int64_t tokens) {
  if (tokens >= 1 && tokens <= kMaxContext) return;
  throw Error(ErrorCode::usage, "`context` must be 1 to " + std::to_string(kMaxContext) +
                                    " tokens, not " + std::to_string(tokens));
}

KvPlan plan_kv(const KvRequest& request) {
  validate(request);
  require_windows(request);
  KvPlan plan = uncapped(request, std::make_shared<const IndexLayout>(plan_index(request)));
  const IndexLayout& layout = *plan.layout;
  if (request.disk) return plan_on_disk(plan, request, layout);
  if (!request.device_cap && request.on.attends_host_rows) {
    plan.in_place = true;
    if (layout.zipvl) plan.compact_rows = std::min(kHostCompactRows, request.context);
    const DeviceRowBytes rows(plan);
    plan.host_bytes +=
        plan.index_bytes + plan.work_bytes + plan.table_bytes + rows.compact + rows.prompt;
    return plan;
  }
  const std::uint64_t cap = room_of(request);
  const KvPlan whole = all_resident(plan);
  if (total_of(whole) <= cap) {
    plan = compact_in(whole, cap - total_of(whole));
  } else {
    plan = shared_with_host(plan, request, layout);
    const std::optional<KvPlan> streaming = fit_streaming(plan, cap);
    if (!streaming) throw_too_small(request, whole, plan);
    plan = widen(*streaming, cap, cache_wish(plan, request, layout), request.cache_memory);
  }
  plan.device_bytes = total_of(plan);
  return plan;
}

}  // namespace sluice
