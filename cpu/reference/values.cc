#include "cpu/reference/values.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/reference/ops.h"
#include "cpu/runtime/whole_pages.h"
#include "lib/code_fit.h"
#include "sluice/half.h"

namespace sluice::cpu::reference {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();
constexpr float kLargestHalf = 65504.0f;

// A page of one KV head within the value tiles.
struct TilePage {
  std::byte* page;
  int channels;
  int bits;

  std::uint16_t& scale(int channel) const { return ValueTiles::scales(page)[channel]; }
  std::uint16_t& zero(int channel) const { return ValueTiles::scales(page)[channels + channel]; }
  std::uint32_t& word(const ValueTiles::Place& place, int channel) const {
    return ValueTiles::words(page, channels)[place.word * channels + channel];
  }

  void set_code(int token, int channel, unsigned code) const {
    const ValueTiles::Place low = ValueTiles::low_place(bits, token);
    const unsigned mask = (1u << ValueTiles::low_bits(bits)) - 1u;
    word(low, channel) |= (code & mask) << low.shift;
    if (bits != 3) return;
    const ValueTiles::Place high = ValueTiles::high_place(token);
    word(high, channel) |= (code >> 2) << high.shift;
  }
  unsigned code(int token, int channel) const {
    const ValueTiles::Place low = ValueTiles::low_place(bits, token);
    const unsigned mask = (1u << ValueTiles::low_bits(bits)) - 1u;
    const unsigned code = (word(low, channel) >> low.shift) & mask;
    if (bits != 3) return code;
    const ValueTiles::Place high = ValueTiles::high_place(token);
    return code | ((word(high, channel) >> high.shift) & 1u) << 2;
  }
  double value(int token, int channel) const {
    return static_cast<double>(f16_to_float(zero(channel))) +
           static_cast<double>(f16_to_float(scale(channel))) * code(token, channel);
  }
};

TilePage tile_page(const ValueTilesView& view, int head_dim, std::int64_t head,
                   std::int64_t sequence, std::int64_t page) {
  return {view.tiles.page(head_dim, head, view.slot(sequence, page), page),
          view.tiles.channels(head_dim), view.tiles.bits};
}

// The products of a value with the vectors of a basis.
template <typename T>
std::vector<double> projected(const ValueTiles& tiles, int head_dim, std::int64_t head,
                              const std::vector<T>& value) {
  std::vector<double> products;
  const float* vector = tiles.basis_of(head_dim, head);
  for (int i = 0; i < tiles.channels(head_dim); ++i, vector += head_dim) {
    double sum = 0.0;
    for (int c = 0; c < head_dim; ++c) {
      sum +=
          static_cast<double>(vector[c]) * static_cast<double>(value[static_cast<std::size_t>(c)]);
    }
    products.push_back(sum);
  }
  return products;
}

std::uint16_t as_half(float x) { return float_to_f16(std::clamp(x, -kLargestHalf, kLargestHalf)); }

void build_channel(const TilePage& page, int channel, const std::vector<float>& values) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  const float margin = ValueTiles::margin(page.bits);
  const float step = ValueTiles::step(page.bits);
  page.zero(channel) = as_half(*low + (*high * margin - *low * margin));
  page.scale(channel) = as_half(*high * step - *low * step);
  const float zero = f16_to_float(page.zero(channel));
  const float scale = f16_to_float(page.scale(channel));
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  const auto largest = static_cast<float>((1 << page.bits) - 1);
  CodeFit fit;
  for (int token = 0; token < kPageTokens; ++token) {
    const float value = values[static_cast<std::size_t>(token)];
    const float exact = (value - zero) * inverse;
    const long code = std::lrint(std::clamp(exact, 0.0f, largest));
    page.set_code(token, channel, static_cast<unsigned>(code));
    fit.add(value, static_cast<int>(code));
  }
  if (!ValueTiles::fitted(page.bits)) return;
  page.scale(channel) = as_half(static_cast<float>(fit.scale(kPageTokens)));
  const auto stored = static_cast<double>(f16_to_float(page.scale(channel)));
  page.zero(channel) = as_half(static_cast<float>(fit.zero(kPageTokens, stored)));
}

// The numbers that tiles hold of a value.
std::vector<float> channels_of(const KvShape& shape, const ValueTiles& tiles, std::int64_t head,
                               const std::byte* row) {
  std::vector<float> value;
  for (int c = 0; c < shape.head_dim; ++c) value.push_back(value_element(shape, row, c));
  if (tiles.basis == nullptr) return value;
  const std::vector<double> products = projected(tiles, shape.head_dim, head, value);
  return {products.begin(), products.end()};
}

