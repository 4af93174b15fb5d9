// Problems for select() on CUDA, in plain vectors and on the device.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/page_weights.h"
#include "kernels/select/select.h"
#include "sluice/half.h"
#include "tests/kernels/device_data.h"
#include "tests/kernels/digest_truth.h"
#include "tests/support/random.h"
#include "tests/support/selection_cases.h"

namespace sluice::cuda {

using sluice::testing::Random;
// Of f16 values; `capacity` is set.
using Case = sluice::testing::SelectCase;

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& host)
      : block_(make_device_block(std::max<std::size_t>(host.size() * sizeof(T), 16))) {
    upload(host);
  }
  void upload(const std::vector<T>& host) { copy_in(data(), host.data(), host.size() * sizeof(T)); }
  T* data() const { return static_cast<T*>(block_.get()); }
  std::vector<T> download(std::size_t count) const {
    std::vector<T> host(count);
    require(cudaMemcpy(host.data(), data(), count * sizeof(T), cudaMemcpyDefault), "download");
    return host;
  }

 private:
  DeviceBlock block_;
};

inline double logit_of(const Case& c, int head, int g, std::int64_t i) {
  const std::int64_t row = head * c.shape.group() + g;
  return static_cast<double>(c.logits[static_cast<std::size_t>(row * c.columns + i)]);
}

// What is kept, or is the cap, of a head.
inline std::int64_t keep_of(const Case& c, int head) {
  return (c.prune == Pruner::top_k ? c.k : c.cap).of(c.token(head).count());
}

struct Answer {
  std::vector<std::vector<std::int32_t>> positions;
  std::vector<HeadSelection> heads;
  std::vector<float> alpha;
  std::vector<float> lse;
  // PageWeights, where there is a digest.
  std::vector<uint4> masks;
  std::vector<float> weights;
  std::vector<float> masses;
  std::int64_t pages = 0;  // of a head
};

