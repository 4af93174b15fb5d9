// Double Sparsity (Yang et al. 2024, arXiv 2408.07092, section 3): a few label channels of every
// key, in 4 bits with a scale per token, stand for the key.
//
//   logit = sum over label channels of q_c k_c / sqrt(head_dim)
//
// The paper finds the label channels by a calibration before the run, in the authors' code by the
// mean magnitude of queries, keys or their products. Here they are those that vary most over the
// first page of the sequence, sinks left out, so that a model needs no such file. There every query
// head chooses for itself, and labels of queries are in 4 bits, too; here a KV head chooses for its
// group, and queries are not coded.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "lib/scorers/own.h"
#include "sluice/element.h"
#include "sluice/errors.h"

namespace sluice::scorers {
namespace {

constexpr int kLevels = 15;  // the highest code of 4 bits
constexpr int kSinks = 4;    // first tokens, whose keys are unlike all others

// The memory of a page: f16 scale [kPageTokens], f16 lowest [kPageTokens], then the codes of every
// token, two label channels in a byte, the first in the lower half.
struct Labels {
  int channels = 0;

  std::size_t token_bytes() const { return static_cast<std::size_t>((channels + 1) / 2); }
  std::size_t page_bytes() const {
    return kPageTokens * (2 * sizeof(std::uint16_t) + token_bytes());
  }
  static std::size_t lowest(int token) {
    return static_cast<std::size_t>(kPageTokens + token) * sizeof(std::uint16_t);
  }
  static std::size_t scale(int token) {
    return static_cast<std::size_t>(token) * sizeof(std::uint16_t);
  }
  std::size_t codes(int token) const {
    return kPageTokens * 2 * sizeof(std::uint16_t) +
           static_cast<std::size_t>(token) * token_bytes();
  }
};

float rounded(std::byte* to, float value) {
  write_element(to, DType::f16, value);
  return read_element(to, DType::f16);
}

void write_labels(const std::vector<float>& key, const Labels& labels, int token, std::byte* page) {
  const auto [least, most] = std::minmax_element(key.begin(), key.end());
  const float lowest = rounded(page + Labels::lowest(token), *least);
  const float scale = rounded(page + Labels::scale(token), (*most - *least) / kLevels);
  std::byte* const codes = page + labels.codes(token);
  std::fill_n(codes, labels.token_bytes(), std::byte{0});
  for (std::size_t i = 0; i < key.size(); ++i) {
    const float level = scale > 0.0f ? std::round((key[i] - lowest) / scale) : 0.0f;
    const auto code = static_cast<unsigned>(std::clamp(level, 0.0f, float{kLevels}));
    codes[i / 2] |= static_cast<std::byte>(code << (i % 2 * 4));
  }
}

// The channels that vary most over a page's tokens, ascending.
std::vector<int> widest(const std::byte* rows, const KvShape& shape, int count) {
  std::vector<double> variance;
  for (int c = 0; c < shape.head_dim; ++c) {
    double sum = 0.0;
    double squares = 0.0;
    for (int token = kSinks; token < kPageTokens; ++token) {
      const std::byte* const row = rows + static_cast<std::size_t>(token) * shape.row_bytes();
      const double k = read_element(row, shape.rows.key(), c);
      sum += k;
      squares += k * k;
    }
    const double tokens = kPageTokens - kSinks;
    variance.push_back(squares / tokens - sum * sum / (tokens * tokens));
  }
  std::vector<int> channels(static_cast<std::size_t>(shape.head_dim));
  std::iota(channels.begin(), channels.end(), 0);
  std::stable_sort(channels.begin(), channels.end(), [&](int a, int b) {
    return variance[static_cast<std::size_t>(a)] > variance[static_cast<std::size_t>(b)];
  });
  channels.resize(static_cast<std::size_t>(count));
  std::sort(channels.begin(), channels.end());
  return channels;
}

class DoubleSparsity : public Scorer {
 public:
  DoubleSparsity()
      : Scorer({"double_sparsity",
                ScorerInfo::Kind::logits,
                {{.name = "r", .least = 1.0, .range = "1 to head_dim"}}}) {}

  void check(const ScorerUse& use) const override {
    if (labels(use).channels <= use.shape.head_dim) return;
    throw Error(ErrorCode::usage,
                "policy: the r of double_sparsity is " + std::to_string(labels(use).channels) +
                    "; it has to be from 1 to " + std::to_string(use.shape.head_dim) +
                    ", the model's head_dim");
  }

