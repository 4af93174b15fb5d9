#include "offload/step/important_tokens.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "lib/bytes.h"
#include "lib/check.h"
#include "offload/step/kv_pool.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::int64_t kProbes = kNewestProbes + kRandomProbes;
static_assert(kProbes <= ChooseTokensParams::kMostProbes);
// Tokens of a block, in which every token attends to all before it. Blocks begin at multiples of
// this, so that the result does not depend on the chunk size.
constexpr std::int64_t kBlock = ChooseTokensParams::kBlock;
constexpr std::uint64_t kSeed = 20241011;

}  // namespace

ImportantTokens::ImportantTokens(Queue& queue, const IndexLayout& layout,
                                 const DeviceRowBytes& rows, Tier tier)
    : queue_(&queue), shape_(layout.shape) {
  const auto rows_in = [&](std::uint64_t bytes) {
    return static_cast<std::int64_t>(bytes / shape_.row_bytes()) / shape_.kv_heads;
  };
  arena_rows_ = rows_in(rows.compact);
  staged_rows_ = rows_in(rows.prompt);
  check(arena_rows_ > 0, "a plan without room for important rows");
  // Parts of the arena are whole pages, so that they can be indexed.
  if (arena_rows_ > kPageTokens) arena_rows_ -= arena_rows_ % kPageTokens;
  Backend& backend = queue.backend();
  const ImportantTokenBytes bytes(layout);
  probe_queries_ = backend.allocate(tier, bytes.probe_queries);
  sums_ = backend.allocate(tier, bytes.sums);
  listed_ = backend.allocate(tier, bytes.listed);
  positions_ = backend.allocate(tier, bytes.positions);
  seen_ = backend.allocate(tier, bytes.seen);
  packed_q_ = backend.allocate(tier, bytes.packed);
  packed_out_ = backend.allocate(tier, bytes.packed);
  packed_lse_ = backend.allocate(tier, bytes.packed_lse);
  arena_ = backend.allocate(tier, rows.compact);
  staged_ = backend.allocate(tier, rows.prompt);
  table_ = backend.allocate(tier, bytes.table);
  host_listed_ = backend.allocate(Tier::host, bytes.listed);
  bad_ = backend.allocate(Tier::host, bytes.bad);
  if (!stages()) return;
  std::vector<PageSlots> places(static_cast<std::size_t>(layout.pages()));
  for (std::size_t page = 0; page < places.size(); ++page) {
    places[page].device = static_cast<std::int32_t>(page);
  }
  const CopyOp op = {table_.data(), reinterpret_cast<const std::byte*>(places.data()), bytes.table};
  queue_->copy({&op, 1});
}

RowRun ImportantTokens::all_rows(const KvPool& pool, int set) const {
  return whole_run(pool.tables(), sequence_, prompt_.end(), set, pool.plan().in_place);
}

std::byte* ImportantTokens::staged_row(int head, std::int64_t row) const {
  return staged_.data() + bytes_of(head * staged_rows_ + row, shape_.row_bytes());
}

std::vector<RowSpan> ImportantTokens::staged(std::int64_t first, std::int64_t count) const {
  std::vector<RowSpan> spans;
  for (int head = 0; head < shape_.kv_heads; ++head) {
    spans.push_back({staged_row(head, first), count});
  }
  return spans;
}

// The layer's rows, from which important ones are gathered.
PagedRows ImportantTokens::rows(const KvPool& pool) const {
  if (!stages()) return pool.rows(layer_);
  PagedRows rows;
  rows.device = staged_.data();
  rows.device_stride = staged_rows_ * static_cast<std::int64_t>(shape_.row_bytes());
  rows.pages = reinterpret_cast<const PageSlots*>(table_.data());
  return rows;
}

