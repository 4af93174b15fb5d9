// Sequences with a key index in one backend's memory: rows in pages in any order, on the device, in
// host memory or both, and tiles in slots in any order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "lib/backend/index_ops.h"
#include "lib/backend/memory.h"
#include "sluice/batch.h"
#include "sluice/half.h"
#include "tests/support/attention_cases.h"
#include "tests/support/device.h"
#include "tests/support/random.h"
#include "tests/support/selection_cases.h"

namespace sluice::testing {

// The inputs of an estimate.
struct EstimateCase {
  std::vector<BatchToken> tokens;
  std::vector<float> q;  // [tokens, query_heads, head_dim]
  Selector method = Selector::int4;
  int channels = 0;
  bool skip_newest = false;
  std::vector<std::vector<std::int32_t>> candidates = {};  // [tokens * kv_heads], or empty
};

class IndexedCase {
 public:
  // All sequences have one shape, and all KV heads of a sequence the same number of rows. The index
  // is not built yet. Rotated tiles take every method but sparq.
  IndexedCase(Device& backend, const std::vector<AttentionCase>& sequences, int bits,
              std::uint64_t seed, bool rotated = false)
      : backend_(backend), sequences_(sequences), shape_(sequences.front().shape) {
    for (const AttentionCase& c : sequences) {
      pages_ = std::max(pages_, (c.count(0) + kPageTokens - 1) / kPageTokens);
    }
    Random random(seed);
    place_rows(random);
    place_index(random, bits, rotated);
    bad_ = backend.allocate(Tier::host, sequences.size() * heads() * sizeof(std::int32_t));
    backend.synchronize();
  }

  // Builds the index of all whole pages from contiguous rows.
  void build() {
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      const AttentionCase& c = sequences_[i];
      const UploadedHeads rows = upload_heads(backend_, c.rows, shape_.row_bytes());
      BuildIndexParams p;
      p.shape = shape_;
      p.index = view_;
      p.sequence = static_cast<std::int32_t>(i);
      p.pages = c.count(0) / kPageTokens;
      p.rows = rows.spans;
      p.bad = flags();
      if (p.pages > 0) backend_.queue->run(p);
      backend_.synchronize();
    }
  }

  // Builds the index as a step does.
  void build_batch(const std::vector<BatchToken>& tokens) {
    const Buffer batch = upload(backend_, tokens);
    backend_.synchronize();
    backend_.queue->run(BuildBatchParams{shape_, view_, batch_of(tokens, batch), rows_, flags()});
    backend_.synchronize();
  }

