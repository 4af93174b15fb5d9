#include "cpu/attention/page_lists.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/runtime/rows.h"
#include "lib/check.h"
#include "sluice/half.h"

namespace sluice::cpu {
namespace {

void mean_of_page(const KvShape& shape, const std::byte* rows, std::uint16_t* mean) {
  const auto d = static_cast<std::size_t>(shape.head_dim);
  std::vector<float> sums(d);
  std::vector<float> key(d);
  for (std::int64_t r = 0; r < kPageTokens; ++r, rows += shape.row_bytes()) {
    read_key(shape, rows, key.data());
    for (std::size_t c = 0; c < d; ++c) sums[c] += key[c];
  }
  for (std::size_t c = 0; c < d; ++c) mean[c] = float_to_bf16(sums[c] / kPageTokens);
}

// A block of queries and a KV head.
struct Block {
  std::int64_t head = 0;
  std::int64_t number = 0;
  std::int64_t first = 0;  // token of the chunk
  std::int64_t tokens = 0;
  std::int64_t before = 0;  // pages that end before its first token
  std::int64_t end = 0;     // end of the pages of its own tokens

  Block(const ChoosePagesParams& p, std::int64_t task)
      : head(task % p.shape.kv_heads),
        number(task / p.shape.kv_heads),
        first(number * PageLists::kBlock),
        tokens(std::min(PageLists::kBlock, p.tokens - first)),
        before((p.first + first) / kPageTokens),
        end((p.first + first + tokens - 1) / kPageTokens + 1) {}
};

std::vector<float> mean_query(const ChoosePagesParams& p, const Block& block, int query_head) {
  const auto d = static_cast<std::size_t>(p.shape.head_dim);
  std::vector<float> mean(d);
  for (std::int64_t t = block.first; t < block.first + block.tokens; ++t) {
    const float* const q = p.q + t * p.q_stride + std::int64_t{query_head} * p.shape.head_dim;
    for (std::size_t c = 0; c < d; ++c) mean[c] += q[c];
  }
  for (float& x : mean) x *= p.scale / static_cast<float>(block.tokens);
  return mean;
}

float dot(const std::vector<float>& q, const std::uint16_t* key) {
  float sum = 0.0f;
  for (std::size_t c = 0; c < q.size(); ++c) sum += q[c] * bf16_to_float(key[c]);
  return sum;
}

// Adds the softmax of one query head over the pages before the block.
void add_weights(const ChoosePagesParams& p, const Block& block, int query_head,
                 std::vector<float>& weights) {
  const std::vector<float> q = mean_query(p, block, query_head);
  std::vector<float> of_head(weights.size());
  const std::uint16_t* const means = p.means.of(p.shape, p.sequence, block.head, 0);
  for (std::size_t i = 0; i < of_head.size(); ++i) {
    of_head[i] = dot(q, means + static_cast<std::int64_t>(i) * p.shape.head_dim);
  }
  const float highest = *std::max_element(of_head.begin(), of_head.end());
  float sum = 0.0f;
  for (float& x : of_head) sum += x = std::exp(x - highest);
  for (std::size_t i = 0; i < of_head.size(); ++i) weights[i] += of_head[i] / sum;
}

// The lightest of the fewest weights whose sum reaches `share` of the total.
float cut_of(std::vector<float> weights, double share) {
  std::sort(weights.begin(), weights.end(), std::greater<>());
  const double wanted = share * std::accumulate(weights.begin(), weights.end(), 0.0);
  double sum = 0.0;
  for (const float weight : weights) {
    sum += weight;
    if (sum >= wanted) return weight;
  }
  return weights.back();
}

void list_pages(const ChoosePagesParams& p, const Block& block) {
  std::vector<float> weights(static_cast<std::size_t>(block.before));
  float cut = 0.0f;
  if (p.share < 1.0 && block.before > 0) {
    for (int g = 0; g < p.shape.group(); ++g) {
      add_weights(p, block, static_cast<int>(block.head) * p.shape.group() + g, weights);
    }
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    if (std::isfinite(total)) cut = cut_of(weights, p.share);
  }
  const std::int64_t entry = block.head * p.lists.blocks + block.number;
  std::int32_t* const pages = p.lists.pages + entry * p.lists.capacity;
  std::int32_t count = 0;
  for (std::int64_t page = 0; page < block.end; ++page) {
    const bool always = page == 0 || page + 1 >= block.before;
    // A NaN weight is below no cut, so its page is kept.
    if (always || !(weights[static_cast<std::size_t>(page)] < cut)) {
      pages[count++] = static_cast<std::int32_t>(page);
    }
  }
  p.lists.counts[entry] = count;
}

}  // namespace

void page_means(const PageMeansParams& p, Threads& threads) {
  const auto row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
  const std::int64_t tasks = p.pages.count * p.shape.kv_heads;
  threads.for_each(
      tasks,
      [&](std::int64_t task) {
        const std::int64_t i = task / p.shape.kv_heads;
        const std::int64_t head = task % p.shape.kv_heads;
        if (!p.pages.exists(i)) return;
        mean_of_page(p.shape, p.pages.rows(i, head, row_bytes),
                     p.to.of(p.shape, p.pages.sequence(i), head, p.pages.number(i)));
      },
      tasks * kPageTokens * row_bytes);
}

void choose_pages(const ChoosePagesParams& p, Threads& threads) {
  check(p.lists.blocks == PageLists::blocks_of(p.tokens), "choose_pages: lists of other blocks");
  check((p.first + p.tokens - 1) / kPageTokens < p.lists.capacity, "choose_pages: lists too short");
  threads.for_each(p.lists.blocks * p.shape.kv_heads,
                   [&](std::int64_t task) { list_pages(p, Block(p, task)); });
  std::fill_n(p.listed, p.shape.kv_heads * p.means.pages, 0u);
  for (std::int64_t head = 0; head < p.shape.kv_heads; ++head) {
    for (std::int64_t block = 0; block < p.lists.blocks; ++block) {
      for (const std::int32_t page : p.lists.of(head, block)) {
        ++p.listed[head * p.means.pages + page];
      }
    }
  }
}

ListedRows::ListedRows(const AttendParams& p, std::int64_t block, std::int64_t head)
    : first_page_(p.first_row_position / kPageTokens),
      rows_(p.rows[static_cast<std::size_t>(head)].rows),
      row_bytes_(p.shape.row_bytes()) {
  const std::int64_t rows = p.rows[static_cast<std::size_t>(head)].count;
  const std::int64_t end_page = first_page_ + (rows + kPageTokens - 1) / kPageTokens;
  const std::span<const std::int32_t> all = p.listed.of(head, block);
  const auto below = [&](std::int64_t page) {
    return std::lower_bound(all.begin(), all.end(), page) - all.begin();
  };
  const std::int64_t first = below(first_page_);
  const std::int64_t end = below(end_page);
  if (first == end) return;
  pages_ = all.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(end - first));
  const std::int64_t last_rows = rows - (pages_.back() - first_page_) * kPageTokens;
  count_ = (end - first - 1) * kPageTokens + std::min<std::int64_t>(kPageTokens, last_rows);
  // All pages from the block's own on are listed, so row numbers there advance with positions.
  const std::int64_t position = p.first_query_position + block * PageLists::kBlock;
  const std::int64_t own = std::max(first_page_, position / kPageTokens);
  visible_ = (below(own) - first - own) * kPageTokens + p.first_query_position + 1;
}

void ListedRows::copy(std::int64_t first, std::int64_t rows, std::byte* to) const {
  const std::int64_t end = first + rows;
  while (first < end) {
    const std::int64_t within = first % kPageTokens;
    const std::int64_t some = std::min(kPageTokens - within, end - first);
    const std::int64_t page = pages_[static_cast<std::size_t>(first / kPageTokens)] - first_page_;
    const std::size_t bytes = static_cast<std::size_t>(some) * row_bytes_;
    std::memcpy(to, rows_ + static_cast<std::size_t>(page * kPageTokens + within) * row_bytes_,
                bytes);
    to += bytes;
    first += some;
  }
}

}  // namespace sluice::cpu
