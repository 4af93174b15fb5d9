#include <algorithm>
#include <vector>

#include "cpu/attention/attended_rows.h"
#include "cpu/attention/attention.h"
#include "cpu/attention/simd.h"

namespace sluice::cpu {
namespace {

// Below these many rows a piece costs more to merge than it saves.
constexpr std::int64_t kMinPieceRows = 1024;
// Tasks per thread: several, so that an interrupted thread does not hold up the others.
constexpr std::int64_t kTasksPerThread = 3;
// Pieces of a token's rows begin at multiples of this.
constexpr std::int64_t kAlign = 64;

// Rows [first, end) of those that a token of the batch attends to.
struct Piece {
  std::int64_t token = 0;
  std::int64_t first = 0;
  std::int64_t end = 0;
};

// Divides the tokens' rows into pieces of about equal size, enough for all threads.
std::vector<Piece> pieces_of(const AttendBatchParams& p, int threads) {
  std::int64_t rows = 0;
  for (std::int64_t b = 0; b < p.batch.count; ++b) rows += p.count(b);
  const std::int64_t wanted = threads == 1 ? 1 : kTasksPerThread * threads;
  const std::int64_t size = std::max(kMinPieceRows, rows * p.shape.kv_heads / wanted);
  std::vector<Piece> pieces;
  for (std::int64_t b = 0; b < p.batch.count; ++b) {
    const std::int64_t count = p.count(b);
    const std::int64_t parts = threads == 1 ? 1 : std::max<std::int64_t>(1, count / size);
    for (std::int64_t part = 0; part < parts; ++part) {
      const auto border = [&](std::int64_t number) {
        return number == parts ? count : number * count / parts / kAlign * kAlign;
      };
      pieces.push_back({b, border(part), border(part + 1)});
    }
  }
  return pieces;
}

// Output of all queries of one token.
struct Place {
  float* out = nullptr;  // [query_heads, head_dim]
  float* lse = nullptr;  // [query_heads]
};

// Outputs of the pieces: a token's first piece writes to the output, the others to scratch of the
// calling thread.
class Partials {
 public:
  Partials(const AttendBatchParams& p, const std::vector<Piece>& pieces)
      : p_(p),
        pieces_(pieces),
        values_(std::int64_t{p.shape.query_heads} * p.shape.head_dim),
        data_(thread_scratch(Scratch::partials,
                             (pieces.size() - static_cast<std::size_t>(p.batch.count)) *
                                 static_cast<std::size_t>(values_ + p.shape.query_heads))) {}

  Place place(std::size_t piece) const {
    const std::int64_t token = pieces_[piece].token;
    if (is_first(piece)) return {p_.out + token * values_, p_.lse + token * p_.shape.query_heads};
    // token + 1 earlier pieces, one per token, write to the output.
    const std::int64_t number = static_cast<std::int64_t>(piece) - (token + 1);
    float* const out = data_ + number * (values_ + p_.shape.query_heads);
    return {out, out + values_};
  }

  // Merges the partials of one KV head's queries.
  void merge(std::int64_t kv_head) const {
    const int d = p_.shape.head_dim;
    Place to;
    for (std::size_t piece = 0; piece < pieces_.size(); ++piece) {
      const Place from = place(piece);
      if (is_first(piece)) to = from;
      for (std::int64_t g = 0; g < p_.shape.group() && !is_first(piece); ++g) {
        const std::int64_t head = kv_head * p_.shape.group() + g;
        merge_partial(from.out + head * d, from.lse[head], d, to.out + head * d, to.lse + head);
      }
    }
  }

 private:
  bool is_first(std::size_t piece) const { return pieces_[piece].first == 0; }

  const AttendBatchParams& p_;
  const std::vector<Piece>& pieces_;
  std::int64_t values_;
  float* data_;  // each [query_heads, head_dim] values, then [query_heads] lse
};

void add_piece(const AttendBatchParams& p, const Piece& piece, std::int64_t head,
               AttendedRows& rows) {
  const PositionGap gap = p.gap(piece.token);
  const auto add = [&](std::int64_t first, std::int64_t end) {
    add_rows(p.rows, p.batch.tokens[piece.token].sequence, head, first, end, p.shape.row_bytes(),
             rows);
  };
  if (p.in_gaps) return add(gap.first + piece.first, gap.first + piece.end);
  add(piece.first, std::min<std::int64_t>(piece.end, gap.first));
  add(std::max<std::int64_t>(piece.first, gap.first) + gap.count(), piece.end + gap.count());
}

void attend_piece(const AttendBatchParams& p, const Piece& piece, const Place& to,
                  std::int64_t head, const ArenaPart& arena) {
  AttendTile tile = decode_tile_of(p, piece.token, head);
  tile.out = to.out + head * p.shape.group() * p.shape.head_dim;
  tile.lse = to.lse + head * p.shape.group();
  AttendedRows rows(tile, arena);
  add_piece(p, piece, head, rows);
  rows.attend();
}

}  // namespace

// Only pieces after a token's first take scratch; there are no more than tasks per KV head.
std::uint64_t decode_scratch_bytes(const KvShape& shape, int threads) {
  AttendTile tile;
  tile.queries = tile.group = shape.group();
  tile.head_dim = shape.head_dim;
  tile.row_bytes = shape.row_bytes();
  tile.format = shape.rows;
  const std::size_t pieces =
      threads == 1 ? 0 : static_cast<std::size_t>(kTasksPerThread * threads / shape.kv_heads + 1);
  const auto of_piece =
      static_cast<std::size_t>(shape.query_heads) * static_cast<std::size_t>(shape.head_dim + 1);
  return (decode_scratch(tile) * static_cast<std::size_t>(threads) + pieces * of_piece) *
         sizeof(float);
}

void attend_batch(const AttendBatchParams& p, Threads& threads) {
  const std::vector<Piece> pieces = pieces_of(p, threads.count());
  const Partials partials(p, pieces);
  const std::size_t row_bytes = p.shape.row_bytes();
  const auto count = static_cast<std::int64_t>(pieces.size());
  const ArenaParts arena(p.arena, p.arena_rows, row_bytes, count);
  std::int64_t rows = 0;
  for (const Piece& piece : pieces) rows += piece.end - piece.first;
  const std::int64_t bytes = rows * p.shape.kv_heads * static_cast<std::int64_t>(row_bytes);
  threads.for_each(
      arena.count * p.shape.kv_heads,
      [&](std::int64_t task) {
        const std::int64_t head = task % p.shape.kv_heads;
        const std::int64_t part = task / p.shape.kv_heads;
        for (std::int64_t i = part; i < count; i += arena.count) {
          const auto at = static_cast<std::size_t>(i);
          attend_piece(p, pieces[at], partials.place(at), head, arena.part(head, part));
        }
      },
      bytes);
  if (count == p.batch.count) return;
  threads.for_each(p.shape.kv_heads, [&](std::int64_t head) { partials.merge(head); });
}

}  // namespace sluice::cpu
