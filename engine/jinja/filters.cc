#include <algorithm>
#include <array>
#include <charconv>

#include "engine/jinja/library.h"
#include "lib/text.h"

namespace sluice::jinja {
namespace {

using Filter = Value (*)(const Value&, const Arguments&, Budget&);

template <typename Function>
struct Named {
  std::string_view name;
  Function function;
};

std::int64_t size_of(const Value& value) {
  if (value.text() != nullptr) return static_cast<std::int64_t>(length(*value.text()));
  if (value.list() != nullptr) return static_cast<std::int64_t>(value.list()->items.size());
  if (value.dict() != nullptr) return static_cast<std::int64_t>(value.dict()->entries.size());
  if (value.undefined() != nullptr) return 0;
  refuse(std::string("asks for the length of ") + value.kind());
}

// Follows a path of member names separated by points.
Value path_of(const Value& object, const Value& path, Budget& budget) {
  if (path.text() == nullptr) return member_of(object, path, budget);
  Value value = object;
  for (const Text& part : split(*path.text(), ".")) value = member_of(value, part, budget);
  return value;
}

Value trim(const Value& value, const Arguments& arguments, Budget&) {
  const auto given = arguments.match("trim", {"chars"});
  const bool has_chars = given[0] != nullptr && !given[0]->is_none();
  return strip(
      to_text(value), Side::both,
      has_chars ? std::optional(text_of(*given[0], "what is trimmed").bytes()) : std::nullopt);
}

Value default_of(const Value& value, const Arguments& arguments, Budget&) {
  const auto given = arguments.match("default", {"default_value", "boolean"});
  const bool any_false = given[1] != nullptr && is_true(*given[1]);
  const bool is_missing = value.undefined() != nullptr || (any_false && !is_true(value));
  if (!is_missing) return value;
  return given[0] == nullptr ? Value(Text()) : *given[0];
}

Value join(const Value& value, const Arguments& arguments, Budget& budget) {
  const auto given = arguments.match("join", {"d", "attribute"});
  const Text between = given[0] == nullptr ? Text() : to_text(*given[0]);
  Text joined;
  bool is_first = true;
  for (const Value& item : items_of(value, budget)) {
    if (!is_first) joined.append(between);
    is_first = false;
    const Value part = given[1] == nullptr ? item : path_of(item, *given[1], budget);
    budget.charge(part.weight() + between.size());
    joined.append(to_text(part));
  }
  return joined;
}

Value replaced(const Value& value, const Arguments& arguments, Budget& budget) {
  const auto given = arguments.match("replace", {"old", "new", "count"});
  if (given[0] == nullptr || given[1] == nullptr) refuse("replaces without saying what by what");
  Arguments forwarded;
  for (const Value* const argument : given) {
    if (argument != nullptr && !argument->is_none()) forwarded.values.push_back(*argument);
  }
  return call_method(to_text(value), "replace", forwarded, budget);
}

Value end_of(const Value& value, Budget& budget, bool at_start) {
  const std::vector<Value> items = items_of(value, budget);
  if (items.empty()) return Undefined{"an item"};
  return at_start ? items.front() : items.back();
}

Value reversed(const Value& value, const Arguments& arguments, Budget& budget) {
  arguments.match("reverse", {});
  std::vector<Value> items = items_of(value, budget);
  std::reverse(items.begin(), items.end());
  if (value.text() == nullptr) return Value::list(std::move(items));
  Text text;
  for (const Value& item : items) text.append(*item.text());
  return text;
}

Value to_integer(const Value& value, const Arguments& arguments, Budget&) {
  const auto given = arguments.match("int", {"default"});
  if (value.integer() != nullptr || value.truth() != nullptr) return integer_of(value, "int");
  if (const double* const real = value.real(); real != nullptr && *real > -1e15 && *real < 1e15) {
    return static_cast<std::int64_t>(*real);
  }
  if (value.text() != nullptr) {
    const std::string digits = strip(*value.text(), Side::both).bytes();
    std::int64_t number = 0;
    const char* const end = digits.data() + digits.size();
    const auto parsed = std::from_chars(digits.data(), end, number);
    if (parsed.ec == std::errc() && parsed.ptr == end) return number;
  }
  return given[0] == nullptr ? Value(std::int64_t{0}) : *given[0];
}

Value as_json(const Value& value, const Arguments& arguments, Budget& budget) {
  const auto given = arguments.match("tojson", {"indent"});
  if (given[0] != nullptr && !given[0]->is_none()) refuse("writes JSON in lines");
  budget.charge(8 * value.weight());
  return to_json(value);
}

Value pairs_of(const Value& value, const Arguments& arguments, Budget& budget) {
  arguments.match("items", {});
  if (value.undefined() != nullptr) return Value::list({});
  return call_method(value, "items", {}, budget);
}

// Jinja's map and select treat false values, such as missing tools, as empty lists.
std::vector<Value> items_if_true(const Value& value, Budget& budget) {
  return is_true(value) ? items_of(value, budget) : std::vector<Value>();
}

// map('filter', arguments...) or map(attribute=path, default=value).
Value mapped(const Value& value, const Arguments& arguments, Budget& budget) {
  std::vector<Value> items = items_if_true(value, budget);
  if (arguments.values.empty()) {
    const auto given = arguments.match("map", {"attribute", "default"});
    if (given[0] == nullptr) refuse("maps without saying to what");
    for (Value& item : items) {
      item = path_of(item, *given[0], budget);
      if (item.undefined() != nullptr && given[1] != nullptr) item = *given[1];
    }
    return Value::list(std::move(items));
  }
  const std::string filter = text_of(arguments.values[0], "the name of a filter").bytes();
  const Arguments rest{{arguments.values.begin() + 1, arguments.values.end()}, arguments.named};
  for (Value& item : items) {
    budget.charge(item.weight());
    item = apply_filter(filter, item, rest, budget);
  }
  return Value::list(std::move(items));
}

// The items for which a test, or without one their truth, equals `wanted`; tests the items or one
// of their members.
Value chosen(const Value& value, const Arguments& arguments, Budget& budget, bool wanted,
             bool by_member) {
  if (!arguments.named.empty()) refuse("chooses by an argument with a name");
  const std::size_t skipped = by_member ? 1 : 0;
  if (arguments.values.size() < skipped) refuse("chooses by a member without its name");
  Arguments rest;
  std::string test;
  if (arguments.values.size() > skipped) {
    test = text_of(arguments.values[skipped], "the name of a test").bytes();
    rest.values.assign(arguments.values.begin() + static_cast<int>(skipped) + 1,
                       arguments.values.end());
  }
  std::vector<Value> items;
  for (Value& item : items_if_true(value, budget)) {
    const Value tested = by_member ? path_of(item, arguments.values[0], budget) : item;
    const bool holds = test.empty() ? is_true(tested) : apply_test(test, tested, rest, budget);
    if (holds == wanted) items.push_back(std::move(item));
  }
  return Value::list(std::move(items));
}

constexpr std::array<Named<Filter>, 23> kFilters = {{
    {"trim", trim},
    {"length", [](const Value& v, const Arguments&, Budget&) { return Value(size_of(v)); }},
    {"count", [](const Value& v, const Arguments&, Budget&) { return Value(size_of(v)); }},
    {"default", default_of},
    {"d", default_of},
    {"lower", [](const Value& v, const Arguments&, Budget&) { return Value(lower(to_text(v))); }},
    {"upper", [](const Value& v, const Arguments&, Budget&) { return Value(upper(to_text(v))); }},
    {"capitalize",
     [](const Value& v, const Arguments&, Budget&) { return Value(capitalize(to_text(v))); }},
    {"join", join},
    {"first", [](const Value& v, const Arguments&, Budget& b) { return end_of(v, b, true); }},
    {"last", [](const Value& v, const Arguments&, Budget& b) { return end_of(v, b, false); }},
    {"replace", replaced},
    {"reverse", reversed},
    {"list",
     [](const Value& v, const Arguments&, Budget& b) { return Value::list(items_of(v, b)); }},
    {"string", [](const Value& v, const Arguments&, Budget&) { return Value(to_text(v)); }},
    {"int", to_integer},
    {"tojson", as_json},
    {"items", pairs_of},
    {"map", mapped},
    {"select",
     [](const Value& v, const Arguments& a, Budget& b) { return chosen(v, a, b, true, false); }},
    {"reject",
     [](const Value& v, const Arguments& a, Budget& b) { return chosen(v, a, b, false, false); }},
    {"selectattr",
     [](const Value& v, const Arguments& a, Budget& b) { return chosen(v, a, b, true, true); }},
    {"rejectattr",
     [](const Value& v, const Arguments& a, Budget& b) { return chosen(v, a, b, false, true); }},
}};

using Test = bool (*)(const Value&);

bool is_number(const Value& v) {
  return v.integer() != nullptr || v.real() != nullptr || v.truth() != nullptr;
}
bool is_sequence(const Value& v) {
  return v.text() != nullptr || v.list() != nullptr || v.dict() != nullptr ||
         v.undefined() != nullptr;
}

// Tests without arguments.
constexpr std::array<Named<Test>, 18> kTests = {{
    {"defined", [](const Value& v) { return v.undefined() == nullptr; }},
    {"undefined", [](const Value& v) { return v.undefined() != nullptr; }},
    {"none", [](const Value& v) { return v.is_none(); }},
    {"string", [](const Value& v) { return v.text() != nullptr; }},
    {"mapping", [](const Value& v) { return v.dict() != nullptr; }},
    {"sequence", is_sequence},
    {"iterable", is_sequence},
    {"number", is_number},
    {"integer", [](const Value& v) { return v.integer() != nullptr; }},
    {"float", [](const Value& v) { return v.real() != nullptr; }},
    {"boolean", [](const Value& v) { return v.truth() != nullptr; }},
    {"true", [](const Value& v) { return v.truth() != nullptr && *v.truth(); }},
    {"false", [](const Value& v) { return v.truth() != nullptr && !*v.truth(); }},
    {"odd", [](const Value& v) { return integer_of(v, "a test of being odd") % 2 != 0; }},
    {"even", [](const Value& v) { return integer_of(v, "a test of being even") % 2 == 0; }},
    {"callable", [](const Value& v) { return v.function() != nullptr; }},
    {"lower",
     [](const Value& v) {
       const Text text = to_text(v);
       return text.bytes() == lower(text).bytes() && text.bytes() != upper(text).bytes();
     }},
    {"upper",
     [](const Value& v) {
       const Text text = to_text(v);
       return text.bytes() == upper(text).bytes() && text.bytes() != lower(text).bytes();
     }},
}};

template <typename Table>
auto found_in(const Table& table, std::string_view name) {
  return std::find_if(table.begin(), table.end(),
                      [name](const auto& entry) { return entry.name == name; });
}

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments,
                   Budget& budget) {
  const auto filter = found_in(kFilters, name);
  if (name.empty() || filter == kFilters.end()) {
    refuse("uses the filter " + in_quotes(name) + ", which is not known here");
  }
  budget.charge(1 + (value.text() != nullptr ? value.weight() : 0));
  return filter->function(value, arguments, budget);
}

bool apply_test(const std::string& name, const Value& value, const Arguments& arguments,
                Budget& budget) {
  budget.charge(1 + (value.text() != nullptr ? value.weight() / 8 : 0));
  if (const auto test = found_in(kTests, name); !name.empty() && test != kTests.end()) {
    arguments.match(name, {});
    return test->function(value);
  }
  const bool is_equality = is_one_of(name, {"eq", "equalto", "==", "sameas"});
  const bool is_inequality = is_one_of(name, {"ne", "!="});
  const bool is_order =
      is_one_of(name, {"lt", "<", "lessthan", "gt", ">", "greaterthan", "le", "<=", "ge", ">="});
  if (!is_equality && !is_inequality && !is_order && name != "in" && name != "divisibleby") {
    refuse("uses the test " + in_quotes(name) + ", which is not known here");
  }
  const auto given = arguments.match(name, {"other"});
  if (given[0] == nullptr) refuse("uses the test " + in_quotes(name) + " without an argument");
  const Value& other = *given[0];
  if (is_equality) return equal(value, other, budget);
  if (is_inequality) return !equal(value, other, budget);
  if (name == "in") return contains(other, value, budget);
  if (name == "divisibleby") {
    const std::int64_t divisor = integer_of(other, "a divisor");
    if (divisor == 0) refuse("divides by 0");
    return divisor == -1 || integer_of(value, "what is divided") % divisor == 0;
  }
  if (is_one_of(name, {"lt", "<", "lessthan"})) return less(value, other);
  if (is_one_of(name, {"gt", ">", "greaterthan"})) return less(other, value);
  return is_one_of(name, {"le", "<="}) ? !less(other, value) : !less(value, other);
}

}  // namespace sluice::jinja
