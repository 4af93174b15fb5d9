#include "cpu/reference/index.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cpu/reference/ops.h"
#include "cpu/runtime/whole_pages.h"
#include "lib/check.h"
#include "lib/code_fit.h"
#include "lib/hadamard.h"
#include "sluice/half.h"

namespace sluice::cpu::reference {
namespace {

// Pointers to one channel of a page.
struct Channel {
  std::byte* codes;
  std::uint16_t* scale;
  std::uint16_t* zero;
};

Channel channel_of(const KeyTiles& tiles, int head_dim, std::int64_t head, std::int64_t slot,
                   std::int64_t page, int channel) {
  std::uint16_t* const scale = tiles.scales_of(head_dim, head, slot, page) + channel;
  return {tiles.codes_of(head_dim, head, slot) +
              KeyTiles::place_of(tiles.bits, page, static_cast<std::size_t>(channel)) *
                  tiles.code_bytes(),
          scale, scale + head_dim};
}

// Byte and bit offset of a token's code.
struct CodePlace {
  std::size_t byte;
  int shift;
};

// Place of a token in an array of `bits` bits per token.
CodePlace place_of(int bits, std::size_t token) {
  const std::size_t bytes = static_cast<std::size_t>(kPageTokens * bits / 8);
  return {token % bytes, static_cast<int>(token / bytes) * bits};
}

// Writes a code; its bits must be zero before.
void write_code(int bits, std::byte* codes, std::size_t token, unsigned code) {
  const auto write = [&](int count, std::byte* to, unsigned number) {
    const CodePlace place = place_of(count, token);
    to[place.byte] |= static_cast<std::byte>(number << place.shift);
  };
  if (bits != 3) return write(bits, codes, code);
  write(2, codes, code & 3);
  write(1, codes + 32, code >> 2);
}

int read_code(int bits, const std::byte* codes, std::size_t token) {
  const auto read = [&](int count, const std::byte* from) {
    const CodePlace place = place_of(count, token);
    return (static_cast<int>(from[place.byte]) >> place.shift) & ((1 << count) - 1);
  };
  return bits != 3 ? read(bits, codes) : read(2, codes) + 4 * read(1, codes + 32);
}

void build_channel(const KeyTiles& tiles, const Channel& channel, const std::vector<float>& keys) {
  const auto [low, high] = std::minmax_element(keys.begin(), keys.end());
  const int largest = (1 << tiles.bits) - 1;
  const float limit = 65504.0f;
  const float range = *high - *low;
  const float first = tiles.rotated ? *low + range * tiles.margin() : *low;
  const float step = range * tiles.kept_range() / static_cast<float>(largest);
  *channel.zero = float_to_f16(std::clamp(first, -limit, limit));
  *channel.scale = float_to_f16(std::clamp(step, -limit, limit));
  const float zero = f16_to_float(*channel.zero);
  const float scale = f16_to_float(*channel.scale);
  std::fill_n(channel.codes, tiles.code_bytes(), std::byte{0});
  CodeFit fit;
  for (std::size_t token = 0; token < keys.size(); ++token) {
    const float exact = scale > 0.0f ? (keys[token] - zero) * (1.0f / scale) : 0.0f;
    const auto code =
        static_cast<unsigned>(std::lrint(std::clamp(exact, 0.0f, static_cast<float>(largest))));
    write_code(tiles.bits, channel.codes, token, code);
    fit.add(keys[token], static_cast<int>(code));
  }
  if (!KeyTiles::fitted(tiles.bits)) return;
  const auto as_half = [&](double x) {
    return float_to_f16(std::clamp(static_cast<float>(x), -limit, limit));
  };
  *channel.scale = as_half(fit.scale(kPageTokens));
  *channel.zero = as_half(fit.zero(kPageTokens, static_cast<double>(f16_to_float(*channel.scale))));
}

// The smallest f16 >= x, found by trying.
std::uint16_t f16_at_least(float x) {
  const float limited = std::clamp(x, -65504.0f, 65504.0f);
  std::uint16_t best = float_to_f16(limited);
  for (int step = -2; step <= 2; ++step) {
    const auto candidate = static_cast<std::uint16_t>(float_to_f16(limited) + step);
    const float value = f16_to_float(candidate);
    if (!(value >= limited)) continue;
    if (!(f16_to_float(best) >= limited) || value < f16_to_float(best)) best = candidate;
  }
  return f16_to_float(best) >= limited ? best : std::uint16_t{0};
}

// A page of one KV head.
struct IndexPage {
  std::int64_t head;
  std::int64_t slot;
  std::int64_t page;
};

void build_bounds(const PageBounds& bounds, int head_dim, const IndexPage& at, int channel,
                  const std::vector<float>& keys) {
  std::uint16_t* to = bounds.of(head_dim, at.head, at.slot, at.page) + channel;
  for (int part = 0; part < kBoundsPerPage; ++part, to += 2 * head_dim) {
    const auto first = keys.begin() + part * kBoundTokens;
    const auto [low, high] = std::minmax_element(first, first + kBoundTokens);
    to[0] = static_cast<std::uint16_t>(f16_at_least(-*low) ^ 0x8000u);
    to[head_dim] = f16_at_least(*high);
  }
}

// Rotates every token of [head_dim][tokens].
void rotate_tokens(std::vector<std::vector<float>>& keys) {
  std::vector<float> token(keys.size());
  for (std::size_t t = 0; t < kPageTokens; ++t) {
    for (std::size_t c = 0; c < keys.size(); ++c) {
      token[c] = std::clamp(keys[c][t], -kMostRotated, kMostRotated);
    }
    rotate(token.data(), std::ssize(token), Rotation::of(static_cast<int>(keys.size())));
    for (std::size_t c = 0; c < keys.size(); ++c) keys[c][t] = token[c];
  }
}

// Builds a page from its rows. Returns false and builds nothing if a key is NaN or Inf.
bool build_page(const KvShape& shape, const KeyIndexView& index, const IndexPage& at,
                const std::byte* rows) {
  std::vector<std::vector<float>> keys(static_cast<std::size_t>(shape.head_dim));
  for (int t = 0; t < kPageTokens; ++t) {
    const std::byte* const row = rows + static_cast<std::size_t>(t) * shape.row_bytes();
    for (std::size_t c = 0; c < keys.size(); ++c) {
      keys[c].push_back(key_element(shape, row, static_cast<std::int64_t>(c)));
      if (!std::isfinite(keys[c].back())) return false;
    }
  }
  for (int c = 0; c < shape.head_dim && index.bounds.bounds != nullptr; ++c) {
    build_bounds(index.bounds, shape.head_dim, at, c, keys[static_cast<std::size_t>(c)]);
  }
  if (index.tiles.codes == nullptr) return true;
  if (index.tiles.rotated) rotate_tokens(keys);
  for (int c = 0; c < shape.head_dim; ++c) {
    build_channel(index.tiles,
                  channel_of(index.tiles, shape.head_dim, at.head, at.slot, at.page, c),
                  keys[static_cast<std::size_t>(c)]);
  }
  return true;
}

template <typename Params>
void build(const Params& p, const std::vector<WholePage>& pages) {
  build_pages(p, pages, [&](const WholePage& page) {
    const std::int64_t slot = p.index.slot(page.sequence, page.number);
    return build_page(p.shape, p.index, {page.head, slot, page.number}, page.rows);
  });
}

// The estimates of one KV head of one token.
class HeadEstimate {
 public:
  HeadEstimate(const EstimateParams& p, std::int64_t number, int head)
      : p_(p), token_(p.batch.tokens[number]), number_(number), head_(head) {
    if (p.method == Selector::newest) {
      first_ = token_.page_first();
    } else if (p.candidates == nullptr) {
      positions_.resize(static_cast<std::size_t>(token_.page_first()));
      std::iota(positions_.begin(), positions_.end(), 0);
    } else {
      const std::int64_t at = number * p.shape.kv_heads + head;
      const std::int32_t* const first = p.candidates->positions + at * p.candidates->capacity;
      positions_.assign(first, first + p.candidates->heads[at].count);
    }
    if (p.skip_newest) return;
    for (std::int64_t t = token_.page_first(); t < token_.count(); ++t) positions_.push_back(t);
  }

