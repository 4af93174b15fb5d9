#include "cpu/digested_selection.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "cpu/page_digest.h"
#include "cpu/softmax.h"

namespace sluice::cpu {
namespace {

// A sum of products may round to more than the sum of their factors; to those that are below the
// normal numbers it may matter, which weigh nothing.
constexpr float kRounding = 1.0f + 1e-5f;

struct Weighed {
  float weight = 0.0f;
  std::int32_t position = 0;
};

bool is_before(const Weighed& a, const Weighed& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.position < b.position;
}

class DigestedHead {
 public:
  DigestedHead(const SelectParams& p, std::int64_t number, std::int64_t kv_head)
      : p_(p),
        token_(p.batch.tokens[number]),
        head_(number * p.shape.kv_heads + kv_head),
        group_(p.shape.group()),
        digest_(PageDigest::of(p.logits.digest, head_ * group_)),
        pages_(token_.pages()),
        sinks_(std::min(p.sinks, token_.page_first())),
        recent_(std::clamp(token_.count() - p.recent, sinks_, token_.page_first())),
        wanted_(std::max<std::int64_t>(p.k.of(token_.count()) - forced(), 0)) {}

  // Makes weights of the pages' levels. False if a logit was NaN or +Inf, or none above -Inf.
  bool weigh() {
    const std::int64_t newest = p_.skip_newest ? 0 : token_.count() - token_.page_first();
    for (int g = 0; g < group_; ++g) {
      if (newest > 0) note_newest(g, newest);
      float* const lse = p_.lse != nullptr ? p_.lse + query(g) : nullptr;
      const std::int64_t noted = pages_ + (newest > 0 ? 1 : 0);
      if (!softmax_pages(digest_.levels_of(g), digest_.sums_of(g), noted, lse)) return false;
    }
    return true;
  }

  // Whether so few are wanted that the pages' heaviest tokens rule out most pages.
  bool is_few() const { return p_.prune == Pruner::top_k && wanted_ <= free_end() - free_begin(); }

  void choose() {
    std::vector<std::int32_t> positions = heaviest();
    for (std::int64_t at = 0; at < sinks_; ++at) positions.push_back(static_cast<int>(at));
    for (std::int64_t at = recent_; at < token_.page_first(); ++at) {
      positions.push_back(static_cast<int>(at));
    }
    std::sort(positions.begin(), positions.end());
    emit(positions);
  }

  void expand() {
    for (int g = 0; g < group_; ++g) {
      float* const levels = digest_.levels_of(g);
      float* const sums = digest_.sums_of(g);
      for (std::int64_t page = 0; page < pages_; ++page) {
        multiply(logits(g) + page * kPageTokens, kPageTokens, levels[page]);
        sums[page] *= levels[page];
        levels[page] = 1.0f;
      }
      if (!p_.skip_newest) {
        multiply(logits(g) + token_.page_first(), token_.count() - token_.page_first(),
                 levels[pages_]);
      }
    }
  }

 private:
  // For one page at a time.
  struct PageScratch {
    explicit PageScratch(int group) : rows(static_cast<std::size_t>(group)) {}
    std::vector<PageRow> rows;
    std::array<float, kPageTokens> weights{};
  };

  std::int64_t query(int g) const { return head_ * group_ + g; }
  float* logits(int g) const { return p_.logits.floats() + query(g) * p_.logits.stride; }
  std::int64_t forced() const { return sinks_ + token_.page_first() - recent_; }
  // Pages of which nothing is always kept.
  std::int64_t free_begin() const { return (sinks_ + kPageTokens - 1) / kPageTokens; }
  std::int64_t free_end() const { return std::max(recent_ / kPageTokens, free_begin()); }

  void note_newest(int g, std::int64_t count) const {
    std::array<float, kPageTokens> page;
    float* const newest = logits(g) + token_.page_first();
    std::copy_n(newest, count, page.begin());
    std::fill(page.begin() + count, page.end(), -std::numeric_limits<float>::infinity());
    const PageSum noted = exp_page(page.data());
    std::copy_n(page.begin(), count, newest);
    digest_.levels_of(g)[pages_] = noted.level;
    digest_.sums_of(g)[pages_] = noted.sum;
  }

  // The heaviest by weight of all query heads, of those that are not kept anyway.
  std::vector<std::int32_t> heaviest() const {
    std::vector<std::int32_t> positions;
    if (wanted_ == 0) return positions;
    std::vector<Weighed> found = heavy_tokens();
    if (wanted_ < std::ssize(found)) {
      std::nth_element(found.begin(), found.begin() + wanted_, found.end(), is_before);
      found.resize(static_cast<std::size_t>(wanted_));
    }
    for (const Weighed& token : found) positions.push_back(token.position);
    return positions;
  }

