#include <algorithm>
#include <array>
#include <vector>

#include "lib/check.h"
#include "offload/host_store.h"
#include "offload/kv_store.h"

namespace sluice {
namespace {

// The device tier holds, per (layer, KV head), the first `resident_tokens` rows and, if the plan
// has tails, the newest unfinished page; and, for one layer at a time, the rows of the current
// step (the window) and two streaming buffers through which all other rows pass. The host is
// written through: it is the home of every row, so nothing on the device ever has to be saved.
class TieredStore : public KvStore {
 public:
  TieredStore(Backend& backend, const KvPlan& plan);
  void begin(const StepRange& step) override;
  void append(int layer, const StepRange& step, const NewRows& rows, Ledger& ledger) override;
  void attend(int layer, const StepRange& step, const Queries& queries, Ledger& ledger) override;
  RowSource source(int layer, int head) const override;
  const std::byte* newest(int layer, int head, std::int64_t first) const override;
  void rewind(std::int64_t length, Ledger& ledger) override;

 private:
  enum class Place { resident, tail, window };

  // Where the rows of a step go on the device, and the first position of the run they end.
  struct Landing {
    Place place;
    std::int64_t first;
  };

  Landing landing(const StepRange& step) const;
  std::byte* place(Place place, int layer, int head, std::int64_t offset) const;
  std::byte* stream(std::size_t buffer, int head) const;
  void copy_heads(Stream stream, std::int64_t tokens, const auto& to, const auto& from);
  void attend_run(const AttendParams& params, std::int64_t first, std::int64_t count,
                  const auto& row);
  void attend_streamed(int layer, AttendParams params, std::int64_t begin, std::int64_t end);

