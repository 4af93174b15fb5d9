// The built-in filters, tests, methods and functions of Jinja and of transformers.
#pragma once

#include <cstddef>
#include <ctime>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/jinja/value.h"

namespace sluice::jinja {

// Arguments of a call, a filter or a test.
struct Arguments {
  std::vector<Value> values;
  std::vector<std::pair<std::string, Value>> named;

  // Returns the arguments in the order of the parameters, null if not given. Throws
  // Error{unsupported} for an argument without a parameter, or two for one.
  std::vector<const Value*> match(const std::string& callee,
                                  const std::vector<std::string_view>& parameters) const;
};

// All throw Error{unsupported} for unknown names, for values of the wrong kind, and when the budget
// is used up.
Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments,
                   Budget& budget);
bool apply_test(const std::string& name, const Value& value, const Arguments& arguments,
                Budget& budget);
Value call_method(const Value& object, const std::string& name, const Arguments& arguments,
                  Budget& budget);

// range, namespace, dict, raise_exception, strftime_now.
bool is_function(std::string_view name);
// Also throws Error{prompt}, if the template raises an exception.
Value call_function(const std::string& name, const Arguments& arguments, const std::tm& now,
                    Budget& budget);

// object.key or object[key]: undefined if there is no such member. Throws Error{unsupported} if
// the object itself is undefined.
Value member_of(const Value& object, const Value& key, Budget& budget);
// Returns true if Python has a method of that name for this kind of value, known here or not.
bool has_method(const Value& object, std::string_view name);

// The items that a loop runs over: of a list, the keys of a dictionary, the characters of a text.
std::vector<Value> items_of(const Value& value, Budget& budget);
// An integer; throws Error{unsupported} for anything else. `what` names its use in the message.
std::int64_t integer_of(const Value& value, const std::string& what);
const Text& text_of(const Value& value, const std::string& what);

}  // namespace sluice::jinja
