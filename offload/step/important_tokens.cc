#include "offload/step/important_tokens.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "lib/check.h"
#include "offload/step/kv_pool.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::int64_t kProbes = kNewestProbes + kRandomProbes;
static_assert(kProbes <= ChooseTokensParams::kMostProbes);
// Tokens of a block, in which every token attends to all before it. Blocks begin at multiples of
// this, so that the result does not depend on the chunk size.
constexpr std::int64_t kBlock = 512;
constexpr std::uint64_t kSeed = 20241011;

std::size_t bytes_of(std::int64_t count, std::size_t size) {
  return static_cast<std::size_t>(count) * size;
}

}  // namespace

ImportantTokens::ImportantTokens(Queue& queue, const IndexLayout& layout, std::uint64_t row_bytes,
                                 Tier tier)
    : queue_(&queue),
      shape_(layout.shape),
      context_(layout.context),
      sequences_(layout.sequences),
      arena_rows_(static_cast<std::int64_t>(row_bytes / shape_.row_bytes()) / shape_.kv_heads) {
  check(arena_rows_ > 0, "a plan without room for important rows");
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
  arena_ = backend.allocate(tier, row_bytes);
  masks_ = backend.allocate(tier, bytes.masks);
  host_listed_ = backend.allocate(Tier::host, bytes.listed);
  eligible_ = backend.allocate(Tier::host, bytes.masks);
  bad_ = backend.allocate(Tier::host, bytes.bad);
  std::fill_n(eligible(0, 0), bytes.masks, std::uint8_t{1});
}

void ImportantTokens::publish(int layer, std::int32_t sequence, std::int64_t first,
                              std::int64_t end) {
  if (first == end) return;
  const std::size_t offset = mask_offset(layer, sequence) + bytes_of(first, 1);
  const CopyOp op = {masks_.data() + offset, eligible_.data() + offset, bytes_of(end - first, 1)};
  queue_->copy({&op, 1});
}

Mask ImportantTokens::mask(int layer) const {
  return {reinterpret_cast<const std::uint8_t*>(masks_.data()) + mask_offset(layer, 0), context_};
}

const std::uint8_t* ImportantTokens::eligible_on_backend(int layer) const {
  return evicted_ ? mask(layer).tokens + sequence_ * context_ : nullptr;
}

void ImportantTokens::rewind(std::int32_t sequence, std::int64_t length) {
  if (masks_.bytes() == 0) return;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    std::uint8_t* const own = eligible(layer, sequence);
    std::fill(own + length, own + context_, std::uint8_t{1});
    publish(layer, sequence, length, context_);
  }
  const std::uint8_t* const all = eligible(0, 0);
  evicted_ = std::find(all, all + eligible_.bytes(), std::uint8_t{0}) != all + eligible_.bytes();
}

bool ImportantTokens::has_evicted_of(std::int32_t sequence) const {
  if (!evicted_) return false;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    const std::uint8_t* const own = eligible(layer, sequence);
    if (std::find(own, own + context_, std::uint8_t{0}) != own + context_) return true;
  }
  return false;
}

void ImportantTokens::copy(std::int32_t from, std::int32_t to) {
  for (int layer = 0; layer < shape_.layers && masks_.bytes() > 0; ++layer) {
    std::copy_n(eligible(layer, from), context_, eligible(layer, to));
    publish(layer, to, 0, context_);
  }
}

RowRun ImportantTokens::all_rows(const KvPool& pool, int set) const {
  return whole_run(pool.tables(), sequence_, prompt_.end(), set, pool.plan().in_place);
}

void ImportantTokens::begin(std::int32_t sequence, const StepRange& prompt, const KvPool& pool) {
  sequence_ = sequence;
  prompt_ = prompt;
  for (int set = 0; set < pool.plan().sets(); ++set) {
    if (all_rows(pool, set).count > 0) continue;
    throw Error(ErrorCode::unsupported,
                "a sparse prefill needs rows that follow each other, and this sequence shares or "
                "interleaves its own with others; use a session of its own for it");
  }
  const std::int64_t newest = std::max(prompt.first, prompt.end() - kNewestProbes);
  std::vector<std::int64_t> others(static_cast<std::size_t>(newest - prompt.first));
  std::iota(others.begin(), others.end(), prompt.first);
  probes_.clear();
  std::mt19937_64 random(kSeed);
  // The first steps of a Fisher-Yates shuffle.
  const auto wanted = std::min<std::size_t>(others.size(), kRandomProbes);
  for (std::size_t i = 0; i < wanted; ++i) {
    std::swap(others[i], others[i + random() % (others.size() - i)]);
    probes_.push_back(others[i]);
  }
  std::sort(probes_.begin(), probes_.end());
  for (std::int64_t t = newest; t < prompt.end(); ++t) probes_.push_back(t);
}

