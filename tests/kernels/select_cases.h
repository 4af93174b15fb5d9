// Problems for select() on CUDA, in plain vectors and on the device.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/error.h"
#include "kernels/owners.h"
#include "kernels/select.h"
#include "lib/half.h"
#include "tests/kernels/digest_truth.h"
#include "tests/support/random.h"

namespace sluice::cuda {

using sluice::testing::Random;

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int32_t>::max();

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& host)
      : block_(make_device_block(std::max<std::size_t>(host.size() * sizeof(T), 16))) {
    require(cudaMemcpy(data(), host.data(), host.size() * sizeof(T), cudaMemcpyDefault), "upload");
  }
  T* data() const { return static_cast<T*>(block_.get()); }
  std::vector<T> download(std::size_t count) const {
    std::vector<T> host(count);
    require(cudaMemcpy(host.data(), data(), count * sizeof(T), cudaMemcpyDefault), "download");
    return host;
  }

 private:
  DeviceBlock block_;
};

struct Case {
  int kv_heads = 1;
  int group = 1;
  std::int64_t count = 0;
  std::int64_t end = 0;
  std::int64_t stride = 0;
  std::vector<float> logits;                          // [kv_heads * group, stride], f16 values
  std::vector<std::vector<std::int32_t>> candidates;  // [kv_heads] or empty
  std::int64_t tail = 0;
  Pruner prune = Pruner::top_k;
  std::int64_t k = 1;
  float p = 0.9f;
  std::int64_t cap = kNoLimit;
  std::int64_t sinks = 0;
  std::int64_t recent_first = kNoLimit;
  std::vector<std::uint8_t> eligible;
  std::int64_t capacity = 0;
  std::vector<float> share;

  int rows() const { return kv_heads * group; }
  std::int64_t emit(int head) const {
    return candidates.empty() ? std::min(end, count)
                              : std::ssize(candidates[static_cast<std::size_t>(head)]);
  }
  std::int64_t total(int head) const { return candidates.empty() ? count : emit(head) + tail; }
  std::int64_t position(int head, std::int64_t i) const {
    return candidates.empty()
               ? i
               : candidates[static_cast<std::size_t>(head)][static_cast<std::size_t>(i)];
  }
  bool is_out(int head, std::int64_t i) const {
    return i < emit(head) && !eligible.empty() &&
           eligible[static_cast<std::size_t>(position(head, i))] == 0;
  }
  bool is_forced(int head, std::int64_t i) const {
    const std::int64_t at = position(head, i);
    return i < emit(head) && !is_out(head, i) && (at < sinks || at >= recent_first);
  }
  double logit(int head, int g, std::int64_t i) const {
    if (is_out(head, i)) return -std::numeric_limits<double>::infinity();
    return static_cast<double>(logits[static_cast<std::size_t>((head * group + g) * stride + i)]);
  }
};

struct Answer {
  std::vector<std::vector<std::int32_t>> positions;
  std::vector<HeadSelection> heads;
  std::vector<float> alpha;
  std::vector<float> lse;
};

