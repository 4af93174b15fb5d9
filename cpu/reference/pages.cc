#include "cpu/reference/pages.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <vector>

#include "cpu/reference/ops.h"
#include "sluice/half.h"

namespace sluice::cpu::reference {
namespace {

struct Block {
  std::int64_t first;  // position
  std::int64_t tokens;
  const float* q;  // of its first token
};

std::vector<double> softmax(std::vector<double> x) {
  const double highest = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double& value : x) sum += value = std::exp(value - highest);
  for (double& value : x) value /= sum;
  return x;
}

// Weight of every page that ends before the block, summed over the query heads of a KV head.
std::vector<double> weights_of(const ChoosePagesParams& p, const Block& block, int head) {
  std::vector<double> weights(static_cast<std::size_t>(block.first / kPageTokens));
  for (int g = 0; g < p.shape.group() && !weights.empty(); ++g) {
    const std::int64_t offset = (std::int64_t{head} * p.shape.group() + g) * p.shape.head_dim;
    std::vector<double> logits(weights.size());
    for (std::size_t page = 0; page < logits.size(); ++page) {
      const std::uint16_t* const mean =
          p.means.of(p.shape, p.sequence, head, static_cast<std::int64_t>(page));
      for (std::int64_t t = 0; t < block.tokens; ++t) {
        for (int c = 0; c < p.shape.head_dim; ++c) {
          logits[page] += static_cast<double>(block.q[t * p.q_stride + offset + c]) *
                          bf16_to_float(mean[c]) * p.scale / static_cast<double>(block.tokens);
        }
      }
    }
    const std::vector<double> of_head = softmax(std::move(logits));
    for (std::size_t page = 0; page < weights.size(); ++page) weights[page] += of_head[page];
  }
  return weights;
}

double lightest_listed(std::vector<double> weights, double share) {
  std::sort(weights.begin(), weights.end(), std::greater<>());
  double total = 0;
  for (const double weight : weights) total += weight;
  double sum = 0;
  for (const double weight : weights) {
    sum += weight;
    if (sum >= share * total) return weight;
  }
  return 0;
}

std::set<std::int64_t> pages_of(const ChoosePagesParams& p, const Block& block, int head) {
  const std::int64_t before = block.first / kPageTokens;
  std::set<std::int64_t> pages = {0, std::max<std::int64_t>(0, before - 1)};
  for (std::int64_t t = 0; t < block.tokens; ++t) pages.insert((block.first + t) / kPageTokens);
  const std::vector<double> weights = weights_of(p, block, head);
  const bool all = p.share >= 1.0 || std::any_of(weights.begin(), weights.end(),
                                                 [](double w) { return !std::isfinite(w); });
  const double cut = all ? 0 : lightest_listed(weights, p.share);
  for (std::size_t page = 0; page < weights.size(); ++page) {
    if (all || weights[page] >= cut) pages.insert(static_cast<std::int64_t>(page));
  }
  return pages;
}

}  // namespace

void page_means(const PageMeansParams& p) {
  for (std::int64_t i = 0; i < p.pages.count; ++i) {
    if (!p.pages.exists(i)) continue;
    for (int head = 0; head < p.shape.kv_heads; ++head) {
      const std::byte* const rows =
          p.pages.rows(i, head, static_cast<std::int64_t>(p.shape.row_bytes()));
      std::uint16_t* const mean = p.to.of(p.shape, p.pages.sequence(i), head, p.pages.number(i));
      for (int c = 0; c < p.shape.head_dim; ++c) {
        double sum = 0;
        for (std::size_t r = 0; r < kPageTokens; ++r) {
          sum += key_element(p.shape, rows + r * p.shape.row_bytes(), c);
        }
        mean[c] = float_to_bf16(static_cast<float>(sum / kPageTokens));
      }
    }
  }
}

void choose_pages(const ChoosePagesParams& p) {
  std::fill_n(p.listed, p.shape.kv_heads * p.means.pages, 0u);
  for (int head = 0; head < p.shape.kv_heads; ++head) {
    for (std::int64_t number = 0; number < p.lists.blocks; ++number) {
      const std::int64_t first = number * PageLists::kBlock;
      const Block block = {p.first + first, std::min(PageLists::kBlock, p.tokens - first),
                           p.q + first * p.q_stride};
      const std::set<std::int64_t> pages = pages_of(p, block, head);
      const std::int64_t entry = head * p.lists.blocks + number;
      p.lists.counts[entry] = static_cast<std::int32_t>(pages.size());
      std::int32_t* to = p.lists.pages + entry * p.lists.capacity;
      for (const std::int64_t page : pages) {
        *to++ = static_cast<std::int32_t>(page);
        ++p.listed[head * p.means.pages + page];
      }
    }
  }
}

}  // namespace sluice::cpu::reference
