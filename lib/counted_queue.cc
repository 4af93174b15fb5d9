#include "lib/counted_queue.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "lib/backend.h"
#include "lib/check.h"

namespace sluice {
namespace {

// An array in the backend's memory, as the host can read it.
template <class T>
class HostView {
 public:
  HostView(Queue& queue, const T* data, std::int64_t count)
      : view_(data, static_cast<std::size_t>(count)) {
    if (view_.empty() || queue.backend().info().compute_tier == Tier::host) return;
    copy_.resize(view_.size());
    const CopyOp op = {reinterpret_cast<std::byte*>(copy_.data()),
                       reinterpret_cast<const std::byte*>(data), view_.size_bytes()};
    queue.copy({&op, 1});
    queue.synchronize();
    view_ = copy_;
  }
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;
  const T& operator[](std::int64_t i) const { return view_[static_cast<std::size_t>(i)]; }
  std::int64_t size() const { return std::ssize(view_); }

 private:
  std::vector<T> copy_;
  std::span<const T> view_;
};

// The pages of a token's sequence, up to its own.
HostView<PageSlots> pages_of(Queue& queue, const PagedRows& rows, const BatchToken& token) {
  return {queue, rows.pages + token.sequence * rows.table_stride, token.pages() + 1};
}

// Counts of one operation that is over.
class OperationCount {
 public:
  OperationCount(Queue& queue, TrafficCounter& counter)
      : queue_(queue), memory_(queue.backend()), counter_(counter) {}

  void add(const CopyParams& p) {
    for (const CopyOp& op : p.ops) {
      if (memory_.is_on_device(op.from) != memory_.is_on_device(op.to)) {
        counter_.add_beside(op.bytes);
      }
    }
  }

  void add(const AppendBatchParams& p) {
    const HostView tokens(queue_, p.batch.tokens, p.batch.count);
    const auto row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
    for (std::int64_t i = 0; i < tokens.size(); ++i) {
      const HostView pages = pages_of(queue_, p.rows, tokens[i]);
      const PageSlots& page = pages[tokens[i].pages()];
      for (int head = 0; head < p.shape.kv_heads; ++head) {
        if (p.rows.is_on_device(page)) write(p.rows.in_device(head, page.device, row_bytes));
        if (p.rows.is_in_host(page)) write(p.rows.in_host(head, page.host, row_bytes));
      }
    }
    const std::size_t bytes = p.shape.row_bytes();
    const Tier near = reads_at();
    counter_.add(near, near, Cause::append, {near_, near_ * bytes});
    counter_.add(near, Tier::host, Cause::write_back, {far_, far_ * bytes});
  }

  void add(const AttendBatchParams& p) {
    const HostView tokens(queue_, p.batch.tokens, p.batch.count);
    const HostView gaps(queue_, p.gaps, p.gaps == nullptr ? 0 : p.batch.count);
    for (std::int64_t i = 0; i < tokens.size(); ++i) {
      PositionGap gap;
      if (gaps.size() > 0) gap = gaps[i];
      if (p.window > 0) {
        gap = {0, static_cast<std::int32_t>(first_in(p.window, tokens[i].position))};
      }
      const HostView pages = pages_of(queue_, p.rows, tokens[i]);
      for (int head = 0; head < p.shape.kv_heads; ++head) {
        begin_head(tokens[i], head);
        if (p.in_gaps) {
          read_between(p, pages, head, gap.first, gap.end);
        } else {
          read_between(p, pages, head, 0, gap.first);
          read_between(p, pages, head, gap.end, tokens[i].count());
        }
      }
    }
    add_attended(p.shape);
  }

  void add(const AttendSelectedParams& p) {
    const HostView tokens(queue_, p.batch.tokens, p.batch.count);
    const HostView selected(queue_, p.selected.heads, p.batch.count * p.shape.kv_heads);
    for (std::int64_t i = 0; i < tokens.size(); ++i) {
      const HostView pages = pages_of(queue_, p.rows, tokens[i]);
      for (int head = 0; head < p.shape.kv_heads; ++head) {
        const std::int64_t index = i * p.shape.kv_heads + head;
        const std::int64_t first = index * p.selected.capacity;
        const HostView<std::int32_t> positions(queue_, p.selected.positions + first,
                                               selected[index].count);
        begin_head(tokens[i], head);
        if (p.places != nullptr) {
          read_placed(p, head, positions, {queue_, p.places + first, selected[index].count});
        } else {
          read_at(p, pages, head, positions);
        }
        read_between(p, pages, head, tokens[i].page_first(), tokens[i].count());
      }
    }
    add_attended(p.shape);
  }

  // Keys in host memory that cross to a device. The others are part of index_read in place.
  void add(const EstimateParams& p) {
    if (!memory_.has_device_buffers()) return;
    const HostView tokens(queue_, p.batch.tokens, p.batch.count);
    for (std::int64_t i = 0; i < tokens.size(); ++i) {
      const HostView pages = pages_of(queue_, p.rows, tokens[i]);
      for (int head = 0; head < p.shape.kv_heads; ++head) {
        if (p.method == Selector::exact) add_keys(p, pages, i, head, tokens[i].page_first());
        if (p.skip_newest) continue;
        read_between(p, pages, head, tokens[i].page_first(), tokens[i].count());
      }
    }
    const int queries = queue_.backend().info().reads.estimate_queries;
    const auto passes = static_cast<std::uint64_t>(ReadPattern::parts(p.shape.group(), queries));
    counter_.add(Tier::host, Tier::device, Cause::index_read,
                 {far_, far_ * passes * p.shape.value_offset()});
  }

 private:
  Tier reads_at() const { return memory_.has_device_buffers() ? Tier::device : Tier::host; }

