// The tokens of a vocabulary by their bytes, so that tokens that begin alike are looked at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/tokenizer.h"

namespace sluice::constrain {

class TokenTrie {
 public:
  // Without special tokens, which have no bytes.
  explicit TokenTrie(const Tokenizer& tokenizer);

  // A node stands for the bytes on the way to it. Nodes come in depth-first order.
  struct Node {
    std::uint8_t byte = 0;
    std::int32_t depth = 0;   // bytes, at least 1
    std::int32_t after = 0;   // the first node that does not begin with these bytes
    std::int32_t tokens = 0;  // index of its tokens, which end where the next node's begin
  };

  std::span<const Node> nodes() const { return std::span(nodes_).first(nodes_.size() - 1); }
  std::span<const TokenId> tokens(std::size_t node) const {
    const auto begin = static_cast<std::size_t>(nodes_[node].tokens);
    const auto end = static_cast<std::size_t>(nodes_[node + 1].tokens);
    return std::span(tokens_).subspan(begin, end - begin);
  }
  // Empty for a token without bytes, and for an id that no token has.
  std::string_view bytes(TokenId token) const {
    if (token < 0 || static_cast<std::size_t>(token) + 1 >= offsets_.size()) return {};
    const std::size_t begin = offsets_[static_cast<std::size_t>(token)];
    return std::string_view(bytes_).substr(begin,
                                           offsets_[static_cast<std::size_t>(token) + 1] - begin);
  }
  std::int32_t most_depth() const { return most_depth_; }
  int vocabulary() const { return vocabulary_; }

 private:
  std::vector<Node> nodes_;  // and one behind the last
  std::vector<TokenId> tokens_;
  std::string bytes_;                 // of all tokens, by id
  std::vector<std::size_t> offsets_;  // [tokens + 1]
  std::int32_t most_depth_ = 0;
  int vocabulary_ = 0;
};

}  // namespace sluice::constrain
