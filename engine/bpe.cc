#include "engine/bpe.h"

#include <algorithm>
#include <bit>
#include <random>

#include "lib/check.h"

namespace sluice {
namespace {

std::uint64_t pair_of(TokenId left, TokenId right) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32) |
         static_cast<std::uint32_t>(right);
}

// The heap's top is the lowest rank and, among equals, the leftmost.
bool comes_later(const Bpe::Scratch::Candidate& a, const Bpe::Scratch::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
}

std::uint64_t random_odd_number() {
  std::random_device random;
  return (std::uint64_t{random()} << 32) | random() | 1;
}

}  // namespace

MergeTable::MergeTable(std::span<const MergeRule> rules) : multiplier_(random_odd_number()) {
  slots_.resize(std::bit_ceil(2 * rules.size() + 2));
  shift_ = 64 - std::countr_zero(slots_.size());
  for (std::size_t rank = 0; rank < rules.size(); ++rank) {
    const MergeRule& rule = rules[rank];
    const std::uint64_t pair = pair_of(rule.left, rule.right);
    std::size_t slot = first_slot(pair);
    while (slots_[slot].merge.rank >= 0 && slots_[slot].pair != pair) {
      slot = (slot + 1) & (slots_.size() - 1);
    }
    slots_[slot] = {pair, {static_cast<std::int32_t>(rank), rule.result}};
  }
}

// Multiplicative hashing: the high bits of the product depend on all bits of the pair, and two
// pairs collide for few multipliers only (Dietzfelbinger et al. 1997, section 2).
std::size_t MergeTable::first_slot(std::uint64_t pair) const {
  return static_cast<std::size_t>((pair * multiplier_) >> shift_);
}

MergeTable::Merge MergeTable::find(TokenId left, TokenId right) const {
  const std::uint64_t pair = pair_of(left, right);
  std::size_t slot = first_slot(pair);
  while (slots_[slot].merge.rank >= 0 && slots_[slot].pair != pair) {
    slot = (slot + 1) & (slots_.size() - 1);
  }
  return slots_[slot].merge;
}

void Bpe::push_candidate(std::int32_t left, Scratch& scratch) const {
  const auto& symbols = scratch.symbols;
  const Scratch::Symbol& first = symbols[static_cast<std::size_t>(left)];
  if (first.next < 0) return;
  const Scratch::Symbol& second = symbols[static_cast<std::size_t>(first.next)];
  const MergeTable::Merge merge = merges_.find(first.id, second.id);
  if (merge.rank < 0) return;
  scratch.heap.push_back({merge.rank, left, merge.result});
  std::push_heap(scratch.heap.begin(), scratch.heap.end(), comes_later);
}

void Bpe::merge_symbols(Scratch& scratch) const {
  auto& [symbols, heap] = scratch;
  while (!heap.empty()) {
    const Scratch::Candidate candidate = heap.front();
    std::pop_heap(heap.begin(), heap.end(), comes_later);
    heap.pop_back();
    Scratch::Symbol& left = symbols[static_cast<std::size_t>(candidate.position)];
    if (left.id == kNone || left.next < 0) continue;
    Scratch::Symbol& right = symbols[static_cast<std::size_t>(left.next)];
    // A neighbour that has merged since makes the candidate stale.
    const MergeTable::Merge merge = merges_.find(left.id, right.id);
    if (merge.rank < 0 || merge.result != candidate.result) continue;
    left.id = candidate.result;
    left.next = right.next;
    right.id = kNone;
    if (left.next >= 0) symbols[static_cast<std::size_t>(left.next)].previous = candidate.position;
    if (left.previous >= 0) push_candidate(left.previous, scratch);
    push_candidate(candidate.position, scratch);
  }
}

void Bpe::encode(std::string_view piece, Scratch& scratch, std::vector<TokenId>& ids) const {
  if (piece.empty()) return;
  scratch.symbols.clear();
  scratch.heap.clear();
  const auto length = static_cast<std::int32_t>(piece.size());
  for (std::int32_t i = 0; i < length; ++i) {
    const auto byte = static_cast<std::uint8_t>(piece[static_cast<std::size_t>(i)]);
    check(bytes_.at(byte) != kNone, "a piece holds a byte that has no token");
    scratch.symbols.push_back({bytes_.at(byte), i - 1, i + 1 < length ? i + 1 : -1});
  }
  for (std::int32_t i = 0; i + 1 < length; ++i) push_candidate(i, scratch);
  merge_symbols(scratch);
  // A merge keeps the left symbol, so the first one is always there.
  for (std::int32_t i = 0; i >= 0; i = scratch.symbols[static_cast<std::size_t>(i)].next) {
    ids.push_back(scratch.symbols[static_cast<std::size_t>(i)].id);
  }
}

}  // namespace sluice
