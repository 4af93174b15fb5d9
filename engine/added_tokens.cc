#include "engine/added_tokens.h"

#include <algorithm>
#include <utility>

#include "engine/utf8.h"

namespace sluice {
namespace {

std::uint64_t edge(std::int32_t node, char byte) {
  return (static_cast<std::uint64_t>(node) << 8) | static_cast<std::uint8_t>(byte);
}

bool is_white_space_unit(std::string_view text) { return is_white_space(first_code_point(text)); }

// Start of the white space that ends at `end`, at least `floor`.
std::size_t strip_left(std::string_view text, std::size_t floor, std::size_t end) {
  std::size_t begin = end;
  while (begin > floor) {
    std::size_t previous = begin - 1;
    while ((static_cast<std::uint8_t>(text[previous]) & 0xC0u) == 0x80u) --previous;
    if (!is_white_space_unit(text.substr(previous))) break;
    begin = previous;
  }
  return begin;
}

// End of the white space that begins at `begin`.
std::size_t strip_right(std::string_view text, std::size_t begin) {
  while (begin < text.size() && is_white_space_unit(text.substr(begin))) {
    begin += next_utf8_unit(text.substr(begin)).length;
  }
  return begin;
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  root_.fill(kNone);
  for (std::size_t i = 0; i < tokens_.size(); ++i) insert(static_cast<std::int32_t>(i));
}

void AddedTokenFinder::insert(std::int32_t token) {
  const std::string& content = tokens_[static_cast<std::size_t>(token)].content;
  std::int32_t node = kNone;
  for (const char byte : content) {
    const auto fresh = static_cast<std::int32_t>(token_at_.size());
    std::int32_t& child = node == kNone
                              ? root_.at(static_cast<std::uint8_t>(byte))
                              : children_.try_emplace(edge(node, byte), kNone).first->second;
    if (child == kNone) {
      child = fresh;
      token_at_.push_back(kNone);
    }
    node = child;
  }
  token_at_[static_cast<std::size_t>(node)] = token;
}

std::int32_t AddedTokenFinder::longest_at(std::string_view text, const TokenFilter& wanted) const {
  std::int32_t node = root_.at(static_cast<std::uint8_t>(text.front()));
  std::int32_t longest = kNone;
  for (std::size_t i = 1; node != kNone; ++i) {
    const std::int32_t token = token_at_[static_cast<std::size_t>(node)];
    if (token != kNone && (!wanted || wanted(tokens_[static_cast<std::size_t>(token)]))) {
      longest = token;
    }
    if (i == text.size()) break;
    const auto child = children_.find(edge(node, text[i]));
    node = child == children_.end() ? kNone : child->second;
  }
  return longest;
}

std::vector<Segment> AddedTokenFinder::split(std::string_view text,
                                             const TokenFilter& wanted) const {
  std::vector<Segment> segments;
  std::size_t done = 0;
  std::size_t at = 0;
  std::size_t white_end = 0;  // of the last white space that was stripped
  while (at < text.size()) {
    const std::int32_t index = longest_at(text.substr(at), wanted);
    if (index == kNone) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<std::size_t>(index)];
    std::size_t begin = at;
    at += token.content.size();
    // White space that a token strips may itself hold tokens; they count, too.
    if (token.rstrip && at > white_end) white_end = strip_right(text, at);
    const std::size_t end = token.rstrip ? white_end : at;
    if (token.lstrip && done < begin) begin = strip_left(text, done, begin);
    if (done < begin) segments.push_back({text.substr(done, begin - done), Segment::kText});
    segments.push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) segments.push_back({text.substr(done), Segment::kText});
  return segments;
}

}  // namespace sluice
