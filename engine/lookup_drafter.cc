// Drafts from the context itself: a chain of earlier places for every three tokens.
#include <algorithm>
#include <unordered_map>

#include "sluice/drafter.h"

namespace sluice {
namespace {

constexpr std::size_t kGram = 3;       // tokens that have to match
constexpr std::size_t kLongMatch = 8;  // from here on drafts are of kind 1
constexpr std::size_t kMostMatch = 32;
constexpr int kMostPlaces = 16;  // the newest ones; bounds the time of a proposal
constexpr std::int32_t kNone = -1;

std::uint64_t key_of(std::span<const TokenId> gram) {
  std::uint64_t key = 0;
  for (const TokenId id : gram) {
    key = (key ^ static_cast<std::uint32_t>(id)) * 0x9e3779b97f4a7c15ULL;
    key ^= key >> 29;
  }
  return key;
}

}  // namespace

struct LookupDrafter::Index {
  std::vector<TokenId> tokens;
  // By the end of every gram in `tokens`, from kGram on: where one with the same key ended before.
  std::vector<std::int32_t> earlier;
  std::unordered_map<std::uint64_t, std::int32_t> newest;  // by key

  std::span<const TokenId> gram(std::size_t end) const {
    return std::span(tokens).subspan(end - kGram, kGram);
  }

  void push(TokenId id) {
    tokens.push_back(id);
    if (tokens.size() < kGram) return;
    const auto [place, added] = newest.try_emplace(key_of(gram(tokens.size())), kNone);
    earlier.push_back(place->second);
    place->second = static_cast<std::int32_t>(tokens.size());
  }

  void pop() {
    if (tokens.size() >= kGram) {
      const std::uint64_t key = key_of(gram(tokens.size()));
      if (earlier.back() == kNone) {
        newest.erase(key);
      } else {
        newest[key] = earlier.back();
      }
      earlier.pop_back();
    }
    tokens.pop_back();
  }

  void follow(std::span<const TokenId> wanted) {
    const std::size_t most = std::min(tokens.size(), wanted.size());
    // Answers only add tokens, so looking from the front is for begin() alone.
    const auto [end, unused] = std::mismatch(
        tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(most), wanted.begin());
    const auto common = static_cast<std::size_t>(end - tokens.begin());
    while (tokens.size() > common) pop();
    add(wanted);
  }

  void add(std::span<const TokenId> wanted) {
    for (const TokenId id : wanted.subspan(tokens.size())) push(id);
  }

  // Tokens before both places that are the same.
  std::size_t match(std::size_t place) const {
    const std::size_t most = std::min(place, kMostMatch);
    std::size_t length = 0;
    while (length < most && tokens[place - 1 - length] == tokens[tokens.size() - 1 - length]) {
      ++length;
    }
    return length;
  }
};

LookupDrafter::LookupDrafter() : index_(std::make_unique<Index>()) {}
LookupDrafter::~LookupDrafter() = default;

void LookupDrafter::begin(std::span<const TokenId> tokens) { index_->follow(tokens); }

// The newest of equally long matches is taken.
Drafts LookupDrafter::propose(std::span<const TokenId> tokens, int most,
                              const Sampler& /*sampler*/) {
  Index& index = *index_;
  if (tokens.size() < index.tokens.size()) {
    index.follow(tokens);
  } else {
    index.add(tokens);
  }
  if (most < 1 || tokens.size() <= kGram) return {};
  std::size_t longest = kGram - 1;
  std::size_t best = 0;
  std::int32_t place = index.earlier.back();
  for (int tried = 0; place != kNone && tried < kMostPlaces; ++tried) {
    const auto at = static_cast<std::size_t>(place);
    const std::size_t length = index.match(at);
    if (length > longest) {
      longest = length;
      best = at;
    }
    place = index.earlier[at - kGram];
  }
  if (best == 0) return {};
  const std::span<const TokenId> next =
      tokens.subspan(best, std::min(static_cast<std::size_t>(most), tokens.size() - best));
  return {{next.begin(), next.end()}, longest >= kLongMatch ? 1 : 0};
}

}  // namespace sluice
