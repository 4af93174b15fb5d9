// H2O (Zhang et al. 2023, arXiv 2306.14048, section 4.1, algorithm 1): every KV head keeps the
// tokens that queries attended to most, its heavy hitters, and the newest tokens, and drops the
// others for good. The two get equal parts of the budget (section 5.1).
//
//   sum_t += softmax(q k / sqrt(head_dim))_t, for every query, over the tokens kept until then
//
//   kept: the newest rows / 2 tokens, and before them those with the largest sums, `rows` in all
//
// A prompt's queries see every token before them, and the first token after the prompt drops what
// is too much, as in the authors' code; from then on every new token drops one.
//
// Differences from the paper:
// - The paper keeps sums per query head; here the heads of a group share rows, so their weights are
//   added.
// - Algorithm 1 drops tokens while it reads the prompt, one for each.
// - `rows` is a number, where the paper's budget is a share of the prompt.
// - Rows stay in host memory: an answer that is taken back takes back what it dropped, and another
//   prompt attends to every row, as all prompts do here. Its weights are added among the tokens
//   that are still kept, so nothing that was dropped is kept again.
// - Queries that were not seen add nothing: those of a saved session, of an answer that was cut in
//   its middle, and of tokens that another policy decoded. A prompt that is cut forgets all sums.
//   Without any sums everything is kept, until another prompt.
//
// A token's key cannot be read before the next step, so its query waits until then. This drops what
// adding it at once would drop, and a query that is taken back before has changed nothing.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "lib/scorers/kept.h"
#include "lib/scorers/own.h"
#include "sluice/batch.h"
#include "sluice/element.h"

namespace sluice::scorers {
namespace {

constexpr float kDropped = -1.0f;        // a sum; all others are at least 0
constexpr std::int64_t kKeyBlock = 32;   // keys that are multiplied at a time, in registers
constexpr std::int64_t kQueryBlock = 8;  // tokens whose queries share what was read of a block

// What a sequence's memory begins with. Zero: no query was seen.
struct HeavyNotes {
  std::int64_t end = 0;      // of the last prompt; there are sums of the tokens before it
  std::int64_t chosen = 0;   // 1: there are kept tokens
  std::int64_t added = 0;    // queries before this position are in the sums of kept tokens
  std::int64_t waiting = 0;  // queries from there on, which are not
};

struct StoredToken {
  std::int32_t position = 0;
  float sum = 0.0f;
};

struct HeavyToken : StoredToken {
  const std::byte* key = nullptr;  // null: not read yet
};

// Behind the notes: f32 queries that wait [kMostBatch, query_heads, head_dim], StoredTokens
// [kv_heads, rows] by position (the first min(rows, added) are valid), and the prompt's f32 sums
// [kv_heads, context].
struct HeavyLayout {
  KvShape shape;
  std::int64_t rows = 0;
  std::int64_t context = 0;

  explicit HeavyLayout(const ScorerUse& use)
      : shape(use.shape),
        rows(static_cast<std::int64_t>(use.parameter("rows", 1024))),
        context(use.context) {}
  std::int64_t newest() const { return rows / 2; }
  std::size_t query_bytes() const {
    return static_cast<std::size_t>(shape.group() * shape.head_dim) * sizeof(float);
  }
  std::size_t query(std::int64_t number, int head) const {
    return sizeof(HeavyNotes) +
           static_cast<std::size_t>(number * shape.kv_heads + head) * query_bytes();
  }
  std::size_t stored(int head) const {
    return query(kMostBatch, 0) + static_cast<std::size_t>(head * rows) * sizeof(StoredToken);
  }
  std::size_t sums(int head) const {
    return stored(shape.kv_heads) + static_cast<std::size_t>(head * context) * sizeof(float);
  }
  std::size_t bytes() const { return sums(shape.kv_heads); }
};

// The memory and keys of one KV head of a call's token.
struct HeavyHead {
  const ScorerReads* reads = nullptr;
  std::int64_t token = 0;
  int head = 0;

