#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "cpu/runtime/cut.h"
#include "cpu/runtime/page_digest.h"
#include "cpu/runtime/softmax.h"
#include "cpu/values/page.h"
#include "cpu/values/project.h"
#include "cpu/values/values.h"
#include "lib/check.h"

namespace sluice::cpu {
namespace {

// Pages per task: to weigh by their logits, and to read values from.
constexpr std::int64_t kWeighPages = 32;
constexpr std::size_t kReadPages = 4;
constexpr std::size_t kLineBytes = 64;
// Costs relative to reading bytes: choosing among pages costs kChooseBytes per page, reading what
// other threads just wrote costs kRemote times as much.
constexpr std::int64_t kChooseBytes = 128;
constexpr std::int64_t kRemote = 2;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Class of a page weight: pages of one class are all read, or none of them.
std::uint32_t class_of(float weight) { return std::bit_cast<std::uint32_t>(weight) >> 16; }

// One KV head of one token.
class HeadTiles {
 public:
  HeadTiles(const AttendTilesParams& p, std::int64_t number, std::int64_t head)
      : p_(p),
        token_(p.batch.tokens[number]),
        head_(head),
        place_(number * p.shape.kv_heads + head),
        group_(p.shape.group()),
        pages_(p.selected.heads[place_].bad != 0 ? 0 : token_.pages()),
        page_weights_(static_cast<std::size_t>(pages_ * group_)),
        masses_(static_cast<std::size_t>(group_)) {
    if (p.logits.digest.data != nullptr) {
      digest_ = PageDigest::of(p.logits.digest, place_ * group_);
    }
  }

  std::int64_t pages() const { return pages_; }
  std::span<const std::int32_t> read() const { return read_; }

  // Weighs pages [begin, end); selected tokens weigh nothing.
  void weigh(std::int64_t begin, std::int64_t end) {
    take_out(begin, end);
    for (std::int64_t page = begin; page < end; ++page) {
      for (int g = 0; g < group_; ++g) {
        float* const row = weights(g, page);
        page_weight(g, page) = p_.weighed ? sum_page(row) : weigh_page(row, reference(g));
      }
    }
  }

  // Weighs all pages by the digest; reads only pages that have selected tokens.
  void weigh_by_digest() {
    for (int g = 0; g < group_; ++g) {
      const float* const sums = digest_.sums_of(g);
      for (std::int64_t page = 0; page < pages_; ++page) {
        page_weight(g, page) = factor(g, page) * sums[page];
      }
    }
    take_out(0, pages_);
    std::int64_t latest = -1;
    for_selected(0, pages_, [&](std::int32_t position) {
      const std::int64_t page = position / kPageTokens;
      for (int g = 0; page != latest && g < group_; ++g) {
        page_weight(g, page) = factor(g, page) * sum_page(weights(g, page));
      }
      latest = page;
    });
  }

  // Chooses the pages to read; called when all pages are weighed.
  void choose() {
    std::vector<float> sums(static_cast<std::size_t>(pages_));
    for (std::int64_t page = 0; page < pages_; ++page) {
      for (int g = 0; g < group_; ++g) {
        sums[static_cast<std::size_t>(page)] += page_weight(g, page);
        mass(g).all += static_cast<double>(page_weight(g, page));
      }
    }
    const std::uint32_t lightest = lightest_class(sums);
    for (std::int64_t page = 0; page < pages_; ++page) {
      if (class_of(sums[static_cast<std::size_t>(page)]) >= lightest) {
        read_.push_back(static_cast<std::int32_t>(page));
        continue;
      }
      for (int g = 0; g < group_; ++g) {
        mass(g).unread += static_cast<double>(page_weight(g, page));
      }
    }
    if (p_.pages_read != nullptr) p_.pages_read[place_] = static_cast<std::int32_t>(read_.size());
  }

  // Channels of a page.
  int channels() const { return p_.values.tiles.channels(p_.shape.head_dim); }

  // Adds the values of `pages` to `sums`, [group, channels].
  void add(std::span<const std::int32_t> pages, float* sums) const {
    const int d = channels();
    std::array<PageWeights, kMostPageQueries> queries;
    for (std::size_t at = 0; at < pages.size(); ++at) {
      const std::int32_t page = pages[at];
      if (at + 1 < pages.size()) prefetch(pages[at + 1]);
      const ValuePage values = {values_of(page), p_.values.tiles.bits, d};
      for (int first = 0; first < group_; first += kMostPageQueries) {
        const int count = std::min(kMostPageQueries, group_ - first);
        for (int i = 0; i < count; ++i) {
          const int g = first + i;
          queries[static_cast<std::size_t>(i)] = {weights(g, page), page_weight(g, page),
                                                  sums + std::int64_t{g} * d, factor(g, page)};
        }
        add_value_page(values, {queries.data(), static_cast<std::size_t>(count)});
      }
    }
  }

