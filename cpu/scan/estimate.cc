#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "cpu/runtime/page_digest.h"
#include "cpu/runtime/softmax.h"
#include "cpu/scan/key_score.h"
#include "cpu/scan/scan.h"
#include "lib/check.h"
#include "lib/hadamard.h"

namespace sluice::cpu {
namespace {

// Pages per task: 128 KiB of tiles at head_dim 128, with logits that fit the cache.
constexpr std::int64_t kTaskPages = 16;

// The estimates of one KV head of one token.
class HeadScan {
 public:
  HeadScan(const EstimateParams& p, std::int64_t number, std::int64_t head)
      : p_(p),
        token_(p.batch.tokens[number]),
        head_(head),
        place_(number * p.shape.kv_heads + head),
        group_(p.shape.group()),
        q_(p.q + number * p.q_stride + head * group_ * p.shape.head_dim),
        channels_(p.method == Selector::sparq
                      ? largest_channels(q_, group_, p.shape.head_dim, p.channels)
                      : all_channels(p.shape.head_dim)) {
    for (int g = 0; g < group_; ++g) {
      factors_.push_back(inverse_temperature(query(g), p.shape.head_dim, channels_));
    }
    tile_q_.assign(q_, q_ + group_ * p.shape.head_dim);
    if (p.index.tiles.rotated && p.method == Selector::int4) {
      rotate(tile_q_.data(), std::ssize(tile_q_), Rotation::of(p.shape.head_dim));
    }
  }

  std::int64_t whole_pages() const { return token_.pages(); }

  // Writes the logits of all tokens in pages [begin, end).
  void pages(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t page = begin; page < end; ++page) {
      if (p_.method == Selector::exact) {
        rows(page * kPageTokens, kPageTokens, page * kPageTokens);
      } else {
        page_to(page, [&](int g) { return logits(g) + page * kPageTokens; });
        if (p_.logits.digest.data != nullptr) note(page);
      }
    }
  }

  // Writes the logits of the candidates, page by page, so that each page's tile is read once.
  void listed() const {
    const std::int32_t* const at = p_.candidates->positions + place_ * p_.candidates->capacity;
    const std::int64_t count = candidates();
    if (p_.method == Selector::exact) return listed_rows({at, static_cast<std::size_t>(count)});
    std::vector<float> scratch(static_cast<std::size_t>(group_) * kPageTokens);
    std::int32_t pages = 0;
    for (std::int64_t i = 0; i < count;) {
      const std::int64_t page = at[i] / kPageTokens;
      page_to(page, [&](int g) { return scratch.data() + g * kPageTokens; });
      ++pages;
      for (; i < count && at[i] / kPageTokens == page; ++i) {
        for (int g = 0; g < group_; ++g) {
          logits(g)[i] = scratch[static_cast<std::size_t>(g) * kPageTokens +
                                 static_cast<std::size_t>(at[i] % kPageTokens)];
        }
      }
    }
    if (p_.pages_read != nullptr) p_.pages_read[place_] = pages;
  }

  // Writes the logits of the rows in the token's own page.
  void newest() const {
    const std::int64_t first = token_.page_first();
    rows(first, token_.count() - first, p_.candidates != nullptr ? candidates() : first);
  }

 private:
  void listed_rows(std::span<const std::int32_t> positions) const {
    std::int32_t resident = 0;
    std::int64_t to = 0;
    for (const std::int32_t position : positions) {
      rows(position, 1, to++);
      const PageSlots& page = p_.rows.page(token_.sequence, position / kPageTokens);
      resident += p_.rows.is_on_device(page) ? 1 : 0;
    }
    if (p_.resident != nullptr) p_.resident[place_] = resident;
  }

  // Writes the page's digest while its logits are in the cache.
  void note(std::int64_t page) const {
    const PageDigest digest = PageDigest::of(p_.logits.digest, place_ * group_);
    for (int g = 0; g < group_; ++g) {
      const PageSum noted = exp_page(logits(g) + page * kPageTokens);
      digest.levels_of(g)[page] = noted.level;
      digest.sums_of(g)[page] = noted.sum;
    }
  }

  std::int64_t candidates() const { return p_.candidates->heads[place_].count; }
  float* logits(int g) const {
    return p_.logits.floats() + (place_ * group_ + g) * p_.logits.stride;
  }
  const float* query(int g) const { return q_ + g * p_.shape.head_dim; }
  float factor(int g) const { return factors_[static_cast<std::size_t>(g)]; }

