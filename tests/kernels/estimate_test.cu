// Estimates of the device against fp64 sums over what the index says.
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/error.h"
#include "kernels/estimate.h"
#include "kernels/key_index.h"
#include "kernels/owners.h"
#include "kernels/workspace.h"
#include "lib/backend.h"
#include "lib/half.h"
#include "tests/kernels/digest_truth.h"
#include "tests/kernels/has_device.h"
#include "tests/kernels/shared_array.h"
#include "tests/support/random.h"

namespace sluice::cuda {
namespace {

using testing::Random;

constexpr std::uint16_t kPoison = 0x7e5a;  // a NaN that no kernel writes

struct Problem {
  Selector method = Selector::int4;
  int head_dim = 128;
  int group = 4;
  int kv_heads = 2;
  std::int64_t pages = 3;
  std::int64_t tail = 37;
  int bits = 4;
  int channels = 32;
  DType dtype = DType::bf16;
  std::int64_t candidates = -1;      // of every KV head, or none
  std::int64_t stride_padding = 27;  // makes logits of every head begin aligned, as sessions' do
  float q_deviation = 1.0f;
  bool q_ties = false;  // queries of few sizes, so that channels tie
};

std::ostream& operator<<(std::ostream& out, const Problem& p) {
  return out << "method " << static_cast<int>(p.method) << " head_dim " << p.head_dim << " group "
             << p.group << " kv_heads " << p.kv_heads << " pages " << p.pages << " tail " << p.tail
             << " bits " << p.bits << " channels " << p.channels << " dtype " << to_string(p.dtype)
             << " candidates " << p.candidates << " padding " << p.stride_padding;
}

// One problem in memory: rows, index, queries and logits.
class Prepared {
 public:
  Prepared(const Problem& p, std::uint64_t seed)
      : p_(p),
        random_(seed),
        shape_{1, p.group * p.kv_heads, p.kv_heads, p.head_dim, p.dtype},
        tokens_(p.pages * kPageTokens + p.tail),
        row_bytes_(shape_.row_bytes()),
        rows_(static_cast<std::size_t>(tokens_ * p.kv_heads) * row_bytes_ + 64),
        codes_(tiles_of(p).codes_bytes(p.kv_heads, p.head_dim) + 16),
        scales_(units() * 2 + 16),
        bounds_(units() * 2 * kBoundsPerPage + 16),
        q_(static_cast<std::size_t>(shape_.query_heads * p.head_dim)),
        positions_(static_cast<std::size_t>(p.kv_heads * capacity())),
        heads_(static_cast<std::size_t>(p.kv_heads)),
        bad_(static_cast<std::size_t>(p.kv_heads)),
        stride_(tokens_ + p.stride_padding),
        logits_(static_cast<std::size_t>(shape_.query_heads * stride_)),
        digest_(LogitDigest::bytes_of(shape_.query_heads, stride_)),
        workspace_(16u << 20) {
    fill_rows();
    const std::vector<float> q = random_.normal(shape_.query_heads * p.head_dim, p.q_deviation);
    for (std::size_t i = 0; i < q.size(); ++i) q_[i] = p.q_ties ? std::round(q[i]) : q[i];
    build();
    choose_candidates();
    std::fill_n(logits_.data(), logits_.size(), kPoison);
    std::fill_n(digest_.data(), digest_.size(), std::byte{0xff});
  }

  float* q() const { return q_.data(); }
  void run() {
    EstimateParams e;
    e.q = q_.data();
    e.shape = shape_;
    e.method = p_.method;
    e.channels = p_.channels;
    e.index = index_;
    e.pages = indexed() || p_.candidates >= 0 ? p_.pages : 0;
    const std::vector<RowSpan> tail = spans(first_row(), tokens_ - first_row());
    const std::vector<RowSpan> all = spans(0, tokens_);
    const SelectionView view{positions_.data(), capacity(), heads_.data()};
    e.rows = tail;
    if (p_.candidates >= 0) {
      e.candidates = &view;
      e.candidate_rows = all;
    }
    e.logits = {reinterpret_cast<std::byte*>(logits_.data()), stride_, digest()};
    estimate(e, workspace_.launch());
    require(cudaDeviceSynchronize(), "estimate");
  }

