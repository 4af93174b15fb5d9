// Writing new rows: of a run of tokens, and of the tokens of a batch into the pages they are of.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/backends.h"
#include "tests/support/device.h"
#include "tests/support/elements.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::download;
using testing::encoded_row;
using testing::NamedBackend;
using testing::Random;
using testing::rounded_value;
using testing::upload;

class AppendParity : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override { backend_ = testing::make_or_skip(GetParam()); }
  void append_extremes(int d, RowCode code);

  const std::uint64_t seed_ = testing::seed(13);
  Random random_{seed_};
  std::unique_ptr<testing::Device> backend_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

// Few rows and many reach their host in different ways.
TEST_P(AppendParity, AppendWritesKThenVOfEveryHeadAndItsHost) {
  for (const auto& [d, tokens] : {std::pair{40, 3}, {64, 3}, {64, 300}}) {
    for (const RowFormat format : testing::row_formats(*backend_, d)) {
      SCOPED_TRACE(to_string(format) + " head_dim " + std::to_string(d));
      const KvShape shape = {
          .layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = d, .rows = format};
      const std::int64_t stride = 4 * d;  // K and V side by side, as one projection writes them
      const std::vector<float> kv = random_.normal(tokens * stride);
      const Buffer device = upload(*backend_, kv);
      const std::size_t bytes = static_cast<std::size_t>(tokens) * shape.row_bytes();
      const Buffer rows = backend_->allocate(backend_->info().compute_tier, 2 * bytes);
      const Buffer host = backend_->allocate(Tier::host, 2 * bytes);
      std::byte* const to[] = {rows.data(), rows.data() + bytes};
      std::byte* const host_to[] = {host.data(), host.data() + bytes};
      backend_->queue->run(AppendParams{device.floats(), device.floats() + 2 * d, tokens, stride,
                                        shape, to, host_to});
      const std::vector<std::byte> actual = download<std::byte>(*backend_, rows);
      EXPECT_EQ(download<std::byte>(*backend_, host), actual);
      for (int head = 0; head < 2; ++head) {
        for (std::int64_t token = 0; token < tokens; ++token) {
          const auto key = kv.begin() + token * stride + head * d;
          const auto value = key + 2 * d;
          const std::vector<std::byte> expected =
              encoded_row({key, key + d}, {value, value + d}, format);
          const std::byte* const row = actual.data() + static_cast<std::size_t>(head) * bytes +
                                       static_cast<std::size_t>(token) * shape.row_bytes();
          ASSERT_TRUE(std::equal(expected.begin(), expected.end(), row))
              << "token " << token << " head " << head;
        }
      }
    }
  }
}

// Keys and values at the limits of the code: a session that moves to another backend has to find
// the bits that this one would write.
std::vector<std::vector<float>> extreme_parts(int d, Random& random) {
  const auto of = [&](float all, float one) {
    std::vector<float> part(static_cast<std::size_t>(d), all);
    part[static_cast<std::size_t>(random.integer(0, d - 1))] = one;
    return part;
  };
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr float kMost = std::numeric_limits<float>::max();
  std::vector<std::vector<float>> parts = {
      of(0.0f, 0.0f),        of(-0.0f, -0.0f),         of(1.0f, kNaN),    of(1.0f, -HUGE_VALF),
      of(0.0f, 0x1.8p-101f), of(0x1p-140f, 0x1p-100f), of(kMost, -kMost), of(1.0f, 200.0f)};
  // Halfway between two codes, with the scale 1: of int8, then of int4 with either sign.
  parts.push_back(of(0.0f, 127.0f));
  for (int c = 0; c < d; ++c) {
    float& x = parts.back()[static_cast<std::size_t>(c)];
    if (x == 0.0f) x = static_cast<float>(c % 126) - 62.5f;
  }
  for (const float farthest : {8.0f, -8.0f}) {
    std::vector<float>& part = parts.emplace_back();
    for (int c = 0; c < d; ++c) {
      part.push_back(c % 32 == 5 ? farthest : static_cast<float>(c % 15) - 7.5f);
    }
  }
  // Two numbers of the same size, the farthest of a group.
  parts.push_back(of(2.0f, -2.0f));
  for (int exponent = -120; exponent <= 120; exponent += 8) {
    parts.push_back(random.normal(d, std::ldexp(1.0f, exponent)));
  }
  return parts;
}