void ImportantTokens::begin(std::int32_t sequence, const StepRange& prompt, const KvPool& pool) {
  sequence_ = sequence;
  prompt_ = prompt;
  for (int set = 0; set < pool.plan().sets() && !stages(); ++set) {
    if (all_rows(pool, set).count > 0) continue;
    throw Error(ErrorCode::unsupported,
                "a sparse prefill needs rows that follow each other, and this sequence shares or "
                "interleaves its own with others; use a session of its own for it");
  }
  const std::int64_t newest = std::max<std::int64_t>(0, prompt.tokens - kNewestProbes);
  std::vector<std::int64_t> others(static_cast<std::size_t>(newest));
  std::iota(others.begin(), others.end(), 0);
  probes_.clear();
  std::mt19937_64 random(kSeed);
  // The first steps of a Fisher-Yates shuffle.
  const auto wanted = std::min<std::size_t>(others.size(), kRandomProbes);
  for (std::size_t i = 0; i < wanted; ++i) {
    std::swap(others[i], others[i + random() % (others.size() - i)]);
    probes_.push_back(others[i]);
  }
  std::sort(probes_.begin(), probes_.end());
  for (std::int64_t t = newest; t < prompt.tokens; ++t) probes_.push_back(t);
}

void ImportantTokens::begin_layer(int layer, const KvPool& pool, Ledger& ledger) {
  layer_ = layer;
  brought_ = -1;
  const int set = pool.set_of(layer);
  local_ = {pool.tables().rows(sequence_, prompt_.first, set), prompt_.tokens};
  if (!stages()) return;
  std::vector<CopyOp> ops;
  for (const RowRun& run : nearest_runs(pool.tables(), sequence_, 0, local_.first, set)) {
    for (int head = 0; head < shape_.kv_heads; ++head) {
      ops.push_back({staged_row(head, run.first), pool.row(layer, head, run),
                     bytes_of(run.count, shape_.row_bytes())});
    }
    if (run.place == RowPlace::device || pool.plan().in_place) continue;
    ledger.record(layer, Tier::host, pool.tier(), Cause::miss, traffic_of(shape_, run.count));
  }
  if (!ops.empty()) queue_->copy(ops);
}

void ImportantTokens::stage(const StepRange& piece, const NewRows& rows) {
  std::vector<std::byte*> heads;
  for (int head = 0; head < shape_.kv_heads; ++head) {
    heads.push_back(staged_row(head, local(piece).first));
  }
  queue_->run(AppendParams{rows.k, rows.v, piece.tokens, rows.stride, shape_, heads, {}});
}

void ImportantTokens::collect(const StepRange& piece, const Queries& queries) {
  const std::int64_t width = std::int64_t{shape_.query_heads} * shape_.head_dim;
  std::vector<CopyOp> ops;
  for (std::size_t i = 0; i < probes_.size(); ++i) {
    const std::int64_t token = prompt_.first + probes_[i];
    if (token < piece.first || token >= piece.end()) continue;
    float* const to = probe_queries_.floats() + static_cast<std::int64_t>(i) * width;
    const float* const from = queries.q + (token - piece.first) * queries.stride;
    ops.push_back({reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from),
                   bytes_of(width, sizeof(float))});
  }
  if (!ops.empty()) queue_->copy(ops);
}

// Softmax weights of every token of the prompt, summed over probes and query heads.
void ImportantTokens::sum_columns(const KvPool& pool) {
  const std::vector<RowSpan> rows =
      stages() ? staged(0, local_.end()) : pool.spans(layer_, all_rows(pool, pool.set_of(layer_)));
  std::vector<std::int64_t> positions = probes_;
  for (std::int64_t& at : positions) at += local_.first;
  ColumnSumsParams params;
  params.q = probe_queries_.floats();
  params.positions = positions;
  params.shape = shape_;
  params.rows = rows;
  params.sums = sums_.floats();
  queue_->run(params);
}

void ImportantTokens::choose(const SparsePrefill& how, const KvPool& pool) {
  brought_ = -1;
  sum_columns(pool);
  std::vector<std::int64_t> probes = probes_;
  for (std::int64_t& at : probes) at += local_.first;
  const auto* const bad = reinterpret_cast<const std::int32_t*>(bad_.data());
  ChooseTokensParams params;
  params.sums = sums_.floats();
  params.first = local_.first;
  params.end = local_.end();
  params.probes = probes;
  params.tau = how.tau;
  params.listed = reinterpret_cast<std::uint8_t*>(listed_.data());
  params.positions = reinterpret_cast<std::int32_t*>(positions_.data());
  params.seen = reinterpret_cast<std::int32_t*>(seen_.data());
  params.bad = reinterpret_cast<std::int32_t*>(bad_.data());
  queue_->run(params);
  const CopyOp op = {host_listed_.data(), listed_.data(), bytes_of(local_.end(), 1)};
  queue_->copy({&op, 1});
  queue_->synchronize();
  if (*bad != 0) {
    throw Error(ErrorCode::numeric, "a query or key of layer " + std::to_string(layer_) +
                                        " is NaN or infinite; the checkpoint's weights are "
                                        "damaged" +
                                        damage_of(shape_));
  }
  listed_tokens_.count({reinterpret_cast<const std::uint8_t*>(host_listed_.data()), op.bytes});
}