  // Every logit within its tolerance, and nothing written beside them.
  void check() const {
    const bool by_tiles = p_.method == Selector::int4 || p_.method == Selector::sparq;
    expect_digest(digest(), logits_.data(), shape_.query_heads, p_.group, stride_,
                  by_tiles && p_.candidates < 0 ? p_.pages : 0);
    for (int h = 0; h < shape_.query_heads; ++h) {
      const std::vector<int> channels = channels_of(h / p_.group);
      const double factor = factor_of(h, channels);
      const std::int64_t count = logit_count();
      for (std::int64_t i = 0; i < stride_; ++i) {
        const std::uint16_t got = logit(h, i);
        if (i >= count) {
          ASSERT_EQ(got, kPoison) << "head " << h << " beyond, at " << i;
          continue;
        }
        const Expected wanted = expected(h, i, channels, factor);
        ASSERT_LE(std::fabs(static_cast<double>(f16_to_float(got)) - wanted.value),
                  wanted.tolerance)
            << "head " << h << " logit " << i << " of " << count << " wanted " << wanted.value
            << " got " << f16_to_float(got);
      }
    }
  }

  std::uint16_t logit(int query_head, std::int64_t i) const {
    return logits_[static_cast<std::size_t>(query_head * stride_ + i)];
  }
  std::int64_t logit_count() const {
    return p_.candidates >= 0 ? p_.candidates + p_.tail : tokens_;
  }

 private:
  struct Expected {
    double value;
    double tolerance;
  };

  LogitDigest digest() const {
    return LogitDigest::in(digest_.data(), shape_.query_heads, stride_);
  }
  static KeyTiles tiles_of(const Problem& p) {
    KeyTiles tiles;
    tiles.bits = p.bits;
    tiles.capacity = p.pages;
    return tiles;
  }
  bool indexed() const { return p_.method != Selector::exact; }
  std::int64_t capacity() const { return std::max<std::int64_t>(p_.candidates, 0) + 5; }
  std::int64_t first_row() const {
    return indexed() || p_.candidates >= 0 ? p_.pages * kPageTokens : 0;
  }
  std::size_t units() const {
    return static_cast<std::size_t>(p_.kv_heads * p_.pages * p_.head_dim);
  }

  std::vector<RowSpan> spans(std::int64_t first, std::int64_t count) const {
    std::vector<RowSpan> spans;
    for (int head = 0; head < p_.kv_heads; ++head) spans.push_back({row(head, first), count});
    return spans;
  }
  std::byte* row(int head, std::int64_t token) const {
    return rows_.data() + static_cast<std::size_t>(head * tokens_ + token) * row_bytes_;
  }

  void fill_rows() {
    for (int head = 0; head < p_.kv_heads; ++head) {
      for (std::int64_t t = 0; t < tokens_; ++t) {
        const std::vector<float> values = random_.normal(2 * p_.head_dim);
        auto* const to = reinterpret_cast<std::uint16_t*>(row(head, t));
        for (std::size_t c = 0; c < values.size(); ++c) {
          // Channels differ in size and offset, as keys' do.
          const float x =
              values[c] * (1.0f + static_cast<float>(c % 7)) + static_cast<float>(c % 3);
          to[c] = p_.dtype == DType::bf16 ? float_to_bf16(x) : float_to_f16(x);
        }
        if (t % 5 == 0) to[p_.head_dim] = 0x7fc0;  // a value that is no number must not matter
      }
    }
  }

