// Sequences in pages in any order and in any tier, and batches of their newest tokens on a backend.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "lib/backend/kv_ops.h"
#include "lib/backend/memory.h"
#include "tests/support/attention_cases.h"
#include "tests/support/attention_oracle.h"
#include "tests/support/device.h"
#include "tests/support/random.h"

namespace sluice::testing {

// The tiers that hold the pages of sequences; `either` picks device, host or both at random for
// each page.
enum class Places { device, host, both, either };

// The newest `tokens` tokens of a sequence of length `count`.
inline AttentionCase newest_case(Random& random, const KvShape& shape, std::int64_t count,
                                 std::int64_t tokens = 1) {
  AttentionCase c = random_case(random, shape, tokens, count);
  c.first_query_position = count - tokens;
  return c;
}

// The same queries for a sequence that has only rows [first, end).
inline AttentionCase only(const AttentionCase& c, std::int64_t first, std::int64_t end) {
  AttentionCase part = c;
  for (std::vector<std::byte>& rows : part.rows) {
    const auto bytes = static_cast<std::ptrdiff_t>(c.shape.row_bytes());
    rows = {rows.begin() + first * bytes, rows.begin() + end * bytes};
  }
  return part;
}

// The same sequence without the rows of a gap.
inline AttentionCase around(const AttentionCase& c, const PositionGap& gap) {
  AttentionCase part = only(c, 0, gap.first);
  const AttentionCase behind = only(c, gap.end, c.count(0));
  for (std::size_t head = 0; head < part.rows.size(); ++head) {
    part.rows[head].insert(part.rows[head].end(), behind.rows[head].begin(),
                           behind.rows[head].end());
  }
  part.first_query_position = part.count(0) - 1;
  return part;
}

// The rows of cases, each a sequence, in a backend's memory, and the batch of all their tokens.
// Memory that belongs to no sequence is NaN.
class PagedSequences {
 public:
  PagedSequences(Device& backend, Random& random, const std::vector<AttentionCase>& cases,
                 Places places)
      : shape_(cases.front().shape) {
    std::int64_t pages = 0;
    for (const AttentionCase& c : cases) {
      pages += pages_of(c);
      stride_ = std::max(stride_, pages_of(c) + 3);
      order_.push_back(static_cast<std::int32_t>(order_.size()));
    }
    std::shuffle(order_.begin(), order_.end(), random.engine());
    Pool device(random, shape_, pages);
    Pool host(random, shape_, pages);
    table_.resize(cases.size() * static_cast<std::size_t>(stride_));
    for (std::size_t i = 0; i < cases.size(); ++i) {
      for (std::int64_t page = 0; page < pages_of(cases[i]); ++page) {
        const bool on_device =
            places == Places::either ? random.integer(0, 1) == 1 : places != Places::host;
        const bool at_host = places == Places::either ? !on_device || random.integer(0, 1) == 1
                                                      : places != Places::device;
        PageSlots& slots = table_[static_cast<std::size_t>(order_[i] * stride_ + page)];
        if (on_device) slots.device = device.put(cases[i], page);
        if (at_host) slots.host = host.put(cases[i], page);
      }
      for (std::int64_t t = 0; t < cases[i].tokens; ++t) {
        tokens_.push_back(
            {order_[i], static_cast<std::int32_t>(cases[i].first_query_position + t)});
        last_ = std::max<std::int64_t>(last_, tokens_.back().position);
      }
    }
    device_ = upload(backend, device.bytes());
    host_ = backend.allocate(Tier::host, host.bytes().size());
    std::copy(host.bytes().begin(), host.bytes().end(), host_.data());
    head_stride_ = static_cast<std::int64_t>(device.head_bytes());
    pages_ = upload(backend, table_);
    batch_ = upload(backend, tokens_);
  }