std::vector<RowSpan> ImportantTokens::rows_to_write(const SparsePrefill& how, std::int64_t first,
                                                    std::int64_t most, const KvPool& pool,
                                                    Ledger& ledger) {
  const std::int64_t count = std::min(most, rows_in_all(how) - first);
  if (!how.evict) return staged(first, count);
  const std::int64_t part = first / arena_rows_ * arena_rows_;
  const std::int64_t all = std::min(arena_rows_, listed_tokens_.count() - part);
  if (brought_ != part) bring(part, all, pool, ledger);
  return brought(first - part, std::min(count, part + all - first));
}

std::int64_t ImportantTokens::block_begin(std::int64_t position) const {
  return std::max(local_.first, position / kBlock * kBlock);
}

void ImportantTokens::attend(const SparsePrefill& how, const StepRange& piece,
                             const Queries& queries, const KvPool& pool, Ledger& ledger) {
  const StepRange local = this->local(piece);
  if (how.evict) return attend_important(local, queries, pool, ledger);
  attend_blocks(local, queries, pool, ledger);
  attend_before(local, queries, pool, ledger);
}

// Attends, for every token, to the tokens of its block up to itself.
void ImportantTokens::attend_blocks(const StepRange& piece, const Queries& queries,
                                    const KvPool& pool, Ledger& ledger) {
  const std::int64_t width = std::int64_t{shape_.query_heads} * shape_.head_dim;
  for (std::int64_t first = piece.first; first < piece.end();) {
    const std::int64_t end = std::min(piece.end(), (first / kBlock + 1) * kBlock);
    const std::int64_t token = first - piece.first;
    AttendParams params =
        attend_params(shape_, {first, end - first},
                      {queries.q + token * queries.stride, queries.stride,
                       queries.out + token * width, queries.lse + token * shape_.query_heads});
    if (stages()) {
      attend_staged(params, block_begin(first), end, pool, ledger);
    } else {
      for (const RowRun& run :
           nearest_runs(pool.tables(), sequence_, block_begin(first), end, pool.set_of(layer_))) {
        attend_run(params, run, pool, ledger);
      }
    }
    first = end;
  }
}

// Attends to a run where it lies if it is resident, else in the window.
void ImportantTokens::attend_run(AttendParams& params, const RowRun& run, const KvPool& pool,
                                 Ledger& ledger) {
  const Tier tier = pool.tier();
  const bool here = run.place == RowPlace::device || pool.plan().in_place;
  const std::int64_t most = here ? run.count : pool.plan().window_tokens;
  for (std::int64_t first = run.first; first < run.end(); first += most) {
    const RowRun part = run.part(first, std::min(run.end(), first + most));
    std::vector<RowSpan> rows = pool.spans(layer_, part);
    std::vector<CopyOp> ops;
    for (int head = 0; head < shape_.kv_heads && !here; ++head) {
      RowSpan& span = rows[static_cast<std::size_t>(head)];
      ops.push_back({pool.window(head), span.rows, bytes_of(part.count, shape_.row_bytes())});
      span.rows = pool.window(head);
    }
    if (!here) queue_->copy(ops);
    ledger.record(layer_, here ? tier : Tier::host, tier, here ? Cause::hit : Cause::miss,
                  traffic_of(shape_, part.count));
    params.rows = rows;
    params.first_row_position = part.first;
    queue_->run(params);
    params.rows = {};
    params.merge = true;
  }
}

void ImportantTokens::attend_staged(AttendParams& params, std::int64_t first, std::int64_t end,
                                    const KvPool& pool, Ledger& ledger) {
  const std::vector<RowSpan> rows = staged(first, end - first);
  count_hits(end - first, pool, ledger);
  params.rows = rows;
  params.first_row_position = first;
  queue_->run(params);
  params.rows = {};
}

