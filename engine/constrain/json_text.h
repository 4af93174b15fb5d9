// Parts of JSON texts as nodes of a grammar. Source: RFC 8259.
//
// What may be written in several ways has one here where it must be compared: names, constants, and
// strings under a pattern are written as nlohmann::json writes them, without escapes that are not
// needed. Other strings may have every escape. Numbers have at most 18 digits before the point, 18
// behind it and an exponent of two digits, so that every parser reads them. White space is allowed
// behind `{ [ , :` and before `} ]`: one blank, or a line feed and up to 20 blanks or tabs.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/constrain/grammar.h"

namespace sluice::constrain {

struct Member {
  NodeId text = 0;  // name, colon and value
  bool required = false;
};

class JsonText {
 public:
  explicit JsonText(Grammar& grammar);

  NodeId space() const { return space_; }
  NodeId string() const { return string_; }
  // A string of `least` to `most` characters (code points).
  NodeId string(std::int32_t least, std::int32_t most);
  NodeId integer() const { return integer_; }
  NodeId number() const { return number_; }
  NodeId boolean() const { return boolean_; }
  NodeId null() const { return null_; }
  NodeId any_object() const { return any_object_; }
  NodeId any_value() const { return any_value_; }
  // This value alone.
  NodeId constant(const nlohmann::ordered_json& value);

  // "[", `least` to `most` items, "]".
  NodeId array(NodeId item, std::int32_t least, std::int32_t most);
  // "{", the members in this order, then any number of `more`, "}".
  NodeId object(std::span<const Member> members, std::optional<NodeId> more);
  NodeId member(std::string_view name, NodeId value);
  // With any name but those of `others`, which must be valid UTF-8.
  NodeId other_member(std::span<const std::string> others, NodeId value);

  // One character of a string, as it is written there if no escape is used that is not needed.
  NodeId written(const CodeSet& characters);

 private:
  NodeId any_character();
  // Characters that have to be escaped.
  NodeId escapes(const CodeSet& characters);
  NodeId literal_string(std::string_view text);
  NodeId name_outside(const std::vector<std::u32string>& names);

  Grammar* grammar_;
  // Parts of nearly every negated set, made once because they take many nodes.
  NodeId beyond_ascii_ = -1;
  NodeId any_escape_ = -1;
  NodeId space_ = -1;
  NodeId character_ = -1;
  NodeId string_ = -1;
  NodeId integer_ = -1;
  NodeId number_ = -1;
  NodeId boolean_ = -1;
  NodeId null_ = -1;
  NodeId any_value_ = -1;
  NodeId any_object_ = -1;
  NodeId any_array_ = -1;
};

// The code points of a text in UTF-8.
std::u32string code_points(std::string_view text);

}  // namespace sluice::constrain
