// Value tiles that the device builds, bit by bit against those of the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/reference/values.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/workspace.h"
#include "kernels/values/values.h"
#include "lib/backend.h"
#include "sluice/errors.h"
#include "sluice/half.h"
#include "tests/kernels/device_data.h"
#include "tests/kernels/has_device.h"
#include "tests/support/elements.h"
#include "tests/support/random.h"
#include "tests/support/value_cases.h"

namespace sluice::cuda {
namespace {

using testing::Random;

struct BuildCase {
  int head_dim = 128;
  int bits = 2;
  RowFormat rows = DType::bf16;
  std::int64_t pages = 3;
  float deviation = 1.0f;
  bool half = false;  // components of values

  int channels() const { return half ? head_dim / 2 : head_dim; }
};

constexpr std::array<RowFormat, 4> kFormats = {DType::bf16, DType::f16, RowCode::int8,
                                               RowCode::k8v4};
constexpr int kHeads = 2;
constexpr std::int64_t kFirstPage = 1;
constexpr std::int32_t kSequence = 1;  // of two

KvShape shape_of(const BuildCase& c) { return {1, kHeads, kHeads, c.head_dim, c.rows}; }

std::int64_t tiles_of_sequence(const BuildCase& c) { return (kFirstPage + c.pages + 1) / 2; }

// Slots of two sequences' tiles; the last tile has the first slot but one.
std::vector<std::int32_t> table_of(const BuildCase& c) {
  const auto tiles = static_cast<std::int32_t>(tiles_of_sequence(c));
  std::vector<std::int32_t> table(static_cast<std::size_t>(2 * tiles), -1);
  for (std::int32_t tile = 0; tile < tiles; ++tile) {
    table[static_cast<std::size_t>(kSequence * tiles + tile)] = tiles - tile;
  }
  return table;
}

// `basis`: of cases of components.
ValueTilesView view_of(const BuildCase& c, void* pages, const void* table,
                       const void* basis = nullptr) {
  ValueTilesView view;
  view.tiles = {c.bits, static_cast<std::byte*>(pages), tiles_of_sequence(c) + 1,
                static_cast<const float*>(basis)};
  view.slots = static_cast<const std::int32_t*>(table);
  view.table_stride = tiles_of_sequence(c);
  return view;
}

std::vector<std::byte> random_rows(const BuildCase& c, std::uint64_t seed) {
  Random random(seed);
  const KvShape shape = shape_of(c);
  const std::int64_t rows = kHeads * c.pages * kPageTokens;
  std::vector<std::byte> bytes(static_cast<std::size_t>(rows) * shape.row_bytes());
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::vector<float> key = random.normal(c.head_dim, c.deviation);
    const std::vector<float> value = random.normal(c.head_dim, c.deviation);
    std::ranges::copy(testing::encoded_row(key, value, c.rows),
                      &bytes[static_cast<std::size_t>(row) * shape.row_bytes()]);
  }
  return bytes;
}

std::vector<RowSpan> spans_of(const BuildCase& c, const void* rows) {
  std::vector<RowSpan> spans;
  const std::int64_t count = c.pages * kPageTokens;
  for (int head = 0; head < kHeads; ++head) {
    spans.push_back({static_cast<const std::byte*>(rows) +
                         static_cast<std::size_t>(head * count) * shape_of(c).row_bytes(),
                     count});
  }
  return spans;
}

// What is built, and what is reported, [2, kHeads].
struct Built {
  std::vector<std::byte> pages;
  std::vector<std::int32_t> bad = std::vector<std::int32_t>(2 * kHeads);