  // Writes the partial of a query head from its sum, [channels]. `sum` has room for [head_dim] and
  // is overwritten.
  void finish(int g, float* sum) const {
    const int d = p_.shape.head_dim;
    const Mass& of = masses_[static_cast<std::size_t>(g)];
    float lse = kMinusInfinity;
    if (of.all > 0.0) {
      lse = reference(g) + static_cast<float>(std::log(of.all));
      const float* const values = p_.value_sums + place_ * d;
      const auto scale = static_cast<float>(1.0 / of.all);
      const double each = 1.0 / static_cast<double>(token_.count());
      auto mean = static_cast<float>(of.unread / of.all * each);
      const float* const basis = p_.values.tiles.basis;
      if (basis != nullptr) {
        const auto read = static_cast<float>((of.all - of.unread) * each);
        unproject({p_.values.tiles.basis_of(d, head_), d}, values, read, sum);
        mean = static_cast<float>(each);
      }
      for (int c = 0; c < d; ++c) sum[c] = scale * sum[c] + mean * values[c];
    }
    const std::int64_t query = place_ * group_ + g;
    float* const out = p_.out + query * d;
    if (p_.merge) return merge_partials({1, d, sum, &lse, out, p_.lse + query});
    std::copy_n(sum, d, out);
    p_.lse[query] = lse;
  }

 private:
  // Weights relative to estimated_lse.
  struct Mass {
    double all = 0.0;
    double unread = 0.0;
  };

  float reference(int g) const { return p_.estimated_lse[place_ * group_ + g]; }
  float* weights(int g, std::int64_t page) const {
    return p_.logits.floats() + (place_ * group_ + g) * p_.logits.stride + page * kPageTokens;
  }
  // Factor that turns a page's stored entries into weights.
  float factor(int g, std::int64_t page) const {
    return digest_.levels == nullptr ? 1.0f : digest_.levels_of(g)[page];
  }
  float& page_weight(int g, std::int64_t page) {
    return page_weights_[static_cast<std::size_t>(page * group_ + g)];
  }
  float page_weight(int g, std::int64_t page) const {
    return page_weights_[static_cast<std::size_t>(page * group_ + g)];
  }

