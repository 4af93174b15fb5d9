// The value of a variable of a template. Values are immutable, except namespaces.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "engine/jinja/text.h"

namespace sluice::jinja {

class Value;
struct Statement;

// Bounds the time and the memory of any template on any input. Unit: a step of the template, or a
// byte that it makes. Throws Error{unsupported} when it is used up.
class Budget {
 public:
  explicit Budget(std::uint64_t units) : left_(units) {}
  void charge(std::uint64_t units);

 private:
  std::uint64_t left_;
};

struct Undefined {
  std::string name;  // the name that was looked up
};

struct List {
  std::vector<Value> items;
  std::uint32_t depth = 1;   // of nested lists and dictionaries
  std::uint64_t weight = 1;  // values and bytes in it, shared ones counted every time
};

struct Dict {
  const Value* find(std::string_view key) const;
  void set(std::string_view key, Value value);

  std::vector<std::pair<std::string, Value>> entries;  // in insertion order
  std::uint32_t depth = 1;
  std::uint64_t weight = 1;
};

// A macro, or a built-in function of Jinja or transformers.
struct Function {
  std::string name;
  const Statement* macro = nullptr;
};

class Value {
 public:
  Value() = default;
  // Conversions are implicit, because the content of a value stands for the value.
  // NOLINTBEGIN(google-explicit-constructor)
  Value(Undefined undefined) : data_(std::move(undefined)) {}
  Value(std::nullptr_t) : data_(nullptr) {}
  Value(bool truth) : data_(truth) {}
  Value(std::int64_t number) : data_(number) {}
  Value(double number) : data_(number) {}
  Value(Text text) : data_(std::make_shared<const Text>(std::move(text))) {}
  Value(Function function) : data_(std::make_shared<const Function>(std::move(function))) {}
  // NOLINTEND(google-explicit-constructor)
  // Throw Error{unsupported} for items that are nested too deeply or hold a namespace.
  static Value list(std::vector<Value> items);
  static Value dict(Dict dict);
  static Value make_namespace(Dict members);

  // Null if it is something else.
  const Undefined* undefined() const { return std::get_if<Undefined>(&data_); }
  const bool* truth() const { return std::get_if<bool>(&data_); }
  const std::int64_t* integer() const { return std::get_if<std::int64_t>(&data_); }
  const double* real() const { return std::get_if<double>(&data_); }
  const Text* text() const { return pointer<const Text>(); }
  const List* list() const { return pointer<const List>(); }
  const Dict* dict() const { return pointer<const Dict>(); }
  const Function* function() const { return pointer<const Function>(); }
  Dict* members() const { return pointer<Dict>(); }  // of a namespace
  bool is_none() const { return std::holds_alternative<std::nullptr_t>(data_); }

  // "text", "a list": for messages.
  const char* kind() const;
  // The cost of writing it: the number of values in it plus the bytes of its texts.
  std::uint64_t weight() const;

 private:
  template <typename T>
  T* pointer() const {
    const auto* const held = std::get_if<std::shared_ptr<T>>(&data_);
    return held == nullptr ? nullptr : held->get();
  }

  std::variant<Undefined, std::nullptr_t, bool, std::int64_t, double, std::shared_ptr<const Text>,
               std::shared_ptr<const List>, std::shared_ptr<const Dict>, std::shared_ptr<Dict>,
               std::shared_ptr<const Function>>
      data_;
};

// Python's bool(), ==, < and `in`. They throw Error{unsupported} for values that cannot be
// compared.
bool is_true(const Value& value);
bool equal(const Value& a, const Value& b, Budget& budget);
bool less(const Value& a, const Value& b);
bool contains(const Value& container, const Value& item, Budget& budget);

// The output for a value: text as it is, numbers as Python prints them, nothing for undefined.
// Throws Error{unsupported} for values without a text, such as lists.
Text to_text(const Value& value);
// As json.dumps(value, ensure_ascii=False) writes it.
Text to_json(const Value& value);

// Throws Error{unsupported}: the template `does` that.
[[noreturn]] void refuse(const std::string& does);

}  // namespace sluice::jinja