  void build() {
    index_.tiles = tiles_of(p_);
    index_.bounds.capacity = p_.pages;
    index_.tiles.codes = codes_.data();
    index_.tiles.scales = scales_.data();
    index_.bounds.bounds = bounds_.data();
    if (p_.pages == 0) return;
    const std::vector<RowSpan> whole = spans(0, p_.pages * kPageTokens);
    build_index({shape_, index_, 0, p_.pages, whole, bad_.data()}, workspace_.launch());
    require(cudaDeviceSynchronize(), "build_index");
  }

  void choose_candidates() {
    if (p_.candidates < 0) return;
    for (int head = 0; head < p_.kv_heads; ++head) {
      std::vector<std::int32_t> all(static_cast<std::size_t>(p_.pages * kPageTokens));
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random_.engine());
      std::sort(all.begin(), all.begin() + p_.candidates);
      std::copy_n(all.begin(), p_.candidates, positions_.data() + head * capacity());
      heads_[static_cast<std::size_t>(head)].count = static_cast<std::int32_t>(p_.candidates);
    }
  }

  const float* query(int h) const { return q_.data() + h * p_.head_dim; }

  std::vector<int> channels_of(int head) const {
    std::vector<int> order(static_cast<std::size_t>(p_.head_dim));
    std::iota(order.begin(), order.end(), 0);
    if (p_.method != Selector::sparq) return order;
    std::vector<float> size(order.size());
    for (int g = 0; g < p_.group; ++g) {
      for (std::size_t c = 0; c < size.size(); ++c) {
        size[c] += std::fabs(query(head * p_.group + g)[c]);
      }
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return size[static_cast<std::size_t>(a)] > size[static_cast<std::size_t>(b)];
    });
    order.resize(static_cast<std::size_t>(std::min(p_.channels, p_.head_dim)));
    std::sort(order.begin(), order.end());
    return order;
  }

  double factor_of(int h, const std::vector<int>& channels) const {
    double all = 0.0;
    double kept = 0.0;
    for (int c = 0; c < p_.head_dim; ++c) all += std::fabs(static_cast<double>(query(h)[c]));
    for (const int c : channels) kept += std::fabs(static_cast<double>(query(h)[c]));
    if (kept == 0.0) return 0.0;
    return std::sqrt(all / (kept * p_.head_dim));
  }

