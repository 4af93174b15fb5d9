// The key index that the device builds, bit by bit against the one of the reference.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

#include "cpu/reference/index.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/workspace.h"
#include "kernels/scan/scan.h"
#include "lib/backend/index_ops.h"
#include "sluice/half.h"
#include "tests/kernels/device_data.h"
#include "tests/kernels/has_device.h"
#include "tests/support/random.h"

namespace sluice::cuda {
namespace {

using testing::Random;

struct IndexCase {
  int head_dim = 128;
  DType dtype = DType::bf16;
  int bits = 4;
  int kv_heads = 2;
  std::int64_t pages = 2;
  float deviation = 1.0f;
  bool rotated = false;
};

constexpr std::int64_t kFirstPage = 1;
constexpr std::int64_t kSpareSlots = 1;  // of tiles, that no page has
constexpr std::int32_t kSequence = 1;    // of two
constexpr std::int32_t kSequences = 2;

std::int64_t tiles_of_sequence(const IndexCase& c) {
  return (kFirstPage + c.pages + kTilePages - 1) / kTilePages;
}

KeyTiles tiles_of(const IndexCase& c) {
  KeyTiles tiles;
  tiles.bits = c.bits;
  tiles.rotated = c.rotated;
  tiles.slots = tiles_of_sequence(c) + kSpareSlots;
  return tiles;
}

// Slots of the sequences' tiles, [kSequences, tiles]; the last tile has the first slot but one.
std::vector<std::int32_t> table_of(const IndexCase& c) {
  const auto tiles = static_cast<std::int32_t>(tiles_of_sequence(c));
  std::vector<std::int32_t> table(static_cast<std::size_t>(kSequences * tiles), -1);
  for (std::int32_t tile = 0; tile < tiles; ++tile) {
    table[static_cast<std::size_t>(kSequence * tiles + tile)] = tiles - tile;
  }
  return table;
}

// The memory of an index, on the host or on the device.
struct IndexBytes {
  std::vector<std::byte> codes;
  std::vector<std::uint16_t> scales;
  std::vector<std::uint16_t> bounds;