  // At least as many tokens as are wanted, the heaviest among them. As many pages have a token that
  // weighs as much as the lightest of their heaviest, which the digest bounds first: most pages
  // have none.
  std::vector<Weighed> heavy_tokens() const {
    PageScratch scratch(group_);
    const std::vector<float> heaviest = heaviest_of_pages(scratch);
    const float lightest = wanted_largest(heaviest);
    std::vector<Weighed> found;
    for (std::size_t page = 0; page < heaviest.size(); ++page) {
      if (heaviest[page] < lightest) continue;
      weigh_page(static_cast<std::int64_t>(page), scratch);
      add_heavy(static_cast<std::int64_t>(page), scratch.weights, lightest, found);
    }
    return found;
  }

  // The wanted-th largest of numbers of pages, of those of which nothing is always kept.
  float wanted_largest(std::span<const float> of_pages) const {
    std::vector<float> order(of_pages.begin() + free_begin(), of_pages.begin() + free_end());
    const auto last = order.begin() + wanted_ - 1;
    std::nth_element(order.begin(), last, order.end(), std::greater<>());
    return *last;
  }

  // What the heaviest token of every page weighs, or 0 where the digest says that there are enough
  // heavier ones. A page has a token that weighs at least what any of its levels says, and none
  // that weighs more than all of them together.
  std::vector<float> heaviest_of_pages(PageScratch& scratch) const {
    const auto pages = static_cast<std::size_t>(pages_);
    std::vector<float> least(pages);
    std::vector<float> most(pages);
    for (int g = 0; g < group_; ++g) {
      const float* const levels = digest_.levels_of(g);
      for (std::size_t page = 0; page < pages; ++page) {
        least[page] = std::max(least[page], levels[page]);
        most[page] += levels[page];
      }
    }
    const float lightest = wanted_largest(least);
    for (std::size_t page = 0; page < pages; ++page) {
      most[page] = most[page] * kRounding >= lightest
                       ? weigh_page(static_cast<std::int64_t>(page), scratch)
                       : 0.0f;
    }
    return most;
  }

  // Weights of a page's tokens, of all query heads together; returns the largest.
  float weigh_page(std::int64_t page, PageScratch& to) const {
    for (int g = 0; g < group_; ++g) {
      to.rows[static_cast<std::size_t>(g)] = {logits(g) + page * kPageTokens,
                                              digest_.levels_of(g)[page]};
    }
    return sum_page_rows(to.rows, to.weights.data());
  }

  void add_heavy(std::int64_t page, std::span<const float> weights, float lightest,
                 std::vector<Weighed>& to) const {
    const std::int64_t first = page * kPageTokens;
    const std::int64_t end = std::min(recent_, first + kPageTokens);
    for (std::int64_t at = std::max(sinks_, first); at < end; ++at) {
      const float weight = weights[static_cast<std::size_t>(at - first)];
      if (weight >= lightest) to.push_back({weight, static_cast<std::int32_t>(at)});
    }
  }

  void emit(std::span<const std::int32_t> positions) const {
    HeadSelection& result = p_.selected.heads[head_];
    const auto capacity = static_cast<std::size_t>(p_.selected.capacity);
    if (positions.size() > capacity) {
      result.cut = 1;
      positions = positions.first(capacity);
    }
    std::int32_t* const to = p_.selected.positions + head_ * p_.selected.capacity;
    std::copy(positions.begin(), positions.end(), to);
    result.count = static_cast<std::int32_t>(positions.size());
    std::int32_t page = -1;
    for (const std::int32_t at : positions) {
      if (at / kPageTokens != page) ++result.pages;
      page = at / kPageTokens;
    }
    for (int g = 0; g < group_; ++g) p_.alpha[query(g)] = alpha(g, positions);
  }

  float alpha(int g, std::span<const std::int32_t> positions) const {
    const float* const levels = digest_.levels_of(g);
    double kept = 0.0;
    if (!p_.skip_newest) {
      kept = static_cast<double>(levels[pages_]) * static_cast<double>(digest_.sums_of(g)[pages_]);
    }
    for (const std::int32_t at : positions) {
      kept += static_cast<double>(logits(g)[at]) * static_cast<double>(levels[at / kPageTokens]);
    }
    const double share = p_.share != nullptr ? static_cast<double>(p_.share[query(g)]) : 1.0;
    return static_cast<float>(std::min(kept, 1.0) * share);
  }

  const SelectParams& p_;
  BatchToken token_;
  std::int64_t head_;  // of all tokens'
  int group_;
  PageDigest digest_;  // of its query heads
  std::int64_t pages_;
  std::int64_t sinks_;   // always kept, below
  std::int64_t recent_;  // likewise, from here on
  std::int64_t wanted_;  // besides these
};

}  // namespace

bool choose_by_digest(const SelectParams& p, std::int64_t token, std::int64_t kv_head) {
  DigestedHead head(p, token, kv_head);
  if (!head.weigh()) {
    p.selected.heads[token * p.shape.kv_heads + kv_head].bad = 1;
    return true;
  }
  if (head.is_few()) {
    head.choose();
    return true;
  }
  head.expand();
  return false;
}

}  // namespace sluice::cpu