  TilePage tile(std::int64_t page) const {
    return tile_page(p_.index.tiles, p_.shape.head_dim, head_, p_.index.slot(token_.sequence, page),
                     page);
  }

  void page_to(std::int64_t page, const auto& to) const {
    if (p_.method == Selector::quest) {
      const std::uint16_t* const bounds =
          p_.index.bounds.of(p_.shape.head_dim, head_, p_.index.slot(token_.sequence, page), page);
      for (int g = 0; g < group_; ++g) {
        score_bounds(bounds, p_.shape.head_dim, query(g), factor(g), to(g));
      }
      return;
    }
    const std::int64_t next = std::min(page + 1, whole_pages() - 1);
    const PageScan scan = {tile(page), p_.index.tiles.bits, &channels_, tile(next).codes};
    std::array<PageQuery, kMaxBunch> folded;
    std::array<float*, kMaxBunch> outs{};
    for (int first = 0; first < group_; first += kMaxBunch) {
      const auto bunch = static_cast<std::size_t>(std::min(kMaxBunch, group_ - first));
      for (std::size_t i = 0; i < bunch; ++i) {
        const int g = first + static_cast<int>(i);
        outs[i] = to(g);
      }
      fold_queries(tile_q_.data() + first * p_.shape.head_dim, p_.shape.head_dim,
                   {&factors_[static_cast<std::size_t>(first)], bunch}, scan, folded.data());
      score_page(scan, {folded.data(), bunch}, {outs.data(), bunch});
    }
  }

  // Scores `count` rows of one page from position `first` on into logits from `to` on.
  void rows(std::int64_t first, std::int64_t count, std::int64_t to) const {
    const std::size_t row_bytes = p_.shape.row_bytes();
    const RowScan scan = {
        p_.rows.row(token_.sequence, head_, first, static_cast<std::int64_t>(row_bytes)), count,
        row_bytes, p_.shape.rows.key(), p_.shape.head_dim};
    for (int g = 0; g < group_; ++g) {
      score_rows(scan, query(g), factor(g), channels_, logits(g) + to);
    }
  }

  const EstimateParams& p_;
  const BatchToken token_;
  std::int64_t head_;
  std::int64_t place_;  // into [tokens, kv_heads]
  int group_;
  const float* q_;             // [group, head_dim]
  std::vector<float> tile_q_;  // the same, as the tiles hold keys
  ChannelList channels_;
  std::vector<float> factors_;  // [group]
};

// A part of a head's work.
struct Task {
  enum class Kind { pages, listed, newest };
  const HeadScan* scan = nullptr;
  Kind kind = Kind::pages;
  std::int64_t begin = 0;  // page
  std::int64_t end = 0;
};

void run(const Task& task) {
  switch (task.kind) {
    case Task::Kind::pages:
      return task.scan->pages(task.begin, task.end);
    case Task::Kind::listed:
      return task.scan->listed();
    case Task::Kind::newest:
      return task.scan->newest();
  }
}

std::vector<Task> tasks_of(const EstimateParams& p, const std::vector<HeadScan>& scans) {
  std::vector<Task> tasks;
  for (const HeadScan& scan : scans) {
    const std::int64_t pages = p.method == Selector::newest ? 0 : scan.whole_pages();
    if (p.candidates != nullptr) tasks.push_back({&scan, Task::Kind::listed});
    for (std::int64_t page = 0; page < pages && p.candidates == nullptr; page += kTaskPages) {
      tasks.push_back({&scan, Task::Kind::pages, page, std::min(pages, page + kTaskPages)});
    }
    if (!p.skip_newest) tasks.push_back({&scan, Task::Kind::newest});
  }
  return tasks;
}

}  // namespace

void estimate(const EstimateParams& p, Threads& threads) {
  check(p.method != Selector::sparq || !p.index.tiles.rotated, "sparq reads unrotated tiles");
  std::vector<HeadScan> scans;
  std::int64_t pages = 0;
  for (std::int64_t token = 0; token < p.batch.count; ++token) {
    for (int head = 0; head < p.shape.kv_heads; ++head) {
      pages += scans.emplace_back(p, token, head).whole_pages() + 1;
    }
  }
  const std::vector<Task> tasks = tasks_of(p, scans);
  threads.for_each(
      static_cast<std::int64_t>(tasks.size()),
      [&](std::int64_t task) { run(tasks[static_cast<std::size_t>(task)]); },
      pages * kPageTokens * p.shape.head_dim / 2);
}

}  // namespace sluice::cpu
