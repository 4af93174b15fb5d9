#include "offload/attention/host_attention.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>

#include "lib/check.h"
#include "lib/current_error.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// Least bytes of a layer's host rows worth sharing: PCIe 5.0 brings this many in 160 microseconds,
// about as long as waking the host and merging take.
constexpr std::uint64_t kLeastBytes = std::uint64_t{8} << 20;

Error typed(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (...) {
    return current_error("attention on the host: ");
  }
}

template <typename T>
std::byte* bytes_of(T* data) {
  return reinterpret_cast<std::byte*>(data);
}
template <typename T>
const std::byte* bytes_of(const T* data) {
  return reinterpret_cast<const std::byte*>(data);
}

}  // namespace

HostAttention::HostAttention(Queue& queue, Queue& beside, const KvPlan& plan,
                             const HostAttender& attender, const PageSlots* pages,
                             const BatchToken* tokens)
    : queue_(queue),
      beside_(beside),
      plan_(plan),
      share_(attender.share),
      attender_(attender.backend),
      host_queue_(attender_->make_queue({.records = false})),
      pages_(pages),
      step_tokens_(tokens) {
  check(attender_->info().compute_tier == Tier::host && attender_->info().attends_host_rows,
        "attention on the host by a backend that is not there");
  const HostAttentionBytes bytes(plan);
  Backend& backend = queue.backend();
  gaps_.resize(bytes.gaps / sizeof(PositionGap));
  crossing_.resize(static_cast<std::size_t>(plan.sets()));
  gap_rows_.resize(crossing_.size());
  seconds_.resize(static_cast<std::size_t>(plan.shape.layers));
  device_gaps_ = backend.allocate(Tier::device, bytes.gaps);
  host_gaps_ = backend.allocate(Tier::host, bytes.gaps);
  tokens_ = backend.allocate(Tier::host, bytes.tokens);
  table_ = backend.allocate(Tier::host, bytes.table);
  queries_ = backend.allocate(Tier::host, bytes.queries);
  out_ = backend.allocate(Tier::host, bytes.queries);
  lse_ = backend.allocate(Tier::host, bytes.lse);
  times_ = backend.allocate(Tier::host, bytes.times);
}

// Waits, because host calls may still be queued.
HostAttention::~HostAttention() {
  try {
    if (beside_.has_backend()) beside_.synchronize();
  } catch (...) {
    return;  // the step that failed has reported it
  }
}

void HostAttention::mirror(std::span<const std::int64_t> entries) {
  auto* const table = reinterpret_cast<PageSlots*>(table_.data());
  std::vector<CopyOp> ops;
  for (const std::int64_t entry : entries) {
    ops.push_back({bytes_of(table + entry), bytes_of(pages_ + entry), sizeof(PageSlots)});
  }
  if (!ops.empty()) queue_.copy(ops);
}

// Chooses the gaps of a set's layers. Returns the number of the tokens' rows that are only in host
// memory.
std::int64_t HostAttention::choose(const BlockTables& tables, int set,
                                   std::span<const BatchToken> tokens) {
  std::int64_t at_host = 0;
  std::int64_t in_gaps = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const BatchToken& token = tokens[i];
    const auto is_host = [&](std::int64_t page) {
      return tables.page(token.sequence, page, set).device == PageSlots::kNone;
    };
    std::int64_t pages = 0;
    for (std::int64_t page = 0; page < token.pages(); ++page) pages += is_host(page) ? 1 : 0;
    std::int64_t left = share_.pages_of(pages);
    in_gaps += left * kPageTokens;
    at_host += pages * kPageTokens;
    std::int64_t first = token.pages();
    while (left > 0) left -= is_host(--first) ? 1 : 0;
    gaps_[at(set, i)] = {static_cast<std::int32_t>(first * kPageTokens),
                         static_cast<std::int32_t>(token.page_first())};
  }
  const auto number = static_cast<std::size_t>(set);
  gap_rows_[number] = in_gaps;
  crossing_[number] = at_host - in_gaps;
  return at_host;
}

bool HostAttention::begin(std::span<const BatchToken> tokens, std::vector<int> layers,
                          const BlockTables& tables) {
  layers_ = std::move(layers);
  has_learnt_ = false;
  {
    const std::lock_guard lock(mutex_);
    failure_ = nullptr;
  }
  if (layers_.empty() || share_.share() == 0.0) return false;
  std::int64_t most = 0;
  for (int set = 0; set < plan_.sets(); ++set) most = std::max(most, choose(tables, set, tokens));
  const std::uint64_t bytes =
      static_cast<std::uint64_t>(most * plan_.shape.kv_heads) * plan_.shape.row_bytes();
  if (!share_.is_fixed() && bytes < kLeastBytes) return false;
  if (std::all_of(gap_rows_.begin(), gap_rows_.end(), [](auto rows) { return rows == 0; })) {
    return false;
  }
  publish(tokens.size());
  return true;
}