  explicit Built(const BuildCase& c)
      : pages(view_of(c, nullptr, nullptr).tiles.bytes(kHeads, c.channels()), std::byte{0x5a}) {}
};

std::vector<float> bases_of(const BuildCase& c) {
  if (!c.half) return {};
  Random random(8);
  return testing::random_bases(random, kHeads, c.head_dim);
}

// By a step for every page with the token that completes it, and others that complete none. Pages
// lie on the device and in host memory by turns.
void build_steps(const BuildCase& c, const ValueTilesView& view, std::byte* device, std::byte* host,
                 std::int32_t* bad, const Launch& launch) {
  PagedRows rows;
  rows.device = device;
  rows.host = host;
  rows.device_stride = rows.host_stride =
      c.pages * kPageTokens * static_cast<std::int64_t>(shape_of(c).row_bytes());
  rows.table_stride = kFirstPage + c.pages;
  std::vector<PageSlots> pages(static_cast<std::size_t>(2 * rows.table_stride));
  for (std::int32_t i = 0; i < c.pages; ++i) {
    PageSlots& at = pages[static_cast<std::size_t>(kSequence * rows.table_stride + kFirstPage + i)];
    (i % 2 == 0 ? at.device : at.host) = i;
  }
  const DeviceBlock table = upload(pages);
  rows.pages = static_cast<const PageSlots*>(table.get());
  for (std::int64_t page = kFirstPage; page < kFirstPage + c.pages; ++page) {
    const auto last = static_cast<std::int32_t>((page + 1) * kPageTokens - 1);
    const DeviceBlock batch =
        upload(std::vector<BatchToken>{{0, 0}, {kSequence, last - 1}, {kSequence, last}});
    build_values_batch(
        {shape_of(c), view, {static_cast<const BatchToken*>(batch.get()), 3, last + 2}, rows, bad},
        launch);
    require(cudaDeviceSynchronize(), "build_values_batch");
  }
}

enum class Source { device, host, pages };

Built build(const BuildCase& c, const std::vector<std::byte>& rows, Source source) {
  const Workspace workspace(1 << 20);
  Built built(c);
  const DeviceBlock pages = upload(built.pages);
  const DeviceBlock table = upload(table_of(c));
  const DeviceBlock on_device = upload(rows);
  const PinnedBlock on_host = make_pinned_block(rows.size());
  std::memcpy(on_host.get(), rows.data(), rows.size());
  const std::size_t flag_bytes = built.bad.size() * sizeof(std::int32_t);
  const PinnedBlock flags = make_pinned_block(flag_bytes);
  std::memset(flags.get(), 0, flag_bytes);
  auto* const bad = static_cast<std::int32_t*>(flags.get());
  const DeviceBlock bases = upload(bases_of(c));
  const ValueTilesView view = view_of(c, pages.get(), table.get(), c.half ? bases.get() : nullptr);
  if (source == Source::pages) {
    build_steps(c, view, static_cast<std::byte*>(on_device.get()),
                static_cast<std::byte*>(on_host.get()), bad, workspace.launch());
  } else {
    const auto spans = spans_of(c, source == Source::host ? on_host.get() : on_device.get());
    build_values({shape_of(c), view, kSequence, kFirstPage, c.pages, spans, bad},
                 workspace.launch());
  }
  require(cudaDeviceSynchronize(), "building");
  require(cudaMemcpy(built.pages.data(), pages.get(), built.pages.size(), cudaMemcpyDeviceToHost),
          "download");
  std::memcpy(built.bad.data(), flags.get(), flag_bytes);
  return built;
}

Built reference(const BuildCase& c, const std::vector<std::byte>& rows) {
  Built built(c);
  const auto spans = spans_of(c, rows.data());
  const std::vector<std::int32_t> table = table_of(c);
  const std::vector<float> bases = bases_of(c);
  const ValueTilesView view =
      view_of(c, built.pages.data(), table.data(), c.half ? bases.data() : nullptr);
  cpu::reference::build_values(
      {shape_of(c), view, kSequence, kFirstPage, c.pages, spans, built.bad.data()});
  return built;
}

void expect_same(const BuildCase& c, std::uint64_t seed, Source source) {
  SCOPED_TRACE(testing::seed_message(seed) + " head_dim " + std::to_string(c.head_dim) + " bits " +
               std::to_string(c.bits) + " rows " + to_string(c.rows) + " deviation " +
               std::to_string(c.deviation));
  const std::vector<std::byte> rows = random_rows(c, seed);
  const Built got = build(c, rows, source);
  EXPECT_TRUE(got.pages == reference(c, rows).pages);
  EXPECT_EQ(got.bad, std::vector<std::int32_t>(got.bad.size()));
}

TEST(CudaBuildValues, EqualsReferenceBitByBit) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(1);
  for (const int head_dim : {4, 32, 64, 80, 96, 128, 256}) {
    for (const int bits : {1, 2, 3, 4}) {
      for (const RowFormat& format : kFormats) {
        if (!format.fits(head_dim)) continue;
        for (const Source source : {Source::device, Source::pages}) {
          expect_same({head_dim, bits, format}, ++seed, source);
        }
      }
    }
  }
}