void ImportantTokens::collect(const StepRange& piece, const Queries& queries) {
  const std::int64_t width = std::int64_t{shape_.query_heads} * shape_.head_dim;
  std::vector<CopyOp> ops;
  for (std::size_t i = 0; i < probes_.size(); ++i) {
    if (probes_[i] < piece.first || probes_[i] >= piece.end()) continue;
    float* const to = probe_queries_.floats() + static_cast<std::int64_t>(i) * width;
    const float* const from = queries.q + (probes_[i] - piece.first) * queries.stride;
    ops.push_back({reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from),
                   bytes_of(width, sizeof(float))});
  }
  if (!ops.empty()) queue_->copy(ops);
}

// Softmax weights of every token of the prompt, summed over probes and query heads.
void ImportantTokens::sum_columns(int layer, const KvPool& pool) {
  const RowRun run = all_rows(pool, pool.set_of(layer));
  const std::vector<RowSpan> rows = pool.spans(layer, run);
  ColumnSumsParams params;
  params.q = probe_queries_.floats();
  params.positions = probes_;
  params.shape = shape_;
  params.rows = rows;
  params.eligible = eligible_on_backend(layer);
  params.sums = sums_.floats();
  queue_->run(params);
}

void ImportantTokens::choose(int layer, const SparsePrefill& how, const KvPool& pool) {
  brought_ = -1;
  sum_columns(layer, pool);
  const auto* const bad = reinterpret_cast<const std::int32_t*>(bad_.data());
  ChooseTokensParams params;
  params.sums = sums_.floats();
  params.first = prompt_.first;
  params.end = prompt_.end();
  params.probes = probes_;
  params.tau = how.tau;
  params.newest = kNewestProbes;
  params.eligible = eligible_on_backend(layer);
  params.block = kBlock;
  params.listed = reinterpret_cast<std::uint8_t*>(listed_.data());
  params.positions = reinterpret_cast<std::int32_t*>(positions_.data());
  params.seen = reinterpret_cast<std::int32_t*>(seen_.data());
  params.bad = reinterpret_cast<std::int32_t*>(bad_.data());
  queue_->run(params);
  const CopyOp op = {host_listed_.data(), listed_.data(), bytes_of(prompt_.end(), 1)};
  queue_->copy({&op, 1});
  queue_->synchronize();
  if (*bad != 0) {
    throw Error(ErrorCode::numeric, "a query or key of layer " + std::to_string(layer) +
                                        " is NaN or infinite; the checkpoint's weights are "
                                        "damaged" +
                                        damage_of(shape_));
  }
  listed_tokens_.count({reinterpret_cast<const std::uint8_t*>(host_listed_.data()), op.bytes});
  if (how.evict) keep_mask(layer);
}

void ImportantTokens::keep_mask(int layer) {
  evicted_ = true;
  const auto* const listed = reinterpret_cast<const std::uint8_t*>(host_listed_.data());
  std::copy(listed + prompt_.first, listed + prompt_.end(),
            eligible(layer, sequence_) + prompt_.first);
  publish(layer, sequence_, prompt_.first, prompt_.end());
}

std::int64_t ImportantTokens::block_begin(std::int64_t position) const {
  return std::max(prompt_.first, position / kBlock * kBlock);
}

void ImportantTokens::attend(int layer, const SparsePrefill& how, const StepRange& piece,
                             const Queries& queries, const KvPool& pool, Ledger& ledger) {
  if (how.evict) return attend_important(layer, piece, queries, pool, ledger);
  attend_blocks(layer, piece, queries, pool, ledger);
  attend_before(layer, piece, queries, pool, ledger);
}

// Attends, for every token, to the tokens of its block up to itself.
void ImportantTokens::attend_blocks(int layer, const StepRange& piece, const Queries& queries,
                                    const KvPool& pool, Ledger& ledger) {
  const std::int64_t width = std::int64_t{shape_.query_heads} * shape_.head_dim;
  for (std::int64_t first = piece.first; first < piece.end();) {
    const std::int64_t end = std::min(piece.end(), (first / kBlock + 1) * kBlock);
    const std::int64_t token = first - piece.first;
    AttendParams params =
        attend_params(shape_, {first, end - first},
                      {queries.q + token * queries.stride, queries.stride,
                       queries.out + token * width, queries.lse + token * shape_.query_heads});
    for (const RowRun& run :
         nearest_runs(pool.tables(), sequence_, block_begin(first), end, pool.set_of(layer))) {
      attend_run(layer, params, run, pool, ledger);
    }
    first = end;
  }
}