// Attends to the important tokens before each token's block.
void ImportantTokens::attend_before(const StepRange& piece, const Queries& queries,
                                    const KvPool& pool, Ledger& ledger) {
  AttendParams params = attend_params(shape_, piece, queries);
  params.seen = reinterpret_cast<const std::int32_t*>(seen_.data()) + (piece.first - local_.first);
  params.merge = true;
  // Later important tokens lie in the chunk's own blocks and are counted there.
  count_hits(listed_tokens_.before(block_begin(piece.first)), pool, ledger);
  attend_listed(params, listed_tokens_.before(block_begin(piece.end() - 1)), pool, ledger);
}

// Packs important tokens, so that they are consecutive as queries and as rows, which the causal
// mask needs.
void ImportantTokens::attend_important(const StepRange& piece, const Queries& queries,
                                       const KvPool& pool, Ledger& ledger) {
  const std::int64_t width = std::int64_t{shape_.query_heads} * shape_.head_dim;
  const std::int64_t end = listed_tokens_.before(piece.end());
  std::int64_t first = listed_tokens_.before(piece.first);
  UnpackTokensParams unpack = {nullptr, 0,       piece.first, piece.tokens,
                               width,   nullptr, queries.out, true};
  if (first == end) return queue_->run(unpack);
  count_hits(end, pool, ledger);
  for (; first < end; first += kPackedTokens, unpack.clear = false) {
    unpack.positions = positions() + first;
    unpack.count = std::min(kPackedTokens, end - first);
    unpack.packed = packed_out_.floats();
    queue_->run(PackTokensParams{unpack.positions, unpack.count, piece.first, width, queries.q,
                                 queries.stride, packed_q_.floats()});
    AttendParams params =
        attend_params(shape_, {first, unpack.count},
                      {packed_q_.floats(), width, packed_out_.floats(), packed_lse_.floats()});
    attend_listed(params, first + unpack.count, pool, ledger);
    queue_->run(unpack);
  }
}

// Counts the rows that a chunk attends to once, in however many parts it attends.
void ImportantTokens::count_hits(std::int64_t rows, const KvPool& pool, Ledger& ledger) const {
  if (rows == 0) return;
  ledger.record(layer_, pool.tier(), pool.tier(), Cause::hit, traffic_of(shape_, rows));
}

// Attends to the first `count` rows of the list; `params` takes list indices for positions.
void ImportantTokens::attend_listed(AttendParams& params, std::int64_t count, const KvPool& pool,
                                    Ledger& ledger) {
  for (std::int64_t first = 0; first < count; first += arena_rows_) {
    const std::int64_t all = std::min(arena_rows_, listed_tokens_.count() - first);
    if (brought_ != first) bring(first, all, pool, ledger);
    const std::vector<RowSpan> rows = brought(0, std::min(all, count - first));
    params.rows = rows;
    params.first_row_position = first;
    queue_->run(params);
    params.rows = {};
    params.merge = true;
  }
}

// Gathers listed rows [first, first + count) into the arena.
void ImportantTokens::bring(std::int64_t first, std::int64_t count, const KvPool& pool,
                            Ledger& ledger) {
  GatherParams params;
  params.shape = shape_;
  params.rows = rows(pool);
  params.sequence = stages() ? 0 : sequence_;
  params.positions = positions() + first;
  params.count = count;
  params.to = arena_.data();
  params.to_rows = arena_rows_;
  queue_->run(params);
  brought_ = first;
  if (pool.plan().in_place || stages()) return;
  const std::int64_t near =
      listed_tokens_.resident(pool.tables(), sequence_, first, first + count, pool.set_of(layer_));
  ledger.record(layer_, Tier::host, pool.tier(), Cause::miss, traffic_of(shape_, count - near));
}

std::vector<RowSpan> ImportantTokens::brought(std::int64_t first, std::int64_t count) const {
  std::vector<RowSpan> rows;
  for (std::int64_t head = 0; head < shape_.kv_heads; ++head) {
    rows.push_back(
        {arena_.data() + bytes_of(head * arena_rows_ + first, shape_.row_bytes()), count});
  }
  return rows;
}

}  // namespace sluice