  template <typename T>
  T* memory(std::size_t offset, std::int64_t count) const {
    return reinterpret_cast<T*>(
        reads->sequence(token, head, offset, static_cast<std::size_t>(count) * sizeof(T)));
  }
  const std::byte* key(std::int64_t position) const { return reads->key(token, head, position); }
};

// Adds softmax(logits) to `weights`, and changes the logits. -Inf weighs nothing.
void add_softmax(std::span<float> logits, double* weights) {
  const float most = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (float& logit : logits) {
    logit = std::exp(logit - most);
    sum += logit;
  }
  const double share = 1.0 / sum;
  for (std::size_t t = 0; t < logits.size(); ++t) weights[t] += share * logits[t];
}

// A group's queries, scaled as logits are.
std::vector<float> scaled(const float* q, const KvShape& shape) {
  std::vector<float> queries(q, q + shape.group() * shape.head_dim);
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  for (float& value : queries) value *= scale;
  return queries;
}

// Keys as [blocks, head_dim, kKeyBlock], so that a block's dot products are computed side by side.
class KeyBlocks {
 public:
  KeyBlocks(const HeavyHead& head, const KvShape& shape, std::int64_t tokens)
      : head_dim_(shape.head_dim), blocks_((tokens + kKeyBlock - 1) / kKeyBlock) {
    keys_.resize(static_cast<std::size_t>(stride() * head_dim_));
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::byte* const key = head.key(t);
      float* const to = keys_.data() + t / kKeyBlock * head_dim_ * kKeyBlock + t % kKeyBlock;
      for (int c = 0; c < head_dim_; ++c)
        to[c * kKeyBlock] = read_element(key, shape.rows.key(), c);
    }
  }

  // Tokens, rounded up to whole blocks.
  std::int64_t stride() const { return blocks_ * kKeyBlock; }

  // The logits of `count` queries, [count, stride()].
  void logits(const float* queries, std::int64_t count, float* out) const {
    for (std::int64_t block = 0; block < blocks_; ++block) {
      const float* const keys = keys_.data() + block * head_dim_ * kKeyBlock;
      for (std::int64_t n = 0; n < count; ++n) {
        dots(queries + n * head_dim_, keys, out + n * stride() + block * kKeyBlock);
      }
    }
  }

 private:
  void dots(const float* q, const float* keys, float* out) const {
    float sums[kKeyBlock] = {};
    for (int c = 0; c < head_dim_; ++c, keys += kKeyBlock) {
      for (int t = 0; t < kKeyBlock; ++t) sums[t] += q[c] * keys[t];
    }
    std::copy_n(sums, kKeyBlock, out);
  }

  int head_dim_;
  std::int64_t blocks_;
  std::vector<float> keys_;
};

// The kept tokens of a KV head, by position.
class HeavyHitters {
 public:
  HeavyHitters(const HeavyHead& head, const HeavyLayout& layout) : head_(head), layout_(layout) {}

  const std::vector<HeavyToken>& tokens() const { return tokens_; }

  // Reads the stored tokens, or those that a prompt's sums choose; adds the queries that wait, and
  // tokens up to `at` without theirs.
  void begin(const HeavyNotes& notes, std::int64_t at) {
    if (notes.chosen != 0) {
      read(std::min(layout_.rows, notes.added));
    } else {
      choose(notes.end);
    }
    for (std::int64_t n = 0; n < notes.waiting; ++n) {
      const auto* const q = head_.memory<const float>(
          layout_.query(n, head_.head), layout_.shape.group() * layout_.shape.head_dim);
      add(notes.added + n, q);
    }
    for (std::int64_t t = notes.chosen != 0 ? notes.added + notes.waiting : notes.end; t < at;
         ++t) {
      append(t);
      drop();
    }
  }

  // Adds the token at `position` and its query, and drops the one that is too much.
  void add(std::int64_t position, const float* q) {
    append(position);
    attend(scaled(q, layout_.shape));
    drop();
  }

  // Reads keys of later queries for another token of the call.
  void count_for(std::int64_t token) { head_.token = token; }

  void store() const {
    auto* const to = head_.memory<StoredToken>(layout_.stored(head_.head), std::ssize(tokens_));
    std::copy(tokens_.begin(), tokens_.end(), to);
  }

 private:
  void read(std::int64_t count) {
    const auto* const from = head_.memory<const StoredToken>(layout_.stored(head_.head), count);
    std::for_each(from, from + count,
                  [&](const StoredToken& token) { tokens_.push_back({token}); });
  }

  // The newest tokens before `end`, and those before them with the largest sums.
  void choose(std::int64_t end) {
    const auto* const sums = head_.memory<const float>(layout_.sums(head_.head), end);
    for (std::int64_t t = 0; t < end; ++t) {
      if (sums[t] != kDropped) tokens_.push_back({{static_cast<std::int32_t>(t), sums[t]}});
    }
    if (std::ssize(tokens_) <= layout_.rows) return;
    const auto newest = tokens_.end() - layout_.newest();
    const auto lost = tokens_.begin() + (layout_.rows - layout_.newest());
    std::stable_sort(tokens_.begin(), newest,
                     [](const auto& a, const auto& b) { return a.sum > b.sum; });
    tokens_.erase(lost, newest);
    std::sort(tokens_.begin(), tokens_.end(),
              [](const auto& a, const auto& b) { return a.position < b.position; });
  }