  void tell(const EstimateReads& reads) const {
    const int parts = ReadPattern::parts(p_.shape.group(), reads.pattern.estimate_queries);
    const std::vector<std::int64_t> pages = pages_read(reads.pattern);
    const std::size_t key_bytes = p_.shape.value_offset();
    const auto channels = static_cast<int>(channels_of().size());
    const std::size_t bytes = p_.method == Selector::quest ? p_.index.bounds.page_bytes(channels)
                                                           : p_.index.tiles.page_bytes(channels);
    for (int part = 0; part < parts; ++part) {
      for (const std::int64_t page : pages) {
        reads.on_page({token_.sequence, head_, page, bytes});
      }
      for (const std::int64_t position : positions_) {
        if (!indexed(position)) reads.on_key(row(position), key_bytes);
      }
    }
    const std::int64_t at = number_ * p_.shape.kv_heads + head_;
    if (p_.pages_read != nullptr) {
      p_.pages_read[at] = parts * static_cast<std::int32_t>(pages.size());
    }
    if (p_.resident != nullptr) p_.resident[at] = resident_candidates();
  }

  void write(int g) const {
    const std::int64_t row = number_ * p_.shape.query_heads + head_ * p_.shape.group() + g;
    const float* const q = query(g);
    const std::vector<int> channels = channels_of();
    const std::vector<double> of_tiles = tile_query(q);
    const double divisor = temperature(q, channels);
    float* to = p_.logits.floats() + row * p_.logits.stride + first_;
    for (const std::int64_t position : positions_) {
      const double dot = !indexed(position) ? row_product(q, position, channels)
                         : p_.method == Selector::quest
                             ? bound_product(q, position)
                             : tile_product(of_tiles, position, channels);
      *to++ = static_cast<float>(divisor > 0.0 || std::isnan(divisor) ? dot / divisor : 0.0);
    }
  }

