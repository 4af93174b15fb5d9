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
  int head_dim;
  int bits;

  std::uint16_t& scale(int channel) const { return ValueTiles::scales(page)[channel]; }
  std::uint16_t& zero(int channel) const { return ValueTiles::scales(page)[head_dim + channel]; }
  std::uint32_t& word(const ValueTiles::Place& place, int channel) const {
    return ValueTiles::words(page, head_dim)[place.word * head_dim + channel];
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
  return {view.tiles.page(head_dim, head, view.slot(sequence, page), page), head_dim,
          view.tiles.bits};
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

// Builds a page from its rows. Returns false and writes nothing if a value is NaN or Inf.
bool build_page(const KvShape& shape, const TilePage& page, const std::byte* rows) {
  const int d = shape.head_dim;
  std::vector<std::vector<float>> values(static_cast<std::size_t>(d));
  for (std::size_t token = 0; token < kPageTokens; ++token) {
    const std::byte* const row = rows + token * shape.row_bytes();
    for (int c = 0; c < d; ++c) {
      const float value = value_element(shape, row, c);
      if (!std::isfinite(value)) return false;
      values[static_cast<std::size_t>(c)].push_back(value);
    }
  }
  std::fill_n(page.page, ValueTiles::page_bytes(page.bits, d), std::byte{0});
  for (int c = 0; c < d; ++c) build_channel(page, c, values[static_cast<std::size_t>(c)]);
  return true;
}

template <typename Params>
void build(const Params& p, const std::vector<WholePage>& pages) {
  build_pages(p, pages, [&](const WholePage& page) {
    return build_page(p.shape,
                      tile_page(p.values, p.shape.head_dim, page.head, page.sequence, page.number),
                      page.rows);
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
    std::vector<double> sums(static_cast<std::size_t>(d));
    double mass = 0.0;
    for (std::size_t at = 0; at < static_cast<std::size_t>(tokens()); ++at) {
      const double weight = weights_[static_cast<std::size_t>(g)][at];
      mass += weight;
      for (int c = 0; c < d && weight > 0.0; ++c) {
        sums[static_cast<std::size_t>(c)] += weight * value(at, c);
      }
    }
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
    if (!is_read_[at / kPageTokens]) {
      return static_cast<double>(p_.value_sums[place_ * p_.shape.head_dim + channel]) /
             static_cast<double>(token_.count());
    }
    return tile_page(p_.values, p_.shape.head_dim, head_, token_.sequence, page)
        .value(static_cast<int>(at % kPageTokens), channel);
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
