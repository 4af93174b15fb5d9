#include "cpu/select/select_by_digest.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "cpu/runtime/page_digest.h"
#include "cpu/runtime/softmax.h"
#include "lib/check.h"

namespace sluice::cpu {
namespace {

// Margin because a sum of products may round above the bound, the sum of their factors. It is too
// small only for subnormal weights, which do not matter.
constexpr float kRounding = 1.0f + 1e-5f;

// Marks a weight that is not computed yet.
constexpr float kOpen = -1.0f;

// From kSharedPages open pages on, all threads weigh a head's pages, kTaskPages per task.
constexpr std::int64_t kSharedPages = 64;
constexpr std::int64_t kTaskPages = 32;

constexpr auto kWeightBytes = static_cast<std::int64_t>(sizeof(float));

struct Weighed {
  float weight = 0.0f;
  std::int32_t position = 0;
};

bool is_before(const Weighed& a, const Weighed& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.position < b.position;
}

// Outcome of reading a head's digest.
enum class Outcome { few, weights, bad };

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

  std::int64_t pages() const { return pages_; }
  // Number of pages whose tokens weigh_pages() reads.
  std::int64_t listed() const { return listed_; }

  // Turns the pages' levels into weights. After Outcome::few the caller runs weigh_pages() and
  // choose() on the few pages that are left; for Outcome::weights all logits become weights, too.
  Outcome prepare() {
    if (pages_ == 0 && p_.skip_newest) return Outcome::weights;  // no rows to weigh
    if (!weigh()) {
      p_.selected.heads[head_].bad = 1;
      return Outcome::bad;
    }
    if (!is_few()) {
      expand();
      return Outcome::weights;
    }
    if (wanted_ > 0) bound_pages();
    return Outcome::few;
  }

  // Computes the weight of the heaviest token of every open page in [begin, end).
  void weigh_pages(std::int64_t begin, std::int64_t end) {
    if (listed_ == 0) return;
    PageScratch scratch(group_);
    for (std::int64_t page = begin; page < end; ++page) {
      float& weight = heaviest_[static_cast<std::size_t>(page)];
      if (weight == kOpen) weight = weigh_page(page, scratch);
    }
  }

  void choose() {
    std::vector<std::int32_t> positions = heaviest();
    for (std::int64_t at = 0; at < sinks_; ++at) positions.push_back(static_cast<int>(at));
    for (std::int64_t at = recent_; at < token_.page_first(); ++at) {
      positions.push_back(static_cast<int>(at));
    }
    std::sort(positions.begin(), positions.end());
    emit(positions);
  }

 private:
  // Returns false if a logit is NaN or +Inf, or if none is above -Inf.
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

  // Returns true if so few tokens are wanted that the pages' heaviest tokens rule out most pages.
  bool is_few() const { return p_.prune == Pruner::top_k && wanted_ <= free_end() - free_begin(); }

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

  // Scratch for one page.
  struct PageScratch {
    explicit PageScratch(int group) : rows(static_cast<std::size_t>(group)) {}
    std::vector<PageRow> rows;
    std::array<float, kPageTokens> weights{};
  };

  std::int64_t query(int g) const { return head_ * group_ + g; }
  float* logits(int g) const { return p_.logits.floats() + query(g) * p_.logits.stride; }
  std::int64_t forced() const { return sinks_ + token_.page_first() - recent_; }
  // Pages [free_begin(), free_end()) have no token that is always kept.
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

  // The wanted_ heaviest tokens by summed weight of all query heads, without those always kept.
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

  // At least wanted_ tokens, including the heaviest: wanted_ pages have a token that weighs at
  // least `lightest`.
  std::vector<Weighed> heavy_tokens() const {
    PageScratch scratch(group_);
    const float lightest = wanted_largest(heaviest_);
    std::vector<Weighed> found;
    for (std::size_t page = 0; page < heaviest_.size(); ++page) {
      if (heaviest_[page] < lightest) continue;
      weigh_page(static_cast<std::int64_t>(page), scratch);
      add_heavy(static_cast<std::int64_t>(page), scratch.weights, lightest, found);
    }
    return found;
  }

