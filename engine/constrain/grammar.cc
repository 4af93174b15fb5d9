#include "engine/constrain/grammar.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "engine/utf8.h"
#include "sluice/errors.h"

namespace sluice::constrain {
namespace {

bool has_no_bytes(const Grammar&, const Node& node) {
  return node.kind == NodeKind::bytes && node.count == 0;
}

bool has_text(const Grammar& grammar, const Node& node) {
  return node.kind == NodeKind::bytes || grammar.set_of(node).any();
}

bool is_leaf(NodeKind kind) { return kind == NodeKind::bytes || kind == NodeKind::set; }

// Code points whose UTF-8 has the same length.
constexpr auto kLengths = std::to_array<CodeRange>(
    {{0, 0x7F}, {0x80, 0x7FF}, {0x800, 0xD7FF}, {0xE000, 0xFFFF}, {0x10000, CodeSet::kLast}});

std::string utf8(char32_t code_point) {
  std::string text;
  append_utf8(text, code_point);
  return text;
}

using ByteRanges = std::vector<std::pair<std::uint8_t, std::uint8_t>>;

// Splits a range of encodings of one length into products of byte ranges: bytes of the first and
// the last encoding apart from the first place where they differ become full ranges 80 to BF.
void split_range(std::string_view first, std::string_view last, const ByteRanges& before,
                 std::vector<ByteRanges>& found) {
  const auto low = static_cast<std::uint8_t>(first.front());
  const auto high = static_cast<std::uint8_t>(last.front());
  const auto with = [&](std::uint8_t from, std::uint8_t to) {
    ByteRanges ranges = before;
    ranges.emplace_back(from, to);
    return ranges;
  };
  if (first.size() == 1) return found.push_back(with(low, high));
  const std::string_view rest_first = first.substr(1);
  const std::string_view rest_last = last.substr(1);
  if (low == high) return split_range(rest_first, rest_last, with(low, low), found);
  const std::string least(rest_first.size(), '\x80');
  const std::string most(rest_first.size(), '\xBF');
  const bool low_is_full = rest_first == least;
  const bool high_is_full = rest_last == most;
  if (!low_is_full) split_range(rest_first, most, with(low, low), found);
  const int from = low + (low_is_full ? 0 : 1);
  const int to = high - (high_is_full ? 0 : 1);
  if (from <= to) {
    ByteRanges middle = with(static_cast<std::uint8_t>(from), static_cast<std::uint8_t>(to));
    middle.insert(middle.end(), rest_first.size(), {0x80, 0xBF});
    found.push_back(std::move(middle));
  }
  if (!high_is_full) split_range(least, rest_last, with(high, high), found);
}

}  // namespace

NodeId Grammar::add(const Node& node) {
  if (nodes_.size() >= kMostNodes) {
    throw Error(ErrorCode::usage, "the constraint is too large: its grammar has more than " +
                                      std::to_string(kMostNodes) + " parts");
  }
  nodes_.push_back(node);
  return static_cast<NodeId>(nodes_.size() - 1);
}

NodeId Grammar::add_parent(NodeKind kind, std::span<const NodeId> parts) {
  const auto first = static_cast<std::int32_t>(children_.size());
  const NodeId id = add({kind, first, static_cast<std::int32_t>(parts.size()), 0, 0});
  children_.insert(children_.end(), parts.begin(), parts.end());
  return id;
}

NodeId Grammar::bytes(std::string_view text) {
  const NodeId id = add({NodeKind::bytes, static_cast<std::int32_t>(texts_.size()),
                         static_cast<std::int32_t>(text.size()), 0, 0});
  texts_ += text;
  return id;
}

NodeId Grammar::set(const ByteSet& set) {
  const auto known = set_ids_.find(set);
  if (known != set_ids_.end()) return known->second;
  const NodeId id = add({NodeKind::set, static_cast<std::int32_t>(sets_.size()), 0, 0, 0});
  sets_.push_back(set);
  set_ids_.emplace(set, id);
  return id;
}

NodeId Grammar::sequence(std::span<const NodeId> parts) {
  return add_parent(NodeKind::sequence, parts);
}

NodeId Grammar::choice(std::span<const NodeId> parts) {
  return add_parent(NodeKind::choice, parts);
}

NodeId Grammar::repeat(NodeId part, std::int32_t least, std::int32_t most) {
  const NodeId id = add_parent(NodeKind::repeat, std::span(&part, 1));
  nodes_.back().least = least;
  nodes_.back().most = most;
  return id;
}

NodeId Grammar::rule() {
  const NodeId undefined = -1;
  return add_parent(NodeKind::rule, std::span(&undefined, 1));
}

void Grammar::define(NodeId rule, NodeId body) {
  children_[static_cast<std::size_t>(node(rule).first)] = body;
}

NodeId Grammar::byte_range(std::uint8_t first, std::uint8_t last) {
  ByteSet bytes;
  for (int byte = first; byte <= last; ++byte) bytes.set(static_cast<std::size_t>(byte));
  return set(bytes);
}

NodeId Grammar::any_byte_of(std::string_view bytes) {
  ByteSet all;
  for (const char byte : bytes) all.set(static_cast<std::uint8_t>(byte));
  return set(all);
}

NodeId Grammar::code_point(const CodeSet& wanted) {
  ByteSet ascii;
  std::vector<ByteRanges> longer;
  for (const CodeRange& length : kLengths) {
    const CodeSet part = wanted & CodeSet{length};
    for (const CodeRange& range : part.ranges()) {
      if (range.last <= 0x7F) {
        for (char32_t code = range.first; code <= range.last; ++code) ascii.set(code);
      } else {
        split_range(utf8(range.first), utf8(range.last), {}, longer);
      }
    }
  }
  std::vector<NodeId> parts;
  if (ascii.any()) parts.push_back(set(ascii));
  for (const ByteRanges& ranges : longer) {
    std::vector<NodeId> places;
    for (const auto& [first, last] : ranges) places.push_back(byte_range(first, last));
    parts.push_back(sequence(places));
  }
  return parts.size() == 1 ? parts.front() : choice(parts);
}

std::vector<bool> Grammar::derivable(bool (*leaf)(const Grammar&, const Node&)) const {
  std::vector<std::vector<NodeId>> parents(nodes_.size());
  std::vector<std::int32_t> missing(nodes_.size());  // children that a sequence waits for
  std::vector<bool> found(nodes_.size());
  std::vector<NodeId> news;
  const auto find = [&](NodeId id) {
    if (found[static_cast<std::size_t>(id)]) return;
    found[static_cast<std::size_t>(id)] = true;
    news.push_back(id);
  };
  for (NodeId id = 0; id < static_cast<NodeId>(nodes_.size()); ++id) {
    const Node& one = node(id);
    if (is_leaf(one.kind)) {
      if (leaf(*this, one)) find(id);
      continue;
    }
    for (const NodeId part : children(one)) parents[static_cast<std::size_t>(part)].push_back(id);
    missing[static_cast<std::size_t>(id)] = one.kind == NodeKind::sequence ? one.count : 1;
    const bool may_be_empty = (one.kind == NodeKind::sequence && one.count == 0) ||
                              (one.kind == NodeKind::repeat && one.least == 0);
    if (may_be_empty) find(id);
  }
  while (!news.empty()) {
    const NodeId id = news.back();
    news.pop_back();
    for (const NodeId parent : parents[static_cast<std::size_t>(id)]) {
      if (--missing[static_cast<std::size_t>(parent)] == 0) find(parent);
    }
  }
  return found;
}

void Grammar::firsts(NodeId id, const std::vector<bool>& nullable,
                     std::vector<NodeId>& found) const {
  const Node& one = node(id);
  found.clear();
  if (is_leaf(one.kind)) return;
  for (const NodeId part : children(one)) {
    if (ends(part)) found.push_back(part);
    if (one.kind == NodeKind::sequence && !nullable[static_cast<std::size_t>(part)]) return;
  }
}

// Depth-first search for a cycle.
bool Grammar::begins_with_itself(const std::vector<bool>& nullable) const {
  enum class State : std::uint8_t { fresh, open, closed };
  struct Visit {
    NodeId id;
    std::vector<NodeId> next;
  };
  std::vector<State> states(nodes_.size(), State::fresh);
  std::vector<Visit> path;
  const auto open = [&](NodeId id) {
    states[static_cast<std::size_t>(id)] = State::open;
    path.push_back({id, {}});
    firsts(id, nullable, path.back().next);
  };
  for (NodeId id = 0; id < static_cast<NodeId>(nodes_.size()); ++id) {
    if (states[static_cast<std::size_t>(id)] != State::fresh || !ends(id)) continue;
    open(id);
    while (!path.empty()) {
      if (path.back().next.empty()) {
        states[static_cast<std::size_t>(path.back().id)] = State::closed;
        path.pop_back();
        continue;
      }
      const NodeId next = path.back().next.back();
      path.back().next.pop_back();
      const State state = states[static_cast<std::size_t>(next)];
      if (state == State::open) return true;
      if (state == State::fresh) open(next);
    }
  }
  return false;
}

void Grammar::classify() {
  std::array<int, 256> classes{};
  int count = 1;
  const auto refine = [&](const ByteSet& bytes) {
    std::map<std::pair<int, bool>, int> renamed;
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const auto key = std::pair(classes[byte], bytes[byte]);
      classes[byte] = renamed.emplace(key, static_cast<int>(renamed.size())).first->second;
    }
    count = static_cast<int>(renamed.size());
  };
  ByteSet seen;  // bytes of texts
  for (const char byte : texts_) seen.set(static_cast<std::uint8_t>(byte));
  for (std::size_t byte = 0; byte < 256; ++byte) {
    if (seen[byte]) refine(ByteSet().set(byte));
  }
  for (const ByteSet& bytes : sets_) {
    if (count < 256) refine(bytes);
  }
  for (std::size_t byte = 0; byte < 256; ++byte) {
    class_of_[byte] = static_cast<std::uint8_t>(classes[byte]);
  }
  classes_ = count;
}

void Grammar::finish(NodeId start, const std::string& what) {
  start_ = start;
  ends_ = derivable(has_text);
  if (!ends(start)) throw Error(ErrorCode::usage, what + " allows no text that ever ends");
  const std::vector<bool> nullable = derivable(has_no_bytes);
  if (begins_with_itself(nullable)) {
    throw Error(ErrorCode::usage, what + " has a rule that begins with itself");
  }
  // An empty part may be repeated as often as wanted, so it counts for nothing.
  for (Node& one : nodes_) {
    if (one.kind == NodeKind::repeat && nullable[static_cast<std::size_t>(child(one, 0))]) {
      one.least = 0;
    }
  }
  classify();
}

}  // namespace sluice::constrain