  double key_of_row(int head, std::int64_t token, int channel) const {
    const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(row(head, token))[channel];
    return static_cast<double>(p_.dtype == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits));
  }

  Expected expected(int h, std::int64_t i, const std::vector<int>& channels, double factor) const {
    const int head = h / p_.group;
    const std::int64_t before = p_.candidates >= 0 ? p_.candidates : first_row();
    const bool is_row = i >= before || !indexed();
    std::int64_t token = i;
    if (p_.candidates >= 0) {
      token = i < before ? positions_[static_cast<std::size_t>(head * capacity() + i)]
                         : first_row() + i - before;
    }
    double sum = 0.0;
    double size = 0.0;      // sum of absolute products
    double variance = 0.0;  // of what rounding adds
    double largest = 0.0;
    for (const int c : channels) {
      largest = std::max(largest, std::fabs(static_cast<double>(query(h)[c])));
    }
    const double half = 0x1p-11 / std::sqrt(3.0);             // half a step of f16, as a deviation
    const double least = 0x1p-24 * largest / std::sqrt(3.0);  // of subnormal queries
    for (const int c : channels) {
      const double q = static_cast<double>(query(h)[c]);
      double product = 0.0;
      if (is_row) {
        // Split queries keep at least 16 bits.
        const double key = key_of_row(head, token, c);
        product = q * key;
        variance += std::pow(product * 0x1p-16, 2) + std::pow(least * key, 2);
      } else if (p_.method == Selector::quest) {
        const std::size_t at = static_cast<std::size_t>(
            (head * p_.pages * kBoundsPerPage + token / kBoundTokens) * 2 * p_.head_dim + c);
        const double low = static_cast<double>(f16_to_float(bounds_[at]));
        const double high =
            static_cast<double>(f16_to_float(bounds_[at + static_cast<std::size_t>(p_.head_dim)]));
        product = std::max(q * low, q * high);
        variance += std::pow(product * 0x1p-16, 2) +
                    std::pow(least * std::max(std::fabs(low), std::fabs(high)), 2);
      } else {
        const auto [zero, scaled, code] = code_of(head, token, c);
        product = q * (zero + scaled);
        variance += std::pow(product * half, 2) + std::pow(q * scaled * half, 2) +
                    std::pow(least * (zero + scaled), 2) + std::pow(least * code, 2);
      }
      sum += product;
      size += std::fabs(product);
    }
    const double value = std::clamp(sum * factor, -65504.0, 65504.0);
    const double summed = size * 0x1p-18;  // a few hundred terms in fp32, some truncated to it
    return {value,
            factor * (7.0 * std::sqrt(variance) + summed) + std::fabs(value) * 0x1p-11 + 0x1p-25};
  }

  struct Code {
    double zero;
    double scaled;  // scale times code
    double code;
  };
  Code code_of(int head, std::int64_t token, int channel) const {
    const std::int64_t of_head = token / kPageTokens;
    const auto page = static_cast<std::size_t>(head * p_.pages + of_head);
    const auto d = static_cast<std::size_t>(p_.head_dim);
    const auto c = static_cast<std::size_t>(channel);
    const auto bytes = static_cast<std::size_t>(16 * p_.bits);
    const auto t = static_cast<std::size_t>(token % kPageTokens);
    const std::byte* const codes =
        index_.tiles.tile_of(p_.head_dim, head, of_head) + KeyTiles::place_of(of_head, c) * bytes;
    const auto byte = static_cast<unsigned>(codes[t % bytes]);
    const unsigned code =
        byte >> (t / bytes * static_cast<unsigned>(p_.bits)) & ((1u << p_.bits) - 1u);
    const auto scale = static_cast<double>(f16_to_float(scales_[page * 2 * d + c]));
    const auto zero = static_cast<double>(f16_to_float(scales_[(page * 2 + 1) * d + c]));
    return {zero, scale * code, static_cast<double>(code)};
  }

  Problem p_;
  Random random_;
  KvShape shape_;
  std::int64_t tokens_;
  std::size_t row_bytes_;
  Shared<std::byte> rows_;
  Shared<std::byte> codes_;
  Shared<std::uint16_t> scales_;
  Shared<std::uint16_t> bounds_;
  Shared<float> q_;
  Shared<std::int32_t> positions_;
  Shared<HeadSelection> heads_;
  Shared<std::int32_t> bad_;
  std::int64_t stride_;
  Shared<std::uint16_t> logits_;
  Shared<std::byte> digest_;
  KeyIndexView index_;
  Workspace workspace_;
};

void expect_close(const Problem& p, std::uint64_t seed) {
  SCOPED_TRACE(testing::seed_message(seed));
  SCOPED_TRACE(::testing::PrintToString(p));
  Prepared setup(p, seed);
  setup.run();
  setup.check();
}

constexpr Selector kMethods[] = {Selector::exact, Selector::int4, Selector::sparq, Selector::quest};

TEST(CudaEstimate, EveryShape) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(1);
  for (const Selector method : kMethods) {
    for (const int head_dim : {32, 64, 80, 96, 128, 256, 2, 20, 54, 200}) {
      for (const int group : {1, 4, 7, 8, 12, 16}) {
        Problem p;
        p.method = method;
        p.head_dim = head_dim;
        p.group = group;
        p.channels = head_dim / 3 + 1;
        ++seed;
        p.bits = seed % 2 == 0 ? 4 : 2;
        p.dtype = seed / 2 % 2 == 0 ? DType::bf16 : DType::f16;
        expect_close(p, seed);
      }
    }
  }
}