TEST_P(AppendParity, CodesExtremesToTheSameBits) {
  for (const int d : {32, 80, 128, 256}) {
    for (const RowCode code : backend_->info().row_codes) {
      SCOPED_TRACE(to_string(RowFormat(code)) + " head_dim " + std::to_string(d));
      append_extremes(d, code);
    }
  }
}

void AppendParity::append_extremes(int d, RowCode code) {
  const KvShape shape = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = d, .rows = code};
  const std::vector<std::vector<float>> parts = extreme_parts(d, random_);
  std::vector<float> keys, values;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::vector<float>& value = parts[parts.size() - 1 - i];
    keys.insert(keys.end(), parts[i].begin(), parts[i].end());
    values.insert(values.end(), value.begin(), value.end());
  }
  const Buffer k = upload(*backend_, keys);
  const Buffer v = upload(*backend_, values);
  const Buffer rows =
      backend_->allocate(backend_->info().compute_tier, parts.size() * shape.row_bytes());
  std::byte* const to[] = {rows.data()};
  backend_->queue->run(AppendParams{k.floats(), v.floats(), std::ssize(parts), d, shape, to});
  const std::vector<std::byte> actual = download<std::byte>(*backend_, rows);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::byte* const row = actual.data() + i * shape.row_bytes();
    const auto expected = encoded_row(parts[i], parts[parts.size() - 1 - i], shape.rows);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), row)) << "row " << i;
  }
}

// Where the pages of a batch lie, and what is to be written there.
struct BatchCase {
  static constexpr int kSpare = 3;  // slots that no page has

  KvShape shape;
  std::vector<BatchToken> tokens;
  std::int64_t sequences = 0;
  std::int64_t table_stride = 0;
  std::vector<PageSlots> pages;  // [sequences, table_stride]
  std::int64_t slots = 0;        // of either pool
  std::int64_t pool_stride = 0;  // bytes from KV head to KV head
  std::vector<float> kv;         // [count, kv_heads K, kv_heads V]

  std::int64_t count() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t stride() const { return 2 * std::int64_t{shape.kv_heads} * shape.head_dim; }
  std::size_t pool_bytes() const { return static_cast<std::size_t>(shape.kv_heads * pool_stride); }
  std::size_t sums(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * shape.kv_heads * shape.head_dim);
  }
};

// What an append leaves behind.
struct Written {
  std::vector<std::byte> device;
  std::vector<std::byte> host;
  std::vector<float> sums;
  std::vector<float> token_sums;

  bool operator==(const Written&) const = default;
};

// Only the pages of new rows have slots, in random order: some on the device, some in host memory,
// some in both.
BatchCase make_case(const KvShape& shape, const std::vector<BatchToken>& tokens, Random& random,
                    bool has_device = true) {
  BatchCase c;
  c.shape = shape;
  c.tokens = tokens;
  std::int64_t longest = 0;
  for (const BatchToken& token : tokens) {
    c.sequences = std::max<std::int64_t>(c.sequences, token.sequence + 2);
    longest = std::max(longest, token.pages() + 1);
  }
  c.table_stride = longest + 5;
  c.pages.resize(static_cast<std::size_t>(c.sequences * c.table_stride));
  c.slots = c.count() + BatchCase::kSpare;
  std::vector<std::int32_t> free[2];
  for (auto& slots : free) {
    slots.resize(static_cast<std::size_t>(c.slots));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random.engine());
  }
  const auto taken = [](std::vector<std::int32_t>& slots) {
    const std::int32_t slot = slots.back();
    slots.pop_back();
    return slot;
  };
  std::int64_t next = random.integer(0, 2);
  for (const BatchToken& token : tokens) {
    PageSlots& page =
        c.pages[static_cast<std::size_t>(token.sequence * c.table_stride + token.pages())];
    if (page.device != PageSlots::kNone || page.host != PageSlots::kNone) continue;
    if (has_device && next != 0) page.device = taken(free[0]);
    if (!has_device || next != 1) page.host = taken(free[1]);
    next = (next + 1) % 3;
  }
  c.pool_stride =
      (c.slots * kPageTokens + 1) * static_cast<std::int64_t>(shape.row_bytes());  // and a gap
  c.kv = random.normal(c.count() * c.stride(), 2.0f);
  return c;
}

