// Random batches of sequences with an index, estimated on the device, against fp64 sums over what
// the index says.
#pragma once

#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <ostream>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/workspace.h"
#include "kernels/scan/scan.h"
#include "lib/backend/index_ops.h"
#include "lib/hadamard.h"
#include "sluice/half.h"
#include "tests/kernels/digest_truth.h"
#include "tests/kernels/scan/shared_array.h"
#include "tests/support/random.h"

namespace sluice::cuda::estimates {

using testing::Random;

inline constexpr std::uint16_t kPoison = 0x7e5a;  // a NaN that no kernel writes

struct Problem {
  Selector method = Selector::int4;
  int head_dim = 128;
  int group = 4;
  int kv_heads = 2;
  std::vector<std::int64_t> lengths = {
      421};                // of sequences; the batch has the newest token of each
  bool twice = false;      // and the one before it
  std::int64_t spare = 0;  // capacity of the batch beyond the longest
  bool skip_newest = false;
  int bits = 4;
  bool rotated = false;  // tiles
  int channels = 32;
  DType dtype = DType::bf16;
  int apart = 0;                // a candidate in so many tokens, or 0: there are none
  std::int64_t odd_stride = 0;  // without it logits of every head begin aligned, as sessions' do
  float q_deviation = 1.0f;
  bool q_ties = false;  // queries of few sizes, so that channels tie
  std::size_t scratch = 16u << 20;
};

inline std::ostream& operator<<(std::ostream& out, const Problem& p) {
  out << "method " << static_cast<int>(p.method) << " head_dim " << p.head_dim << " group "
      << p.group << " kv_heads " << p.kv_heads << " skip_newest " << p.skip_newest << " bits "
      << p.bits << (p.rotated ? " rotated" : "") << " channels " << p.channels << " dtype "
      << to_string(p.dtype) << " apart " << p.apart << " odd_stride " << p.odd_stride << " spare "
      << p.spare << " lengths";
  for (const std::int64_t length : p.lengths) out << ' ' << length;
  return out;
}

inline std::vector<BatchToken> tokens_of(const Problem& p) {
  std::vector<BatchToken> tokens;
  for (std::size_t i = 0; i < p.lengths.size(); ++i) {
    const auto sequence = static_cast<std::int32_t>(i);
    const auto last = static_cast<std::int32_t>(p.lengths[i] - 1);
    if (p.twice && last > 0) tokens.push_back({sequence, last - 1});
    tokens.push_back({sequence, last});
  }
  return tokens;
}

// One problem in memory: rows in pages that lie anywhere, index, queries and logits.
class Prepared {
 public:
  Prepared(const Problem& p, std::uint64_t seed)
      : p_(p),
        random_(seed),
        shape_{1, p.group * p.kv_heads, p.kv_heads, p.head_dim, p.dtype},
        tokens_(tokens_of(p)),
        longest_(*std::max_element(p.lengths.begin(), p.lengths.end())),
        table_pages_((longest_ + kPageTokens - 1) / kPageTokens),
        table_tiles_((table_pages_ + kTilePages - 1) / kTilePages),
        page_slots_(p.lengths.size() * static_cast<std::size_t>(table_pages_)),
        tile_slots_(p.lengths.size() * static_cast<std::size_t>(table_tiles_)),
        row_bytes_(shape_.row_bytes()),
        batch_(tokens_.size()),
        page_table_(page_slots_),
        tile_table_(tile_slots_),
        on_device_(rows_bytes()),
        at_host_(rows_bytes()),
        codes_(tiles_of(p).codes_bytes(p.kv_heads, p.head_dim)),
        scales_(tiles_of(p).scales_bytes(p.kv_heads, p.head_dim) / 2),
        bounds_(bounds_of(p).bytes(p.kv_heads, p.head_dim) / 2),
        q_(rows() * static_cast<std::size_t>(p.head_dim)),
        bad_(p.lengths.size() * static_cast<std::size_t>(p.kv_heads)),
        stride_((longest_ + p.spare + 63) / 64 * 64 + p.odd_stride),
        logits_(rows() * static_cast<std::size_t>(stride_)),
        digest_(PageDigest::bytes_of(static_cast<std::int64_t>(rows()), stride_)),
        workspace_(p.scratch) {
    std::copy(tokens_.begin(), tokens_.end(), batch_.data());
    place();
    fill_rows();
    const std::vector<float> q =
        random_.normal(static_cast<std::int64_t>(q_.size()), p.q_deviation);
    for (std::size_t i = 0; i < q.size(); ++i) q_[i] = p.q_ties ? std::round(q[i]) : q[i];
    build();
    choose_candidates();
    std::fill_n(logits_.data(), logits_.size(), kPoison);
    std::fill_n(digest_.data(), digest_.size(), std::byte{0xff});
  }