// A case's arrays on the device and the parameters that name them.
class Problem {
 public:
  explicit Problem(const Case& c, bool digested = false)
      : case_(c),
        tokens_(c.tokens),
        logits_(halves(c)),
        digest_(digested ? digest_of(c) : std::vector<std::byte>()),
        page_weights_(std::vector<std::byte>(digested ? page_weight_bytes(c) : 0, std::byte{0xa5})),
        positions_(std::vector<std::int32_t>(static_cast<std::size_t>(c.heads() * c.capacity), -7)),
        lists_(lists(c)),
        pinned_(make_pinned_block(1 << 20)) {
    auto* at = static_cast<std::byte*>(pinned_.get());
    std::memset(at, 0x55, 1 << 20);
    const auto take = [&]<typename T>(T*, int count) {
      const auto bytes = static_cast<std::size_t>(count) * sizeof(T);
      return reinterpret_cast<T*>(std::exchange(at, at + (bytes + 63) / 64 * 64));
    };
    constexpr HeadSelection* kHeads = nullptr;
    constexpr float* kFloats = nullptr;
    params_.shape = c.shape;
    params_.batch = {tokens_.data(), std::ssize(c.tokens), c.context};
    if (!c.logits.empty()) {
      params_.logits = {reinterpret_cast<std::byte*>(logits_.data()), stride_of(c)};
    }
    if (digested) {
      params_.logits.digest = LogitDigest::in(digest_.data(), c.rows(), c.columns);
      params_.logits.digest.weights = page_weights_.data();
    }
    params_.skip_newest = c.skip_newest;
    if (!c.candidates.empty()) {
      view_ = {lists_.data(), list_capacity(c), take(kHeads, c.heads())};
      for (std::size_t h = 0; h < c.candidates.size(); ++h) {
        view_.heads[h].count = static_cast<std::int32_t>(c.candidates[h].size());
      }
      params_.candidates = &view_;
    }
    params_.prune = c.prune;
    params_.k = c.k;
    params_.p = c.p;
    params_.cap = c.cap;
    params_.sinks = c.sinks;
    params_.recent = c.recent;
    params_.selected = {positions_.data(), c.capacity, take(kHeads, c.heads())};
    params_.alpha = take(kFloats, c.rows());
    params_.lse = take(kFloats, c.rows());
    if (!c.share.empty()) {
      float* const share = take(kFloats, c.rows());
      std::copy(c.share.begin(), c.share.end(), share);
      params_.share = share;
    }
    // A copy from pageable memory may still be under way, and other streams do not wait for it.
    require(cudaDeviceSynchronize(), "uploads");
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const SelectParams& params() const { return params_; }

  // The case has got other tokens; a call leaves the digest changed.
  void renew() {
    tokens_.upload(case_.tokens);
    if (params_.logits.digest.data != nullptr) digest_.upload(digest_of(case_));
    require(cudaDeviceSynchronize(), "uploads");
  }

  Answer answer() const {
    Answer a;
    const auto all = positions_.download(static_cast<std::size_t>(case_.heads() * case_.capacity));
    for (int h = 0; h < case_.heads(); ++h) {
      a.heads.push_back(params_.selected.heads[h]);
      const auto first = all.begin() + h * case_.capacity;
      const std::int64_t count = std::clamp<std::int64_t>(a.heads.back().count, 0, case_.capacity);
      a.positions.emplace_back(first, first + count);
    }
    a.alpha.assign(params_.alpha, params_.alpha + case_.rows());
    a.lse.assign(params_.lse, params_.lse + case_.rows());
    add_page_weights(a);
    return a;
  }

 private:
  static std::size_t page_weight_bytes(const Case& c) {
    return static_cast<std::size_t>(c.heads() * LogitDigest::pages_of(c.columns)) *
           PageWeights::kPageBytes;
  }
  void add_page_weights(Answer& a) const {
    if (params_.logits.digest.weights == nullptr) return;
    std::vector<std::byte> bytes = page_weights_.download(page_weight_bytes(case_));
    a.pages = params_.logits.digest.pages;
    const int group = case_.shape.group();
    const PageWeights all = PageWeights::in(bytes.data(), case_.heads(), a.pages, group);
    const std::int64_t count = case_.heads() * a.pages;
    a.masks.assign(all.masks, all.masks + count);
    a.weights.assign(all.weights, all.weights + count);
    a.masses.assign(all.masses,
                    all.masses + case_.heads() * PageWeights::slices_of(a.pages) * group);
  }
  static std::int64_t stride_of(const Case& c) {
    constexpr std::int64_t kUnit = LogitView::kLogitAlignment;
    return (c.columns + kUnit - 1) / kUnit * kUnit;
  }
  // [rows, stride], NaN from `columns` on.
  static std::vector<std::uint16_t> halves(const Case& c) {
    std::vector<std::uint16_t> bits;
    for (std::size_t i = 0; i < c.logits.size(); ++i) {
      bits.push_back(float_to_f16(c.logits[i]));
      const auto row = static_cast<std::int64_t>(i + 1) / c.columns;
      if (static_cast<std::int64_t>(i + 1) % c.columns == 0) {
        bits.resize(static_cast<std::size_t>(row * stride_of(c)), 0x7e5a);
      }
    }
    return bits;
  }
  // What a scan notes of whole pages; of others, nonsense.
  template <typename Note>
  static void for_pages(const Case& c, const Note& note) {
    const int group = c.shape.group();
    for (int head = 0; head < c.heads(); ++head) {
      for (std::int64_t page = 0; page < LogitDigest::pages_of(c.columns); ++page) {
        const bool is_whole = page < c.token(head).pages();
        for (int row = head * group; row < (head + 1) * group; ++row) {
          note(is_whole ? c.logits.data() + row * c.columns + page * kPageTokens : nullptr);
        }
      }
    }
  }
  static std::vector<std::byte> digest_of(const Case& c) {
    std::vector<std::byte> bytes(PageDigest::bytes_of(c.rows(), c.columns));
    const auto digest = PageDigest::of(LogitDigest::in(bytes.data(), c.rows(), c.columns));
    std::int64_t place = 0;
    for_pages(c, [&](const float* page) {
      for (int i = 0; i < kBoundsPerPage; ++i) {
        digest.maxima[place * kBoundsPerPage + i] =
            page == nullptr ? 0x7e5a
                            : float_to_f16(largest_of(page + i * kBoundTokens, kBoundTokens));
      }
      digest.sums[place++] = page == nullptr ? std::nanf("") : digest_sum(page);
    });
    return bytes;
  }
  static std::int64_t list_capacity(const Case& c) { return (c.columns - kPageTokens) / 8 * 8; }
  static std::vector<std::int32_t> lists(const Case& c) {
    std::vector<std::int32_t> all;
    for (const auto& list : c.candidates) {
      all.insert(all.end(), list.begin(), list.end());
      all.resize(all.size() + static_cast<std::size_t>(list_capacity(c) - std::ssize(list)),
                 1 << 30);
    }
    return all;
  }

  const Case& case_;
  DeviceArray<BatchToken> tokens_;
  DeviceArray<std::uint16_t> logits_;
  DeviceArray<std::byte> digest_;
  DeviceArray<std::byte> page_weights_;
  DeviceArray<std::int32_t> positions_;
  DeviceArray<std::int32_t> lists_;
  PinnedBlock pinned_;
  SelectionView view_;
  SelectParams params_;
};

constexpr int kKinds = 10;

// A row of logits of one of several kinds; all end up as f16.
inline std::vector<float> row_of(Random& random, std::int64_t count, int kind) {
  const auto deviations = std::to_array({0.5f, 2.0f, 4.0f, 8.0f});
  std::vector<float> row = random.normal(count, deviations[static_cast<std::size_t>(kind % 4)]);
  const auto any = [&] { return static_cast<std::size_t>(random.integer(0, count - 1)); };
  if (kind == 4) row[any()] = 30.0f;  // a needle
  if (kind == 5) std::fill(row.begin(), row.end(), -3.25f);
  if (kind == 6) {
    for (float& x : row) x = std::round(x);  // ties
  }
  if (kind == 7) {  // parts of very different weight
    const std::size_t first = any();
    for (std::size_t i = first; i < std::min(row.size(), first + row.size() / 9 + 1); ++i) {
      row[i] += 12.0f;
    }
  }
  if (kind == 8) {
    for (float& x : row) x *= 3000.0f;
  }
  if (kind == 9) {  // nothing, then very little, then a few that count
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (i < row.size() / 3) row[i] = -std::numeric_limits<float>::infinity();
      if (i >= row.size() / 3 && i < row.size() / 2) row[i] -= 200.0f;
    }
    row[row.size() / 2 + any() / 2] = 80.0f;
    row[row.size() / 2 + any() / 2] = 79.0f;
  }
  for (float& x : row) {
    if (kind != 5 && random.integer(0, 49) == 0) x = -std::numeric_limits<float>::infinity();
    x = f16_to_float(float_to_f16(std::min(x, 65504.0f)));
    if (kind != 5 && random.integer(0, 99) == 0) x = -std::numeric_limits<float>::infinity();
  }
  return row;
}