// Attends to a run where it lies if it is resident, else in the window.
void ImportantTokens::attend_run(int layer, AttendParams& params, const RowRun& run,
                                 const KvPool& pool, Ledger& ledger) {
  const Tier tier = pool.tier();
  const bool here = run.place == RowPlace::device || pool.plan().in_place;
  const std::int64_t most = here ? run.count : pool.plan().window_tokens;
  for (std::int64_t first = run.first; first < run.end(); first += most) {
    const RowRun part = run.part(first, std::min(run.end(), first + most));
    std::vector<RowSpan> rows = pool.spans(layer, part);
    std::vector<CopyOp> ops;
    for (int head = 0; head < shape_.kv_heads && !here; ++head) {
      RowSpan& span = rows[static_cast<std::size_t>(head)];
      ops.push_back({pool.window(head), span.rows, bytes_of(part.count, shape_.row_bytes())});
      span.rows = pool.window(head);
    }
    if (!here) queue_->copy(ops);
    ledger.record(layer, here ? tier : Tier::host, tier, here ? Cause::hit : Cause::miss,
                  traffic_of(shape_, part.count));
    params.rows = rows;
    params.first_row_position = part.first;
    queue_->run(params);
    params.rows = {};
    params.merge = true;
  }
}

// Attends to the important tokens before each token's block.
void ImportantTokens::attend_before(int layer, const StepRange& piece, const Queries& queries,
                                    const KvPool& pool, Ledger& ledger) {
  AttendParams params = attend_params(shape_, piece, queries);
  params.seen = reinterpret_cast<const std::int32_t*>(seen_.data()) + (piece.first - prompt_.first);
  params.merge = true;
  // Later important tokens lie in the chunk's own blocks and are counted there.
  count_hits(layer, listed_tokens_.before(block_begin(piece.first)), pool, ledger);
  attend_listed(layer, params, listed_tokens_.before(block_begin(piece.end() - 1)), pool, ledger);
}

// Packs important tokens, so that they are consecutive as queries and as rows, which the causal
// mask needs.
void ImportantTokens::attend_important(int layer, const StepRange& piece, const Queries& queries,
                                       const KvPool& pool, Ledger& ledger) {
  const std::int64_t width = std::int64_t{shape_.query_heads} * shape_.head_dim;
  const std::int64_t end = listed_tokens_.before(piece.end());
  std::int64_t first = listed_tokens_.before(piece.first);
  UnpackTokensParams unpack = {nullptr, 0,       piece.first, piece.tokens,
                               width,   nullptr, queries.out, true};
  if (first == end) return queue_->run(unpack);
  count_hits(layer, end, pool, ledger);
  for (; first < end; first += kPackedTokens, unpack.clear = false) {
    unpack.positions = positions() + first;
    unpack.count = std::min(kPackedTokens, end - first);
    unpack.packed = packed_out_.floats();
    queue_->run(PackTokensParams{unpack.positions, unpack.count, piece.first, width, queries.q,
                                 queries.stride, packed_q_.floats()});
    AttendParams params =
        attend_params(shape_, {first, unpack.count},
                      {packed_q_.floats(), width, packed_out_.floats(), packed_lse_.floats()});
    attend_listed(layer, params, first + unpack.count, pool, ledger);
    queue_->run(unpack);
  }
}

// Counts the rows that a chunk attends to once, in however many parts it attends.
void ImportantTokens::count_hits(int layer, std::int64_t rows, const KvPool& pool,
                                 Ledger& ledger) const {
  if (rows == 0) return;
  ledger.record(layer, pool.tier(), pool.tier(), Cause::hit, traffic_of(shape_, rows));
}

// Attends to the first `count` rows of the list; `params` takes list indices for positions.
void ImportantTokens::attend_listed(int layer, AttendParams& params, std::int64_t count,
                                    const KvPool& pool, Ledger& ledger) {
  for (std::int64_t first = 0; first < count; first += arena_rows_) {
    const std::int64_t all = std::min(arena_rows_, listed_tokens_.count() - first);
    if (brought_ != first) bring(layer, first, all, pool, ledger);
    const std::vector<RowSpan> rows = brought(std::min(all, count - first));
    params.rows = rows;
    params.first_row_position = first;
    queue_->run(params);
    params.rows = {};
    params.merge = true;
  }
}

// Gathers listed rows [first, first + count) into the arena.
void ImportantTokens::bring(int layer, std::int64_t first, std::int64_t count, const KvPool& pool,
                            Ledger& ledger) {
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(shape_.kv_heads), count);
  GatherParams params;
  params.shape = shape_;
  params.rows = pool.rows(layer);
  params.sequence = sequence_;
  params.positions = positions();
  params.first = first;
  params.counts = counts;
  params.to = arena_.data();
  params.to_rows = arena_rows_;
  queue_->run(params);
  brought_ = first;
  if (pool.plan().in_place) return;
  const std::int64_t near =
      listed_tokens_.resident(pool.tables(), sequence_, first, first + count, pool.set_of(layer));
  ledger.record(layer, Tier::host, pool.tier(), Cause::miss, traffic_of(shape_, count - near));
}

std::vector<RowSpan> ImportantTokens::brought(std::int64_t count) const {
  std::vector<RowSpan> rows;
  for (std::int64_t head = 0; head < shape_.kv_heads; ++head) {
    rows.push_back({arena_.data() + bytes_of(head * arena_rows_, shape_.row_bytes()), count});
  }
  return rows;
}

}  // namespace sluice