  void append(std::int64_t position) { tokens_.push_back({{static_cast<std::int32_t>(position)}}); }

  void attend(const std::vector<float>& queries) {
    const KvShape& shape = layout_.shape;
    const std::size_t count = tokens_.size();
    std::vector<float> logits(static_cast<std::size_t>(shape.group()) * count);
    std::vector<float> key(static_cast<std::size_t>(shape.head_dim));
    for (std::size_t i = 0; i < count; ++i) {
      HeavyToken& token = tokens_[i];
      if (token.key == nullptr) token.key = head_.key(token.position);
      for (int c = 0; c < shape.head_dim; ++c) {
        key[static_cast<std::size_t>(c)] = read_element(token.key, shape.rows.key(), c);
      }
      for (int g = 0; g < shape.group(); ++g) {
        logits[static_cast<std::size_t>(g) * count + i] =
            std::inner_product(key.begin(), key.end(), queries.begin() + g * shape.head_dim, 0.0f);
      }
    }
    std::vector<double> weights(count);
    for (int g = 0; g < shape.group(); ++g) {
      add_softmax({logits.data() + static_cast<std::size_t>(g) * count, count}, weights.data());
    }
    for (std::size_t i = 0; i < count; ++i) tokens_[i].sum += static_cast<float>(weights[i]);
  }

  // Of the tokens before the newest, the one with the smallest sum.
  void drop() {
    if (std::ssize(tokens_) <= layout_.rows) return;
    tokens_.erase(std::min_element(tokens_.begin(), tokens_.end() - layout_.newest(),
                                   [](const auto& a, const auto& b) { return a.sum < b.sum; }));
  }

  HeavyHead head_;
  HeavyLayout layout_;
  std::vector<HeavyToken> tokens_;
};

class H2o : public Scorer {
 public:
  H2o()
      : Scorer(
            {"h2o",
             ScorerInfo::Kind::bounds,
             // Half of 256 are all tokens that the newest page may have, which is always attended.
             {{.name = "rows", .least = 256, .most = 1 << 20, .range = "256 to 1048576"}}}) {}

  bool observes() const override { return true; }
  bool reads_rows() const override { return true; }

  IndexNeeds needs(const ScorerUse& use) const override {
    IndexNeeds needs;
    needs.sequence_bytes = HeavyLayout(use).bytes();
    return needs;
  }

  // Notes, kept tokens, which are written, too, queries that wait and those that will, and keys of
  // the kept tokens and of the tokens that wait; the first time behind a prompt also its sums.
  std::uint64_t bytes_read(const ScorerUse& use, const ScanExtent& extent) const override {
    const HeavyLayout layout(use);
    const std::int64_t tokens = (extent.pages + 1) * kPageTokens;
    const auto keys = static_cast<std::uint64_t>(std::min(layout.rows + kMostBatch + 1, tokens));
    return sizeof(HeavyNotes) + 2 * static_cast<std::uint64_t>(layout.rows) * sizeof(StoredToken) +
           2 * kMostBatch * layout.query_bytes() +
           static_cast<std::uint64_t>(tokens) * sizeof(float) + keys * use.shape.value_offset();
  }

  void observe(const ObserveScorer& call) const override {
    const HeavyLayout layout(call.use);
    auto* const notes = HeavyHead{call.reads}.memory<HeavyNotes>(0, 1);
    const std::int64_t end = call.first + call.count;
    for (int head = 0; head < layout.shape.kv_heads; ++head) {
      const HeavyHead of{call.reads, 0, head};
      auto* const sums = of.memory<float>(layout.sums(head), end);
      if (notes->chosen != 0) restore_sums(of, layout, *notes, call.first, sums);
      const std::int64_t known = notes->chosen != 0 ? call.first : notes->end;
      std::fill(sums + known, sums + end, 0.0f);
      add_prompt(call, of, layout, sums);
    }
    *notes = {end, 0, 0, 0};
  }

  void truncate(const TruncateScorer& call) const override {
    auto* const notes = reinterpret_cast<HeavyNotes*>(call.memory.sequence(call.sequence));
    if (call.length < notes->end) {
      *notes = {};
    } else if (notes->chosen != 0 && call.length < notes->added) {
      *notes = {notes->end, 0, 0, 0};
    } else {
      notes->waiting = std::min(notes->waiting, call.length - notes->added);
    }
  }

  void score(const RunScorer& call) const override {
    for (std::int64_t first = 0; first < call.batch.count;) {
      std::int64_t end = first + 1;
      while (end < call.batch.count &&
             call.batch.tokens[end].sequence == call.batch.tokens[first].sequence) {
        ++end;
      }
      score_sequence(call, first, end);
      first = end;
    }
  }

