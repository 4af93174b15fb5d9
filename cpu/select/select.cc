#include "cpu/select/select.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cpu/runtime/cut.h"
#include "cpu/runtime/softmax.h"
#include "cpu/select/select_by_digest.h"
#include "lib/check.h"

namespace sluice::cpu {
namespace {

// Returns for each weight, in position order, whether the cut keeps it.
class CutWalk {
 public:
  explicit CutWalk(const Cut& cut) : cut_(cut) {}
  bool keeps(float weight) {
    if (weight != cut_.weight) return weight > cut_.weight;
    return cut_.ties-- > 0;
  }

 private:
  Cut cut_;
};

// The choice of one KV head of a token.
class HeadChoice {
 public:
  HeadChoice(const SelectParams& p, std::int64_t token, std::int64_t kv_head)
      : p_(p),
        token_(p.batch.tokens[token]),
        head_(token * p.shape.kv_heads + kv_head),
        sinks_(std::min(p.sinks, token_.page_first())),
        recent_first_(std::max<std::int64_t>(token_.count() - p.recent, 0)) {
    const SelectionView* const list = p.candidates;
    if (list != nullptr) listed_ = list->positions + head_ * list->capacity;
    count_ = list != nullptr ? list->heads[head_].count : token_.page_first();
    total_ = count_ + (p.skip_newest ? 0 : token_.count() - token_.page_first());
  }

  void run() {
    HeadSelection& result = p_.selected.heads[head_];
    keep_forced();
    if (p_.logits.data == nullptr) return emit(result);
    if (total_ == 0) return report_nothing();
    if (p_.logits.digest.data == nullptr && !softmax_rows()) {
      result.bad = 1;
      return;
    }
    if (p_.prune == Pruner::top_k) {
      keep_heaviest(std::max(p_.k.of(token_.count()), forced_));
    } else {
      const std::int64_t cap = p_.cap.of(token_.count());
      for (int g = 0; g < p_.shape.group(); ++g) keep_share(row(g));
      const auto wanted = std::count(kept_.begin(), kept_.end(), std::uint8_t{1});
      if (wanted > cap) {
        for (std::size_t i = 0; i < kept_.size(); ++i) kept_[i] = kept_[i] != 0 || is_forced(i);
        keep_heaviest(std::max(cap, forced_));
        result.cut = 1;
      }
    }
    emit(result);
  }

 private:
  std::int64_t position(std::size_t i) const {
    return listed_ != nullptr ? listed_[i] : static_cast<std::int64_t>(i);
  }
  bool is_forced(std::size_t i) const {
    const std::int64_t at = position(i);
    return at < sinks_ || at >= recent_first_;
  }
  float* row(int g) const {
    return p_.logits.floats() + (head_ * p_.shape.group() + g) * p_.logits.stride;
  }

  // Calls body(i) for every entry that is always kept.
  void for_forced(const auto& body) const {
    if (listed_ != nullptr) {
      for (std::size_t i = 0; i < kept_.size(); ++i)
        if (is_forced(i)) body(i);
      return;
    }
    const auto sinks = static_cast<std::size_t>(sinks_);
    const auto recent = static_cast<std::size_t>(std::clamp(recent_first_, sinks_, count_));
    for (std::size_t i = 0; i < sinks; ++i) body(i);
    for (std::size_t i = std::max(recent, sinks); i < kept_.size(); ++i) body(i);
  }

  bool softmax_rows() {
    for (int g = 0; g < p_.shape.group(); ++g) {
      float* const lse = p_.lse != nullptr ? p_.lse + head_ * p_.shape.group() + g : nullptr;
      if (!softmax(row(g), total_, lse)) return false;
    }
    return true;
  }

  void keep_forced() {
    kept_.assign(static_cast<std::size_t>(count_), 0);
    for_forced([&](std::size_t i) {
      kept_[i] = 1;
      ++forced_;
    });
  }

  double share(std::int64_t query_head) const {
    return p_.share != nullptr ? static_cast<double>(p_.share[query_head]) : 1.0;
  }

  void report_nothing() {
    for (int g = 0; g < p_.shape.group(); ++g) {
      const std::int64_t query_head = head_ * p_.shape.group() + g;
      p_.alpha[query_head] = static_cast<float>(share(query_head));
      if (p_.lse != nullptr) p_.lse[query_head] = -std::numeric_limits<float>::infinity();
    }
  }