  // The wanted_-th largest of `of_pages` among pages without a token that is always kept.
  float wanted_largest(std::span<const float> of_pages) const {
    std::vector<float> order(of_pages.begin() + free_begin(), of_pages.begin() + free_end());
    const auto last = order.begin() + wanted_ - 1;
    std::nth_element(order.begin(), last, order.end(), std::greater<>());
    return *last;
  }

  // Rules out pages by the digest. A page has a token that weighs at least as much as any of its
  // levels, and none that weighs more than their sum.
  void bound_pages() {
    const auto pages = static_cast<std::size_t>(pages_);
    std::vector<float> least(pages);
    heaviest_.assign(pages, 0.0f);
    for (int g = 0; g < group_; ++g) {
      const float* const levels = digest_.levels_of(g);
      for (std::size_t page = 0; page < pages; ++page) {
        least[page] = std::max(least[page], levels[page]);
        heaviest_[page] += levels[page];
      }
    }
    const float lightest = wanted_largest(least);
    for (float& most : heaviest_) {
      most = most * kRounding >= lightest ? kOpen : 0.0f;
      listed_ += most == kOpen ? 1 : 0;
    }
  }

  // Weights of a page's tokens, summed over the query heads. Returns the largest.
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
    check(std::ssize(positions) <= p_.selected.capacity,
          "more selected positions than there is room for");
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
  std::int64_t head_;  // into [tokens, kv_heads]
  int group_;
  PageDigest digest_;  // of its query heads
  std::int64_t pages_;
  std::int64_t sinks_;   // tokens below are always kept
  std::int64_t recent_;  // tokens from here on are always kept
  std::int64_t wanted_;  // tokens to choose besides these
  // [pages]: weight of the heaviest token, kOpen, or 0 if enough other pages have heavier ones.
  std::vector<float> heaviest_;
  std::int64_t listed_ = 0;  // pages that are or were open
};

// Weighs the pages of heads that have many open ones, on all threads.
void weigh_together(std::vector<DigestedHead>& heads, Threads& threads) {
  struct Task {
    DigestedHead* head;
    std::int64_t first;
  };
  std::vector<Task> tasks;
  for (DigestedHead& head : heads) {
    if (head.listed() < kSharedPages) continue;
    for (std::int64_t page = 0; page < head.pages(); page += kTaskPages) {
      tasks.push_back({&head, page});
    }
  }
  if (tasks.empty()) return;
  threads.for_each(std::ssize(tasks), [&](std::int64_t i) {
    const Task& task = tasks[static_cast<std::size_t>(i)];
    task.head->weigh_pages(task.first, std::min(task.head->pages(), task.first + kTaskPages));
  });
}

}  // namespace

void choose_by_digest(const SelectParams& p, Threads& threads, std::span<std::uint8_t> chosen) {
  const std::int64_t kv_heads = p.shape.kv_heads;
  const auto count = std::ssize(chosen);
  std::vector<DigestedHead> heads;
  heads.reserve(chosen.size());
  for (std::int64_t i = 0; i < count; ++i) heads.emplace_back(p, i / kv_heads, i % kv_heads);
  std::vector<Outcome> outcomes(chosen.size());
  const auto for_heads = [&](const auto& body) {
    threads.for_each(
        count, [&](std::int64_t i) { body(static_cast<std::size_t>(i)); },
        count * p.batch.capacity * p.shape.group() * kWeightBytes);
  };
  const auto choose = [&](std::size_t i) {
    if (outcomes[i] == Outcome::few) {
      heads[i].weigh_pages(0, heads[i].pages());
      heads[i].choose();
    }
    chosen[i] = outcomes[i] != Outcome::weights ? 1 : 0;
  };
  if (count >= threads.count()) {
    return for_heads([&](std::size_t i) {
      outcomes[i] = heads[i].prepare();
      choose(i);
    });
  }
  for_heads([&](std::size_t i) { outcomes[i] = heads[i].prepare(); });
  weigh_together(heads, threads);
  for_heads(choose);
}

}  // namespace sluice::cpu