  const std::byte* values_of(std::int64_t page) const {
    return p_.values.tiles.page(p_.shape.head_dim, head_, p_.values.slot(token_.sequence, page),
                                page);
  }
  // The pages to read are scattered, so the hardware prefetcher cannot predict the next one.
  void prefetch(std::int64_t page) const {
    const std::byte* const values = values_of(page);
    const std::size_t bytes = p_.values.tiles.page_bytes(p_.shape.head_dim);
    for (std::size_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(values + at);
  }

  // Calls body(position) for every selected token of pages [begin, end).
  void for_selected(std::int64_t begin, std::int64_t end, const auto& body) const {
    const std::int32_t* const first = p_.selected.positions + place_ * p_.selected.capacity;
    const std::int32_t* const last = first + p_.selected.heads[place_].count;
    for (const std::int32_t* at = std::lower_bound(first, last, begin * kPageTokens);
         at != last && *at < end * kPageTokens; ++at) {
      body(*at);
    }
  }

  void take_out(std::int64_t begin, std::int64_t end) const {
    const bool is_weight = p_.weighed || digest_.levels != nullptr;
    const float nothing = is_weight ? 0.0f : kMinusInfinity;
    for_selected(begin, end, [&](std::int32_t position) {
      for (int g = 0; g < group_; ++g) weights(g, 0)[position] = nothing;
    });
  }

  Mass& mass(int g) { return masses_[static_cast<std::size_t>(g)]; }

  // The class of the lightest page to read; `sums` are the page weights.
  std::uint32_t lightest_class(std::span<const float> sums) const {
    if (p_.share >= 1.0f) return 0;
    double all = 0.0;
    for (const Mass& of : masses_) all += of.all;
    const Cut cut = cut_by_weight(sums, all * static_cast<double>(p_.share));
    return cut.weight >= 0.0f ? class_of(cut.weight) : 0;
  }

  const AttendTilesParams& p_;
  const BatchToken token_;
  std::int64_t head_;
  std::int64_t place_;  // into [tokens, kv_heads]
  int group_;
  std::int64_t pages_;               // attended pages
  PageDigest digest_;                // of its query heads, or null pointers
  std::vector<float> page_weights_;  // [pages, group]
  std::vector<Mass> masses_;         // [group]
  std::vector<std::int32_t> read_;   // pages, ascending
};

// A part of a head's pages.
struct WeighTask {
  HeadTiles* head;
  std::int64_t begin;
  std::int64_t end;
};
struct ReadTask {
  const HeadTiles* head;
  std::span<const std::int32_t> pages;
};

void weigh_by_digest(std::vector<HeadTiles>& heads, Threads& threads) {
  std::int64_t pages = 0;
  for (const HeadTiles& head : heads) pages += head.pages();
  threads.for_each(
      static_cast<std::int64_t>(heads.size()),
      [&](std::int64_t i) {
        HeadTiles& head = heads[static_cast<std::size_t>(i)];
        head.weigh_by_digest();
        head.choose();
      },
      pages * kChooseBytes);
}

void weigh(std::vector<HeadTiles>& heads, const AttendTilesParams& p, Threads& threads) {
  if (p.logits.digest.data != nullptr) return weigh_by_digest(heads, threads);
  std::vector<WeighTask> tasks;
  std::int64_t pages = 0;
  for (HeadTiles& head : heads) {
    pages += head.pages();
    for (std::int64_t page = 0; page < head.pages(); page += kWeighPages) {
      tasks.push_back({&head, page, std::min(head.pages(), page + kWeighPages)});
    }
  }
  const std::int64_t page_bytes = std::int64_t{kPageTokens} * p.shape.group() * 4;
  threads.for_each(
      static_cast<std::int64_t>(tasks.size()),
      [&](std::int64_t i) {
        const WeighTask& task = tasks[static_cast<std::size_t>(i)];
        task.head->weigh(task.begin, task.end);
      },
      pages * page_bytes);
  threads.for_each(
      static_cast<std::int64_t>(heads.size()),
      [&](std::int64_t i) { heads[static_cast<std::size_t>(i)].choose(); }, pages * page_bytes);
}

}  // namespace

void attend_tiles(const AttendTilesParams& p, Threads& threads) {
  std::vector<HeadTiles> heads;
  heads.reserve(static_cast<std::size_t>(p.batch.count * p.shape.kv_heads));
  for (std::int64_t token = 0; token < p.batch.count; ++token) {
    for (int head = 0; head < p.shape.kv_heads; ++head) heads.emplace_back(p, token, head);
  }
  weigh(heads, p, threads);

  std::vector<ReadTask> tasks;
  std::vector<std::size_t> firsts;  // first task of every head; tasks are in page order
  std::int64_t bytes = 0;
  for (const HeadTiles& head : heads) {
    firsts.push_back(tasks.size());
    const std::span<const std::int32_t> read = head.read();
    for (std::size_t i = 0; i < read.size(); i += kReadPages) {
      tasks.push_back({&head, read.subspan(i, std::min(kReadPages, read.size() - i))});
    }
    bytes += static_cast<std::int64_t>(read.size() * p.values.tiles.page_bytes(p.shape.head_dim));
  }
  firsts.push_back(tasks.size());
  // [tasks, group, channels], added up in the order of tasks, so that sums do not depend on timing.
  const int channels = p.values.tiles.channels(p.shape.head_dim);
  const auto d = static_cast<std::size_t>(channels);
  const std::size_t size = d * static_cast<std::size_t>(p.shape.group());
  std::vector<float> sums(tasks.size() * size);
  threads.for_each(
      static_cast<std::int64_t>(tasks.size()),
      [&](std::int64_t i) {
        const ReadTask& task = tasks[static_cast<std::size_t>(i)];
        task.head->add(task.pages, &sums[static_cast<std::size_t>(i) * size]);
      },
      bytes);
  // Costs more per byte, because the sums are in the caches of the threads that wrote them.
  threads.for_each(
      std::ssize(heads) * p.shape.group(),
      [&](std::int64_t i) {
        const auto head = static_cast<std::size_t>(i / p.shape.group());
        const auto g = static_cast<std::size_t>(i % p.shape.group());
        std::vector<float> sum(static_cast<std::size_t>(p.shape.head_dim));
        for (std::size_t task = firsts[head]; task < firsts[head + 1]; ++task) {
          add_to(&sums[task * size + g * d], channels, sum.data());
        }
        heads[head].finish(static_cast<int>(g), sum.data());
      },
      kRemote * static_cast<std::int64_t>(sums.size() * sizeof(float)));
}

void merge_partials(const MergePartialsParams& p) {
  for (std::int64_t row = 0; row < p.rows; ++row) {
    const float highest = std::max(p.from_lse[row], p.lse[row]);
    if (p.from_lse[row] == kMinusInfinity) continue;
    const float here = std::exp(p.from_lse[row] - highest);
    const float before = std::exp(p.lse[row] - highest);
    const float weight = here / (here + before);
    const float kept = before / (here + before);
    const float* const from = p.from + row * p.head_dim;
    float* const out = p.out + row * p.head_dim;
    for (int c = 0; c < p.head_dim; ++c) {
      out[c] = (kept == 0.0f ? 0.0f : kept * out[c]) + weight * from[c];
    }
    p.lse[row] = highest + std::log(here + before);
  }
}

}  // namespace sluice::cpu
