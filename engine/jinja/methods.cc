#include <algorithm>
#include <array>

#include "engine/jinja/library.h"
#include "lib/text.h"

namespace sluice::jinja {
namespace {

using Method = Value (*)(const Text&, const Arguments&);

struct TextMethod {
  std::string_view name;
  Method run;
};

// The argument's text, or nothing for none.
std::optional<std::string> optional_text(const Value* given, const std::string& what) {
  if (given == nullptr || given->is_none()) return std::nullopt;
  return text_of(*given, what).bytes();
}

std::int64_t count_of(const Value* given) {
  return given == nullptr ? -1 : std::max<std::int64_t>(-1, integer_of(*given, "a count"));
}

Value stripped(const Text& text, const Arguments& arguments, Side side) {
  const auto given = arguments.match("strip", {"chars"});
  return strip(text, side, optional_text(given[0], "what is stripped"));
}

// Python's startswith (`at_start`) or endswith, with one affix or a list of them.
Value has_affix(const Text& text, const Arguments& arguments, bool at_start) {
  const auto given = arguments.match(at_start ? "startswith" : "endswith", {"affix"});
  if (given[0] == nullptr) refuse("asks what a text begins or ends with, and not for what");
  const auto has = [&](const Value& affix) {
    const std::string& part = text_of(affix, "what a text begins or ends with").bytes();
    return at_start ? text.bytes().starts_with(part) : text.bytes().ends_with(part);
  };
  if (given[0]->list() == nullptr) return has(*given[0]);
  const std::vector<Value>& affixes = given[0]->list()->items;
  return std::any_of(affixes.begin(), affixes.end(), has);
}

Value without_affix(const Text& text, const Arguments& arguments, bool at_start) {
  const auto given = arguments.match(at_start ? "removeprefix" : "removesuffix", {"affix"});
  if (given[0] == nullptr) refuse("removes a part of a text, and does not say which");
  const std::string& part = text_of(*given[0], "a part of a text").bytes();
  if (at_start && text.bytes().starts_with(part)) return text.slice(part.size(), text.size());
  if (!at_start && text.bytes().ends_with(part)) return text.slice(0, text.size() - part.size());
  return text;
}

Value parts_of(const Text& text, const Arguments& arguments, bool from_right) {
  const auto given = arguments.match("split", {"sep", "maxsplit"});
  const auto separator = optional_text(given[0], "what separates");
  if (separator && separator->empty()) refuse("splits a text at nothing");
  std::vector<Value> parts;
  for (Text& part : split(text, separator, count_of(given[1]), from_right)) {
    parts.emplace_back(std::move(part));
  }
  return Value::list(std::move(parts));
}

Value lines_of(const Text& text, const Arguments& arguments) {
  arguments.match("splitlines", {});
  std::vector<Value> lines;
  for (Text& line : split_lines(text)) lines.emplace_back(std::move(line));
  return Value::list(std::move(lines));
}

// Position in characters; -1: not found.
Value position(const Text& text, const Arguments& arguments) {
  const auto given = arguments.match("find", {"sub"});
  if (given[0] == nullptr) refuse("looks for nothing in a text");
  const std::size_t at = find_part(text.bytes(), text_of(*given[0], "what is looked for").bytes());
  if (at == std::string::npos) return std::int64_t{-1};
  return static_cast<std::int64_t>(length(text.slice(0, at)));
}

Value occurrences(const Text& text, const Arguments& arguments) {
  const auto given = arguments.match("count", {"sub"});
  if (given[0] == nullptr) refuse("counts nothing in a text");
  const std::string& part = text_of(*given[0], "what is counted").bytes();
  if (part.empty()) return static_cast<std::int64_t>(length(text) + 1);
  return static_cast<std::int64_t>(split(text, part).size()) - 1;
}

constexpr std::array<TextMethod, 17> kTextMethods = {{
    {"strip", [](const Text& t, const Arguments& a) { return stripped(t, a, Side::both); }},
    {"lstrip", [](const Text& t, const Arguments& a) { return stripped(t, a, Side::left); }},
    {"rstrip", [](const Text& t, const Arguments& a) { return stripped(t, a, Side::right); }},
    {"startswith", [](const Text& t, const Arguments& a) { return has_affix(t, a, true); }},
    {"endswith", [](const Text& t, const Arguments& a) { return has_affix(t, a, false); }},
    {"removeprefix", [](const Text& t, const Arguments& a) { return without_affix(t, a, true); }},
    {"removesuffix", [](const Text& t, const Arguments& a) { return without_affix(t, a, false); }},
    {"split", [](const Text& t, const Arguments& a) { return parts_of(t, a, false); }},
    {"rsplit", [](const Text& t, const Arguments& a) { return parts_of(t, a, true); }},
    {"splitlines", lines_of},
    {"find", position},
    {"count", occurrences},
    {"lower", [](const Text& t, const Arguments&) { return Value(lower(t)); }},
    {"upper", [](const Text& t, const Arguments&) { return Value(upper(t)); }},
    {"capitalize", [](const Text& t, const Arguments&) { return Value(capitalize(t)); }},
    {"title", [](const Text& t, const Arguments&) { return Value(title(t)); }},
    {"isspace",
     [](const Text& t, const Arguments&) {
       return Value(t.size() > 0 && strip(t, Side::both).size() == 0);
     }},
}};

// All of Python's str methods; only those above and the ones handled by name are implemented.
constexpr std::array<std::string_view, 47> kAllTextMethods = {
    "capitalize",   "casefold",    "center",    "count",      "encode",       "endswith",
    "expandtabs",   "find",        "format",    "format_map", "index",        "isalnum",
    "isalpha",      "isascii",     "isdecimal", "isdigit",    "isidentifier", "islower",
    "isnumeric",    "isprintable", "isspace",   "istitle",    "isupper",      "join",
    "ljust",        "lower",       "lstrip",    "maketrans",  "partition",    "removeprefix",
    "removesuffix", "replace",     "rfind",     "rindex",     "rjust",        "rpartition",
    "rsplit",       "rstrip",      "split",     "splitlines", "startswith",   "strip",
    "swapcase",     "title",       "translate", "upper",      "zfill"};
constexpr std::array<std::string_view, 11> kListMethods = {"append", "clear",   "copy",   "count",
                                                           "extend", "index",   "insert", "pop",
                                                           "remove", "reverse", "sort"};
constexpr std::array<std::string_view, 11> kDictMethods = {
    "clear", "copy",    "fromkeys",   "get",    "items", "keys",
    "pop",   "popitem", "setdefault", "update", "values"};

template <typename Names>
bool is_among(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Value call_text_method(const Text& text, const std::string& name, const Arguments& arguments,
                       Budget& budget) {
  // Charges for the parts, because each is an object even if it is empty.
  if (name.find("split") != std::string::npos) budget.charge(16 * text.size());
  if (name == "join") {
    const auto given = arguments.match(name, {"parts"});
    if (given[0] == nullptr) refuse("joins nothing");
    return apply_filter("join", *given[0], {{Value(text)}, {}}, budget);
  }
  if (name == "replace") {
    const auto given = arguments.match(name, {"old", "new", "count"});
    if (given[0] == nullptr || given[1] == nullptr) refuse("replaces without saying what by what");
    const std::string& from = text_of(*given[0], "what is replaced").bytes();
    const Text& to = text_of(*given[1], "what it is replaced by");
    if (from.empty()) refuse("replaces nothing by something");
    budget.charge(text.size() / from.size() * to.size());
    return replace(text, from, to, count_of(given[2]));
  }
  const auto* const method =
      std::find_if(kTextMethods.begin(), kTextMethods.end(),
                   [&name](const TextMethod& entry) { return entry.name == name; });
  if (method == kTextMethods.end()) refuse("calls the method " + in_quotes(name) + " of text");
  return method->run(text, arguments);
}

Value call_dict_method(const Dict& dict, const std::string& name, const Arguments& arguments) {
  if (name == "get") {
    const auto given = arguments.match(name, {"key", "default"});
    if (given[0] == nullptr) refuse("gets nothing from a dictionary");
    const Value* const found =
        given[0]->text() == nullptr ? nullptr : dict.find(given[0]->text()->bytes());
    if (found != nullptr) return *found;
    return given[1] == nullptr ? Value(nullptr) : *given[1];
  }
  if (name != "items" && name != "keys" && name != "values") {
    refuse("calls the method " + in_quotes(name) + " of a dictionary");
  }
  arguments.match(name, {});
  std::vector<Value> items;
  for (const auto& [key, value] : dict.entries) {
    if (name == "items") {
      items.push_back(Value::list({Value(Text(key)), value}));
    } else {
      items.push_back(name == "keys" ? Value(Text(key)) : value);
    }
  }
  return Value::list(std::move(items));
}

}  // namespace

bool has_method(const Value& object, std::string_view name) {
  if (object.text() != nullptr) return is_among(kAllTextMethods, name);
  if (object.list() != nullptr) return is_among(kListMethods, name);
  return object.dict() != nullptr && is_among(kDictMethods, name);
}

Value call_method(const Value& object, const std::string& name, const Arguments& arguments,
                  Budget& budget) {
  budget.charge(object.list() != nullptr ? 1 : object.weight());
  if (object.text() != nullptr) {
    return call_text_method(*object.text(), name, arguments, budget);
  }
  if (object.dict() != nullptr) return call_dict_method(*object.dict(), name, arguments);
  if (object.undefined() != nullptr) {
    refuse("uses " + in_quotes(object.undefined()->name) + ", which is undefined");
  }
  refuse("calls the method " + in_quotes(name) + " of " + object.kind());
}

}  // namespace sluice::jinja