// The host reads copies made in the queue's order, because it may run ahead of the device.
void HostAttention::publish(std::size_t tokens) {
  const CopyOp to_device = {device_gaps_.data(), bytes_of(gaps_.data()), device_gaps_.bytes()};
  queue_.copy({&to_device, 1});
  const CopyOp ops[] = {{host_gaps_.data(), device_gaps_.data(), host_gaps_.bytes()},
                        {tokens_.data(), bytes_of(step_tokens_), tokens * sizeof(BatchToken)}};
  queue_.copy(ops);
}

HostAttention::Call& HostAttention::call(int layer, const AttendBatchParams& params) {
  std::unique_ptr<Call>& known = calls_[{layer, params.batch.count}];
  if (known != nullptr) return *known;
  AttendBatchParams own = params;
  own.q = queries_.floats();
  own.q_stride = std::int64_t{params.shape.query_heads} * params.shape.head_dim;
  own.batch.tokens = reinterpret_cast<const BatchToken*>(tokens_.data());
  own.rows.device = nullptr;
  own.rows.pages = reinterpret_cast<const PageSlots*>(table_.data());
  own.gaps = reinterpret_cast<const PositionGap*>(host_gaps_.data()) + at(plan_.set_of(layer), 0);
  own.in_gaps = true;
  own.out = out_.floats();
  own.lse = lse_.floats();
  own.arena = nullptr;
  known = std::make_unique<Call>(*this, layer, own);
  return *known;
}

void HostAttention::copy_queries(const AttendBatchParams& params) {
  const std::int64_t width = std::int64_t{params.shape.query_heads} * params.shape.head_dim;
  std::vector<CopyOp> ops;
  for (std::int64_t token = 0; token < params.batch.count; ++token) {
    ops.push_back({bytes_of(queries_.floats() + token * width),
                   bytes_of(params.q + token * params.q_stride),
                   static_cast<std::size_t>(width) * sizeof(float)});
  }
  queue_.copy(ops);
}

void HostAttention::attend(int layer, AttendBatchParams params) {
  auto* const times = reinterpret_cast<std::uint64_t*>(times_.data()) + std::int64_t{2} * layer;
  copy_queries(params);
  beside_.wait_for(queue_);
  beside_.call_host(call(layer, params));
  params.gaps =
      reinterpret_cast<const PositionGap*>(device_gaps_.data()) + at(plan_.set_of(layer), 0);
  queue_.note_time(times);
  queue_.run(params);
  queue_.note_time(times + 1);
  queue_.wait_for(beside_);
  queue_.run(MergePartialsParams{params.batch.count * params.shape.query_heads,
                                 params.shape.head_dim, out_.floats(), lse_.floats(), params.out,
                                 params.lse});
}

void HostAttention::attend_gaps(int layer, const AttendBatchParams& params) noexcept {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  std::exception_ptr failure;
  try {
    host_queue_->run(params);
  } catch (...) {
    failure = std::current_exception();
  }
  const std::chrono::duration<double> spent = Clock::now() - begin;
  const std::lock_guard lock(mutex_);
  seconds_[static_cast<std::size_t>(layer)] = spent.count();
  if (failure_ == nullptr) failure_ = failure;
}

void HostAttention::finish() {
  {
    const std::lock_guard lock(mutex_);
    if (failure_ != nullptr) throw typed(failure_);
  }
  if (!has_learnt_) learn();
  has_learnt_ = true;
}

void HostAttention::learn() {
  const auto* const times = reinterpret_cast<const std::uint64_t*>(times_.data());
  HostShare::Part host;
  HostShare::Part device;
  const std::lock_guard lock(mutex_);
  for (const int layer : layers_) {
    const auto number = static_cast<std::size_t>(layer);
    const auto set = static_cast<std::size_t>(plan_.set_of(layer));
    host.rows += gap_rows_[set];
    host.seconds += seconds_[number];
    device.rows += crossing_[set];
    const std::uint64_t begin = times[2 * number];
    device.seconds += 1e-9 * static_cast<double>(std::max(begin, times[2 * number + 1]) - begin);
  }
  share_.learn(host, device);
}

}  // namespace sluice