  explicit IndexBytes(const IndexCase& c) {
    const KeyTiles tiles = tiles_of(c);
    codes.assign(tiles.codes_bytes(c.kv_heads, c.head_dim), std::byte{0x5a});
    scales.assign(tiles.scales_bytes(c.kv_heads, c.head_dim) / 2, 0x5a5a);
    bounds.assign(PageBounds{nullptr, tiles.slots}.bytes(c.kv_heads, c.head_dim) / 2, 0x5a5a);
  }
};

// Codes of one page, [head_dim, code_bytes].
std::vector<std::byte> codes_of(const IndexCase& c, IndexBytes& index, std::int64_t head,
                                std::int64_t page) {
  KeyTiles tiles = tiles_of(c);
  tiles.codes = index.codes.data();
  const std::int64_t tile = kSequence * tiles_of_sequence(c) + page / kTilePages;
  const std::int64_t slot = table_of(c)[static_cast<std::size_t>(tile)];
  std::vector<std::byte> codes;
  for (std::size_t channel = 0; channel < static_cast<std::size_t>(c.head_dim); ++channel) {
    const std::byte* const from = tiles.codes_of(c.head_dim, head, slot) +
                                  KeyTiles::place_of(c.bits, page, channel) * tiles.code_bytes();
    codes.insert(codes.end(), from, from + tiles.code_bytes());
  }
  return codes;
}

KvShape shape_of(const IndexCase& c) { return {1, c.kv_heads, c.kv_heads, c.head_dim, c.dtype}; }

std::vector<std::byte> random_rows(const IndexCase& c, Random& random) {
  const KvShape shape = shape_of(c);
  const std::int64_t rows = c.kv_heads * c.pages * kPageTokens;
  std::vector<std::byte> bytes(static_cast<std::size_t>(rows) * shape.row_bytes());
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::vector<float> values = random.normal(2 * c.head_dim, c.deviation);
    auto* const to = reinterpret_cast<std::uint16_t*>(bytes.data() + static_cast<std::size_t>(row) *
                                                                         shape.row_bytes());
    for (std::size_t i = 0; i < values.size(); ++i) {
      to[i] = c.dtype == DType::bf16 ? float_to_bf16(values[i]) : float_to_f16(values[i]);
    }
  }
  return bytes;
}

std::vector<RowSpan> spans_of(const IndexCase& c, const std::byte* rows) {
  std::vector<RowSpan> spans;
  const std::int64_t count = c.pages * kPageTokens;
  for (int head = 0; head < c.kv_heads; ++head) {
    const auto first = static_cast<std::size_t>(head * count);
    spans.push_back({rows + first * shape_of(c).row_bytes(), count});
  }
  return spans;
}

KeyIndexView view_of(const IndexCase& c, void* codes, void* scales, void* bounds,
                     const void* table) {
  KeyIndexView view;
  view.tiles = tiles_of(c);
  view.bounds.slots = view.tiles.slots;
  view.tiles.codes = static_cast<std::byte*>(codes);
  view.tiles.scales = static_cast<std::uint16_t*>(scales);
  view.bounds.bounds = static_cast<std::uint16_t*>(bounds);
  view.slots = static_cast<const std::int32_t*>(table);
  view.table_stride = tiles_of_sequence(c);
  return view;
}

// Where the rows are that a page is built from.
enum class Source {
  device,  // follow each other, as in prefill
  host,    // likewise, in host memory
  pages,   // in pages on the device and in host memory, as in a step
};

// By two steps for every page: one with its last token, and others that complete none.
void build_steps(const IndexCase& c, const KeyIndexView& view, const std::byte* device,
                 const std::byte* host, std::int32_t* bad, const Launch& launch) {
  PagedRows rows;
  rows.device = const_cast<std::byte*>(device);
  rows.host = const_cast<std::byte*>(host);
  rows.device_stride = rows.host_stride =
      c.pages * kPageTokens * static_cast<std::int64_t>(shape_of(c).row_bytes());
  rows.table_stride = kFirstPage + c.pages;
  std::vector<PageSlots> pages(static_cast<std::size_t>(kSequences * rows.table_stride));
  for (std::int32_t i = 0; i < c.pages; ++i) {
    PageSlots& at = pages[static_cast<std::size_t>(kSequence * rows.table_stride + kFirstPage + i)];
    (i % 2 == 0 ? at.device : at.host) = i;
  }
  const DeviceBlock table = upload(pages);
  rows.pages = static_cast<const PageSlots*>(table.get());
  for (std::int64_t page = kFirstPage; page < kFirstPage + c.pages; ++page) {
    const auto last = static_cast<std::int32_t>((page + 1) * kPageTokens - 1);
    const std::vector<BatchToken> tokens = {
        {0, 0}, {kSequence, last - 1}, {kSequence, last}, {kSequence, last + 1}};
    const DeviceBlock batch = upload(tokens);
    build_batch({shape_of(c),
                 view,
                 {static_cast<const BatchToken*>(batch.get()),
                  static_cast<std::int64_t>(tokens.size()), last + 2},
                 rows,
                 bad},
                launch);
    require(cudaDeviceSynchronize(), "build_batch");
  }
}

// What the device made of `rows`; `bad` [kSequences, kv_heads].
IndexBytes build(const IndexCase& c, const std::vector<std::byte>& rows, Source source,
                 std::vector<std::int32_t>& bad) {
  Workspace workspace(1 << 20);
  IndexBytes index(c);
  const DeviceBlock codes = upload(index.codes);
  const DeviceBlock scales = upload(index.scales);
  const DeviceBlock bounds = upload(index.bounds);
  const DeviceBlock table = upload(table_of(c));
  const DeviceBlock on_device = upload(rows);
  const PinnedBlock on_host = make_pinned_block(rows.size());
  std::memcpy(on_host.get(), rows.data(), rows.size());
  bad.assign(static_cast<std::size_t>(kSequences * c.kv_heads), 0);
  const PinnedBlock flags = make_pinned_block(bad.size() * sizeof(std::int32_t));
  std::memset(flags.get(), 0, bad.size() * sizeof(std::int32_t));
  const KeyIndexView view = view_of(c, codes.get(), scales.get(), bounds.get(), table.get());
  const auto* const device = static_cast<const std::byte*>(on_device.get());
  const auto* const host = static_cast<const std::byte*>(on_host.get());
  auto* const reported = static_cast<std::int32_t*>(flags.get());
  if (source == Source::pages) {
    build_steps(c, view, device, host, reported, workspace.launch());
  } else {
    const std::vector<RowSpan> spans = spans_of(c, source == Source::host ? host : device);
    build_index({shape_of(c), view, kSequence, kFirstPage, c.pages, spans, reported},
                workspace.launch());
  }
  require(cudaDeviceSynchronize(), "building");
  index.codes = download<std::byte>(codes, index.codes.size());
  index.scales = download<std::uint16_t>(scales, index.scales.size());
  index.bounds = download<std::uint16_t>(bounds, index.bounds.size());
  std::memcpy(bad.data(), flags.get(), bad.size() * sizeof(std::int32_t));
  return index;
}

IndexBytes reference(const IndexCase& c, const std::vector<std::byte>& rows) {
  IndexBytes index(c);
  std::vector<std::int32_t> bad(static_cast<std::size_t>(kSequences * c.kv_heads));
  const std::vector<RowSpan> spans = spans_of(c, rows.data());
  const std::vector<std::int32_t> table = table_of(c);
  cpu::reference::build_index(
      {shape_of(c),
       view_of(c, index.codes.data(), index.scales.data(), index.bounds.data(), table.data()),
       kSequence, kFirstPage, c.pages, spans, bad.data()});
  return index;
}

void expect_same(const IndexCase& c, std::uint64_t seed, Source source) {
  SCOPED_TRACE(testing::seed_message(seed));
  SCOPED_TRACE("head_dim " + std::to_string(c.head_dim) + " bits " + std::to_string(c.bits) +
               " dtype " + std::string(to_string(c.dtype)) + " deviation " +
               std::to_string(c.deviation) + (c.rotated ? " rotated" : ""));
  Random random(seed);
  const std::vector<std::byte> rows = random_rows(c, random);
  std::vector<std::int32_t> bad;
  const IndexBytes got = build(c, rows, source, bad);
  const IndexBytes wanted = reference(c, rows);
  EXPECT_TRUE(got.codes == wanted.codes);
  EXPECT_TRUE(got.scales == wanted.scales);
  EXPECT_TRUE(got.bounds == wanted.bounds);
  EXPECT_EQ(bad, std::vector<std::int32_t>(bad.size()));
}

TEST(CudaKeyIndex, EqualsReferenceBitByBit) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(1);
  for (const int head_dim : {2, 10, 32, 64, 80, 96, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const int bits : {4, 3, 2, 1}) {
        for (const std::int64_t pages : {1, 4}) {
          for (const Source source : {Source::device, Source::pages}) {
            for (const bool rotated : {false, true}) {
              if (bits == 1 && !rotated) continue;
              expect_same({head_dim, dtype, bits, 2, pages, 1.0f, rotated}, ++seed, source);
            }
          }
        }
      }
    }
  }
}