  float* q() const { return q_.data(); }
  void run() {
    EstimateParams e;
    e.q = q_.data();
    e.q_stride = std::int64_t{shape_.query_heads} * p_.head_dim;
    e.shape = shape_;
    e.batch = {batch_.data(), static_cast<std::int64_t>(tokens_.size()), longest_ + p_.spare};
    e.method = p_.method;
    e.channels = p_.channels;
    e.index = index_;
    e.rows = paged_;
    e.skip_newest = p_.skip_newest;
    // With room for one more, as a selection's.
    Shared<std::int32_t> positions((lists_.size() + 1) * static_cast<std::size_t>(longest_ + 1));
    Shared<HeadSelection> heads(lists_.size() + 1);
    for (std::size_t i = 0; i < lists_.size(); ++i) {
      std::copy(lists_[i].begin(), lists_[i].end(),
                positions.data() + i * static_cast<std::size_t>(longest_ + 1));
      heads[i].count = static_cast<std::int32_t>(lists_[i].size());
    }
    const SelectionView view{positions.data(), longest_ + 1, heads.data()};
    if (p_.apart > 0) e.candidates = &view;
    e.logits = {reinterpret_cast<std::byte*>(logits_.data()), stride_, digest()};
    estimate(e, workspace_.launch());
    require(cudaDeviceSynchronize(), "estimate");
  }

  // Every logit within its tolerance, and nothing written beside them.
  void check() const {
    const bool by_tiles = p_.method == Selector::int4 || p_.method == Selector::sparq;
    expect_digest(PageDigest::of(digest()), logits_.data(), static_cast<std::int64_t>(rows()),
                  p_.group, stride_, [&](std::int64_t row) {
                    return by_tiles && p_.apart == 0 ? token_of(row).pages() : 0;
                  });
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(rows()); ++row) {
      const std::vector<int> channels = channels_of(row / p_.group);
      const double factor = factor_of(row, channels);
      const std::vector<std::int64_t> at = positions(row);
      for (std::int64_t i = 0; i < stride_; ++i) {
        const std::uint16_t got = logit(row, i);
        if (i >= static_cast<std::int64_t>(at.size())) {
          ASSERT_EQ(got, kPoison) << "row " << row << " beyond, at " << i;
          continue;
        }
        const Expected wanted = expected(row, at[static_cast<std::size_t>(i)], channels, factor);
        ASSERT_LE(std::fabs(static_cast<double>(f16_to_float(got)) - wanted.value),
                  wanted.tolerance)
            << "row " << row << " logit " << i << " of " << at.size() << " wanted " << wanted.value
            << " got " << f16_to_float(got);
      }
    }
  }

  std::uint16_t logit(std::int64_t row, std::int64_t i) const {
    return logits_[static_cast<std::size_t>(row * stride_ + i)];
  }
  // The positions of a row's logits, in their order.
  std::vector<std::int64_t> positions(std::int64_t row) const {
    const BatchToken& token = token_of(row);
    std::vector<std::int64_t> all(static_cast<std::size_t>(token.page_first()));
    std::iota(all.begin(), all.end(), 0);
    if (p_.apart > 0) {
      const auto& list = lists_[static_cast<std::size_t>(row / p_.group)];
      all.assign(list.begin(), list.end());
    }
    for (std::int64_t t = token.page_first(); t < token.count() && !p_.skip_newest; ++t) {
      all.push_back(t);
    }
    return all;
  }

 private:
  struct Expected {
    double value;
    double tolerance;
  };