TEST(CudaBuildValues, RoundsLikeReferenceAtEveryMagnitude) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(100);
  for (const float deviation : {0.0f, 1e-8f, 1e-6f, 1e-4f, 100.0f, 1e4f, 1e30f}) {
    for (const int bits : {1, 2, 3, 4}) {
      expect_same({64, bits, DType::bf16, 1, deviation}, ++seed, Source::host);
    }
  }
}

// Products are rounded in another order than the reference's, so a few are a code away, where they
// lie between two.
void expect_like_reference(const BuildCase& c, std::uint64_t seed, Source source) {
  SCOPED_TRACE(testing::seed_message(seed) + " head_dim " + std::to_string(c.head_dim) + " bits " +
               std::to_string(c.bits) + " rows " + to_string(c.rows));
  const std::vector<std::byte> rows = random_rows(c, seed);
  const Built got = build(c, rows, source);
  const Built wanted = reference(c, rows);
  EXPECT_EQ(got.bad, std::vector<std::int32_t>(got.bad.size()));
  const std::size_t page_bytes = ValueTiles::page_bytes(c.bits, c.channels());
  std::int64_t count = 0;
  std::int64_t differ = 0;
  for (std::size_t page = 0; page < got.pages.size(); page += page_bytes) {
    if (wanted.pages[page] == std::byte{0x5a} && wanted.pages[page + 1] == std::byte{0x5a}) {
      EXPECT_EQ(got.pages[page], std::byte{0x5a}) << "a page that nobody built";
      continue;
    }
    for (int i = 0; i < kPageTokens * c.channels(); ++i) {
      const int token = i / c.channels();
      const int channel = i % c.channels();
      const auto value = [&](const Built& of) {
        return testing::value_in_page(&of.pages[page], c.bits, c.channels(), token, channel);
      };
      std::uint16_t half = 0;
      std::memcpy(&half, &wanted.pages[page + 2 * static_cast<std::size_t>(channel)], 2);
      const auto step = static_cast<double>(f16_to_float(half));
      const double difference = std::fabs(value(got) - value(wanted));
      ++count;
      if (difference > 0.1 * step) ++differ;
      ASSERT_LE(difference, 1.05 * step + 1e-6) << "token " << token << " channel " << channel;
    }
  }
  EXPECT_EQ(count, kHeads * c.pages * kPageTokens * c.channels());
  EXPECT_LE(differ, count / 1000);
}

TEST(CudaBuildValues, BuildsComponentsLikeTheReference) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(300);
  for (const int head_dim : {8, 64, 80, 96, 128, 256}) {
    for (const int bits : {1, 2, 3, 4}) {
      for (const RowFormat& format : kFormats) {
        if (!format.fits(head_dim)) continue;
        for (const Source source : {Source::device, Source::pages, Source::host}) {
          expect_like_reference({head_dim, bits, format, 3, 1.0f, true}, ++seed, source);
        }
      }
    }
  }
}

TEST(CudaBuildValues, ReportsNotANumberAndBuildsNothing) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  for (const float strange :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    BuildCase c{128, 2, DType::bf16, 2};
    std::vector<std::byte> rows = random_rows(c, testing::seed(7));
    const std::size_t row = shape_of(c).row_bytes();
    const auto bits = testing::encoded({strange}, c.rows.element);
    // The last value of head 1, page 1; and a key, which is no value, of head 0.
    std::memcpy(&rows[(3 * kPageTokens + 127) * row + 255 * 2], bits.data(), 2);
    std::memcpy(&rows[5 * row], bits.data(), 2);
    for (const Source source : {Source::device, Source::pages}) {
      c.half = false;
      const Built got = build(c, rows, source);
      EXPECT_EQ(got.bad, (std::vector<std::int32_t>{0, 0, 0, 1}));
      EXPECT_TRUE(got.pages == reference(c, rows).pages);
      c.half = true;
      EXPECT_EQ(build(c, rows, source).bad, got.bad);
    }
  }
}

TEST(CudaBuildValues, RefusesRowsInF32) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  const BuildCase c{64, 2, DType::f32, 1};
  EXPECT_THROW(build(c, random_rows(c, 1), Source::device), Error);
}

}  // namespace
}  // namespace sluice::cuda