  PagedRows rows() const {
    return {device_.data(),
            host_.data(),
            head_stride_,
            head_stride_,
            reinterpret_cast<const PageSlots*>(pages_.data()),
            stride_};
  }
  const std::vector<BatchToken>& tokens() const { return tokens_; }
  TokenBatch batch() const { return batch(last_ + 1); }
  TokenBatch batch(std::int64_t capacity) const {
    return {reinterpret_cast<const BatchToken*>(batch_.data()),
            static_cast<std::int64_t>(tokens_.size()), capacity};
  }
  std::int32_t sequence(std::size_t number) const { return order_[number]; }
  const PageSlots& page_of(std::int32_t sequence, std::int64_t position) const {
    return table_[static_cast<std::size_t>(sequence * stride_ + position / kPageTokens)];
  }
  bool on_device(std::int32_t sequence, std::int64_t position) const {
    return page_of(sequence, position).device != PageSlots::kNone;
  }

 private:
  // Slots of a tier, [kv_heads, slots, kPageTokens, row_bytes], with padding between KV heads.
  class Pool {
   public:
    Pool(Random& random, const KvShape& shape, std::int64_t pages)
        : shape_(shape), free_(static_cast<std::size_t>(pages + 2)) {
      std::iota(free_.begin(), free_.end(), 0);
      std::shuffle(free_.begin(), free_.end(), random.engine());
      head_bytes_ = free_.size() * page_bytes() + 3 * kRowAlignment;
      bytes_.assign(static_cast<std::size_t>(shape.kv_heads) * head_bytes_, std::byte{0xff});
    }

    std::int32_t put(const AttentionCase& c, std::int64_t page) {
      const std::int32_t slot = free_.back();
      free_.pop_back();
      const std::size_t first = static_cast<std::size_t>(page) * page_bytes();
      for (std::size_t head = 0; head < c.rows.size(); ++head) {
        const std::size_t bytes = std::min(page_bytes(), c.rows[head].size() - first);
        std::copy_n(c.rows[head].begin() + static_cast<std::ptrdiff_t>(first), bytes,
                    bytes_.begin() +
                        static_cast<std::ptrdiff_t>(head * head_bytes_ +
                                                    static_cast<std::size_t>(slot) * page_bytes()));
      }
      return slot;
    }
    std::size_t head_bytes() const { return head_bytes_; }
    const std::vector<std::byte>& bytes() const { return bytes_; }

   private:
    std::size_t page_bytes() const { return kPageTokens * shape_.row_bytes(); }

    KvShape shape_;
    std::vector<std::int32_t> free_;
    std::size_t head_bytes_ = 0;
    std::vector<std::byte> bytes_;
  };

  static std::int64_t pages_of(const AttentionCase& c) {
    return (c.count(0) + kPageTokens - 1) / kPageTokens;
  }

  KvShape shape_;
  std::int64_t stride_ = 0;  // of the page table
  std::int64_t head_stride_ = 0;
  std::int64_t last_ = 0;            // position of a token
  std::vector<std::int32_t> order_;  // sequence of each case
  std::vector<PageSlots> table_;     // [cases, stride_]
  std::vector<BatchToken> tokens_;
  Buffer device_, host_, pages_, batch_;
};

// Queries of all cases' tokens, with padding between tokens, and buffers for results.
class BatchQueries {
 public:
  BatchQueries(Device& backend, const std::vector<AttentionCase>& cases)
      : backend_(backend), shape_(cases.front().shape) {
    std::vector<float> q;
    for (const AttentionCase& c : cases) {
      tokens_.push_back(c.tokens);
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        const auto first = c.q.begin() + t * width();
        q.insert(q.end(), first, first + width());
        q.insert(q.end(), kBetween, std::numeric_limits<float>::quiet_NaN());
      }
    }
    const std::int64_t tokens = std::accumulate(tokens_.begin(), tokens_.end(), std::int64_t{0});
    const Tier tier = backend.info().compute_tier;
    q_ = upload(backend, q);
    out_ = backend.allocate(tier, static_cast<std::size_t>(tokens * width()) * sizeof(float));
    lse_ = backend.allocate(tier,
                            static_cast<std::size_t>(tokens * shape_.query_heads) * sizeof(float));
  }

