// SnapKV (Li et al. 2024, arXiv 2404.14469, sections 4.1 and 4.3): after a prompt every KV head
// keeps the tokens that the last queries of the prompt attend to, and forgets the others for good.
//
//   votes_t = sum of softmax(q k / sqrt(head_dim))_t, over the window's queries and group's heads
//
//   kept: the window, and before it the tokens with the largest max_pool(votes, kernel)
//
// The choice is made by the first token after a prompt, and stands until another prompt follows.
// Tokens after the prompt are all kept. The paper chooses for every query head; here the heads of a
// group share rows, so their votes are added.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "lib/scorers/kept.h"
#include "lib/scorers/own.h"
#include "sluice/element.h"
#include "sluice/errors.h"

namespace sluice::scorers {
namespace {

// The settings of LongBench in the paper (section 5.3).
struct Settings {
  std::int64_t rows = 0;    // that a prompt is reduced to, the window's among them
  std::int64_t window = 0;  // tokens
  std::int64_t kernel = 0;  // tokens that are pooled

  explicit Settings(const ScorerUse& use)
      : rows(static_cast<std::int64_t>(use.parameter("rows", 1024))),
        window(static_cast<std::int64_t>(use.parameter("window", 32))),
        kernel(static_cast<std::int64_t>(use.parameter("kernel", 7))) {}
};

// What a sequence's memory begins with. Zero: no prompt was seen.
struct Notes {
  std::int64_t end = 0;     // of the prompt
  std::int64_t seen = 0;    // newest tokens of it whose queries are here
  std::int64_t chosen = 0;  // 1: the kept positions are
};

// Behind the notes: f32 queries [window, query_heads, head_dim], the oldest first, then int32
// positions [kv_heads, rows], ascending; only the first min(rows, end) - seen are valid.
struct Layout {
  Settings settings;
  KvShape shape;

  explicit Layout(const ScorerUse& use) : settings(use), shape(use.shape) {}
  std::size_t width() const { return static_cast<std::size_t>(shape.query_heads * shape.head_dim); }
  std::size_t queries() const { return sizeof(Notes); }
  std::size_t query_bytes(std::int64_t tokens) const {
    return static_cast<std::size_t>(tokens) * width() * sizeof(float);
  }
  std::size_t positions(int head) const {
    return queries() + query_bytes(settings.window) +
           static_cast<std::size_t>(head * settings.rows) * sizeof(std::int32_t);
  }
  std::size_t bytes() const { return positions(shape.kv_heads); }
  std::int64_t kept(const Notes& notes) const {
    return std::min(settings.rows, notes.end) - notes.seen;
  }
};

Notes notes_in(const std::byte* memory) {
  Notes notes;
  std::memcpy(&notes, memory, sizeof notes);
  return notes;
}

void write(const Notes& notes, std::byte* memory) { std::memcpy(memory, &notes, sizeof notes); }

// The largest of the `kernel` entries around each.
std::vector<double> pooled(const std::vector<double>& votes, std::int64_t kernel) {
  std::vector<double> result;
  const std::int64_t before = kernel / 2;
  for (std::int64_t t = 0; t < std::ssize(votes); ++t) {
    const auto first = votes.begin() + std::max<std::int64_t>(0, t - before);
    const auto end = votes.begin() + std::min(std::ssize(votes), t - before + kernel);
    result.push_back(*std::max_element(first, end));
  }
  return result;
}

// The `count` positions with the largest scores, the first of equal ones, ascending.
std::vector<std::int32_t> best(const std::vector<double>& scores, std::int64_t count) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(count));
  std::sort(order.begin(), order.end());
  return order;
}

class SnapKv : public Scorer {
 public:
  SnapKv()
      : Scorer({"snapkv",
                ScorerInfo::Kind::bounds,
                {{.name = "kernel", .least = 1, .most = 1023, .range = "1 to 1023"},
                 {.name = "rows", .least = 1, .most = 1 << 20, .range = "1 to 1048576"},
                 {.name = "window", .least = 1, .most = 1024, .range = "1 to 1024"}}}) {}

  bool observes() const override { return true; }

  IndexNeeds needs(const ScorerUse& use) const override {
    IndexNeeds needs;
    needs.sequence_bytes = Layout(use).bytes();
    return needs;
  }

  void check(const ScorerUse& use) const override {
    const Settings settings(use);
    if (settings.rows > settings.window) return;
    throw Error(ErrorCode::usage, "policy: snapkv keeps " + std::to_string(settings.rows) +
                                      " rows, and its window has " +
                                      std::to_string(settings.window) +
                                      "; rows has to be more than window");
  }

  // Notes and positions; the first time behind a prompt also its queries and every key, and the
  // positions once more, because they are written.
  std::uint64_t bytes_read(const ScorerUse& use, const ScanExtent& extent) const override {
    const Layout layout(use);
    const auto tokens = static_cast<std::uint64_t>(extent.pages + 1) * kPageTokens;
    return layout.bytes() +
           static_cast<std::uint64_t>(layout.settings.rows) * sizeof(std::int32_t) +
           tokens * use.shape.value_offset();
  }