Written before(const BatchCase& c, Random& random) {
  return {std::vector<std::byte>(c.pool_bytes(), std::byte{0x5a}),
          std::vector<std::byte>(c.pool_bytes(), std::byte{0x5a}),
          random.normal(static_cast<std::int64_t>(c.sums(c.sequences)), 100.0f),
          std::vector<float>(c.sums(c.count()))};
}

// By its definition.
Written expected_after(const BatchCase& c, Written w) {
  const auto d = static_cast<std::size_t>(c.shape.head_dim);
  const auto heads = static_cast<std::size_t>(c.shape.kv_heads);
  for (std::size_t t = 0; t < c.tokens.size(); ++t) {
    const auto sequence = static_cast<std::size_t>(c.tokens[t].sequence);
    const auto position = static_cast<std::size_t>(c.tokens[t].position);
    const PageSlots page =
        c.pages[sequence * static_cast<std::size_t>(c.table_stride) + position / kPageTokens];
    for (std::size_t head = 0; head < heads; ++head) {
      const std::size_t from = (2 * t * heads + head) * d;
      const auto part_at = [&](std::size_t first) {
        const auto at = c.kv.begin() + static_cast<std::ptrdiff_t>(first);
        return std::vector<float>(at, at + static_cast<std::ptrdiff_t>(d));
      };
      const std::vector<float> value = part_at(from + heads * d);
      const std::vector<std::byte> bytes = encoded_row(part_at(from), value, c.shape.rows);
      const std::vector<float> values = rounded_value(value, c.shape.rows);
      const auto put = [&](std::vector<std::byte>& pool, std::int32_t slot) {
        if (slot < 0) return;
        const std::size_t number =
            static_cast<std::size_t>(slot) * kPageTokens + position % kPageTokens;
        std::memcpy(
            &pool[head * static_cast<std::size_t>(c.pool_stride) + number * c.shape.row_bytes()],
            bytes.data(), bytes.size());
      };
      put(w.device, page.device);
      put(w.host, page.host);
      for (std::size_t i = 0; i < d; ++i) {
        float& sum = w.sums[(sequence * heads + head) * d + i];
        sum += values[i];
        w.token_sums[(t * heads + head) * d + i] = sum;
      }
    }
  }
  return w;
}

// What a call leaves out.
struct Without {
  bool device = false;
  bool sums = false;
  bool token_sums = false;
};