// Builds a page from its rows. Returns false and writes nothing if a value is NaN or Inf.
bool build_page(const KvShape& shape, const ValueTiles& tiles, const WholePage& from,
                const TilePage& page) {
  std::vector<std::vector<float>> values(static_cast<std::size_t>(page.channels));
  for (std::size_t token = 0; token < kPageTokens; ++token) {
    const std::byte* const row = from.rows + token * shape.row_bytes();
    const std::vector<float> channels = channels_of(shape, tiles, from.head, row);
    for (std::size_t c = 0; c < values.size(); ++c) {
      if (!std::isfinite(channels[c])) return false;
      values[c].push_back(channels[c]);
    }
  }
  std::fill_n(page.page, ValueTiles::page_bytes(page.bits, page.channels), std::byte{0});
  for (int c = 0; c < page.channels; ++c) {
    build_channel(page, c, values[static_cast<std::size_t>(c)]);
  }
  return true;
}

template <typename Params>
void build(const Params& p, const std::vector<WholePage>& pages) {
  build_pages(p, pages, [&](const WholePage& page) {
    return build_page(p.shape, p.values.tiles, page,
                      tile_page(p.values, p.shape.head_dim, page.head, page.sequence, page.number));
  });
}

// Attention of one KV head of a token; all weights are relative to estimated_lse.
class HeadTiles {
 public:
  HeadTiles(const AttendTilesParams& p, std::int64_t number, int head)
      : p_(p),
        token_(p.batch.tokens[number]),
        head_(head),
        place_(number * p.shape.kv_heads + head),
        is_bad_(p.selected.heads[place_].bad != 0) {
    for (int g = 0; g < p.shape.group() && !is_bad_; ++g) weights_.push_back(weights_of(g));
    if (!is_bad_) choose();
  }

  void report(const std::function<void(const PageRead&)>& on_page) const {
    std::int32_t pages = 0;
    for (std::size_t page = 0; page < is_read_.size(); ++page) {
      if (!is_read_[page]) continue;
      ++pages;
      on_page({token_.sequence, head_, static_cast<std::int64_t>(page),
               p_.values.tiles.page_bytes(p_.shape.head_dim)});
    }
    if (p_.pages_read != nullptr) p_.pages_read[place_] = pages;
  }

  // Writes the partial of one query head to the output.
  void attend(int g) const {
    const int d = p_.shape.head_dim;
    const std::int64_t query = place_ * p_.shape.group() + g;
    const int channels = p_.values.tiles.channels(d);
    std::vector<double> sums(static_cast<std::size_t>(channels));
    double mass = 0.0;
    double read = 0.0;  // weights of tokens whose pages are read
    for (std::size_t at = 0; at < static_cast<std::size_t>(tokens()); ++at) {
      const double weight = weights_[static_cast<std::size_t>(g)][at];
      mass += weight;
      if (!is_read_[at / kPageTokens]) continue;
      read += weight;
      for (int c = 0; c < channels && weight > 0.0; ++c) {
        sums[static_cast<std::size_t>(c)] += weight * value(at, c);
      }
    }
    sums = mass > 0.0 ? whole(sums, read, mass) : std::vector<double>(static_cast<std::size_t>(d));
    const double reference = static_cast<double>(p_.estimated_lse[query]);
    std::vector<float> out;
    for (const double sum : sums) out.push_back(mass > 0.0 ? static_cast<float>(sum / mass) : 0.0f);
    const float lse = static_cast<float>(mass > 0.0 ? reference + std::log(mass) : kNone);
    if (p_.merge) {
      merge_partials({1, d, out.data(), &lse, p_.out + query * d, p_.lse + query});
    } else {
      std::copy(out.begin(), out.end(), p_.out + query * d);
      p_.lse[query] = lse;
    }
  }

 private:
  std::int64_t tokens() const { return is_bad_ ? 0 : token_.page_first(); }

  // Weights of all tokens; selected tokens have weight 0.
  std::vector<double> weights_of(int g) const {
    const std::int64_t query = place_ * p_.shape.group() + g;
    const float* const row = p_.logits.floats() + query * p_.logits.stride;
    const auto lse = static_cast<double>(p_.estimated_lse[query]);
    std::vector<double> weights;
    for (std::int64_t at = 0; at < token_.page_first(); ++at) {
      const auto x = static_cast<double>(row[at]);
      weights.push_back(p_.weighed ? x : std::exp(x - lse));
    }
    const std::int32_t* const taken = p_.selected.positions + place_ * p_.selected.capacity;
    for (std::int32_t i = 0; i < p_.selected.heads[place_].count; ++i) {
      weights[static_cast<std::size_t>(taken[i])] = 0.0;
    }
    return weights;
  }