 private:
  bool indexed(std::int64_t position) const {
    return p_.method != Selector::exact && position < token_.page_first();
  }
  std::int32_t resident_candidates() const {
    return static_cast<std::int32_t>(
        std::count_if(positions_.begin(), positions_.end(), [&](std::int64_t position) {
          return position < token_.page_first() &&
                 p_.rows.is_on_device(p_.rows.page(token_.sequence, position / kPageTokens));
        }));
  }
  // Pages of the index that are read, including those that share a tile.
  std::vector<std::int64_t> pages_read(const ReadPattern& pattern) const {
    const std::int64_t unit = p_.method == Selector::quest ? 1 : pattern.tile_pages;
    std::vector<std::int64_t> pages;
    std::int64_t last = -1;
    for (const std::int64_t position : positions_) {
      const std::int64_t tile = position / kPageTokens / unit;
      if (!indexed(position) || tile == last) continue;
      last = tile;
      for (std::int64_t page = tile * unit; page < (tile + 1) * unit; ++page) pages.push_back(page);
    }
    return pages;
  }
  const std::byte* row(std::int64_t position) const {
    return p_.rows.row(token_.sequence, head_, position,
                       static_cast<std::int64_t>(p_.shape.row_bytes()));
  }
  const float* query(int g) const {
    return p_.q + number_ * p_.q_stride + (head_ * p_.shape.group() + g) * p_.shape.head_dim;
  }