  LogitDigest digest() const {
    return LogitDigest::in(digest_.data(), static_cast<std::int64_t>(rows()), stride_);
  }
  KeyTiles tiles_of(const Problem& p) const {
    KeyTiles tiles;
    tiles.bits = p.bits;
    tiles.rotated = p.rotated;
    tiles.slots = static_cast<std::int64_t>(tile_slots_);
    return tiles;
  }
  PageBounds bounds_of(const Problem&) const {
    return {nullptr, static_cast<std::int64_t>(tile_slots_)};
  }
  // Query heads of all tokens.
  std::size_t rows() const { return tokens_.size() * static_cast<std::size_t>(shape_.query_heads); }
  std::size_t rows_bytes() const {
    return static_cast<std::size_t>(p_.kv_heads) * page_slots_ * kPageTokens * row_bytes_;
  }
  const BatchToken& token_of(std::int64_t row) const {
    return tokens_[static_cast<std::size_t>(row / shape_.query_heads)];
  }
  int kv_head_of(std::int64_t row) const {
    return static_cast<int>(row % shape_.query_heads) / p_.group;
  }

  std::vector<std::int32_t> shuffled(std::size_t count) {
    std::vector<std::int32_t> numbers(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    std::shuffle(numbers.begin(), numbers.end(), random_.engine());
    return numbers;
  }

  // Pages in any order, on the device or in host memory or both; rows that no page has are NaN.
  void place() {
    const std::vector<std::int32_t> device = shuffled(page_slots_);
    const std::vector<std::int32_t> host = shuffled(page_slots_);
    for (std::size_t i = 0; i < page_slots_; ++i) {
      const std::int64_t where = random_.integer(0, 2);
      if (where != 1) page_table_[i].device = device[i];
      if (where == 1) page_table_[i].device = PageSlots::kNone;
      page_table_[i].host = where != 0 ? host[i] : PageSlots::kNone;
    }
    const std::vector<std::int32_t> tiles = shuffled(tile_slots_);
    std::copy(tiles.begin(), tiles.end(), tile_table_.data());
    std::fill_n(on_device_.data(), on_device_.size(), std::byte{0xff});
    std::fill_n(at_host_.data(), at_host_.size(), std::byte{0xff});
    std::fill_n(scales_.data(), scales_.size(), kPoison);
    std::fill_n(bounds_.data(), bounds_.size(), kPoison);
    paged_.device = on_device_.data();
    paged_.host = at_host_.data();
    paged_.device_stride = paged_.host_stride =
        static_cast<std::int64_t>(page_slots_ * kPageTokens * row_bytes_);
    paged_.pages = page_table_.data();
    paged_.table_stride = table_pages_;
    index_.tiles = tiles_of(p_);
    index_.bounds = bounds_of(p_);
    index_.tiles.codes = codes_.data();
    index_.tiles.scales = scales_.data();
    index_.bounds.bounds = bounds_.data();
    index_.slots = tile_table_.data();
    index_.table_stride = table_tiles_;
  }

  void fill_rows() {
    for (std::size_t i = 0; i < p_.lengths.size(); ++i) {
      const auto sequence = static_cast<std::int64_t>(i);
      for (int head = 0; head < p_.kv_heads; ++head) {
        for (std::int64_t t = 0; t < p_.lengths[i]; ++t) fill_row(sequence, head, t);
      }
    }
  }
  void fill_row(std::int64_t sequence, int head, std::int64_t t) {
    const std::vector<float> values = random_.normal(2 * p_.head_dim);
    std::vector<std::uint16_t> row(values.size());
    for (std::size_t c = 0; c < values.size(); ++c) {
      // Channels differ in size and offset, as keys' do.
      const float x = values[c] * (1.0f + static_cast<float>(c % 7)) + static_cast<float>(c % 3);
      row[c] = p_.dtype == DType::bf16 ? float_to_bf16(x) : float_to_f16(x);
    }
    // A NaN among the values must not matter.
    if (t % 5 == 0) row[static_cast<std::size_t>(p_.head_dim)] = 0x7fc0;
    const PageSlots& at = paged_.page(sequence, t / kPageTokens);
    const auto bytes = static_cast<std::int64_t>(row_bytes_);
    const auto put = [&](std::byte* page) {
      std::memcpy(page + t % kPageTokens * bytes, row.data(), row.size() * 2);
    };
    if (at.device != PageSlots::kNone) put(paged_.in_device(head, at.device, bytes));
    if (at.host != PageSlots::kNone) put(paged_.in_host(head, at.host, bytes));
  }

  // A step for every page, of all sequences that have it.
  void build() {
    for (std::int64_t page = 0; page < longest_ / kPageTokens; ++page) {
      std::vector<BatchToken> last;
      for (std::size_t i = 0; i < p_.lengths.size(); ++i) {
        if (p_.lengths[i] / kPageTokens <= page) continue;
        last.push_back({static_cast<std::int32_t>(i),
                        static_cast<std::int32_t>((page + 1) * kPageTokens - 1)});
      }
      const Shared<BatchToken> batch(last.size());
      std::copy(last.begin(), last.end(), batch.data());
      build_batch({shape_,
                   index_,
                   {batch.data(), static_cast<std::int64_t>(last.size()), longest_},
                   paged_,
                   bad_.data()},
                  workspace_.launch());
      require(cudaDeviceSynchronize(), "build_batch");
    }
  }

  void choose_candidates() {
    if (p_.apart == 0) return;
    for (const BatchToken& token : tokens_) {
      for (int head = 0; head < p_.kv_heads; ++head) {
        auto& list = lists_.emplace_back();
        for (std::int32_t t = 0; t < token.page_first(); ++t) {
          if (random_.integer(1, p_.apart) == 1) list.push_back(t);
        }
      }
    }
  }

  const float* query(std::int64_t row) const { return q_.data() + row * p_.head_dim; }

  // Of the KV head `head` of all tokens'.
  std::vector<int> channels_of(std::int64_t head) const {
    std::vector<int> order(static_cast<std::size_t>(p_.head_dim));
    std::iota(order.begin(), order.end(), 0);
    if (p_.method != Selector::sparq) return order;
    std::vector<float> size(order.size());
    for (int g = 0; g < p_.group; ++g) {
      for (std::size_t c = 0; c < size.size(); ++c) {
        size[c] += std::fabs(query(head * p_.group + g)[c]);
      }
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return size[static_cast<std::size_t>(a)] > size[static_cast<std::size_t>(b)];
    });
    order.resize(static_cast<std::size_t>(std::min(p_.channels, p_.head_dim)));
    std::sort(order.begin(), order.end());
    return order;
  }