  void begin_head(const BatchToken& token, int head) {
    if (counter_.keeps_missed()) missed_.push_back({0, token.sequence, head, {}});
  }

  // Rows of the positions from `position` on, which lie one after the other.
  void read(const std::byte* row, std::int64_t position, std::int64_t rows = 1) {
    const bool is_near = reads_at() == Tier::host || memory_.is_on_device(row);
    (is_near ? near_ : far_) += static_cast<std::uint64_t>(rows);
    if (is_near || missed_.empty()) return;
    for (std::int64_t i = 0; i < rows; ++i) {
      missed_.back().positions.push_back(static_cast<std::int32_t>(position + i));
    }
  }
  void write(const std::byte* row) { read(row, 0); }

  // Rows of a page lie one after the other.
  template <class Params>
  void read_between(const Params& p, const HostView<PageSlots>& pages, int head, std::int64_t first,
                    std::int64_t end) {
    while (first < end) {
      const std::int64_t next = std::min(end, (first / kPageTokens + 1) * kPageTokens);
      read(row(p, pages, head, first), first, next - first);
      first = next;
    }
  }

  template <class Params>
  void read_at(const Params& p, const HostView<PageSlots>& pages, int head,
               const HostView<std::int32_t>& positions) {
    for (std::int64_t i = 0; i < positions.size(); ++i) {
      read(row(p, pages, head, positions[i]), positions[i]);
    }
  }

  void read_placed(const AttendSelectedParams& p, int head, const HostView<std::int32_t>& positions,
                   const HostView<PlacedRow>& places) {
    const auto row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
    for (std::int64_t i = 0; i < places.size(); ++i) {
      const std::int64_t offset = places[i].number * row_bytes;
      if (places[i].is_cached()) {
        read(p.cache.rows + head * p.cache.ways() * row_bytes + offset, positions[i]);
      } else if (places[i].is_on_device()) {
        read(p.rows.device + head * p.rows.device_stride + offset, positions[i]);
      } else {
        read(p.rows.host + head * p.rows.host_stride + offset, positions[i]);
      }
    }
  }

  // Keys of the candidates of token `number`, or of all rows before its page.
  void add_keys(const EstimateParams& p, const HostView<PageSlots>& pages, std::int64_t number,
                int head, std::int64_t end) {
    if (p.candidates == nullptr) return read_between(p, pages, head, 0, end);
    const std::int64_t index = number * p.shape.kv_heads + head;
    const HostView heads(queue_, p.candidates->heads + index, 1);
    read_at(p, pages, head,
            {queue_, p.candidates->positions + index * p.candidates->capacity, heads[0].count});
  }

  // PagedRows::row() with a view of the table.
  template <class Params>
  static const std::byte* row(const Params& p, const HostView<PageSlots>& pages, int head,
                              std::int64_t position) {
    const auto row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
    const PageSlots& page = pages[position / kPageTokens];
    const std::byte* const first = p.rows.is_on_device(page)
                                       ? p.rows.in_device(head, page.device, row_bytes)
                                       : p.rows.in_host(head, page.host, row_bytes);
    return first + position % kPageTokens * row_bytes;
  }

  // Rows that attention read, once for each part of a KV head's queries.
  void add_attended(const KvShape& shape) {
    const int queries = queue_.backend().info().reads.attend_queries;
    const auto parts = static_cast<std::uint64_t>(ReadPattern::parts(shape.group(), queries));
    const Tier near = reads_at();
    const std::size_t bytes = shape.row_bytes();
    counter_.add(near, near, Cause::hit, {parts * near_, parts * near_ * bytes});
    counter_.add(Tier::host, near, Cause::miss, {parts * far_, parts * far_ * bytes});
    if (counter_.keeps_missed()) counter_.add_missed(std::move(missed_));
  }

  Queue& queue_;
  const Memory& memory_;
  TrafficCounter& counter_;
  std::uint64_t near_ = 0;  // rows where attention reads
  std::uint64_t far_ = 0;   // rows in host memory only
  std::vector<MissedRows> missed_;
};

}  // namespace

CountedQueue::CountedQueue(std::unique_ptr<Queue> queue, std::shared_ptr<TrafficCounter> counter)
    : Queue(queue->backend()), queue_(std::move(queue)), counter_(std::move(counter)) {}

void CountedQueue::submit(const Operation& operation) {
  queue_->submit(operation);
  if (!counter_->counts()) return;
  queue_->synchronize();
  OperationCount count(*queue_, *counter_);
  if (const auto* copy = params_of<CopyParams>(operation)) count.add(*copy);
  if (const auto* append = params_of<AppendBatchParams>(operation)) count.add(*append);
  if (const auto* attend = params_of<AttendBatchParams>(operation)) count.add(*attend);
  if (const auto* attend = params_of<AttendSelectedParams>(operation)) count.add(*attend);
  if (const auto* estimate = params_of<EstimateParams>(operation)) count.add(*estimate);
}

void CountedQueue::replay(std::unique_ptr<Recording>& recording,
                          const std::function<void()>& issue) {
  if (counter_->counts()) return issue();
  queue_->replay(recording, issue);
}

void CountedQueue::branch(int number, const std::function<void()>& issue) {
  if (counter_->counts()) return issue();
  queue_->branch(number, issue);
}

void CountedQueue::join(int number) {
  if (!counter_->counts()) queue_->join(number);
}

void CountedQueue::wait_for(Queue& other) {
  auto* const counted = dynamic_cast<CountedQueue*>(&other);
  check(counted != nullptr, "a counted queue waits for one that is not");
  queue_->wait_for(*counted->queue_);
}

std::unique_ptr<Queue> CountedQueue::make_sibling(const QueueOptions& options) {
  return std::make_unique<CountedQueue>(queue_->make_sibling(options), counter_);
}

}  // namespace sluice