  // The channels that SparQ reads; all channels for other methods.
  std::vector<int> channels_of() const {
    const int d = p_.shape.head_dim;
    std::vector<int> order(static_cast<std::size_t>(d));
    std::iota(order.begin(), order.end(), 0);
    if (p_.method != Selector::sparq) return order;
    const auto size = [&](int channel) {
      float sum = 0.0f;
      for (int g = 0; g < p_.shape.group(); ++g) sum += std::fabs(query(g)[channel]);
      return sum;
    };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return size(a) > size(b); });
    order.resize(static_cast<std::size_t>(std::min(p_.channels, d)));
    return order;
  }

  double temperature(const float* q, const std::vector<int>& channels) const {
    const int d = p_.shape.head_dim;
    double all = 0.0;
    double kept = 0.0;
    for (int c = 0; c < d; ++c) all += std::fabs(static_cast<double>(q[c]));
    for (const int c : channels) kept += std::fabs(static_cast<double>(q[c]));
    if (static_cast<int>(channels.size()) == d) return std::sqrt(d);
    return std::sqrt(d * kept / all);
  }

  double row_product(const float* q, std::int64_t position,
                     const std::vector<int>& channels) const {
    const std::byte* const keys = row(position);
    double sum = 0.0;
    for (const int c : channels) {
      sum += static_cast<double>(q[c]) * static_cast<double>(key_element(p_.shape, keys, c));
    }
    return sum;
  }

  // A query as the tiles hold keys.
  std::vector<double> tile_query(const float* q) const {
    std::vector<double> of_tiles(q, q + p_.shape.head_dim);
    if (p_.index.tiles.rotated) {
      check(p_.method != Selector::sparq, "sparq reads unrotated tiles");
      rotate(of_tiles.data(), std::ssize(of_tiles), Rotation::of(p_.shape.head_dim));
    }
    return of_tiles;
  }

  double tile_product(const std::vector<double>& q, std::int64_t position,
                      const std::vector<int>& channels) const {
    const KeyTiles& tiles = p_.index.tiles;
    const std::int64_t page = position / kPageTokens;
    const std::int64_t slot = p_.index.slot(token_.sequence, page);
    const auto token = static_cast<std::size_t>(position % kPageTokens);
    double sum = 0.0;
    for (const int c : channels) {
      const Channel at = channel_of(tiles, p_.shape.head_dim, head_, slot, page, c);
      const int code = read_code(tiles.bits, at.codes, token);
      sum += q[static_cast<std::size_t>(c)] * (static_cast<double>(f16_to_float(*at.zero)) +
                                               static_cast<double>(f16_to_float(*at.scale)) * code);
    }
    return sum;
  }

  double bound_product(const float* q, std::int64_t position) const {
    const int d = p_.shape.head_dim;
    const std::int64_t page = position / kPageTokens;
    const std::int64_t slot = p_.index.slot(token_.sequence, page);
    const std::uint16_t* const low =
        p_.index.bounds.of(d, head_, slot, page) + position % kPageTokens / kBoundTokens * 2 * d;
    double sum = 0.0;
    for (int c = 0; c < d; ++c) {
      const auto x = static_cast<double>(q[c]);
      sum += std::max(x * static_cast<double>(f16_to_float(low[c])),
                      x * static_cast<double>(f16_to_float(low[d + c])));
    }
    return sum;
  }

  const EstimateParams& p_;
  const BatchToken token_;
  std::int64_t number_;
  int head_;
  std::vector<std::int64_t> positions_;  // in the order of the logits
  std::int64_t first_ = 0;               // logit
};

}  // namespace

void build_index(const BuildIndexParams& params) { build(params, pages_of_run(params)); }

void build_batch(const BuildBatchParams& params) { build(params, pages_of_batch(params)); }

void estimate(const EstimateParams& p, const EstimateReads& reads) {
  for (std::int64_t token = 0; token < p.batch.count; ++token) {
    for (int head = 0; head < p.shape.kv_heads; ++head) {
      const HeadEstimate of_head(p, token, head);
      of_head.tell(reads);
      for (int g = 0; g < p.shape.group(); ++g) of_head.write(g);
    }
  }
}

}  // namespace sluice::cpu::reference