  double factor_of(std::int64_t row, const std::vector<int>& channels) const {
    double all = 0.0;
    double kept = 0.0;
    for (int c = 0; c < p_.head_dim; ++c) all += std::fabs(static_cast<double>(query(row)[c]));
    for (const int c : channels) kept += std::fabs(static_cast<double>(query(row)[c]));
    if (kept == 0.0) return 0.0;
    return std::sqrt(all / (kept * p_.head_dim));
  }

  double key_of_row(std::int64_t sequence, int head, std::int64_t position, int channel) const {
    const std::byte* const row =
        paged_.row(sequence, head, position, static_cast<std::int64_t>(row_bytes_));
    const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(row)[channel];
    return static_cast<double>(p_.dtype == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits));
  }

  Expected expected(std::int64_t row, std::int64_t position, const std::vector<int>& channels,
                    double factor) const {
    const BatchToken& token = token_of(row);
    const int head = kv_head_of(row);
    const bool is_row = p_.method == Selector::exact || position >= token.page_first();
    std::vector<double> queries(query(row), query(row) + p_.head_dim);
    if (p_.rotated && p_.method == Selector::int4 && !is_row) {
      rotate(queries.data(), p_.head_dim, Rotation::of(p_.head_dim));
    }
    double sum = 0.0;
    double size = 0.0;      // sum of absolute products
    double variance = 0.0;  // of what rounding adds
    double largest = 0.0;
    for (const int c : channels) {
      largest = std::max(largest, std::fabs(queries[static_cast<std::size_t>(c)]));
    }
    const double half = 0x1p-11 / std::sqrt(3.0);             // half a step of f16, as a deviation
    const double least = 0x1p-24 * largest / std::sqrt(3.0);  // of subnormal queries
    for (const int c : channels) {
      const double q = queries[static_cast<std::size_t>(c)];
      double product = 0.0;
      if (is_row) {
        // Split queries keep at least 16 bits.
        const double key = key_of_row(token.sequence, head, position, c);
        product = q * key;
        variance += std::pow(product * 0x1p-16, 2) + std::pow(least * key, 2);
      } else if (p_.method == Selector::quest) {
        const std::int64_t page = position / kPageTokens;
        const std::uint16_t* const bounds =
            index_.bounds.of(p_.head_dim, head, index_.slot(token.sequence, page), page) +
            position % kPageTokens / kBoundTokens * 2 * p_.head_dim + c;
        const double low = static_cast<double>(f16_to_float(bounds[0]));
        const double high = static_cast<double>(f16_to_float(bounds[p_.head_dim]));
        product = std::max(q * low, q * high);
        variance += std::pow(product * 0x1p-16, 2) +
                    std::pow(least * std::max(std::fabs(low), std::fabs(high)), 2);
      } else {
        const auto [zero, scaled, code] = code_of(token.sequence, head, position, c);
        product = q * (zero + scaled);
        variance += std::pow(product * half, 2) + std::pow(q * scaled * half, 2) +
                    std::pow(least * (zero + scaled), 2) + std::pow(least * code, 2);
      }
      sum += product;
      size += std::fabs(product);
    }
    const double value = std::clamp(sum * factor, -65504.0, 65504.0);
    const double summed = size * 0x1p-18;  // a few hundred terms in fp32, some truncated to it
    return {value,
            factor * (7.0 * std::sqrt(variance) + summed) + std::fabs(value) * 0x1p-11 + 0x1p-25};
  }

  struct Code {
    double zero;
    double scaled;  // scale times code
    double code;
  };
  Code code_of(std::int64_t sequence, int head, std::int64_t position, int channel) const {
    const std::int64_t page = position / kPageTokens;
    const std::int64_t slot = index_.slot(sequence, page);
    const auto t = static_cast<std::size_t>(position % kPageTokens);
    const std::byte* const codes =
        index_.tiles.codes_of(p_.head_dim, head, slot) +
        KeyTiles::place_of(p_.bits, page, static_cast<std::size_t>(channel)) *
            index_.tiles.code_bytes();
    // `bits` bits of the token, of those that lie together.
    const auto read = [&](const std::byte* from, unsigned bits) {
      const std::size_t bytes = std::size_t{16} * bits;
      return static_cast<unsigned>(from[t % bytes]) >> (t / bytes * bits) & ((1u << bits) - 1u);
    };
    const unsigned code = p_.bits == 3 ? read(codes, 2) + 4 * read(codes + 32, 1)
                                       : read(codes, static_cast<unsigned>(p_.bits));
    const std::uint16_t* const scales =
        index_.tiles.scales_of(p_.head_dim, head, slot, page) + channel;
    const auto scale = static_cast<double>(f16_to_float(scales[0]));
    const auto zero = static_cast<double>(f16_to_float(scales[p_.head_dim]));
    return {zero, scale * code, static_cast<double>(code)};
  }

  Problem p_;
  Random random_;
  KvShape shape_;
  std::vector<BatchToken> tokens_;
  std::int64_t longest_;
  std::int64_t table_pages_;
  std::int64_t table_tiles_;
  std::size_t page_slots_;
  std::size_t tile_slots_;
  std::size_t row_bytes_;
  Shared<BatchToken> batch_;
  Shared<PageSlots> page_table_;
  Shared<std::int32_t> tile_table_;
  Shared<std::byte> on_device_;
  Shared<std::byte> at_host_;
  Shared<std::byte> codes_;
  Shared<std::uint16_t> scales_;
  Shared<std::uint16_t> bounds_;
  Shared<float> q_;
  Shared<std::int32_t> bad_;
  std::int64_t stride_;
  Shared<std::uint16_t> logits_;
  Shared<std::byte> digest_;
  std::vector<std::vector<std::int32_t>> lists_;  // [tokens * kv_heads], candidates
  PagedRows paged_;
  KeyIndexView index_;
  Workspace workspace_;
};

}  // namespace sluice::cuda::estimates
