#include "cpu/scan/key_index.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/runtime/rows.h"
#include "cpu/runtime/whole_pages.h"
#include "cpu/scan/scan.h"
#include "lib/code_fit.h"
#include "lib/hadamard.h"
#include "sluice/half.h"

namespace sluice::cpu {
namespace {

constexpr float kLargestHalf = 65504.0f;

using Channels = std::array<float, kMaxHeadDim>;

// Keys of one page as floats, [kPageTokens, head_dim].
class PageKeys {
 public:
  PageKeys(const std::byte* rows, const KvShape& shape)
      : head_dim_(static_cast<std::size_t>(shape.head_dim)), keys_(kPageTokens * head_dim_) {
    for (std::size_t token = 0; token < kPageTokens; ++token) {
      read_key(shape, rows + token * shape.row_bytes(), &keys_[token * head_dim_]);
    }
  }

  const float* key(std::size_t token) const { return &keys_[token * head_dim_]; }

  bool finite() const {
    return std::all_of(keys_.begin(), keys_.end(), [](float x) { return std::isfinite(x); });
  }

  void rotate() {
    for (float& x : keys_) x = std::clamp(x, -kMostRotated, kMostRotated);
    sluice::rotate(keys_.data(), std::ssize(keys_), Rotation::of(static_cast<int>(head_dim_)));
  }

  // Minimum and maximum per channel over tokens [first, first + count).
  void range(std::size_t first, std::size_t count, Channels& low, Channels& high) const {
    std::copy_n(key(first), head_dim_, low.begin());
    std::copy_n(key(first), head_dim_, high.begin());
    for (std::size_t token = first + 1; token < first + count; ++token) {
      const float* const k = key(token);
      for (std::size_t c = 0; c < head_dim_; ++c) {
        low[c] = k[c] < low[c] ? k[c] : low[c];
        high[c] = k[c] > high[c] ? k[c] : high[c];
      }
    }
  }