inline KvShape shape_of(int kv_heads, int group) {
  return {1, kv_heads * group, kv_heads, 64, DType::bf16};
}

// One token that chooses among `count` positions, all of them in whole pages.
inline Case case_of(int kv_heads, int group, std::int64_t count) {
  Case c;
  c.shape = shape_of(kv_heads, group);
  c.tokens = {{0, static_cast<std::int32_t>(count)}};
  c.context = count + 1;
  c.skip_newest = true;
  c.columns = c.capacity = count;
  c.k.share.tokens = 1;
  c.p = 0.9f;
  return c;
}

// The first at the end of the context, others anywhere; some follow another of their sequence.
inline std::vector<BatchToken> random_tokens(Random& random, std::int64_t context,
                                             std::int64_t most) {
  const auto places = std::to_array<std::int64_t>({0, 126, 127, 128, 129, 255, 256, 1023});
  std::vector<BatchToken> tokens = {{2, static_cast<std::int32_t>(context - 1)}};
  for (std::int32_t i = random.integer(0, 1) == 1 ? 1 : 0; i < random.integer(0, most - 1); ++i) {
    std::int64_t at = random.integer(0, context - 1);
    if (random.integer(0, 2) == 0) at = places[static_cast<std::size_t>(random.integer(0, 7))];
    tokens.push_back({i % 2, static_cast<std::int32_t>(std::min(at, context - 1))});
    const BatchToken& last = tokens.back();
    if (last.position + 1 < context && random.integer(0, 2) == 0) {
      tokens.push_back({last.sequence, last.position + 1});
    }
  }
  return tokens;
}

// Logits of every row, by kind(row); NaN beyond what the token sees.
template <typename Kind>
void fill_logits(Random& random, Case& c, const Kind& kind) {
  c.logits.assign(static_cast<std::size_t>(c.rows() * c.columns), std::nanf(""));
  for (int row = 0; row < c.rows(); ++row) {
    const std::int64_t total = c.total(row / c.shape.group());
    if (total == 0) continue;
    const int own_kind = kind(row);
    std::vector<float> logits = row_of(random, total, own_kind);
    if (own_kind != 5) logits[static_cast<std::size_t>(random.integer(0, total - 1))] = 5.0f;
    std::copy(logits.begin(), logits.end(), c.logits.begin() + row * c.columns);
  }
}

inline void fill_shares(Random& random, Case& c) {
  if (random.integer(0, 1) == 1) return;
  for (int i = 0; i < c.rows(); ++i) c.share.push_back(0.125f * static_cast<float>(1 + i % 8));
}