  // Class of a page weight: pages of one class are all read, or none of them.
  static std::uint32_t class_of(double weight) {
    return std::bit_cast<std::uint32_t>(static_cast<float>(weight)) >> 16;
  }

  void choose() {
    std::vector<double> pages(static_cast<std::size_t>(token_.pages()));
    for (const std::vector<double>& weights : weights_) {
      for (std::size_t at = 0; at < weights.size(); ++at) pages[at / kPageTokens] += weights[at];
    }
    std::vector<double> sorted = pages;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    double all = 0.0;
    for (const double weight : sorted) all += weight;
    double sum = 0.0;
    std::uint32_t lightest = std::numeric_limits<std::uint32_t>::max();
    for (const double weight : sorted) {
      if (sum >= all * static_cast<double>(p_.share)) break;
      sum += weight;
      lightest = class_of(weight);
    }
    if (p_.share >= 1.0f) lightest = 0;
    for (const double weight : pages) is_read_.push_back(class_of(weight) >= lightest);
  }

  double value(std::size_t at, int channel) const {
    const auto page = static_cast<std::int64_t>(at / kPageTokens);
    return tile_page(p_.values, p_.shape.head_dim, head_, token_.sequence, page)
        .value(static_cast<int>(at % kPageTokens), channel);
  }

  // The sums of all channels: of the tokens that were read and of the others, whose values are the
  // mean. `sums`: of the channels of tiles, of tokens that weigh `read` of `mass`.
  std::vector<double> whole(std::vector<double> sums, double read, double mass) const {
    const int d = p_.shape.head_dim;
    const ValueTiles& tiles = p_.values.tiles;
    std::vector<double> mean;
    for (int c = 0; c < d; ++c) {
      mean.push_back(static_cast<double>(p_.value_sums[place_ * d + c]) /
                     static_cast<double>(token_.count()));
    }
    double by_mean = mass - read;  // the weight of the mean
    if (tiles.basis != nullptr) {
      const std::vector<double> of_mean = projected(tiles, d, head_, mean);
      std::vector<double> all(static_cast<std::size_t>(d));
      const float* vector = tiles.basis_of(d, head_);
      for (std::size_t i = 0; i < of_mean.size(); ++i, vector += d) {
        const double beside = sums[i] - read * of_mean[i];
        for (int c = 0; c < d; ++c) {
          all[static_cast<std::size_t>(c)] += beside * static_cast<double>(vector[c]);
        }
      }
      sums = std::move(all);
      by_mean = mass;
    }
    for (int c = 0; c < d && by_mean > 0.0; ++c) {
      sums[static_cast<std::size_t>(c)] += by_mean * mean[static_cast<std::size_t>(c)];
    }
    return sums;
  }

  const AttendTilesParams& p_;
  const BatchToken token_;
  int head_;
  std::int64_t place_;  // into [tokens, kv_heads]
  bool is_bad_;
  std::vector<std::vector<double>> weights_;  // [group][page_first]
  std::vector<bool> is_read_;                 // [pages]
};

}  // namespace

void build_values(const BuildValuesParams& params) { build(params, pages_of_run(params)); }

void build_values_batch(const BuildValuesBatchParams& params) {
  build(params, pages_of_batch(params));
}

void attend_tiles(const AttendTilesParams& p, const std::function<void(const PageRead&)>& on_page) {
  for (std::int64_t token = 0; token < p.batch.count; ++token) {
    for (int head = 0; head < p.shape.kv_heads; ++head) {
      const HeadTiles tiles(p, token, head);
      tiles.report(on_page);
      for (int g = 0; g < p.shape.group(); ++g) tiles.attend(g);
    }
  }
}

void merge_partials(const MergePartialsParams& p) {
  for (std::int64_t row = 0; row < p.rows; ++row) {
    const auto here = static_cast<double>(p.from_lse[row]);
    const auto before = static_cast<double>(p.lse[row]);
    if (here == kNone) continue;
    const double highest = std::max(here, before);
    const double lse = highest + std::log(std::exp(here - highest) + std::exp(before - highest));
    const double weight = std::exp(here - lse);
    const double kept = std::exp(before - lse);
    for (std::int64_t at = row * p.head_dim; at < (row + 1) * p.head_dim; ++at) {
      const double old = kept == 0.0 ? 0.0 : kept * static_cast<double>(p.out[at]);
      p.out[at] = static_cast<float>(old + weight * static_cast<double>(p.from[at]));
    }
    p.lse[row] = static_cast<float>(lse);
  }
}

}  // namespace sluice::cpu::reference