  void observe(const ObserveScorer& call) const override {
    const Layout layout(call.use);
    std::byte* const memory = call.memory.sequence(call.sequence);
    auto* const queries = reinterpret_cast<float*>(memory + layout.queries());
    Notes notes = notes_in(memory);
    // Tokens between that were not seen end the window.
    if (notes.end != call.first) notes.seen = 0;
    const std::int64_t added = std::min(call.count, layout.settings.window);
    const std::int64_t left = std::min(notes.seen, layout.settings.window - added);
    const std::size_t width = layout.width();
    std::memmove(queries, queries + static_cast<std::size_t>(notes.seen - left) * width,
                 layout.query_bytes(left));
    for (std::int64_t i = 0; i < added; ++i) {
      std::copy_n(call.q + (call.count - added + i) * call.q_stride, width,
                  queries + static_cast<std::size_t>(left + i) * width);
    }
    write({call.first + call.count, left + added, 0}, memory);
  }

  // Without the window's queries nothing can be chosen again, and everything is kept.
  void truncate(const TruncateScorer& call) const override {
    std::byte* const memory = call.memory.sequence(call.sequence);
    const Notes notes = notes_in(memory);
    if (call.length >= notes.end) return;
    const std::int64_t seen = std::max<std::int64_t>(0, notes.seen - (notes.end - call.length));
    write({seen > 0 ? call.length : 0, seen, 0}, memory);
  }

  void score(const RunScorer& call) const override {
    const Layout layout(call.use);
    for (std::int64_t i = 0; i < call.batch.count; ++i) {
      if (call.batch.tokens[i].pages() == 0) continue;
      std::byte* const memory = call.reads->sequence(i, 0, 0, sizeof(Notes));
      Notes notes = notes_in(memory);
      const bool chooses = layout.kept(notes) > 0 && notes.chosen == 0;
      for (int head = 0; head < call.use.shape.kv_heads; ++head) {
        if (chooses) choose(call, layout, notes, i, head);
        write_logits(call, layout, notes, i, head);
      }
      notes.chosen = 1;
      if (chooses) write(notes, memory);
    }
  }

 private:
  // Votes of the window's queries for the positions before it, by one KV head.
  static std::vector<double> votes(const RunScorer& call, const Layout& layout, const Notes& notes,
                                   std::int64_t i, int head) {
    const KvShape& shape = layout.shape;
    const auto d = static_cast<std::size_t>(shape.head_dim);
    const auto* const queries = reinterpret_cast<const float*>(
        call.reads->sequence(i, head, layout.queries(), layout.query_bytes(notes.seen)));
    const std::int64_t count = notes.seen * shape.group();
    std::vector<float> logits(static_cast<std::size_t>(count * notes.end),
                              -std::numeric_limits<float>::infinity());
    std::vector<float> key(d);
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    const std::int64_t first = notes.end - notes.seen;
    for (std::int64_t t = 0; t < notes.end; ++t) {
      const std::byte* const row = call.reads->key(i, head, t);
      for (int c = 0; c < shape.head_dim; ++c) {
        key[static_cast<std::size_t>(c)] = read_element(row, shape.rows.key(), c);
      }
      for (std::int64_t n = 0; n < count; ++n) {
        const std::int64_t token = n / shape.group();
        if (t > first + token) continue;  // after the query
        const float* const q =
            queries + static_cast<std::size_t>(token) * layout.width() +
            static_cast<std::size_t>(head * shape.group() + n % shape.group()) * d;
        logits[static_cast<std::size_t>(n * notes.end + t)] =
            scale * std::inner_product(key.begin(), key.end(), q, 0.0f);
      }
    }
    std::vector<double> tally(static_cast<std::size_t>(first));
    for (std::int64_t n = 0; n < count; ++n) {
      const auto row = logits.begin() + n * notes.end;
      const double most = *std::max_element(row, row + notes.end);
      double sum = 0.0;
      for (std::int64_t t = 0; t < notes.end; ++t) sum += std::exp(row[t] - most);
      for (std::int64_t t = 0; t < first; ++t) {
        tally[static_cast<std::size_t>(t)] += std::exp(row[t] - most) / sum;
      }
    }
    return tally;
  }

  static void choose(const RunScorer& call, const Layout& layout, const Notes& notes,
                     std::int64_t i, int head) {
    const std::vector<double> scores =
        pooled(votes(call, layout, notes, i, head), layout.settings.kernel);
    const std::vector<std::int32_t> kept = best(scores, layout.kept(notes));
    const std::size_t bytes = kept.size() * sizeof(std::int32_t);
    std::memcpy(call.reads->sequence(i, head, layout.positions(head), bytes), kept.data(), bytes);
  }

  static void write_logits(const RunScorer& call, const Layout& layout, const Notes& notes,
                           std::int64_t i, int head) {
    const std::int64_t tokens = call.batch.tokens[i].page_first();
    const std::int64_t first = std::clamp<std::int64_t>(notes.end - notes.seen, 0, tokens);
    std::vector<float> logits(static_cast<std::size_t>(tokens), kKept);
    std::fill_n(logits.begin(), first, -std::numeric_limits<float>::infinity());
    const std::int64_t kept = std::max<std::int64_t>(0, layout.kept(notes));
    const auto* const positions = reinterpret_cast<const std::int32_t*>(call.reads->sequence(
        i, head, layout.positions(head), static_cast<std::size_t>(kept) * sizeof(std::int32_t)));
    for (std::int64_t n = 0; n < kept; ++n) {
      if (positions[n] < tokens) logits[static_cast<std::size_t>(positions[n])] = kKept;
    }
    give_group(call, i, head, logits);
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_snapkv() { return std::make_shared<SnapKv>(); }

}  // namespace sluice::scorers