// Appends the whole batch at once, or token by token.
Written appended(testing::Device& backend, const BatchCase& c, const Written& start, bool alone,
                 const Without& without = {}) {
  const Buffer device = upload(backend, start.device);
  const Buffer host = backend.allocate(Tier::host, c.pool_bytes());
  std::memcpy(host.data(), start.host.data(), start.host.size());
  const Buffer sums = upload(backend, start.sums);
  const Buffer token_sums = upload(backend, start.token_sums);
  const Buffer kv = upload(backend, c.kv);
  const Buffer tokens = upload(backend, c.tokens);
  const Buffer pages = upload(backend, c.pages);
  const std::int64_t step = alone ? 1 : c.count();
  for (std::int64_t first = 0; first < c.count(); first += step) {
    AppendBatchParams p;
    p.k = kv.floats() + first * c.stride();
    p.v = p.k + c.stride() / 2;
    p.stride = c.stride();
    p.shape = c.shape;
    p.batch = {reinterpret_cast<const BatchToken*>(tokens.data()) + first, step,
               c.table_stride * kPageTokens};
    p.rows = {without.device ? nullptr : device.data(),
              host.data(),
              c.pool_stride,
              c.pool_stride,
              reinterpret_cast<const PageSlots*>(pages.data()),
              c.table_stride};
    if (!without.sums) p.sums = sums.floats();
    if (!without.token_sums) {
      p.token_sums = token_sums.floats() + static_cast<std::ptrdiff_t>(c.sums(first));
    }
    backend.queue->run(p);
  }
  return {download<std::byte>(backend, device), download<std::byte>(backend, host),
          download<float>(backend, sums), download<float>(backend, token_sums)};
}

void expect_equal(const Written& actual, const Written& expected) {
  EXPECT_TRUE(actual.device == expected.device) << "rows on the device";
  EXPECT_TRUE(actual.host == expected.host) << "rows in host memory";
  EXPECT_EQ(actual.sums, expected.sums);
  EXPECT_EQ(actual.token_sums, expected.token_sums);
}

// Sequences of all lengths, one at a page's border with the tokens of two pages, one of many.
std::vector<BatchToken> ragged_tokens() {
  std::vector<BatchToken> tokens = {{3, 0}, {0, 127}, {7, 128}, {2, 129}, {5, 4095}, {5, 4096}};
  for (int i = 0; i < 9; ++i) tokens.push_back({4, 250 + i});
  tokens.push_back({1, 70000});
  return tokens;
}

TEST_P(AppendParity, ABatchGoesToThePagesOfItsSequences) {
  for (const int d : {40, 64, 256}) {
    for (const RowFormat format : testing::row_formats(*backend_, d)) {
      SCOPED_TRACE(to_string(format) + " head_dim " + std::to_string(d));
      const KvShape shape = {
          .layers = 1, .query_heads = 6, .kv_heads = 3, .head_dim = d, .rows = format};
      for (const auto& tokens : {ragged_tokens(), {{0, 0}}, {{2, 128}}}) {
        const BatchCase c = make_case(shape, tokens, random_);
        const Written start = before(c, random_);
        expect_equal(appended(*backend_, c, start, false), expected_after(c, start));
      }
    }
  }
}

TEST_P(AppendParity, ABatchIsItsTokensAlone) {
  const KvShape shape = {.layers = 1, .query_heads = 8, .kv_heads = 4, .head_dim = 128};
  const BatchCase c = make_case(shape, ragged_tokens(), random_);
  const Written start = before(c, random_);
  expect_equal(appended(*backend_, c, start, false), appended(*backend_, c, start, true));
}

TEST_P(AppendParity, ABatchLeavesOutWhatIsNotAskedFor) {
  const KvShape shape = {.layers = 1, .query_heads = 2, .kv_heads = 2, .head_dim = 64};
  const BatchCase c = make_case(shape, ragged_tokens(), random_);
  const Written start = before(c, random_);
  Written expected = expected_after(c, start);
  expected.token_sums = start.token_sums;
  expect_equal(appended(*backend_, c, start, false, {.token_sums = true}), expected);
  expected.sums = start.sums;
  expect_equal(appended(*backend_, c, start, false, {.sums = true, .token_sums = true}), expected);
  const BatchCase host = make_case(shape, ragged_tokens(), random_, false);
  expect_equal(appended(*backend_, host, start, false, {.device = true}),
               expected_after(host, start));
}

INSTANTIATE_TEST_SUITE_P(, AppendParity, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

}  // namespace
}  // namespace sluice