// A case's arrays on the device and the parameters that name them.
class Problem {
 public:
  explicit Problem(const Case& c, bool digested = false)
      : case_(c),
        logits_(halves(c)),
        maxima_(digested ? maxima(c) : std::vector<std::uint16_t>()),
        sums_(digested ? sums(c) : std::vector<float>()),
        positions_(
            std::vector<std::int32_t>(static_cast<std::size_t>(c.kv_heads * c.capacity), -7)),
        eligible_(shifted(c.eligible)),
        lists_(lists(c)),
        pinned_(make_pinned_block(1 << 20)) {
    auto* at = static_cast<std::byte*>(pinned_.get());
    std::memset(at, 0x55, 1 << 20);
    const auto take = [&](std::size_t bytes) {
      return std::exchange(at, at + (bytes + 63) / 64 * 64);
    };
    const auto kv_heads = static_cast<std::size_t>(c.kv_heads);
    const auto rows = static_cast<std::size_t>(c.rows());
    params_.shape = {1, c.rows(), c.kv_heads, 64, DType::bf16};
    params_.logits = {reinterpret_cast<std::byte*>(logits_.data()), c.stride};
    if (digested) {
      params_.logits.digest = {maxima_.data(), sums_.data(), LogitDigest::pages_of(c.stride)};
    }
    params_.count = c.count;
    params_.end = c.end;
    if (!c.candidates.empty()) {
      view_ = {lists_.data(), list_capacity(c),
               reinterpret_cast<HeadSelection*>(take(kv_heads * sizeof(HeadSelection)))};
      for (std::size_t h = 0; h < kv_heads; ++h) {
        view_.heads[h].count = static_cast<std::int32_t>(c.candidates[h].size());
      }
      params_.candidates = &view_;
      params_.tail = c.tail;
    }
    params_.prune = c.prune;
    params_.k = c.k;
    params_.p = c.p;
    params_.cap = c.cap;
    params_.sinks = c.sinks;
    params_.recent_first = c.recent_first;
    // Off by one: masks may start anywhere.
    if (!c.eligible.empty()) params_.eligible = eligible_.data() + 1;
    params_.selected = {positions_.data(), c.capacity,
                        reinterpret_cast<HeadSelection*>(take(kv_heads * sizeof(HeadSelection)))};
    params_.alpha = reinterpret_cast<float*>(take(rows * sizeof(float)));
    params_.lse = reinterpret_cast<float*>(take(rows * sizeof(float)));
    if (!c.share.empty()) {
      auto* const share = reinterpret_cast<float*>(take(rows * sizeof(float)));
      std::copy(c.share.begin(), c.share.end(), share);
      params_.share = share;
    }
    // A copy from pageable memory may still be under way, and other streams do not wait for it.
    require(cudaDeviceSynchronize(), "uploads");
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const SelectParams& params() const { return params_; }

  Answer answer() const {
    Answer a;
    const auto all = positions_.download(static_cast<std::size_t>(case_.kv_heads * case_.capacity));
    for (int h = 0; h < case_.kv_heads; ++h) {
      a.heads.push_back(params_.selected.heads[h]);
      const auto first = all.begin() + h * case_.capacity;
      const std::int64_t count = std::clamp<std::int64_t>(a.heads.back().count, 0, case_.capacity);
      a.positions.emplace_back(first, first + count);
    }
    a.alpha.assign(params_.alpha, params_.alpha + case_.rows());
    a.lse.assign(params_.lse, params_.lse + case_.rows());
    return a;
  }

 private:
  static std::vector<std::uint16_t> halves(const Case& c) {
    std::vector<std::uint16_t> bits;
    for (const float x : c.logits) bits.push_back(float_to_f16(x));
    return bits;
  }
  // What a scan notes of pages below `end`; of others, nonsense.
  template <typename Note>
  static void for_pages(const Case& c, const Note& note) {
    for (int head = 0; head < c.kv_heads; ++head) {
      for (std::int64_t page = 0; page < LogitDigest::pages_of(c.stride); ++page) {
        const std::int64_t first = page * kPageTokens;
        const bool is_whole = first + kPageTokens <= std::min(c.end, c.count);
        for (int row = head * c.group; row < (head + 1) * c.group; ++row) {
          note(is_whole ? c.logits.data() + row * c.stride + first : nullptr);
        }
      }
    }
  }
  static std::vector<std::uint16_t> maxima(const Case& c) {
    std::vector<std::uint16_t> bits;
    for_pages(c, [&](const float* page) {
      for (int i = 0; i < kPageTokens; i += kBoundTokens) {
        bits.push_back(page == nullptr ? 0x7e5a : float_to_f16(largest_of(page + i, kBoundTokens)));
      }
    });
    return bits;
  }
  static std::vector<float> sums(const Case& c) {
    std::vector<float> sums;
    for_pages(c, [&](const float* page) {
      sums.push_back(page == nullptr ? std::nanf("") : digest_sum(page));
    });
    return sums;
  }
  static std::vector<std::uint8_t> shifted(std::vector<std::uint8_t> mask) {
    mask.insert(mask.begin(), 0);
    return mask;
  }
  static std::int64_t list_capacity(const Case& c) {
    std::int64_t most = 8;
    for (const auto& list : c.candidates) most = std::max(most, std::ssize(list));
    return (most + 7) / 8 * 8;
  }
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
  DeviceArray<std::uint16_t> logits_;
  DeviceArray<std::uint16_t> maxima_;
  DeviceArray<float> sums_;
  DeviceArray<std::int32_t> positions_;
  DeviceArray<std::uint8_t> eligible_;
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

inline Case random_case(Random& random, std::int64_t count) {
  Case c;
  const auto groups = std::to_array({1, 1, 2, 3, 4, 8, 16});
  c.group = groups[static_cast<std::size_t>(random.integer(0, 6))];
  c.kv_heads = c.group > 8 ? 1 : static_cast<int>(random.integer(1, 3));
  const bool listed = random.integer(0, 2) == 0;
  std::int64_t entries = count;
  std::int64_t positions = count;
  if (listed) {
    positions = count * 3 + 128;
    c.tail = random.integer(0, 127);
    entries = count + c.tail;
  }
  c.count = listed ? 0 : count;
  c.end = random.integer(0, 1) == 1 ? positions / kPageTokens * kPageTokens : positions;
  c.stride = entries + 8 + (random.integer(0, 1) == 1 ? random.integer(0, 9) : 0);
  if (random.integer(0, 1) == 1) c.stride = (c.stride + 7) / 8 * 8;
  for (int row = 0; row < c.rows(); ++row) {
    std::vector<float> logits =
        row_of(random, entries, static_cast<int>(random.integer(0, kKinds - 1)));
    logits[static_cast<std::size_t>(random.integer(0, entries - 1))] = 5.0f;
    logits.resize(static_cast<std::size_t>(c.stride), std::nanf(""));
    c.logits.insert(c.logits.end(), logits.begin(), logits.end());
  }
  for (int head = 0; listed && head < c.kv_heads; ++head) {
    std::vector<std::int32_t> list;
    const std::int64_t wanted = head == 0 ? count : random.integer(count / 2, count);
    for (std::int64_t at = random.integer(0, 3); at < c.end && std::ssize(list) < wanted;
         at += random.integer(1, 3)) {
      list.push_back(static_cast<std::int32_t>(at));
    }
    c.candidates.push_back(list);
  }
  c.prune = random.integer(0, 1) == 1 ? Pruner::top_p : Pruner::top_k;
  c.k = random.integer(1, random.integer(0, 1) == 1 ? count : std::min<std::int64_t>(count, 256));
  const auto shares = std::to_array({0.95f, 0.5f, 0.999f, 1.0f, 0.05f});
  c.p = shares[static_cast<std::size_t>(random.integer(0, 4))];
  if (random.integer(0, 2) == 0) c.cap = random.integer(1, count);
  if (random.integer(0, 1) == 1) c.sinks = random.integer(0, 4);
  if (random.integer(0, 1) == 1) c.recent_first = positions - random.integer(1, 300);
  if (random.integer(0, 2) == 0) {
    // One by one, or many neighbours at once.
    const std::int64_t longest = random.integer(0, 1) == 1 ? 1 : 200;
    while (std::ssize(c.eligible) < std::max<std::int64_t>(c.end, 1)) {
      c.eligible.resize(c.eligible.size() + static_cast<std::size_t>(random.integer(1, longest)),
                        random.integer(0, 3) == 0 ? 0 : 1);
    }
  }
  if (random.integer(0, 1) == 1) {
    for (int i = 0; i < c.rows(); ++i) c.share.push_back(0.125f * static_cast<float>(1 + i % 8));
  }
  c.capacity = entries;
  return c;
}

// A small k or cap, of what a scan digests.
inline Case few_of_many(Random& random, std::int64_t count) {
  Case c;
  const auto groups = std::to_array({1, 2, 4, 7, 8});
  const bool is_long = count > 1000000;
  c.group = groups[static_cast<std::size_t>(random.integer(0, is_long ? 2 : 4))];
  c.kv_heads = is_long ? 1 : static_cast<int>(random.integer(1, 2));
  c.count = count;
  c.end = random.integer(0, 1) == 1 ? count / kPageTokens * kPageTokens : count;
  c.stride = (count + 8 + random.integer(0, 999)) / 8 * 8;
  // Of one kind, or each of its own.
  const auto kind = static_cast<int>(random.integer(-kKinds, kKinds - 1));
  for (int row = 0; row < c.rows(); ++row) {
    std::vector<float> logits =
        row_of(random, count, kind >= 0 ? kind : static_cast<int>(random.integer(0, kKinds - 1)));
    if (kind != 5) logits[static_cast<std::size_t>(random.integer(0, count - 1))] = 5.0f;
    logits.resize(static_cast<std::size_t>(c.stride), std::nanf(""));
    c.logits.insert(c.logits.end(), logits.begin(), logits.end());
  }
  c.prune = random.integer(0, 1) == 1 ? Pruner::top_p : Pruner::top_k;
  const auto shares = std::to_array({0.95f, 0.5f, 0.999f, 0.9f});
  c.p = shares[static_cast<std::size_t>(random.integer(0, 3))];
  c.k = c.cap = random.integer(1, 4096 / c.group);
  if (random.integer(0, 1) == 1) c.sinks = random.integer(0, 700);
  if (random.integer(0, 1) == 1) c.recent_first = count - random.integer(1, 1500);
  if (random.integer(0, 1) == 1) {
    for (int i = 0; i < c.rows(); ++i) c.share.push_back(0.125f * static_cast<float>(1 + i % 8));
  }
  c.capacity = random.integer(0, 3) == 0 ? random.integer(1, c.k) : count;
  return c;
}

}  // namespace sluice::cuda