 private:
  std::size_t head_dim_;
  std::vector<float> keys_;
};

float clamp_to_half(float x) { return std::clamp(x, -kLargestHalf, kLargestHalf); }

// The next f16 towards +infinity from a finite f16.
std::uint16_t next_up(std::uint16_t bits) {
  if (bits == 0x8000u) return 0x0001u;
  return static_cast<std::uint16_t>((bits & 0x8000u) != 0 ? bits - 1 : bits + 1);
}

// The smallest f16 >= x.
std::uint16_t round_up_to_half(float x) {
  const std::uint16_t bits = float_to_f16(clamp_to_half(x));
  return f16_to_float(bits) < x ? next_up(bits) : bits;
}

std::uint16_t round_down_to_half(float x) {
  return static_cast<std::uint16_t>(round_up_to_half(-x) ^ 0x8000u);
}

// Packs `bits` bits, from bit `first` on, of each of `codes` [kPageTokens].
void pack_bits(const std::uint8_t* codes, int first, int bits, std::byte* to) {
  const std::size_t bytes = TilePage::code_bytes(bits);
  const unsigned mask = (1u << bits) - 1;
  for (std::size_t b = 0; b < bytes; ++b) {
    unsigned packed = 0;
    for (std::size_t part = 0; part * bytes < kPageTokens; ++part) {
      packed |= (static_cast<unsigned>(codes[part * bytes + b]) >> first & mask)
                << (part * static_cast<unsigned>(bits));
    }
    to[b] = static_cast<std::byte>(packed);
  }
}

// Packs `codes` [kPageTokens] of one channel in the layout of KeyTiles.
void pack_channel(const std::uint8_t* codes, int bits, std::byte* to) {
  pack_bits(codes, 0, KeyTiles::low_bits(bits), to);
  if (bits == 3) pack_bits(codes, 2, 1, to + KeyTiles::low_bytes(bits));
}

// Replaces a page's scales and zeros by those that fit its `codes` [head_dim, kPageTokens].
void fit_scales(const PageKeys& keys, std::size_t channels, const std::uint8_t* codes,
                const TilePage& page) {
  for (std::size_t c = 0; c < channels; ++c, codes += kPageTokens) {
    CodeFit fit;
    for (std::size_t token = 0; token < kPageTokens; ++token) {
      fit.add(keys.key(token)[c], codes[token]);
    }
    page.scales[c] = float_to_f16(clamp_to_half(static_cast<float>(fit.scale(kPageTokens))));
    const auto scale = static_cast<double>(f16_to_float(page.scales[c]));
    page.zeros[c] = float_to_f16(clamp_to_half(static_cast<float>(fit.zero(kPageTokens, scale))));
  }
}

void build_tile(const PageKeys& keys, int head_dim, const KeyTiles& tiles, const TilePage& page) {
  const int bits = tiles.bits;
  Channels low;
  Channels high;
  keys.range(0, kPageTokens, low, high);
  const auto largest = static_cast<float>((1 << bits) - 1);
  const auto channels = static_cast<std::size_t>(head_dim);
  Channels zero;
  Channels inverse;
  for (std::size_t c = 0; c < channels; ++c) {
    const float range = high[c] - low[c];
    const float first = tiles.rotated ? low[c] + range * tiles.margin() : low[c];
    page.zeros[c] = float_to_f16(clamp_to_half(first));
    page.scales[c] = float_to_f16(clamp_to_half(range * tiles.kept_range() / largest));
    zero[c] = f16_to_float(page.zeros[c]);
    const float scale = f16_to_float(page.scales[c]);
    inverse[c] = scale > 0.0f ? 1.0f / scale : 0.0f;
  }
  std::vector<std::uint8_t> codes(channels * kPageTokens);  // [head_dim, kPageTokens]
  for (std::size_t token = 0; token < kPageTokens; ++token) {
    const float* const key = keys.key(token);
    for (std::size_t c = 0; c < channels; ++c) {
      const float code = std::clamp((key[c] - zero[c]) * inverse[c], 0.0f, largest);
      codes[c * kPageTokens + token] = static_cast<std::uint8_t>(std::lrint(code));
    }
  }
  if (KeyTiles::fitted(bits)) fit_scales(keys, channels, codes.data(), page);
  for (std::size_t c = 0; c < channels; ++c) {
    pack_channel(&codes[c * kPageTokens], bits, page.codes_of(c, bits));
  }
}

void build_bounds(const PageKeys& keys, int head_dim, std::uint16_t* to) {
  Channels low;
  Channels high;
  for (std::size_t part = 0; part < kBoundsPerPage; ++part) {
    keys.range(part * kBoundTokens, kBoundTokens, low, high);
    for (int c = 0; c < head_dim; ++c) {
      *to++ = round_down_to_half(low[static_cast<std::size_t>(c)]);
    }
    for (int c = 0; c < head_dim; ++c) *to++ = round_up_to_half(high[static_cast<std::size_t>(c)]);
  }
}

// Builds a page from its rows. Returns false and builds nothing if a key is NaN or Inf.
bool build_page(const KvShape& shape, const KeyIndexView& index, const WholePage& page) {
  PageKeys keys(page.rows, shape);
  if (!keys.finite()) return false;
  const int d = shape.head_dim;
  const std::int64_t slot = index.slot(page.sequence, page.number);
  if (index.bounds.bounds != nullptr) {
    build_bounds(keys, d, index.bounds.of(d, page.head, slot, page.number));
  }
  if (index.tiles.codes == nullptr) return true;
  if (index.tiles.rotated) keys.rotate();
  build_tile(keys, d, index.tiles, tile_page(index.tiles, d, page.head, slot, page.number));
  return true;
}

}  // namespace

TilePage tile_page(const KeyTiles& tiles, int head_dim, std::int64_t head, std::int64_t slot,
                   std::int64_t page) {
  std::uint16_t* const scales = tiles.scales_of(head_dim, head, slot, page);
  return {tiles.codes_of(head_dim, head, slot), scales, scales + head_dim, page};
}

void build_index(const BuildIndexParams& p, Threads& threads) {
  build_pages(p, pages_of_run(p), threads,
              [&](const WholePage& page) { return build_page(p.shape, p.index, page); });
}

void build_batch(const BuildBatchParams& p, Threads& threads) {
  build_pages(p, pages_of_batch(p), threads,
              [&](const WholePage& page) { return build_page(p.shape, p.index, page); });
}

ChannelList all_channels(int head_dim) {
  ChannelList list;
  list.count = head_dim;
  std::iota(list.index.begin(), list.index.begin() + head_dim, std::uint8_t{0});
  return list;
}

ChannelList largest_channels(const float* q, int group, int head_dim, int count) {
  ChannelList list = all_channels(head_dim);
  Channels size{};
  for (int g = 0; g < group; ++g) {
    for (int c = 0; c < head_dim; ++c) {
      size[static_cast<std::size_t>(c)] += std::fabs(q[g * head_dim + c]);
    }
  }
  list.count = std::min(count, head_dim);
  const auto end = list.index.begin() + head_dim;
  const auto chosen = list.index.begin() + list.count;
  std::partial_sort(list.index.begin(), chosen, end, [&](std::uint8_t a, std::uint8_t b) {
    return size[a] != size[b] ? size[a] > size[b] : a < b;
  });
  std::sort(list.index.begin(), chosen);
  return list;
}

float inverse_temperature(const float* q, int head_dim, const ChannelList& channels) {
  float all = 0.0f;
  float kept = 0.0f;
  for (int c = 0; c < head_dim; ++c) all += std::fabs(q[c]);
  for (int i = 0; i < channels.count; ++i) {
    kept += std::fabs(q[channels.index[static_cast<std::size_t>(i)]]);
  }
  if (channels.count == head_dim) return 1.0f / std::sqrt(static_cast<float>(head_dim));
  if (!(kept > 0.0f)) return kept == 0.0f ? 0.0f : kept;  // NaN stays NaN
  return std::sqrt(all / (kept * static_cast<float>(head_dim)));
}

}  // namespace sluice::cpu