  // The logits of every query head of every token, [tokens * query_heads].
  std::vector<std::vector<float>> estimate(const EstimateCase& c) {
    const Buffer q = upload(backend_, c.q);
    const Buffer batch = upload(backend_, c.tokens);
    EstimateParams p;
    p.q = q.floats();
    p.q_stride = std::int64_t{shape_.query_heads} * shape_.head_dim;
    p.shape = shape_;
    p.batch = batch_of(c.tokens, batch);
    p.method = c.method;
    p.channels = c.channels;
    p.index = view_;
    p.rows = rows_;
    p.skip_newest = c.skip_newest;
    Candidates candidates(backend_, c.candidates);
    if (!c.candidates.empty()) p.candidates = &candidates.view;
    const auto rows = static_cast<std::int64_t>(c.tokens.size()) * shape_.query_heads;
    LogitMatrix logits(backend_, rows, p.batch.capacity);
    p.logits = logits.view();
    const Buffer read = upload(backend_, std::vector<std::int32_t>(c.tokens.size() * heads(), -1));
    const Buffer resident =
        upload(backend_, std::vector<std::int32_t>(c.tokens.size() * heads(), -1));
    p.pages_read = reinterpret_cast<std::int32_t*>(read.data());
    p.resident = reinterpret_cast<std::int32_t*>(resident.data());
    backend_.synchronize();
    backend_.queue->run(p);
    const std::vector<float> all = logits.get();
    pages_read_ = download<std::int32_t>(backend_, read);
    resident_ = download<std::int32_t>(backend_, resident);
    std::vector<std::vector<float>> of_rows;
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto first = all.begin() + row * p.batch.capacity;
      of_rows.emplace_back(first, first + static_cast<std::int64_t>(positions(c, row).size()));
    }
    return of_rows;
  }

  // The positions of a row's logits, in order.
  std::vector<std::int64_t> positions(const EstimateCase& c, std::int64_t row) const {
    const BatchToken& token = c.tokens[static_cast<std::size_t>(row / shape_.query_heads)];
    std::vector<std::int64_t> all(static_cast<std::size_t>(token.page_first()));
    std::iota(all.begin(), all.end(), 0);
    if (!c.candidates.empty()) {
      const auto& listed = c.candidates[static_cast<std::size_t>(row / shape_.group())];
      all.assign(listed.begin(), listed.end());
    }
    for (std::int64_t t = token.page_first(); t < token.count() && !c.skip_newest; ++t) {
      all.push_back(t);
    }
    return all;
  }

  // What the last estimate reported, [tokens, kv_heads]: pages, and candidates on the device.
  const std::vector<std::int32_t>& pages_read() const { return pages_read_; }
  const std::vector<std::int32_t>& resident() const { return resident_; }

  bool is_on_device(const BatchToken& token, std::int64_t position) const {
    return on_device_[static_cast<std::size_t>(token.sequence * pages_ + position / kPageTokens)];
  }

  // The keys that a page's tile holds, [kPageTokens, head_dim], decoded as KeyTiles describes.
  std::vector<double> tile_keys(std::size_t sequence, std::int64_t head, std::int64_t page) {
    const std::vector<std::uint8_t> all = codes();
    const std::vector<std::uint16_t> halves = scales();
    const auto d = static_cast<std::size_t>(shape_.head_dim);
    const KeyTiles& tiles = view_.tiles;
    const std::int64_t slot = slot_of(sequence, page);
    const std::uint16_t* const scale =
        halves.data() + (tiles.scales_of(shape_.head_dim, head, slot, page) - tiles.scales);
    std::vector<double> keys;
    for (std::size_t token = 0; token < kPageTokens; ++token) {
      for (std::size_t c = 0; c < d; ++c) {
        const std::uint8_t* const from =
            all.data() + (tiles.codes_of(shape_.head_dim, head, slot) - tiles.codes) +
            KeyTiles::place_of(tiles.bits, page, c) * tiles.code_bytes();
        const auto read = [&](const std::uint8_t* at, unsigned bits) {
          const std::size_t bytes = std::size_t{16} * bits;
          return static_cast<unsigned>(at[token % bytes]) >> (token / bytes * bits) &
                 ((1u << bits) - 1u);
        };
        const unsigned code = tiles.bits == 3 ? read(from, 2) + 4 * read(from + 32, 1)
                                              : read(from, static_cast<unsigned>(tiles.bits));
        keys.push_back(static_cast<double>(f16_to_float(scale[d + c])) +
                       static_cast<double>(f16_to_float(scale[c])) * code);
      }
    }
    return keys;
  }

  std::vector<std::uint8_t> codes() { return download<std::uint8_t>(backend_, codes_); }
  std::vector<std::uint16_t> scales() { return download<std::uint16_t>(backend_, scales_); }
  std::vector<std::uint16_t> bounds() { return download<std::uint16_t>(backend_, bounds_); }
  // [sequences, kv_heads]
  std::vector<std::int32_t> bad() {
    backend_.synchronize();
    return {flags(), flags() + sequences_.size() * heads()};
  }
  // The offset of a page's bounds in bounds().
  std::size_t bounds_of(std::size_t sequence, std::int64_t head, std::int64_t page) const {
    const std::int64_t slot = slot_of(sequence, page);
    PageBounds from_zero = view_.bounds;
    return static_cast<std::size_t>(from_zero.of(shape_.head_dim, head, slot, page) -
                                    from_zero.bounds);
  }

 private:
  // Lists of all heads, in the backend's memory.
  struct Candidates {
    Candidates(Device& backend, const std::vector<std::vector<std::int32_t>>& lists) {
      for (const auto& list : lists) {
        view.capacity = std::max(view.capacity, static_cast<std::int64_t>(list.size()) + 3);
      }
      std::vector<std::int32_t> all(lists.size() * static_cast<std::size_t>(view.capacity), -9);
      found = backend.allocate(Tier::host, lists.size() * sizeof(HeadSelection));
      view.heads = reinterpret_cast<HeadSelection*>(found.data());
      for (std::size_t i = 0; i < lists.size(); ++i) {
        std::copy(lists[i].begin(), lists[i].end(),
                  all.begin() + static_cast<std::int64_t>(i) * view.capacity);
        view.heads[i].count = static_cast<std::int32_t>(lists[i].size());
      }
      positions = upload(backend, all);
      view.positions = reinterpret_cast<std::int32_t*>(positions.data());
    }
    Buffer positions, found;
    SelectionView view;
  };

  std::int64_t slot_of(std::size_t sequence, std::int64_t page) const {
    return slots_[sequence * static_cast<std::size_t>(view_.table_stride) +
                  static_cast<std::size_t>(page / kTilePages)];
  }
  std::size_t heads() const { return static_cast<std::size_t>(shape_.kv_heads); }
  std::int32_t* flags() const { return reinterpret_cast<std::int32_t*>(bad_.data()); }

  TokenBatch batch_of(const std::vector<BatchToken>& tokens, const Buffer& buffer) const {
    return {reinterpret_cast<const BatchToken*>(buffer.data()),
            static_cast<std::int64_t>(tokens.size()), pages_ * kPageTokens};
  }

  static std::vector<std::int32_t> shuffled(Random& random, std::size_t count) {
    std::vector<std::int32_t> numbers(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    std::shuffle(numbers.begin(), numbers.end(), random.engine());
    return numbers;
  }

  // Rows outside all pages are NaN.
  void place_rows(Random& random) {
    const std::size_t pages = sequences_.size() * static_cast<std::size_t>(pages_);
    const std::size_t page_bytes = kPageTokens * shape_.row_bytes();
    const std::vector<std::int32_t> on_device = shuffled(random, pages);
    const std::vector<std::int32_t> at_host = shuffled(random, pages);
    std::vector<std::byte> device(heads() * pages * page_bytes, std::byte{0xff});
    std::vector<std::byte> host = device;
    std::vector<PageSlots> table(pages);
    for (std::size_t i = 0; i < pages; ++i) {
      const std::int64_t where = random.integer(0, 2);
      if (where != 1) table[i].device = on_device[i];
      if (where != 0) table[i].host = at_host[i];
      on_device_.push_back(where != 1);
      const AttentionCase& c = sequences_[i / static_cast<std::size_t>(pages_)];
      const std::size_t first = i % static_cast<std::size_t>(pages_) * page_bytes;
      for (std::size_t head = 0; head < heads(); ++head) {
        const std::vector<std::byte>& rows = c.rows[head];
        if (first >= rows.size()) continue;
        const std::size_t bytes = std::min(page_bytes, rows.size() - first);
        const auto to = [&](std::vector<std::byte>& pool, std::int32_t slot) {
          if (slot == PageSlots::kNone) return;
          std::memcpy(&pool[(head * pages + static_cast<std::size_t>(slot)) * page_bytes],
                      &rows[first], bytes);
        };
        to(device, table[i].device);
        to(host, table[i].host);
      }
    }
    device_ = upload(backend_, device);
    host_ = backend_.allocate(Tier::host, host.size());
    std::memcpy(host_.data(), host.data(), host.size());
    table_ = upload(backend_, table);
    rows_.device = device_.data();
    rows_.host = host_.data();
    rows_.device_stride = rows_.host_stride = static_cast<std::int64_t>(pages * page_bytes);
    rows_.pages = reinterpret_cast<const PageSlots*>(table_.data());
    rows_.table_stride = pages_;
  }

  void place_index(Random& random, int bits, bool rotated) {
    view_.table_stride = (pages_ + kTilePages - 1) / kTilePages;
    slots_ = shuffled(random, sequences_.size() * static_cast<std::size_t>(view_.table_stride));
    view_.tiles.bits = bits;
    view_.tiles.rotated = rotated;
    view_.tiles.slots = view_.bounds.slots = static_cast<std::int64_t>(slots_.size());
    const int d = shape_.head_dim;
    const Tier tier = backend_.info().compute_tier;
    codes_ = backend_.allocate(tier, view_.tiles.codes_bytes(shape_.kv_heads, d));
    scales_ = backend_.allocate(tier, view_.tiles.scales_bytes(shape_.kv_heads, d));
    bounds_ = backend_.allocate(tier, view_.bounds.bytes(shape_.kv_heads, d));
    slot_table_ = upload(backend_, slots_);
    view_.tiles.codes = codes_.data();
    view_.tiles.scales = reinterpret_cast<std::uint16_t*>(scales_.data());
    view_.bounds.bounds = reinterpret_cast<std::uint16_t*>(bounds_.data());
    view_.slots = reinterpret_cast<const std::int32_t*>(slot_table_.data());
  }

  Device& backend_;
  const std::vector<AttentionCase>& sequences_;
  KvShape shape_;
  std::int64_t pages_ = 0;  // capacity of a sequence
  PagedRows rows_;
  KeyIndexView view_;
  std::vector<std::int32_t> slots_;  // [sequences, tiles]
  std::vector<std::int32_t> pages_read_, resident_;
  std::vector<bool> on_device_;  // [sequences, pages]
  Buffer device_, host_, table_, slot_table_, codes_, scales_, bounds_, bad_;
};

}  // namespace sluice::testing
