// A context-free grammar over bytes: what every kind of constraint is compiled to.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/unicode/code_set.h"

namespace sluice::constrain {

using NodeId = std::int32_t;
using ByteSet = std::bitset<256>;

constexpr std::int32_t kUnbounded = INT32_MAX;
constexpr std::int32_t kMostRepeats = 1'000'000;

enum class NodeKind : std::uint8_t { bytes, set, sequence, choice, repeat, rule };

struct Node {
  NodeKind kind = NodeKind::bytes;
  std::int32_t first = 0;  // bytes: offset in the texts; set: its index; otherwise of the children
  std::int32_t count = 0;  // of bytes or children
  std::int32_t least = 0;  // of a repeat
  std::int32_t most = 0;
};

// Nodes are added bottom-up, except rules, which are declared first and may call themselves.
class Grammar {
 public:
  static constexpr std::size_t kMostNodes = 200'000;

  // Add a node. Throw Error{usage} beyond kMostNodes.
  NodeId bytes(std::string_view text);
  NodeId set(const ByteSet& set);
  NodeId sequence(std::span<const NodeId> parts);
  NodeId sequence(std::initializer_list<NodeId> parts) {
    return sequence(std::span(parts.begin(), parts.size()));
  }
  // No parts: a node without any text.
  NodeId choice(std::span<const NodeId> parts);
  NodeId choice(std::initializer_list<NodeId> parts) {
    return choice(std::span(parts.begin(), parts.size()));
  }
  NodeId repeat(NodeId part, std::int32_t least, std::int32_t most = kUnbounded);
  NodeId optional(NodeId part) { return repeat(part, 0, 1); }
  NodeId rule();
  void define(NodeId rule, NodeId body);

  NodeId empty() { return bytes({}); }
  NodeId byte_range(std::uint8_t first, std::uint8_t last);
  NodeId any_byte_of(std::string_view bytes);
  // One code point of the set, in UTF-8. Surrogates have none.
  NodeId code_point(const CodeSet& set);

  // Sets the start and checks the grammar. Throws Error{usage} that begins with `what` if no text
  // has an end, or if a rule begins with itself.
  void finish(NodeId start, const std::string& what);

  NodeId start() const { return start_; }
  const Node& node(NodeId id) const { return nodes_[static_cast<std::size_t>(id)]; }
  NodeId child(const Node& node, std::int32_t index) const {
    return children_[static_cast<std::size_t>(node.first + index)];
  }
  std::span<const NodeId> children(const Node& node) const {
    return std::span(children_).subspan(static_cast<std::size_t>(node.first),
                                        static_cast<std::size_t>(node.count));
  }
  std::uint8_t byte(const Node& node, std::int32_t index) const {
    return static_cast<std::uint8_t>(texts_[static_cast<std::size_t>(node.first + index)]);
  }
  const ByteSet& set_of(const Node& node) const {
    return sets_[static_cast<std::size_t>(node.first)];
  }
  // Returns false for a node from which no text has an end.
  bool ends(NodeId id) const { return ends_[static_cast<std::size_t>(id)]; }

  // Bytes that the grammar never tells apart have the same class, 0 to classes() - 1.
  std::uint8_t class_of(std::uint8_t byte) const { return class_of_[byte]; }
  int classes() const { return classes_; }
  std::size_t size() const { return nodes_.size(); }

 private:
  NodeId add(const Node& node);
  NodeId add_parent(NodeKind kind, std::span<const NodeId> parts);
  // For every node, whether it has a derivation whose leaves all satisfy `leaf`.
  std::vector<bool> derivable(bool (*leaf)(const Grammar&, const Node&)) const;
  // The nodes that may stand first in a node's text.
  void firsts(NodeId id, const std::vector<bool>& nullable, std::vector<NodeId>& found) const;
  bool begins_with_itself(const std::vector<bool>& nullable) const;
  void classify();

  std::vector<Node> nodes_;
  std::vector<NodeId> children_;
  std::string texts_;
  std::vector<ByteSet> sets_;  // none twice
  std::unordered_map<ByteSet, NodeId> set_ids_;
  std::vector<bool> ends_;
  std::array<std::uint8_t, 256> class_of_{};
  int classes_ = 1;
  NodeId start_ = -1;
};

}  // namespace sluice::constrain
