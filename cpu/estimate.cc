#include <algorithm>
#include <array>
#include <vector>

#include "cpu/key_score.h"
#include "cpu/selection.h"
#include "lib/check.h"

namespace sluice::cpu {
namespace {

// Pages of one task: 256 KiB of tiles at head_dim 128, a cache's worth of logits.
constexpr std::int64_t kTaskPages = 32;

// The estimates of one KV head.
class HeadScan {
 public:
  HeadScan(const EstimateParams& p, std::int64_t head)
      : p_(p),
        head_(head),
        group_(p.shape.group()),
        q_(p.q + head * group_ * p.shape.head_dim),
        channels_(p.method == Selector::sparq
                      ? largest_channels(q_, group_, p.shape.head_dim, p.channels)
                      : all_channels(p.shape.head_dim)) {
    for (int g = 0; g < group_; ++g) {
      factors_.push_back(inverse_temperature(query(g), p.shape.head_dim, channels_));
    }
  }

  // Pages [begin, end) in full, to their places among the logits.
  void pages(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t page = begin; page < end; ++page) {
      page_to(page, [&](int g) { return logits(g) + page * kPageTokens; });
    }
  }

  // The logits of the candidates, page by page: what a page's tile is read for is used at once.
  void listed() const {
    const std::int32_t* const at = p_.candidates->positions + head_ * p_.candidates->capacity;
    const std::int64_t count = p_.candidates->heads[head_].count;
    if (p_.method == Selector::exact) return listed_rows(at, count);
    std::vector<float> scratch(static_cast<std::size_t>(group_) * kPageTokens);
    for (std::int64_t i = 0; i < count;) {
      const std::int64_t page = at[i] / kPageTokens;
      page_to(page, [&](int g) { return scratch.data() + g * kPageTokens; });
      for (; i < count && at[i] / kPageTokens == page; ++i) {
        for (int g = 0; g < group_; ++g) {
          logits(g)[i] = scratch[static_cast<std::size_t>(g) * kPageTokens +
                                 static_cast<std::size_t>(at[i] % kPageTokens)];
        }
      }
    }
  }

  void rows() const {
    const std::int64_t first =
        p_.candidates != nullptr ? p_.candidates->heads[head_].count : p_.pages * kPageTokens;
    const RowSpan& span = p_.rows[static_cast<std::size_t>(head_)];
    score_span({span.rows, span.count, p_.shape.row_bytes(), p_.shape.dtype, p_.shape.head_dim},
               first);
  }

 private:
  float* logits(int g) const {
    return p_.logits.floats() + (head_ * group_ + g) * p_.logits.stride;
  }
  const float* query(int g) const { return q_ + g * p_.shape.head_dim; }
  float factor(int g) const { return factors_[static_cast<std::size_t>(g)]; }

  void page_to(std::int64_t page, const auto& to) const {
    if (p_.method == Selector::quest) {
      const std::uint16_t* const bounds =
          bounds_page(p_.index.bounds, p_.shape.head_dim, head_, page);
      for (int g = 0; g < group_; ++g) {
        score_bounds(bounds, p_.shape.head_dim, query(g), factor(g), to(g));
      }
      return;
    }
    const KeyTiles& tiles = p_.index.tiles;
    const PageScan scan = {tile_page(tiles, p_.shape.head_dim, head_, page), tiles.bits, &channels_,
                           tiles.tile_of(p_.shape.head_dim, head_, page + 1)};
    std::array<PageQuery, kMaxBunch> folded;
    std::array<float*, kMaxBunch> outs{};
    for (int first = 0; first < group_; first += kMaxBunch) {
      const auto bunch = static_cast<std::size_t>(std::min(kMaxBunch, group_ - first));
      for (std::size_t i = 0; i < bunch; ++i) {
        const int g = first + static_cast<int>(i);
        outs[i] = to(g);
      }
      fold_queries(query(first), p_.shape.head_dim,
                   {&factors_[static_cast<std::size_t>(first)], bunch}, scan, folded.data());
      score_page(scan, {folded.data(), bunch}, {outs.data(), bunch});
    }
  }

  void score_span(const RowScan& scan, std::int64_t first) const {
    for (int g = 0; g < group_; ++g) {
      score_rows(scan, query(g), factor(g), channels_, logits(g) + first);
    }
  }

  void listed_rows(const std::int32_t* at, std::int64_t count) const {
    const RowSpan& span = p_.candidate_rows[static_cast<std::size_t>(head_)];
    const std::size_t row_bytes = p_.shape.row_bytes();
    for (std::int64_t i = 0; i < count; ++i) {
      score_span({span.rows + static_cast<std::size_t>(at[i]) * row_bytes, 1, row_bytes,
                  p_.shape.dtype, p_.shape.head_dim},
                 i);
    }
  }

  const EstimateParams& p_;
  std::int64_t head_;
  int group_;
  const float* q_;  // [group, head_dim]
  ChannelList channels_;
  std::vector<float> factors_;  // [group]
};

}  // namespace

void estimate(const EstimateParams& p, Threads& threads) {
  const std::int64_t heads = p.shape.kv_heads;
  const bool listed = p.candidates != nullptr;
  const std::int64_t parts = listed ? 1 : (p.pages + kTaskPages - 1) / kTaskPages;
  std::vector<HeadScan> scans;
  for (std::int64_t head = 0; head < heads; ++head) scans.emplace_back(p, head);
  // One task a part, and one for the rows after the pages.
  threads.for_each(
      heads * (parts + 1),
      [&](std::int64_t task) {
        const HeadScan& scan = scans[static_cast<std::size_t>(task % heads)];
        const std::int64_t part = task / heads;
        if (part == parts) {
          scan.rows();
        } else if (listed) {
          scan.listed();
        } else {
          scan.pages(part * kTaskPages, std::min(p.pages, (part + 1) * kTaskPages));
        }
      },
      heads * (p.pages + 1) * kPageTokens * p.shape.head_dim / 2);
}

}  // namespace sluice::cpu
