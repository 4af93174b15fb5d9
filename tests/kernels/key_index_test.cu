// The key index that the device builds, bit by bit against the one of the reference.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

#include "cpu/reference_selection.h"
#include "kernels/error.h"
#include "kernels/key_index.h"
#include "kernels/owners.h"
#include "kernels/workspace.h"
#include "lib/backend.h"
#include "lib/half.h"
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
};

constexpr std::int64_t kFirstPage = 1;
constexpr std::int64_t kSparePages = 2;  // before and after those that are built

KeyTiles tiles_of(const IndexCase& c) {
  KeyTiles tiles;
  tiles.bits = c.bits;
  tiles.capacity = c.pages + kSparePages;
  return tiles;
}

// The memory of an index, on the host or on the device.
struct IndexBytes {
  std::vector<std::byte> codes;
  std::vector<std::uint16_t> scales;
  std::vector<std::uint16_t> bounds;

  explicit IndexBytes(const IndexCase& c) {
    const auto pages = static_cast<std::size_t>(c.kv_heads * (c.pages + kSparePages));
    const auto d = static_cast<std::size_t>(c.head_dim);
    codes.assign(tiles_of(c).codes_bytes(c.kv_heads, c.head_dim), std::byte{0x5a});
    scales.assign(pages * 2 * d, 0x5a5a);
    bounds.assign(pages * kBoundsPerPage * 2 * d, 0x5a5a);
  }
};

// Codes of one page, [head_dim, code_bytes].
std::vector<std::byte> codes_of(const IndexCase& c, const IndexBytes& index, std::int64_t head,
                                std::int64_t page) {
  const KeyTiles tiles = tiles_of(c);
  const std::size_t tile = static_cast<std::size_t>(head * tiles.tiles() + page / kTilePages);
  std::vector<std::byte> codes;
  for (std::size_t channel = 0; channel < static_cast<std::size_t>(c.head_dim); ++channel) {
    const std::byte* const from = index.codes.data() + tile * tiles.tile_bytes(c.head_dim) +
                                  KeyTiles::place_of(page, channel) * tiles.code_bytes();
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

KeyIndexView view_of(const IndexCase& c, void* codes, void* scales, void* bounds) {
  KeyIndexView view;
  view.tiles = tiles_of(c);
  view.bounds.capacity = view.tiles.capacity;
  view.tiles.codes = static_cast<std::byte*>(codes);
  view.tiles.scales = static_cast<std::uint16_t*>(scales);
  view.bounds.bounds = static_cast<std::uint16_t*>(bounds);
  return view;
}

template <typename T>
DeviceBlock upload(const std::vector<T>& from) {
  DeviceBlock block = make_device_block(from.size() * sizeof(T));
  require(cudaMemcpy(block.get(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
  return block;
}
template <typename T>
void download(const DeviceBlock& from, std::vector<T>& to) {
  require(cudaMemcpy(to.data(), from.get(), to.size() * sizeof(T), cudaMemcpyDeviceToHost),
          "download");
}

// What the device made of `rows`; `bad` [kv_heads].
IndexBytes build(const IndexCase& c, const std::vector<std::byte>& rows, bool mapped,
                 std::vector<std::int32_t>& bad) {
  Workspace workspace(1 << 20);
  IndexBytes index(c);
  const DeviceBlock codes = upload(index.codes);
  const DeviceBlock scales = upload(index.scales);
  const DeviceBlock bounds = upload(index.bounds);
  const DeviceBlock on_device = upload(rows);
  const PinnedBlock on_host = make_pinned_block(rows.size());
  std::memcpy(on_host.get(), rows.data(), rows.size());
  const PinnedBlock flags = make_pinned_block(bad.size() * sizeof(std::int32_t));
  std::memset(flags.get(), 0, bad.size() * sizeof(std::int32_t));
  const auto* const where = static_cast<const std::byte*>(mapped ? on_host.get() : on_device.get());
  const std::vector<RowSpan> spans = spans_of(c, where);
  build_index({shape_of(c), view_of(c, codes.get(), scales.get(), bounds.get()), kFirstPage,
               c.pages, spans, static_cast<std::int32_t*>(flags.get())},
              workspace.launch());
  require(cudaDeviceSynchronize(), "build_index");
  download(codes, index.codes);
  download(scales, index.scales);
  download(bounds, index.bounds);
  std::memcpy(bad.data(), flags.get(), bad.size() * sizeof(std::int32_t));
  return index;
}

IndexBytes reference(const IndexCase& c, const std::vector<std::byte>& rows) {
  IndexBytes index(c);
  std::vector<std::int32_t> bad(static_cast<std::size_t>(c.kv_heads));
  const std::vector<RowSpan> spans = spans_of(c, rows.data());
  cpu::reference::build_index(
      {shape_of(c), view_of(c, index.codes.data(), index.scales.data(), index.bounds.data()),
       kFirstPage, c.pages, spans, bad.data()});
  return index;
}

void expect_same(const IndexCase& c, std::uint64_t seed, bool mapped) {
  SCOPED_TRACE(testing::seed_message(seed));
  SCOPED_TRACE("head_dim " + std::to_string(c.head_dim) + " bits " + std::to_string(c.bits) +
               " dtype " + std::string(to_string(c.dtype)) + " deviation " +
               std::to_string(c.deviation));
  Random random(seed);
  const std::vector<std::byte> rows = random_rows(c, random);
  std::vector<std::int32_t> bad(static_cast<std::size_t>(c.kv_heads));
  const IndexBytes got = build(c, rows, mapped, bad);
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
      for (const int bits : {4, 2}) expect_same({head_dim, dtype, bits}, ++seed, false);
    }
  }
}

TEST(CudaKeyIndex, RoundsLikeReferenceAtEveryMagnitude) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(100);
  for (const float deviation : {0.0f, 1e-8f, 1e-6f, 1e-4f, 100.0f, 1e4f}) {
    for (const int bits : {4, 2}) {
      expect_same({64, DType::bf16, bits, 3, 1, deviation}, ++seed, true);
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
    std::vector<std::int32_t> bad(3);
    const IndexBytes got = build(c, rows, false, bad);
    EXPECT_EQ(bad, (std::vector<std::int32_t>{0, 1, 0}));
    const std::vector<std::byte> untouched(128 * 64, std::byte{0x5a});
    EXPECT_EQ(codes_of(c, got, 1, kFirstPage + 1), untouched);
    EXPECT_NE(codes_of(c, got, 1, kFirstPage), untouched);
  }
}

}  // namespace
}  // namespace sluice::cuda
