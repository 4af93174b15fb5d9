// Byte-pair encoding: merges adjacent tokens of a piece of text, lowest rank first (Sennrich et
// al. 2016; the order of ties and of stale candidates is that of Hugging Face's tokenizers).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "sluice/types.h"

namespace sluice {

// "left right -> result"; its rank is its place in the list.
struct MergeRule {
  TokenId left = 0;
  TokenId right = 0;
  TokenId result = 0;
};

// A hash table from pairs of tokens to their merges. Every table hashes differently, so that nobody
// can craft a file whose pairs all collide.
class MergeTable {
 public:
  struct Merge {
    std::int32_t rank = -1;  // -1: the pair does not merge
    TokenId result = 0;
  };

  explicit MergeTable(std::span<const MergeRule> rules);
  Merge find(TokenId left, TokenId right) const;

 private:
  struct Slot {
    std::uint64_t pair = 0;
    Merge merge;
  };
  std::size_t first_slot(std::uint64_t pair) const;

  std::uint64_t multiplier_;
  std::vector<Slot> slots_;  // a power of two, at most half of them in use
  int shift_ = 0;
};

class Bpe {
 public:
  static constexpr TokenId kNone = -1;

  // Scratch memory of encode(), reused between calls.
  struct Scratch {
    // A token of the piece, in a list linked by index.
    struct Symbol {
      TokenId id = kNone;  // kNone: merged into the symbol before it
      std::int32_t previous = -1;
      std::int32_t next = -1;
    };
    struct Candidate {
      std::int32_t rank = 0;
      std::int32_t position = 0;
      TokenId result = 0;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  // `bytes`: the token of every byte that a piece may hold, kNone for others.
  Bpe(const std::array<TokenId, 256>& bytes, std::span<const MergeRule> merges)
      : bytes_(bytes), merges_(merges) {}

  // Appends the tokens of `piece`, which must be shorter than 2 GiB. Takes time n log n.
  void encode(std::string_view piece, Scratch& scratch, std::vector<TokenId>& ids) const;

 private:
  void push_candidate(std::int32_t left, Scratch& scratch) const;
  void merge_symbols(Scratch& scratch) const;

  std::array<TokenId, 256> bytes_;
  MergeTable merges_;
};

}  // namespace sluice
