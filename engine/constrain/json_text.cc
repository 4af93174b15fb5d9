#include "engine/constrain/json_text.h"

#include <algorithm>
#include <array>
#include <map>

#include "engine/utf8.h"
#include "sluice/errors.h"

namespace sluice::constrain {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int32_t kMostDigits = 18;
constexpr std::int32_t kMostBlanks = 20;
constexpr std::size_t kMostNameCharacters = 20'000;

// Characters that a string has to escape. All others stand for themselves.
const CodeSet& escaped() {
  static const CodeSet kEscaped = {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
  return kEscaped;
}

const CodeSet& ascii() {
  static const CodeSet kAscii = {{0, 0x7F}};
  return kAscii;
}

std::string json_string(std::string_view text) { return Json(text).dump(); }

// The escape of a character, without quotes.
std::string escape_of(char32_t code_point) {
  const std::string quoted = json_string(std::string(1, static_cast<char>(code_point)));
  return quoted.substr(1, quoted.size() - 2);
}

}  // namespace

std::u32string code_points(std::string_view text) {
  std::u32string all;
  while (!text.empty()) {
    all += first_code_point(text);
    text.remove_prefix(next_utf8_unit(text).length);
  }
  return all;
}

JsonText::JsonText(Grammar& grammar) : grammar_(&grammar) {
  Grammar& g = grammar;
  const NodeId blanks = g.repeat(g.any_byte_of(" \t"), 0, kMostBlanks);
  space_ = g.optional(g.choice({g.bytes(" "), g.sequence({g.bytes("\n"), blanks})}));
  beyond_ascii_ = g.code_point(~ascii());
  any_escape_ = escapes(escaped());
  character_ = any_character();
  string_ = string(0, kUnbounded);
  const NodeId digit = g.byte_range('0', '9');
  const NodeId whole = g.choice(
      {g.bytes("0"), g.sequence({g.byte_range('1', '9'), g.repeat(digit, 0, kMostDigits - 1)})});
  integer_ = g.sequence({g.optional(g.bytes("-")), whole});
  const NodeId fraction = g.sequence({g.bytes("."), g.repeat(digit, 1, kMostDigits)});
  const NodeId exponent =
      g.sequence({g.any_byte_of("eE"), g.optional(g.any_byte_of("+-")), g.repeat(digit, 1, 2)});
  number_ = g.sequence({integer_, g.optional(fraction), g.optional(exponent)});
  boolean_ = g.choice({g.bytes("true"), g.bytes("false")});
  null_ = g.bytes("null");
  any_value_ = g.rule();
  any_array_ = array(any_value_, 0, kUnbounded);
  any_object_ = object({}, other_member({}, any_value_));
  g.define(any_value_, g.choice({any_object_, any_array_, string_, number_, boolean_, null_}));
}

// A character of a string in any way to write it. Surrogates come in pairs.
NodeId JsonText::any_character() {
  Grammar& g = *grammar_;
  const NodeId hex = g.any_byte_of("0123456789abcdefABCDEF");
  const auto unit = [&](std::initializer_list<NodeId> digits) {
    std::vector<NodeId> parts = {g.bytes("\\u")};
    parts.insert(parts.end(), digits);
    return g.sequence(parts);
  };
  const NodeId d = g.any_byte_of("dD");
  const NodeId basic = unit({g.any_byte_of("0123456789abcefABCEF"), hex, hex, hex});
  const NodeId below = unit({d, g.any_byte_of("01234567"), hex, hex});
  const NodeId high = unit({d, g.any_byte_of("89abAB"), hex, hex});
  const NodeId low = unit({d, g.any_byte_of("cdefCDEF"), hex, hex});
  const NodeId simple = g.sequence({g.bytes("\\"), g.any_byte_of("\"\\/bfnrt")});
  return g.choice({g.code_point(~escaped()), simple, basic, below, g.sequence({high, low})});
}

NodeId JsonText::string(std::int32_t least, std::int32_t most) {
  const NodeId quote = grammar_->bytes("\"");
  return grammar_->sequence({quote, grammar_->repeat(character_, least, most), quote});
}

NodeId JsonText::written(const CodeSet& characters) {
  std::vector<NodeId> ways = {grammar_->code_point(characters & ascii() & ~escaped())};
  const CodeSet beyond = characters & ~ascii();
  if (beyond == ~ascii()) {
    ways.push_back(beyond_ascii_);
  } else if (!beyond.empty()) {
    ways.push_back(grammar_->code_point(beyond));
  }
  const CodeSet special = characters & escaped();
  if (special == escaped()) {
    ways.push_back(any_escape_);
  } else if (!special.empty()) {
    ways.push_back(escapes(special));
  }
  return ways.size() == 1 ? ways.front() : grammar_->choice(ways);
}

NodeId JsonText::escapes(const CodeSet& characters) {
  std::vector<NodeId> ways;
  for (const CodeRange& range : characters.ranges()) {
    for (char32_t code = range.first; code <= range.last; ++code) {
      ways.push_back(grammar_->bytes(escape_of(code)));
    }
  }
  return grammar_->choice(ways);
}

NodeId JsonText::literal_string(std::string_view text) {
  return grammar_->bytes(json_string(text));
}

NodeId JsonText::constant(const Json& value) {
  if (value.is_array()) {
    if (value.empty()) return array(null_, 0, 0);
    std::vector<NodeId> parts = {grammar_->bytes("["), space_};
    for (const Json& item : value) {
      if (parts.size() > 2) parts.insert(parts.end(), {grammar_->bytes(","), space_});
      parts.push_back(constant(item));
    }
    parts.insert(parts.end(), {space_, grammar_->bytes("]")});
    return grammar_->sequence(parts);
  }
  if (value.is_object()) {
    std::vector<Member> members;
    for (const auto& [name, inner] : value.items()) {
      members.push_back({member(name, constant(inner)), true});
    }
    return object(members, std::nullopt);
  }
  return grammar_->bytes(value.dump());
}

NodeId JsonText::array(NodeId item, std::int32_t least, std::int32_t most) {
  Grammar& g = *grammar_;
  std::vector<NodeId> bodies;
  if (least == 0) bodies.push_back(g.empty());
  if (most > 0) {
    const NodeId next = g.sequence({g.bytes(","), space_, item});
    const NodeId others =
        g.repeat(next, std::max(least - 1, 0), most == kUnbounded ? kUnbounded : most - 1);
    bodies.push_back(g.sequence({item, others, space_}));
  }
  return g.sequence({g.bytes("["), space_, g.choice(bodies), g.bytes("]")});
}

// From the last member to the first: `pick` is what may stand where a member has to, `rest` what
// may stand behind one.
NodeId JsonText::object(std::span<const Member> members, std::optional<NodeId> more) {
  Grammar& g = *grammar_;
  const NodeId comma = g.sequence({g.bytes(","), space_});
  NodeId rest = more ? g.repeat(g.sequence({comma, *more}), 0) : g.empty();
  NodeId pick = more ? g.sequence({*more, rest}) : g.choice({});
  bool may_end = true;
  for (auto one = members.rbegin(); one != members.rend(); ++one) {
    const NodeId here = g.sequence({one->text, rest});
    pick = one->required ? here : g.choice({here, pick});
    may_end = may_end && !one->required;
    const NodeId next = g.sequence({comma, pick});
    rest = may_end ? g.optional(next) : next;
  }
  const NodeId body = g.sequence({pick, space_});
  return g.sequence({g.bytes("{"), space_, may_end ? g.optional(body) : body, g.bytes("}")});
}

NodeId JsonText::member(std::string_view name, NodeId value) {
  return grammar_->sequence({literal_string(name), grammar_->bytes(":"), space_, value});
}

NodeId JsonText::other_member(std::span<const std::string> others, NodeId value) {
  std::vector<std::u32string> names;
  for (const std::string& name : others) names.push_back(code_points(name));
  return grammar_->sequence({name_outside(names), grammar_->bytes(":"), space_, value});
}

// A trie of the names: where a name leaves it, all characters may follow.
NodeId JsonText::name_outside(const std::vector<std::u32string>& names) {
  if (names.empty()) return string_;
  Grammar& g = *grammar_;
  struct Place {
    std::map<char32_t, std::size_t> next;
    bool is_name = false;
    NodeId node = 0;
  };
  std::size_t characters = 0;
  for (const std::u32string& name : names) characters += name.size();
  if (characters > kMostNameCharacters) {
    throw Error(ErrorCode::usage,
                "the constraint is too large: the names of an object's properties have " +
                    std::to_string(characters) +
                    " characters; the most are 20000 where other names are allowed");
  }
  std::vector<Place> places(1);
  for (const std::u32string& name : names) {
    std::size_t at = 0;
    for (const char32_t code : name) {
      const auto [found, is_new] = places[at].next.emplace(code, places.size());
      const std::size_t next = found->second;
      if (is_new) places.emplace_back();
      at = next;
    }
    places[at].is_name = true;
  }
  const NodeId quote = g.bytes("\"");
  const NodeId free = g.sequence({g.repeat(written(CodeSet::all()), 0), quote});
  for (auto place = places.rbegin(); place != places.rend(); ++place) {
    std::vector<NodeId> ways;
    std::vector<CodeRange> known;
    for (const auto& [code, next] : place->next) {
      known.push_back({code, code});
      ways.push_back(g.sequence({written(CodeSet{{code, code}}), places[next].node}));
    }
    ways.push_back(g.sequence({written(~CodeSet(std::move(known))), free}));
    if (!place->is_name) ways.push_back(quote);
    place->node = g.choice(ways);
  }
  return g.sequence({quote, places.front().node});
}

}  // namespace sluice::constrain