inline Quota random_quota(Random& random, std::int64_t most) {
  if (random.integer(0, 9) == 0) return Quota::nothing();
  Quota quota;
  if (random.integer(0, 2) > 0) {
    quota.share.tokens =
        random.integer(1, random.integer(0, 1) == 1 ? most : std::min<std::int64_t>(most, 256));
  } else {
    quota.share.divisor = random.integer(1, 40);
    quota.least.tokens = random.integer(0, 100);
    quota.extra = random.integer(0, 9);
  }
  return quota;
}

inline Case random_case(Random& random, std::int64_t count) {
  Case c;
  const auto groups = std::to_array({1, 1, 2, 3, 4, 8, 16});
  const int group = groups[static_cast<std::size_t>(random.integer(0, 6))];
  const int kv_heads = group > 8 ? 1 : static_cast<int>(random.integer(1, 2));
  c.shape = shape_of(kv_heads, group);
  const bool listed = random.integer(0, 2) == 0;
  c.context = listed ? count * 3 + 128 : count;
  c.tokens = random_tokens(random, c.context, 4 - kv_heads);
  c.skip_newest = random.integer(0, 1) == 1;
  std::int64_t entries = c.context;
  if (listed) {
    entries = 0;
    for (int head = 0; head < c.heads(); ++head) {
      std::vector<std::int32_t>& list = c.candidates.emplace_back();
      const std::int64_t wanted = head == 0 ? count : random.integer(count / 2, count);
      for (std::int64_t at = random.integer(0, 3);
           at < c.token(head).page_first() && std::ssize(list) < wanted;
           at += random.integer(1, 3)) {
        list.push_back(static_cast<std::int32_t>(at));
      }
      entries = std::max(entries, std::ssize(list) + 8 + kPageTokens);
    }
  }
  c.columns = entries + 8 + (random.integer(0, 1) == 1 ? random.integer(0, 9) : 0);
  fill_logits(random, c, [&](int) { return static_cast<int>(random.integer(0, kKinds - 1)); });
  c.prune = random.integer(0, 1) == 1 ? Pruner::top_p : Pruner::top_k;
  c.k = random_quota(random, count);
  const auto shares = std::to_array({0.95f, 0.5f, 0.999f, 1.0f, 0.05f});
  c.p = shares[static_cast<std::size_t>(random.integer(0, 4))];
  if (random.integer(0, 2) == 0) c.cap = random_quota(random, count);
  if (random.integer(0, 1) == 1) c.sinks = random.integer(0, 4);
  if (random.integer(0, 1) == 1) c.recent = random.integer(1, 300);
  fill_shares(random, c);
  c.capacity = entries;
  return c;
}

// A small k or cap, of what a scan digests.
inline Case few_of_many(Random& random, std::int64_t count) {
  Case c;
  const auto groups = std::to_array({1, 2, 4, 7, 8});
  const bool is_long = count > 1000000;
  const int group = groups[static_cast<std::size_t>(random.integer(0, is_long ? 2 : 4))];
  c.shape = shape_of(is_long ? 1 : static_cast<int>(random.integer(1, 2)), group);
  c.context = count;
  c.tokens = random_tokens(random, count, is_long ? 1 : 2);
  c.skip_newest = random.integer(0, 1) == 1;
  c.columns = (count + 8 + random.integer(0, 999)) / 8 * 8;
  // Of one kind, or each of its own.
  const auto kind = static_cast<int>(random.integer(-kKinds, kKinds - 1));
  fill_logits(random, c, [&](int) {
    return kind >= 0 ? kind : static_cast<int>(random.integer(0, kKinds - 1));
  });
  c.prune = random.integer(0, 1) == 1 ? Pruner::top_p : Pruner::top_k;
  const auto shares = std::to_array({0.95f, 0.5f, 0.999f, 0.9f});
  c.p = shares[static_cast<std::size_t>(random.integer(0, 3))];
  const std::int64_t few = random.integer(1, 4096 / group);
  c.k.share.tokens = random.integer(0, 2) > 0 ? few : 0;
  c.k.share.divisor = c.k.share.tokens == 0 ? count / few + 1 : 0;
  c.cap = c.k;
  if (random.integer(0, 1) == 1) c.sinks = random.integer(0, 700);
  if (random.integer(0, 1) == 1) c.recent = random.integer(1, 1500);
  fill_shares(random, c);
  const std::int64_t kept = std::max(c.k.of(count), c.sinks + c.recent);
  c.capacity = random.integer(0, 3) == 0 ? std::min(kept, count) : count;
  return c;
}

}  // namespace sluice::cuda