TEST(CudaKeyIndex, RoundsLikeReferenceAtEveryMagnitude) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(100);
  for (const float deviation : {0.0f, 1e-8f, 1e-6f, 1e-4f, 100.0f, 1e4f, 1e30f}) {
    for (const int bits : {4, 3, 2, 1}) {
      if (bits > 1) expect_same({64, DType::bf16, bits, 3, 1, deviation}, ++seed, Source::host);
      expect_same({64, DType::bf16, bits, 3, 1, deviation, true}, ++seed, Source::host);
    }
  }
}

TEST(CudaKeyIndex, ReportsNotANumberAndBuildsNothing) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  for (const float strange :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    const IndexCase c{128, DType::bf16, 4, 3, 2};
    Random random(testing::seed(7));
    std::vector<std::byte> rows = random_rows(c, random);
    const std::uint16_t bits = float_to_bf16(strange);
    // Head 1, page 1, token 127, channel 127; then a value, which is no key, of head 2.
    const std::size_t row_bytes = shape_of(c).row_bytes();
    std::memcpy(rows.data() + (3 * 128 + 127 + 128) * row_bytes - row_bytes * 128 + 127 * 2, &bits,
                2);
    std::memcpy(rows.data() + 4 * 128 * row_bytes + 200 * 2, &bits, 2);
    for (const Source source : {Source::device, Source::pages}) {
      std::vector<std::int32_t> bad;
      IndexBytes got = build(c, rows, source, bad);
      EXPECT_EQ(bad, (std::vector<std::int32_t>{0, 0, 0, 0, 1, 0}));
      const std::vector<std::byte> untouched(128 * 64, std::byte{0x5a});
      EXPECT_EQ(codes_of(c, got, 1, kFirstPage + 1), untouched);
      EXPECT_NE(codes_of(c, got, 1, kFirstPage), untouched);
    }
  }
}

}  // namespace
}  // namespace sluice::cuda