  Backend* backend_;
  KvPlan plan_;
  StepRange step_;
  HostStore host_;
  Buffer resident_;  // [layers, kv_heads, resident_tokens, row_bytes]
  Buffer tails_;     // [layers, kv_heads, kPageTokens, row_bytes]
  Buffer window_;    // [kv_heads, window_tokens, row_bytes]
  Buffer stream_;    // [2, kv_heads, stream_tokens, row_bytes]
};

TieredStore::TieredStore(Backend& backend, const KvPlan& plan)
    : backend_(&backend), plan_(plan), host_(backend, plan.shape, plan.context) {
  const auto heads = static_cast<std::size_t>(plan.shape.kv_heads);
  const auto regions = heads * static_cast<std::size_t>(plan.shape.layers);
  const auto allocate = [&](std::size_t runs, std::int64_t tokens) {
    return backend.allocate(Tier::device,
                            runs * static_cast<std::size_t>(tokens) * plan.shape.row_bytes());
  };
  resident_ = allocate(regions, plan.resident_tokens);
  tails_ = allocate(regions, plan.tails ? kPageTokens : 0);
  window_ = allocate(heads, plan.window_tokens);
  stream_ = allocate(2 * heads, plan.stream_tokens);
}

void TieredStore::begin(const StepRange& step) {
  host_.grow(step.end());
  step_ = step;
}

RowSource TieredStore::source(int layer, int head) const {
  return {place(Place::resident, layer, head, 0), std::min(plan_.resident_tokens, step_.end()),
          host_.row(layer, head, 0)};
}

const std::byte* TieredStore::newest(int layer, int head, std::int64_t first) const {
  const Landing landing = this->landing(step_);
  check(first >= landing.first, "rows of a page that is not kept on the device");
  return place(landing.place, layer, head, first - landing.first);
}

// The unfinished page comes back from its home, unless it is among the resident rows.
void TieredStore::rewind(std::int64_t length, Ledger& ledger) {
  const std::int64_t page = length / kPageTokens * kPageTokens;
  if (!plan_.tails || length <= plan_.resident_tokens || page == length) return;
  for (int layer = 0; layer < plan_.shape.layers; ++layer) {
    copy_heads(
        Stream::compute, length - page,
        [&](int head) { return place(Place::tail, layer, head, 0); },
        [&](int head) { return host_.row(layer, head, page); });
    ledger.record(layer, Tier::host, Tier::device, Cause::miss,
                  traffic_of(plan_.shape, length - page));
  }
}

TieredStore::Landing TieredStore::landing(const StepRange& step) const {
  if (step.end() <= plan_.resident_tokens) return {Place::resident, 0};
  if (!plan_.tails) return {Place::window, step.first};
  // Resident rows end where a page does, so the page where the step begins is whole in one place.
  const std::int64_t page = step.first / kPageTokens * kPageTokens;
  if (step.first < plan_.resident_tokens) return {Place::window, page};
  return {step.end() <= page + kPageTokens ? Place::tail : Place::window, page};
}

std::byte* TieredStore::place(Place place, int layer, int head, std::int64_t offset) const {
  const std::int64_t region = std::int64_t{layer} * plan_.shape.kv_heads + head;
  std::byte* base = nullptr;
  std::int64_t row = offset;
  switch (place) {
    case Place::resident:
      base = resident_.data();
      row += region * plan_.resident_tokens;
      break;
    case Place::tail:
      base = tails_.data();
      row += region * kPageTokens;
      break;
    case Place::window:
      base = window_.data();
      row += head * plan_.window_tokens;
      break;
  }
  return base + static_cast<std::size_t>(row) * plan_.shape.row_bytes();
}

std::byte* TieredStore::stream(std::size_t buffer, int head) const {
  const auto heads = static_cast<std::size_t>(plan_.shape.kv_heads);
  const auto tokens = static_cast<std::size_t>(plan_.stream_tokens);
  return stream_.data() +
         (buffer * heads + static_cast<std::size_t>(head)) * tokens * plan_.shape.row_bytes();
}

// Copies `tokens` rows per KV head from from(head) to to(head).
void TieredStore::copy_heads(Stream stream, std::int64_t tokens, const auto& to, const auto& from) {
  if (tokens == 0) return;
  const std::size_t bytes = static_cast<std::size_t>(tokens) * plan_.shape.row_bytes();
  std::vector<CopyOp> ops;
  for (int head = 0; head < plan_.shape.kv_heads; ++head) {
    ops.push_back({to(head), from(head), bytes});
  }
  backend_->copy(ops, stream);
}

void TieredStore::append(int layer, const StepRange& step, const NewRows& rows, Ledger& ledger) {
  const Landing landing = this->landing(step);
  const std::int64_t before = step.first - landing.first;  // rows of the run that exist already
  const auto at = [&](Place where, std::int64_t offset) {
    return [this, where, layer, offset](int head) { return place(where, layer, head, offset); };
  };
  if (landing.place == Place::window) {
    const bool resident = landing.first < plan_.resident_tokens;
    copy_heads(Stream::compute, before, at(Place::window, 0),
               resident ? at(Place::resident, landing.first) : at(Place::tail, 0));
  }
  std::vector<std::byte*> to;
  std::vector<std::byte*> home;
  for (int head = 0; head < plan_.shape.kv_heads; ++head) {
    to.push_back(place(landing.place, layer, head, before));
    home.push_back(host_.row(layer, head, step.first));
  }
  backend_->append({rows.k, rows.v, step.tokens, rows.stride, plan_.shape, to, home});
  ledger.record(layer, Tier::device, Tier::device, Cause::append,
                traffic_of(plan_.shape, step.tokens));

  ledger.record(layer, Tier::device, Tier::host, Cause::write_back,
                traffic_of(plan_.shape, step.tokens));

  if (landing.place != Place::window) return;
  if (step.first < plan_.resident_tokens) {
    copy_heads(Stream::compute, plan_.resident_tokens - step.first, at(Place::resident, step.first),
               at(Place::window, before));
  }
  if (plan_.tails) {
    const std::int64_t page = step.end() / kPageTokens * kPageTokens;
    copy_heads(Stream::compute, step.end() - page, at(Place::tail, 0),
               at(Place::window, page - landing.first));
  }
}

// Attends to `count` rows of each head, which begin at row(head) and at position `first`.
void TieredStore::attend_run(const AttendParams& params, std::int64_t first, std::int64_t count,
                             const auto& row) {
  std::vector<RowSpan> rows;
  for (int head = 0; head < plan_.shape.kv_heads; ++head) rows.push_back({row(head), count});
  AttendParams run = params;
  run.rows = rows;
  run.first_row_position = first;
  backend_->attend(run);
}

void TieredStore::attend(int layer, const StepRange& step, const Queries& queries, Ledger& ledger) {
  const Landing landing = this->landing(step);
  AttendParams params = attend_params(plan_.shape, step, queries);
  // The run that the step's rows end: it covers everything if all of them are resident.
  attend_run(params, landing.first, step.end() - landing.first,
             [&](int head) { return place(landing.place, layer, head, 0); });
  std::int64_t hits = step.end() - landing.first;
  params.merge = true;
  const std::int64_t resident = std::min(landing.first, plan_.resident_tokens);
  if (resident > 0) {
    attend_run(params, 0, resident,
               [&](int head) { return place(Place::resident, layer, head, 0); });
    hits += resident;
  }
  attend_streamed(layer, params, resident, landing.first);
  ledger.record(layer, Tier::device, Tier::device, Cause::hit, traffic_of(plan_.shape, hits));
  ledger.record(layer, Tier::host, Tier::device, Cause::miss,
                traffic_of(plan_.shape, landing.first - resident));
}

void TieredStore::attend_streamed(int layer, AttendParams params, std::int64_t begin,
                                  std::int64_t end) {
  const auto fetch = [&](std::size_t buffer, std::int64_t first) {
    if (first >= end) return;
    // Not before attention has finished with what the buffer held.
    backend_->order(Stream::compute, Stream::transfer);
    copy_heads(
        Stream::transfer, std::min(plan_.stream_tokens, end - first),
        [&](int head) { return stream(buffer, head); },
        [&](int head) { return host_.row(layer, head, first); });
  };
  std::size_t buffer = 0;
  fetch(buffer, begin);
  for (std::int64_t first = begin; first < end; first += plan_.stream_tokens) {
    backend_->order(Stream::transfer, Stream::compute);
    fetch(1 - buffer, first + plan_.stream_tokens);
    attend_run(params, first, std::min(plan_.stream_tokens, end - first),
               [&](int head) { return stream(buffer, head); });
    buffer = 1 - buffer;
  }
}

}  // namespace

std::unique_ptr<KvStore> make_tiered_store(Backend& backend, const KvPlan& plan) {
  check(plan.resident_tokens == plan.context || plan.stream_tokens > 0,
        "a plan that neither holds nor streams its rows");
  return std::make_unique<TieredStore>(backend, plan);
}

}  // namespace sluice