  // Keeps the `count` heaviest entries by summed weight, counting those that are always kept. With
  // top_p, keeps only entries that it has already chosen.
  void keep_heaviest(std::int64_t count) {
    const bool chosen = p_.prune == Pruner::top_p;
    std::vector<float> sums(kept_.size(), 0.0f);
    for (int g = 0; g < p_.shape.group(); ++g) add_to(row(g), count_, sums.data());
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (chosen && kept_[i] == 0) sums[i] = -1.0f;
    }
    for_forced([&](std::size_t i) { sums[i] = std::numeric_limits<float>::infinity(); });
    CutWalk walk(cut_by_count(sums, count));
    for (std::size_t i = 0; i < sums.size(); ++i) kept_[i] = sums[i] >= 0.0f && walk.keeps(sums[i]);
  }

  // Adds the fewest entries that bring one query head to the share p of its weight.
  void keep_share(float* weights) {
    std::vector<float> free(weights, weights + count_);
    double missing = p_.p;
    for (std::int64_t i = count_; i < total_; ++i) missing -= static_cast<double>(weights[i]);
    for_forced([&](std::size_t i) {
      missing -= static_cast<double>(weights[i]);
      free[i] = -1.0f;
    });
    if (missing <= 0.0) return;
    CutWalk walk(cut_by_weight(free, missing));
    for (std::size_t i = 0; i < free.size(); ++i) {
      if (free[i] >= 0.0f && walk.keeps(free[i])) kept_[i] = 1;
    }
  }

  void emit(HeadSelection& result) {
    std::int32_t* const to = p_.selected.positions + head_ * p_.selected.capacity;
    const bool has_logits = p_.logits.data != nullptr;
    std::vector<double> alpha(static_cast<std::size_t>(p_.shape.group()), has_logits ? 0.0 : 1.0);
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      if (kept_[i] == 0) continue;
      check(result.count < p_.selected.capacity, "more selected positions than there is room for");
      const std::int64_t at = position(i);
      if (result.count == 0 || to[result.count - 1] / kPageTokens != at / kPageTokens) {
        ++result.pages;
      }
      to[result.count++] = static_cast<std::int32_t>(at);
      for (int g = 0; has_logits && g < p_.shape.group(); ++g) {
        alpha[static_cast<std::size_t>(g)] += static_cast<double>(row(g)[i]);
      }
    }
    for (int g = 0; g < p_.shape.group(); ++g) {
      double& sum = alpha[static_cast<std::size_t>(g)];
      for (std::int64_t i = count_; has_logits && i < total_; ++i) {
        sum += static_cast<double>(row(g)[i]);
      }
      const std::int64_t query_head = head_ * p_.shape.group() + g;
      p_.alpha[query_head] = static_cast<float>(std::min(sum, 1.0) * share(query_head));
    }
  }

  const SelectParams& p_;
  BatchToken token_;
  std::int64_t head_;  // into [tokens, kv_heads]
  std::int64_t sinks_;
  std::int64_t recent_first_;
  const std::int32_t* listed_ = nullptr;
  std::int64_t count_ = 0;   // entries that may be emitted
  std::int64_t total_ = 0;   // entries including the tail
  std::int64_t forced_ = 0;  // always kept
  std::vector<std::uint8_t> kept_;
};

}  // namespace

void select(const SelectParams& p, Threads& threads) {
  check(p.logits.digest.data == nullptr || p.candidates == nullptr, "a digest tells of all tokens");
  const std::int64_t kv_heads = p.shape.kv_heads;
  const std::int64_t heads = p.batch.count * kv_heads;
  std::fill_n(p.selected.heads, heads, HeadSelection{});
  std::vector<std::uint8_t> chosen(static_cast<std::size_t>(heads));
  if (p.logits.digest.data != nullptr) choose_by_digest(p, threads, chosen);
  if (std::count(chosen.begin(), chosen.end(), std::uint8_t{0}) == 0) return;
  const std::int64_t longest = p.candidates != nullptr ? p.candidates->capacity : p.batch.capacity;
  threads.for_each(
      heads,
      [&](std::int64_t i) {
        if (chosen[static_cast<std::size_t>(i)] != 0) return;
        HeadChoice(p, i / kv_heads, i % kv_heads).run();
      },
      longest * p.batch.count * p.shape.query_heads * static_cast<std::int64_t>(sizeof(float)));
}

}  // namespace sluice::cpu