 private:
  // The sums that the kept tokens have before another prompt.
  static void restore_sums(const HeavyHead& head, const HeavyLayout& layout,
                           const HeavyNotes& notes, std::int64_t first, float* sums) {
    HeavyHitters kept(head, layout);
    kept.begin(notes, first);
    std::fill_n(sums, first, kDropped);
    for (const HeavyToken& token : kept.tokens()) sums[token.position] = token.sum;
  }

  static void add_prompt(const ObserveScorer& call, const HeavyHead& head,
                         const HeavyLayout& layout, float* sums) {
    const KvShape& shape = layout.shape;
    const std::int64_t end = call.first + call.count;
    const KeyBlocks keys(head, shape, end);
    std::vector<double> weights(static_cast<std::size_t>(end));
    std::vector<float> queries;
    std::vector<float> logits(
        static_cast<std::size_t>(kQueryBlock * shape.group() * keys.stride()));
    for (std::int64_t first = 0; first < call.count; first += kQueryBlock) {
      const std::int64_t count = std::min(kQueryBlock, call.count - first);
      queries.clear();
      for (std::int64_t i = first; i < first + count; ++i) {
        const std::vector<float> group =
            scaled(call.q + i * call.q_stride + head.head * shape.group() * shape.head_dim, shape);
        queries.insert(queries.end(), group.begin(), group.end());
      }
      keys.logits(queries.data(), count * shape.group(), logits.data());
      for (std::int64_t n = 0; n < count * shape.group(); ++n) {
        const std::int64_t seen = call.first + first + n / shape.group() + 1;
        float* const row = logits.data() + n * keys.stride();
        for (std::int64_t t = 0; t < call.first; ++t) {
          if (sums[t] == kDropped) row[t] = -std::numeric_limits<float>::infinity();
        }
        add_softmax({row, static_cast<std::size_t>(seen)}, weights.data());
      }
    }
    for (std::int64_t t = 0; t < end; ++t) {
      if (sums[t] != kDropped) sums[t] += static_cast<float>(weights[static_cast<std::size_t>(t)]);
    }
  }

  // Tokens [first, end) of the batch, which are one sequence's.
  static void score_sequence(const RunScorer& call, std::int64_t first, std::int64_t end) {
    const HeavyLayout layout(call.use);
    auto* const notes = HeavyHead{call.reads, first}.memory<HeavyNotes>(0, 1);
    const std::int64_t at = call.batch.tokens[first].position;
    const bool has_sums = notes->chosen != 0 || notes->end > 0 || at == 0;
    for (int head = 0; head < layout.shape.kv_heads; ++head) {
      if (has_sums) {
        score_head(call, layout, *notes, first, end, head);
      } else {
        keep_all(call, first, end, head);
      }
    }
    if (has_sums) *notes = {notes->end, 1, at, end - first};
  }

  static void score_head(const RunScorer& call, const HeavyLayout& layout, const HeavyNotes& notes,
                         std::int64_t first, std::int64_t end, int head) {
    const HeavyHead of{call.reads, first, head};
    HeavyHitters kept(of, layout);
    kept.begin(notes, call.batch.tokens[first].position);
    kept.store();
    const std::int64_t width = layout.shape.group() * layout.shape.head_dim;
    for (std::int64_t i = first; i < end; ++i) {
      const float* const q = call.q + i * call.q_stride + head * width;
      std::copy_n(q, width, of.memory<float>(layout.query(i - first, head), width));
      write_logits(call, i, head, kept.tokens());
      if (i + 1 == end) break;
      kept.count_for(i + 1);
      kept.add(call.batch.tokens[i].position, q);
    }
  }

  static void write_logits(const RunScorer& call, std::int64_t i, int head,
                           const std::vector<HeavyToken>& kept) {
    const std::int64_t tokens = call.batch.tokens[i].page_first();
    std::vector<float> logits(static_cast<std::size_t>(tokens),
                              -std::numeric_limits<float>::infinity());
    for (const HeavyToken& token : kept) {
      if (token.position < tokens) logits[static_cast<std::size_t>(token.position)] = kKept;
    }
    give_group(call, i, head, logits);
  }

  static void keep_all(const RunScorer& call, std::int64_t first, std::int64_t end, int head) {
    for (std::int64_t i = first; i < end; ++i) {
      give_group(
          call, i, head,
          std::vector<float>(static_cast<std::size_t>(call.batch.tokens[i].page_first()), kKept));
    }
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_h2o() { return std::make_shared<H2o>(); }

}  // namespace sluice::scorers