TEST(CudaEstimate, EveryNumberOfChannels) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(1000);
  for (const int channels : {1, 8, 15, 16, 17, 32, 33, 48, 64, 100, 127, 128, 500}) {
    for (const int bits : {4, 2}) {
      Problem p;
      p.method = Selector::sparq;
      p.channels = channels;
      p.bits = bits;
      p.q_ties = channels % 2 == 0;
      expect_close(p, ++seed);
    }
  }
}

TEST(CudaEstimate, Candidates) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(2000);
  for (const Selector method : {Selector::exact, Selector::int4}) {
    for (const std::int64_t candidates : {0, 1, 7, 100, 1000, 1280}) {
      for (const int group : {1, 5, 16}) {
        Problem p;
        p.method = method;
        p.group = group;
        p.pages = 10;
        p.candidates = candidates;
        p.bits = ++seed % 2 == 0 ? 4 : 2;
        p.head_dim = group == 5 ? 54 : 64;
        expect_close(p, seed);
      }
    }
  }
}

TEST(CudaEstimate, LengthsAndStrides) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(3000);
  for (const Selector method : kMethods) {
    for (const std::int64_t pages : {0, 1, 5}) {
      for (const std::int64_t tail : {0, 1, 31, 33, 300}) {
        if (pages + tail == 0) continue;
        Problem p;
        p.method = method;
        p.pages = pages;
        p.tail = tail;
        p.head_dim = 64;
        p.stride_padding = 1 + tail % 8;
        expect_close(p, ++seed);
      }
    }
  }
}

TEST(CudaEstimate, ManyHeadsAndLargeGroups) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(4000);
  for (const Selector method : kMethods) {
    Problem many;
    many.method = method;
    many.head_dim = 32;
    many.channels = 8;
    many.group = 1;
    many.kv_heads = 700;
    expect_close(many, ++seed);
    Problem large;
    large.method = method;
    large.head_dim = 64;
    large.group = 40;
    expect_close(large, ++seed);
  }
}

// So many that warps take some of their pages as they go.
TEST(CudaEstimate, ManyPages) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(4500);
  for (const Selector method : {Selector::int4, Selector::sparq}) {
    Problem p;
    p.method = method;
    p.head_dim = 16;
    p.channels = 8;
    p.group = 1;
    p.kv_heads = 3;
    p.pages = 7500;
    expect_close(p, ++seed);
  }
}

TEST(CudaEstimate, LargeQueriesAreClampedAndSmallOnesKept) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(5000);
  for (const Selector method : kMethods) {
    for (const float deviation : {1e-30f, 1e-3f, 3e3f, 1e20f}) {
      Problem p;
      p.method = method;
      p.q_deviation = deviation;
      expect_close(p, ++seed);
    }
  }
}

TEST(CudaEstimate, NotANumberStaysNone) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  for (const Selector method : kMethods) {
    for (const float strange :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      Problem p;
      p.method = method;
      Prepared setup(p, testing::seed(6000));
      setup.q()[128 + 77] = strange;  // query head 1
      setup.run();
      for (std::int64_t i = 0; i < setup.logit_count(); ++i) {
        ASSERT_TRUE(std::isnan(f16_to_float(setup.logit(1, i)))) << i;
        ASSERT_TRUE(std::isfinite(f16_to_float(setup.logit(4, i)))) << i;
      }
    }
  }
}

TEST(CudaEstimate, ZeroQueriesGiveZeros) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  for (const Selector method : kMethods) {
    Problem p;
    p.method = method;
    p.q_deviation = 0.0f;
    Prepared setup(p, testing::seed(7000));
    setup.run();
    for (std::int64_t i = 0; i < setup.logit_count(); ++i) {
      ASSERT_EQ(f16_to_float(setup.logit(3, i)), 0.0f) << i;
    }
  }
}

}  // namespace
}  // namespace sluice::cuda
