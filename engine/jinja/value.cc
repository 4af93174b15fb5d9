#include "engine/jinja/value.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::jinja {
namespace {

constexpr std::uint32_t kMostDepth = 64;

// Refuses namespaces as items: they can change, so one could be put inside itself.
template <typename Container>
void measure(Container& container, const Value& item) {
  const auto add = [&](std::uint32_t depth, std::uint64_t weight) {
    container.depth = std::max(container.depth, depth + 1);
    container.weight += weight;
  };
  if (item.members() != nullptr) refuse("puts a namespace into a value");
  if (const List* const list = item.list()) {
    add(list->depth, list->weight);
  } else if (const Dict* const dict = item.dict()) {
    add(dict->depth, dict->weight);
  } else {
    add(0, item.weight());
  }
  if (container.depth > kMostDepth) {
    refuse("nests values more than " + std::to_string(kMostDepth) + " deep");
  }
}

// The number of a value; booleans count as 0 or 1.
std::optional<double> number(const Value& value) {
  if (const bool* const truth = value.truth()) return *truth ? 1.0 : 0.0;
  if (const std::int64_t* const integer = value.integer()) return static_cast<double>(*integer);
  if (const double* const real = value.real()) return *real;
  return std::nullopt;
}

bool equal_dicts(const Dict& a, const Dict& b, Budget& budget) {
  if (a.entries.size() != b.entries.size()) return false;
  return std::all_of(a.entries.begin(), a.entries.end(), [&](const auto& entry) {
    budget.charge(b.entries.size());
    const Value* const other = b.find(entry.first);
    return other != nullptr && equal(entry.second, *other, budget);
  });
}

// Python's repr(): the shortest text that reads back, with ".0" if it looks like an integer.
std::string text_of(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  const double size = std::abs(value);
  const bool with_exponent = value != 0.0 && (size < 1e-4 || size >= 1e16);
  std::array<char, 64> digits{};
  const auto format = with_exponent ? std::chars_format::scientific : std::chars_format::fixed;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value, format).ptr;
  std::string text(digits.data(), end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

void append_json_string(const Text& text, Text& json) {
  json.append(Text("\""));
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const auto c = static_cast<unsigned char>(text.bytes()[at]);
    if (c >= 0x20 && c != '"' && c != '\\') continue;
    json.append(text, begin, at);
    begin = at + 1;
    constexpr std::string_view kNamed = "\b\f\n\r\t\"\\";
    constexpr std::string_view kNames = "bfnrt\"\\";
    const std::size_t named = kNamed.find(static_cast<char>(c));
    std::array<char, 8> escape{};
    if (named != std::string_view::npos) {
      std::snprintf(escape.data(), escape.size(), "\\%c", kNames[named]);
    } else {
      std::snprintf(escape.data(), escape.size(), "\\u%04x", c);
    }
    json.append(Text(escape.data(), text.origins()[at]));
  }
  json.append(text, begin, text.size());
  json.append(Text("\""));
}

void append_json(const Value& value, Text& json) {
  if (const Text* const text = value.text()) return append_json_string(*text, json);
  if (value.is_none()) return json.append(Text("null"));
  if (const bool* const truth = value.truth()) return json.append(Text(*truth ? "true" : "false"));
  if (const List* const list = value.list()) {
    json.append(Text("["));
    for (std::size_t i = 0; i < list->items.size(); ++i) {
      if (i > 0) json.append(Text(", "));
      append_json(list->items[i], json);
    }
    return json.append(Text("]"));
  }
  if (const Dict* const dict = value.dict()) {
    json.append(Text("{"));
    for (std::size_t i = 0; i < dict->entries.size(); ++i) {
      if (i > 0) json.append(Text(", "));
      append_json_string(Text(dict->entries[i].first), json);
      json.append(Text(": "));
      append_json(dict->entries[i].second, json);
    }
    return json.append(Text("}"));
  }
  if (value.undefined() != nullptr) refuse("writes what is undefined as JSON");
  if (value.function() != nullptr || value.members() != nullptr) {
    refuse(std::string("writes ") + value.kind() + " as JSON");
  }
  json.append(to_text(value));
}

}  // namespace

void refuse(const std::string& does) {
  throw Error(ErrorCode::unsupported, "the template " + does);
}

void Budget::charge(std::uint64_t units) {
  if (units > left_) refuse("takes implausibly many steps");
  left_ -= units;
}

const Value* Dict::find(std::string_view key) const {
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [key](const auto& entry) { return entry.first == key; });
  return found == entries.end() ? nullptr : &found->second;
}

void Dict::set(std::string_view key, Value value) {
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [key](const auto& entry) { return entry.first == key; });
  if (found != entries.end()) {
    found->second = std::move(value);
  } else {
    entries.emplace_back(key, std::move(value));
  }
}

