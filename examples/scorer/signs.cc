#include "signs.h"

#include <sluice/element.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace signs {
namespace {

using sluice::kPageTokens;

// The keys of a page, [kPageTokens, head_dim].
std::vector<float> keys_of(const std::byte* rows, const sluice::KvShape& shape) {
  std::vector<float> keys;
  for (int token = 0; token < kPageTokens; ++token, rows += shape.row_bytes()) {
    for (int c = 0; c < shape.head_dim; ++c)
      keys.push_back(sluice::read_element(rows, shape.rows.key(), c));
  }
  return keys;
}

Page page_at(const PageLayout& layout, std::byte* page) {
  return {layout, reinterpret_cast<float*>(page), reinterpret_cast<std::uint32_t*>(page)};
}

ReadPage read_page(const PageLayout& layout, const std::byte* page) {
  return {layout, reinterpret_cast<const float*>(page),
          reinterpret_cast<const std::uint32_t*>(page)};
}

void build_page(const std::vector<float>& keys, const PageLayout& layout, const Page& page) {
  const int d = layout.head_dim;
  const auto key = [&](int token, int c) {
    return keys[static_cast<std::size_t>(token) * static_cast<std::size_t>(d) +
                static_cast<std::size_t>(c)];
  };
  std::fill_n(page.signs, kPageTokens * layout.words(), 0u);
  for (int c = 0; c < d; ++c) {
    float sum = 0.0f;
    for (int token = 0; token < kPageTokens; ++token) sum += key(token, c);
    const float mean = sum / kPageTokens;
    float distance = 0.0f;
    for (int token = 0; token < kPageTokens; ++token) {
      distance += std::fabs(key(token, c) - mean);
      if (key(token, c) > mean) page.signs[token * layout.words() + c / 32] |= 1u << (c % 32);
    }
    page.mean[c] = mean;
    page.size[c] = distance / kPageTokens;
  }
}

// The logits of a page's tokens for one query.
void score_page(const float* q, const PageLayout& layout, const ReadPage& page, float* logits) {
  const int d = layout.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  float base = 0.0f;  // of a token with no channel above the mean
  std::vector<float> above;
  for (int c = 0; c < d; ++c) {
    const float weight = q[c] * page.size[c] * scale;
    base += q[c] * page.mean[c] * scale - weight;
    above.push_back(2.0f * weight);
  }
  for (int token = 0; token < kPageTokens; ++token) {
    const std::uint32_t* const signs = page.signs + token * layout.words();
    float logit = base;
    for (int c = 0; c < d; ++c) {
      if ((signs[c / 32] >> (c % 32) & 1u) != 0) logit += above[static_cast<std::size_t>(c)];
    }
    logits[token] = logit;
  }
}

}  // namespace

bool Signs::runs_on(sluice::Processor processor) const {
#ifdef SIGNS_CUDA
  return processor == sluice::Processor::host || processor == sluice::Processor::cuda;
#else
  return processor == sluice::Processor::host;
#endif
}

sluice::IndexNeeds Signs::needs(const sluice::ScorerUse& use) const {
  sluice::IndexNeeds needs;
  needs.page_bytes = PageLayout{use.shape.head_dim}.bytes();
  return needs;
}

std::uint64_t Signs::bytes_read(const sluice::ScorerUse& use,
                                const sluice::ScanExtent& extent) const {
  return static_cast<std::uint64_t>(extent.pages) * PageLayout{use.shape.head_dim}.bytes();
}

void Signs::build(const sluice::BuildScorer& call) const {
#ifdef SIGNS_CUDA
  if (call.processor == sluice::Processor::cuda) return build_on_gpu(call);
#endif
  const sluice::KvShape& shape = call.use.shape;
  const PageLayout layout{shape.head_dim};
  const auto row_bytes = static_cast<std::int64_t>(shape.row_bytes());
  for (std::int64_t i = 0; i < call.pages.count; ++i) {
    if (!call.pages.exists(i)) continue;
    for (int head = 0; head < shape.kv_heads; ++head) {
      std::byte* const page = call.memory.page(head, call.pages.sequence(i), call.pages.number(i));
      build_page(keys_of(call.pages.rows(i, head, row_bytes), shape), layout,
                 page_at(layout, page));
    }
  }
}

void Signs::score(const sluice::RunScorer& call) const {
#ifdef SIGNS_CUDA
  if (call.processor == sluice::Processor::cuda) return score_on_gpu(call);
#endif
  const sluice::KvShape& shape = call.use.shape;
  const PageLayout layout{shape.head_dim};
  for (std::int64_t i = 0; i < call.batch.count; ++i) {
    for (int head = 0; head < shape.kv_heads; ++head) {
      for (std::int64_t number = 0; number < call.batch.tokens[i].pages(); ++number) {
        // Read once, for all query heads that share it.
        const ReadPage page =
            read_page(layout, call.reads->page(i, head, number, 0, layout.bytes()));
        for (int g = 0; g < shape.group(); ++g) {
          const int query = head * shape.group() + g;
          score_page(call.q + i * call.q_stride + query * shape.head_dim, layout, page,
                     call.logits.row<float>(i * shape.query_heads + query) + number * kPageTokens);
        }
      }
    }
  }
}

}  // namespace signs
