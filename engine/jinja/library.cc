#include "engine/jinja/library.h"

#include <algorithm>
#include <array>

#include "engine/utf8.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::jinja {
namespace {

constexpr std::int64_t kMostItems = 10'000;  // in a range

Value character_at(const Text& text, std::int64_t index) {
  const auto count = static_cast<std::int64_t>(length(text));
  if (index < 0) index += count;
  if (index < 0 || index >= count) return Undefined{"a character"};
  const std::size_t begin = offset_of(text, static_cast<std::size_t>(index));
  const std::size_t size = next_utf8_unit(std::string_view(text.bytes()).substr(begin)).length;
  return text.slice(begin, begin + size);
}

Value range(const Arguments& arguments, Budget& budget) {
  const auto given = arguments.match("range", {"start", "stop", "step"});
  if (given[0] == nullptr) refuse("calls range without an end");
  const bool has_start = given[1] != nullptr;
  const std::int64_t start = has_start ? integer_of(*given[0], "a start of range") : 0;
  const std::int64_t stop = integer_of(*given[has_start ? 1 : 0], "an end of range");
  const std::int64_t step = given[2] == nullptr ? 1 : integer_of(*given[2], "a step of range");
  if (step == 0) refuse("has a range with a step of 0");
  std::vector<Value> items;
  for (std::int64_t i = start; step > 0 ? i < stop : i > stop;) {
    if (static_cast<std::int64_t>(items.size()) >= kMostItems)
      refuse("has a range that is too long");
    items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  budget.charge(items.size());
  return Value::list(std::move(items));
}

// Allows only directives of one letter, because a width could make the text arbitrarily long.
Value formatted(const Text& format, const std::tm& now) {
  const std::string& text = format.bytes();
  if (text.find('\0') != std::string::npos) refuse("writes a date in an unknown form");
  for (std::size_t i = text.find('%'); i != std::string::npos; i = text.find('%', i + 1)) {
    if (i + 1 < text.size() && text[i + 1] == '-') ++i;
    constexpr std::string_view kDirectives = "aAbBcdHIjmMpSUwWxXyYZz%";
    if (i + 1 >= text.size() || kDirectives.find(text[i + 1]) == std::string_view::npos) {
      refuse("writes a date in an unknown form");
    }
    ++i;
  }
  if (text.size() > 256) refuse("writes a date in an unknown form");
  std::array<char, 4096> buffer{};
  const std::size_t size = std::strftime(buffer.data(), buffer.size(), text.c_str(), &now);
  return Text(std::string_view(buffer.data(), size));
}

Dict named_members(const std::string& name, const Arguments& arguments) {
  Dict members;
  for (const Value& value : arguments.values) {
    if (value.dict() == nullptr) refuse("calls " + name + " with " + value.kind());
    for (const auto& [key, member] : value.dict()->entries) members.set(key, member);
  }
  for (const auto& [key, member] : arguments.named) members.set(key, member);
  return members;
}

}  // namespace

std::vector<const Value*> Arguments::match(const std::string& callee,
                                           const std::vector<std::string_view>& parameters) const {
  if (values.size() > parameters.size()) {
    refuse("gives " + callee + " more than " + std::to_string(parameters.size()) + " arguments");
  }
  std::vector<const Value*> matched(parameters.size(), nullptr);
  for (std::size_t i = 0; i < values.size(); ++i) matched[i] = &values[i];
  for (const auto& [name, value] : named) {
    const auto found = std::find(parameters.begin(), parameters.end(), name);
    const auto index = static_cast<std::size_t>(found - parameters.begin());
    if (found == parameters.end() || matched[index] != nullptr) {
      refuse("gives " + callee + " the argument " + in_quotes(name));
    }
    matched[index] = &value;
  }
  return matched;
}

std::int64_t integer_of(const Value& value, const std::string& what) {
  if (value.integer() != nullptr) return *value.integer();
  if (value.truth() != nullptr) return *value.truth() ? 1 : 0;
  refuse(std::string("has ") + value.kind() + " for " + what);
}

const Text& text_of(const Value& value, const std::string& what) {
  if (value.text() == nullptr) refuse(std::string("has ") + value.kind() + " for " + what);
  return *value.text();
}

std::vector<Value> items_of(const Value& value, Budget& budget) {
  if (value.list() != nullptr) {
    budget.charge(value.list()->items.size());
    return value.list()->items;
  }
  std::vector<Value> items;
  if (const Dict* const dict = value.dict()) {
    budget.charge(value.weight());
    for (const auto& [key, item] : dict->entries) items.emplace_back(Text(key));
  } else if (const Text* const text = value.text()) {
    budget.charge(16 * text->size());
    for (std::size_t at = 0; at < text->size();) {
      const std::size_t size = next_utf8_unit(std::string_view(text->bytes()).substr(at)).length;
      items.emplace_back(text->slice(at, at + size));
      at += size;
    }
  } else if (value.undefined() == nullptr) {
    refuse(std::string("runs over ") + value.kind());
  }
  return items;
}

Value member_of(const Value& object, const Value& key, Budget& budget) {
  const std::string name = key.text() != nullptr ? key.text()->bytes() : "an item";
  if (object.undefined() != nullptr) {
    refuse("uses " + in_quotes(object.undefined()->name) + ", which is undefined");
  }
  const Dict* const dict = object.members() != nullptr ? object.members() : object.dict();
  if (dict != nullptr && key.text() != nullptr) {
    const Value* const member = dict->find(name);
    return member == nullptr ? Value(Undefined{name}) : *member;
  }
  const bool has_index = key.integer() != nullptr || key.truth() != nullptr;
  if (has_index && object.text() != nullptr) {
    budget.charge(object.text()->size() / 8);  // its characters are counted
    return character_at(*object.text(), integer_of(key, "an index"));
  }
  if (has_index && object.list() != nullptr) {
    const std::vector<Value>& items = object.list()->items;
    const auto count = static_cast<std::int64_t>(items.size());
    std::int64_t index = integer_of(key, "an index");
    if (index < 0) index += count;
    if (index >= 0 && index < count) return items[static_cast<std::size_t>(index)];
  }
  return Undefined{name};
}

bool is_function(std::string_view name) {
  constexpr std::array<std::string_view, 5> kNames = {"range", "namespace", "dict",
                                                      "raise_exception", "strftime_now"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

Value call_function(const std::string& name, const Arguments& arguments, const std::tm& now,
                    Budget& budget) {
  if (name == "range") return range(arguments, budget);
  if (name == "namespace") return Value::make_namespace(named_members(name, arguments));
  if (name == "dict") return Value::dict(named_members(name, arguments));
  if (name == "strftime_now") {
    const auto given = arguments.match(name, {"format"});
    if (given[0] == nullptr) refuse("calls strftime_now without a form");
    return formatted(text_of(*given[0], "the form of a date"), now);
  }
  const auto given = arguments.match(name, {"message"});
  const std::string message = given[0] == nullptr ? "" : to_text(*given[0]).bytes();
  throw Error(ErrorCode::prompt, "the template refuses this conversation: " + in_quotes(message));
}

}  // namespace sluice::jinja
