// Finds the added tokens ("<|end_of_text|>") in a text.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sluice/types.h"

namespace sluice {

// An entry of "added_tokens" in tokenizer.json.
struct AddedToken {
  std::string content;  // never empty
  TokenId id = 0;
  bool special = false;     // dropped from decoded text
  bool lstrip = false;      // strips the white space before it
  bool rstrip = false;      // strips the white space after it
  bool normalized = false;  // matched in normalised text
};

// A stretch of text, or one added token in it.
struct Segment {
  static constexpr TokenId kText = -1;
  std::string_view text;
  TokenId id = kText;
};

using TokenFilter = std::function<bool(const AddedToken&)>;

class AddedTokenFinder {
 public:
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  // Matches the leftmost token first and the longest of those that begin there; the views point
  // into `text`. An empty text has no segment. Tokens that are not `wanted` stay text.
  std::vector<Segment> split(std::string_view text, const TokenFilter& wanted = {}) const;

 private:
  static constexpr std::int32_t kNone = -1;

  void insert(std::int32_t token);
  std::int32_t longest_at(std::string_view text, const TokenFilter& wanted) const;

  std::vector<AddedToken> tokens_;
  // A trie: the root's children by byte, the other nodes' by (node, byte), and the token that ends
  // at each node, or kNone.
  std::array<std::int32_t, 256> root_{};
  std::unordered_map<std::uint64_t, std::int32_t> children_;
  std::vector<std::int32_t> token_at_;
};

}  // namespace sluice
