#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "cpu/runtime/rows.h"
#include "cpu/runtime/whole_pages.h"
#include "cpu/values/project.h"
#include "cpu/values/values.h"
#include "lib/check.h"
#include "lib/code_fit.h"
#include "sluice/half.h"

namespace sluice::cpu {
namespace {

constexpr float kLargestHalf = 65504.0f;
constexpr std::size_t kMaxHeadDim = 256;

using Channels = std::array<float, kMaxHeadDim>;

// Values of one page as floats, [kPageTokens, head_dim].
std::vector<float> values_of(const KvShape& shape, const std::byte* rows) {
  const auto d = static_cast<std::size_t>(shape.head_dim);
  std::vector<float> values(kPageTokens * d);
  for (std::size_t token = 0; token < kPageTokens; ++token, rows += shape.row_bytes()) {
    read_value(shape, rows, &values[token * d]);
  }
  return values;
}

std::uint16_t as_half(float x) { return float_to_f16(std::clamp(x, -kLargestHalf, kLargestHalf)); }

// Zeros and inverse steps of all channels, for computing codes. The constructor writes the page's
// scales.
struct Quantisers {
  Channels zero;
  Channels inverse;
  float largest;

  Quantisers(const std::vector<float>& values, std::size_t d, int bits, std::uint16_t* scales)
      : largest(static_cast<float>((1 << bits) - 1)) {
    Channels low;
    Channels high;
    std::copy_n(values.begin(), d, low.begin());
    std::copy_n(values.begin(), d, high.begin());
    for (std::size_t token = 1; token < kPageTokens; ++token) {
      const float* const v = &values[token * d];
      for (std::size_t c = 0; c < d; ++c) {
        low[c] = v[c] < low[c] ? v[c] : low[c];
        high[c] = v[c] > high[c] ? v[c] : high[c];
      }
    }
    const float margin = ValueTiles::margin(bits);
    const float step = ValueTiles::step(bits);
    for (std::size_t c = 0; c < d; ++c) {
      scales[c] = as_half(high[c] * step - low[c] * step);
      scales[d + c] = as_half(low[c] + (high[c] * margin - low[c] * margin));
      zero[c] = f16_to_float(scales[d + c]);
      const float scale = f16_to_float(scales[c]);
      inverse[c] = scale > 0.0f ? 1.0f / scale : 0.0f;
    }
  }

  std::uint32_t code(float value, std::size_t channel) const {
    const float exact = (value - zero[channel]) * inverse[channel];
    return static_cast<std::uint32_t>(std::lrint(std::clamp(exact, 0.0f, largest)));
  }
};

// Replaces a page's scales and zeros by those that fit its codes, which quantisers.code() gives.
void fit_scales(const std::vector<float>& values, const Quantisers& quantisers, std::size_t d,
                std::uint16_t* scales) {
  std::vector<CodeFit> fits(d);
  for (std::size_t token = 0; token < kPageTokens; ++token) {
    const float* const v = &values[token * d];
    for (std::size_t c = 0; c < d; ++c) {
      fits[c].add(v[c], static_cast<int>(quantisers.code(v[c], c)));
    }
  }
  for (std::size_t c = 0; c < d; ++c) {
    scales[c] = as_half(static_cast<float>(fits[c].scale(kPageTokens)));
    const auto stored = static_cast<double>(f16_to_float(scales[c]));
    scales[d + c] = as_half(static_cast<float>(fits[c].zero(kPageTokens, stored)));
  }
}

bool all_finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

// Builds a page from its rows. Returns false and writes nothing if a value is NaN or Inf.
bool build_page(const KvShape& shape, const ValueTiles& tiles, const WholePage& from,
                std::byte* page) {
  std::vector<float> values = values_of(shape, from.rows);
  if (!all_finite(values)) return false;
  if (tiles.basis != nullptr) {
    values = projected({tiles.basis_of(shape.head_dim, from.head), shape.head_dim}, values);
    if (!all_finite(values)) return false;
  }
  const int bits = tiles.bits;
  const int channels = tiles.channels(shape.head_dim);
  const auto d = static_cast<std::size_t>(channels);
  const Quantisers quantisers(values, d, bits, ValueTiles::scales(page));
  std::uint32_t* const words = ValueTiles::words(page, channels);
  std::fill_n(words, static_cast<std::size_t>(bits) * 4 * d, 0u);
  const std::uint32_t mask = (1u << ValueTiles::low_bits(bits)) - 1u;
  for (int token = 0; token < kPageTokens; ++token) {
    const float* const v = &values[static_cast<std::size_t>(token) * d];
    const ValueTiles::Place low = ValueTiles::low_place(bits, token);
    const ValueTiles::Place high = ValueTiles::high_place(token);
    std::uint32_t* const lows = words + static_cast<std::size_t>(low.word) * d;
    std::uint32_t* const highs = words + static_cast<std::size_t>(high.word) * d;
    for (std::size_t c = 0; c < d; ++c) {
      const std::uint32_t code = quantisers.code(v[c], c);
      lows[c] |= (code & mask) << low.shift;
      if (bits == 3) highs[c] |= (code >> 2) << high.shift;
    }
  }
  if (ValueTiles::fitted(bits)) {
    fit_scales(values, quantisers, d, ValueTiles::scales(page));
  }
  return true;
}

template <typename Params>
void build(const Params& p, const std::vector<WholePage>& pages, Threads& threads) {
  check(p.shape.head_dim <= static_cast<int>(kMaxHeadDim), "build_values: head_dim");
  build_pages(p, pages, threads, [&](const WholePage& page) {
    const std::int64_t slot = p.values.slot(page.sequence, page.number);
    std::byte* const to = p.values.tiles.page(p.shape.head_dim, page.head, slot, page.number);
    return build_page(p.shape, p.values.tiles, page, to);
  });
}

}  // namespace

void build_values(const BuildValuesParams& params, Threads& threads) {
  build(params, pages_of_run(params), threads);
}

void build_values_batch(const BuildValuesBatchParams& params, Threads& threads) {
  build(params, pages_of_batch(params), threads);
}

}  // namespace sluice::cpu