  // Of a sequence: the numbers of the label channels, a byte each, [kv_heads, channels].
  IndexNeeds needs(const ScorerUse& use) const override {
    IndexNeeds needs;
    needs.page_bytes = labels(use).page_bytes();
    needs.sequence_bytes = static_cast<std::size_t>(use.shape.kv_heads * labels(use).channels);
    return needs;
  }

  std::uint64_t bytes_read(const ScorerUse& use, const ScanExtent& extent) const override {
    if (extent.pages == 0) return 0;
    return static_cast<std::uint64_t>(labels(use).channels) +
           static_cast<std::uint64_t>(extent.pages) * labels(use).page_bytes();
  }

  void build(const BuildScorer& call) const override {
    const KvShape& shape = call.use.shape;
    const Labels labels = this->labels(call.use);
    const auto row_bytes = static_cast<std::int64_t>(shape.row_bytes());
    for (std::int64_t i = 0; i < call.pages.count; ++i) {
      if (!call.pages.exists(i)) continue;
      const std::int32_t sequence = call.pages.sequence(i);
      for (int head = 0; head < shape.kv_heads; ++head) {
        const std::byte* row = call.pages.rows(i, head, row_bytes);
        std::byte* const numbers = call.memory.sequence(sequence) + head * labels.channels;
        if (call.pages.number(i) == 0) {
          const std::vector<int> channels = widest(row, shape, labels.channels);
          std::transform(channels.begin(), channels.end(), numbers,
                         [](int c) { return static_cast<std::byte>(c); });
        }
        std::byte* const page = call.memory.page(head, sequence, call.pages.number(i));
        for (int token = 0; token < kPageTokens; ++token, row += row_bytes) {
          std::vector<float> key;
          for (int c = 0; c < labels.channels; ++c) {
            key.push_back(read_element(row, shape.rows.key(), std::to_integer<int>(numbers[c])));
          }
          write_labels(key, labels, token, page);
        }
      }
    }
  }

  void score(const RunScorer& call) const override {
    for (std::int64_t i = 0; i < call.batch.count; ++i) {
      if (call.batch.tokens[i].pages() == 0) continue;
      for (int head = 0; head < call.use.shape.kv_heads; ++head) score_head(call, i, head);
    }
  }

 private:
  static Labels labels(const ScorerUse& use) {
    return {static_cast<int>(use.parameter("r", std::max(1, use.shape.head_dim / 4)))};
  }

  // Every page is read once for all query heads that share it.
  static void score_head(const RunScorer& call, std::int64_t i, int head) {
    const KvShape& shape = call.use.shape;
    const Labels labels = DoubleSparsity::labels(call.use);
    const auto count = static_cast<std::size_t>(labels.channels);
    const std::byte* const numbers =
        call.reads->sequence(i, head, static_cast<std::size_t>(head) * count, count);
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    std::vector<float> q;  // [group, channels], scaled
    std::vector<float> sums;
    for (int g = 0; g < shape.group(); ++g) {
      const float* const own =
          call.q + i * call.q_stride + (head * shape.group() + g) * shape.head_dim;
      for (std::size_t c = 0; c < count; ++c) {
        q.push_back(own[std::to_integer<std::size_t>(numbers[c])] * scale);
      }
      sums.push_back(std::accumulate(q.end() - labels.channels, q.end(), 0.0f));
    }
    std::vector<float> codes(count);
    for (std::int64_t number = 0; number < call.batch.tokens[i].pages(); ++number) {
      const std::byte* const page = call.reads->page(i, head, number, 0, labels.page_bytes());
      for (int token = 0; token < kPageTokens; ++token) {
        const std::byte* const bytes = page + labels.codes(token);
        for (std::size_t c = 0; c < count; ++c) {
          codes[c] = static_cast<float>(std::to_integer<int>(bytes[c / 2] >> (c % 2 * 4)) & 15);
        }
        const float step = read_element(page + Labels::scale(token), DType::f16);
        const float lowest = read_element(page + Labels::lowest(token), DType::f16);
        for (int g = 0; g < shape.group(); ++g) {
          const auto at = static_cast<std::size_t>(g);
          const float dot =
              std::inner_product(codes.begin(), codes.end(), q.begin() + g * labels.channels, 0.0f);
          call.logits.row<float>(i * shape.query_heads + head * shape.group() +
                                 g)[number * kPageTokens + token] = lowest * sums[at] + step * dot;
        }
      }
    }
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_double_sparsity() { return std::make_shared<DoubleSparsity>(); }

}  // namespace sluice::scorers