  // Fills AttendBatchParams or AttendSelectedParams.
  template <typename Params>
  void put(Params& p) const {
    p.q = q_.floats();
    p.q_stride = width() + kBetween;
    p.shape = shape_;
    p.out = out_.floats();
    p.lse = lse_.floats();
  }

  // One result per case, over all its tokens.
  std::vector<Partial> results() const { return results(tokens_); }
  std::vector<Partial> results_by_token() const {
    return results(std::vector<std::int64_t>(
        lse_.bytes() / sizeof(float) / static_cast<std::size_t>(shape_.query_heads), 1));
  }

 private:
  static constexpr std::int64_t kBetween = 4;

  std::vector<Partial> results(const std::vector<std::int64_t>& parts) const {
    const std::vector<float> out = download<float>(backend_, out_);
    const std::vector<float> lse = download<float>(backend_, lse_);
    std::vector<Partial> results;
    auto value = out.begin();
    auto logit = lse.begin();
    for (const std::int64_t tokens : parts) {
      results.push_back(
          {{value, value + tokens * width()}, {logit, logit + tokens * shape_.query_heads}});
      value += tokens * width();
      logit += tokens * shape_.query_heads;
    }
    return results;
  }

  std::int64_t width() const { return std::int64_t{shape_.query_heads} * shape_.head_dim; }

  Device& backend_;
  KvShape shape_;
  std::vector<std::int64_t> tokens_;
  Buffer q_, out_, lse_;
};

// Dense attention of a batch.
class BatchRun {
 public:
  BatchRun(Device& backend, Random& random, const std::vector<AttentionCase>& cases,
           Places places = Places::either)
      : backend_(backend),
        sequences_(backend, random, cases, places),
        queries_(backend, cases),
        scale_(cases.front().scale),
        window_(cases.front().window),
        shape_(cases.front().shape) {}

  std::vector<Partial> attend(std::int64_t arena_rows = 0) {
    return attend(sequences_.batch(), arena_rows);
  }
  // Attends to all positions except the gaps, or to the gaps alone. Neither reads other rows.
  std::vector<Partial> attend_around(const std::vector<PositionGap>& gaps) {
    const Buffer there = upload(backend_, gaps);
    AttendBatchParams p = params(sequences_.batch());
    p.gaps = reinterpret_cast<const PositionGap*>(there.data());
    backend_.queue->run(p);
    return queries_.results();
  }
  std::vector<Partial> attend_within(const std::vector<PositionGap>& gaps) {
    AttendBatchParams p = params(sequences_.batch());
    p.gaps = gaps.data();
    p.in_gaps = true;
    backend_.queue->run(p);
    return queries_.results();
  }
  std::vector<Partial> attend(const TokenBatch& batch, std::int64_t arena_rows) {
    const std::size_t arena_bytes =
        static_cast<std::size_t>(shape_.kv_heads * arena_rows) * shape_.row_bytes();
    const Buffer arena = backend_.allocate(backend_.info().compute_tier, arena_bytes);
    AttendBatchParams p = params(batch);
    p.arena = arena.data();
    p.arena_rows = arena_rows;
    backend_.queue->run(p);
    return queries_.results();
  }
  const PagedSequences& sequences() const { return sequences_; }

 private:
  AttendBatchParams params(const TokenBatch& batch) const {
    AttendBatchParams p;
    queries_.put(p);
    p.batch = batch;
    p.rows = sequences_.rows();
    p.window = window_;
    p.scale = scale_;
    return p;
  }

  Device& backend_;
  PagedSequences sequences_;
  BatchQueries queries_;
  float scale_;
  std::int64_t window_;  // of all cases
  KvShape shape_;
};

}  // namespace sluice::testing