Value Value::list(std::vector<Value> items) {
  auto list = std::make_shared<List>();
  for (const Value& item : items) measure(*list, item);
  list->items = std::move(items);
  Value value;
  value.data_ = std::shared_ptr<const List>(std::move(list));
  return value;
}

Value Value::dict(Dict dict) {
  dict.depth = 1;
  dict.weight = 1;
  for (const auto& [key, item] : dict.entries) measure(dict, item);
  Value value;
  value.data_ = std::make_shared<const Dict>(std::move(dict));
  return value;
}

Value Value::make_namespace(Dict members) {
  for (const auto& [name, member] : members.entries) measure(members, member);
  Value value;
  value.data_ = std::make_shared<Dict>(std::move(members));
  return value;
}

const char* Value::kind() const {
  constexpr std::array<const char*, 10> kKinds = {
      "what is undefined", "none",        "true or false", "a number", "a number", "text", "a list",
      "a dictionary",      "a namespace", "a function"};
  return kKinds.at(data_.index());
}

std::uint64_t Value::weight() const {
  if (const Text* const held = text()) return held->size() + 1;
  if (const List* const held = list()) return held->weight;
  if (const Dict* const held = dict()) return held->weight;
  return 1;
}

bool is_true(const Value& value) {
  if (const Text* const text = value.text()) return text->size() > 0;
  if (const List* const list = value.list()) return !list->items.empty();
  if (const Dict* const dict = value.dict()) return !dict->entries.empty();
  if (const auto is_number = number(value)) return *is_number != 0.0;
  return value.undefined() == nullptr && !value.is_none();
}

bool equal(const Value& a, const Value& b, Budget& budget) {
  budget.charge(1);
  if (a.text() != nullptr && b.text() != nullptr) {
    if (a.text()->size() != b.text()->size()) return false;
    budget.charge(a.text()->size() / 8);
    return a.text()->bytes() == b.text()->bytes();
  }
  if (a.integer() != nullptr && b.integer() != nullptr) return *a.integer() == *b.integer();
  const auto x = number(a);
  const auto y = number(b);
  if (x && y) return *x == *y;
  if (a.list() != nullptr && b.list() != nullptr) {
    const auto same = [&](const Value& left, const Value& right) {
      return equal(left, right, budget);
    };
    return std::equal(a.list()->items.begin(), a.list()->items.end(), b.list()->items.begin(),
                      b.list()->items.end(), same);
  }
  if (a.dict() != nullptr && b.dict() != nullptr) return equal_dicts(*a.dict(), *b.dict(), budget);
  if (a.members() != nullptr || b.members() != nullptr) return a.members() == b.members();
  if (a.function() != nullptr || b.function() != nullptr) return a.function() == b.function();
  return (a.is_none() && b.is_none()) || (a.undefined() != nullptr && b.undefined() != nullptr);
}

bool less(const Value& a, const Value& b) {
  if (a.text() != nullptr && b.text() != nullptr) return a.text()->bytes() < b.text()->bytes();
  if (a.integer() != nullptr && b.integer() != nullptr) return *a.integer() < *b.integer();
  const auto x = number(a);
  const auto y = number(b);
  if (!x || !y) refuse(std::string("orders ") + a.kind() + " and " + b.kind());
  return *x < *y;
}

bool contains(const Value& container, const Value& item, Budget& budget) {
  if (const Text* const text = container.text()) {
    if (item.text() == nullptr) refuse(std::string("looks for ") + item.kind() + " in text");
    budget.charge(text->size() / 8 + 1);
    return find_part(text->bytes(), item.text()->bytes()) != std::string::npos;
  }
  if (const List* const list = container.list()) {
    return std::any_of(list->items.begin(), list->items.end(),
                       [&](const Value& held) { return equal(held, item, budget); });
  }
  if (const Dict* const dict = container.dict()) {
    budget.charge(dict->entries.size());
    if (item.list() != nullptr || item.dict() != nullptr) {
      refuse(std::string("looks for ") + item.kind() + " in a dictionary");
    }
    return item.text() != nullptr && dict->find(item.text()->bytes()) != nullptr;
  }
  if (container.undefined() != nullptr) return false;
  refuse(std::string("looks for something in ") + container.kind());
}

Text to_text(const Value& value) {
  if (const Text* const text = value.text()) return *text;
  if (value.undefined() != nullptr) return {};
  if (value.is_none()) return Text("None");
  if (const bool* const truth = value.truth()) return Text(*truth ? "True" : "False");
  if (const std::int64_t* const integer = value.integer()) return Text(std::to_string(*integer));
  if (const double* const real = value.real()) return Text(text_of(*real));
  refuse(std::string("writes ") + value.kind());
}

Text to_json(const Value& value) {
  Text json;
  append_json(value, json);
  return json;
}

}  // namespace sluice::jinja
