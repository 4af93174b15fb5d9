#include <cmath>
#include <limits>
#include <optional>

#include "engine/jinja/interpreter.h"
#include "lib/text.h"

namespace sluice::jinja {
namespace {

std::optional<std::int64_t> whole(const Value& value) {
  if (value.integer() != nullptr) return *value.integer();
  if (value.truth() != nullptr) return *value.truth() ? 1 : 0;
  return std::nullopt;
}

std::optional<double> real(const Value& value) {
  if (value.real() != nullptr) return *value.real();
  if (const auto number = whole(value)) return static_cast<double>(*number);
  return std::nullopt;
}

// Rounds down, as Python does.
std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
  const std::int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

Value of_integers(char name, std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  bool overflows = false;
  switch (name) {
    case '+':
      overflows = __builtin_add_overflow(a, b, &result);
      break;
    case '-':
      overflows = __builtin_sub_overflow(a, b, &result);
      break;
    case '*':
      overflows = __builtin_mul_overflow(a, b, &result);
      break;
    default:  // '/' is the one that rounds
      if (b == 0) refuse("divides by 0");
      overflows = b == -1 && a == std::numeric_limits<std::int64_t>::min();
      if (!overflows) result = name == '/' ? floor_divide(a, b) : a - floor_divide(a, b) * b;
  }
  if (overflows) refuse("computes a number that is too large");
  return result;
}

Value of_reals(const std::string& name, double a, double b) {
  if (name == "+") return a + b;
  if (name == "-") return a - b;
  if (name == "*") return a * b;
  if (b == 0.0) refuse("divides by 0");
  if (name == "/") return a / b;
  if (name == "//") return std::floor(a / b);
  return a - std::floor(a / b) * b;
}

Value concatenated(const Text& left, const Text& right, Budget& budget) {
  budget.charge(left.size() + right.size());
  Text text = left;
  text.append(right);
  return text;
}

Value repeated(const Text& text, std::int64_t times, Budget& budget) {
  Text result;
  for (std::int64_t i = 0; i < times; ++i) {
    budget.charge(text.size() + 1);
    result.append(text);
  }
  return result;
}

Value arithmetic(const std::string& name, const Value& left, const Value& right, Budget& budget) {
  if (name == "+" && left.text() != nullptr && right.text() != nullptr) {
    return concatenated(*left.text(), *right.text(), budget);
  }
  if (name == "+" && left.list() != nullptr && right.list() != nullptr) {
    std::vector<Value> items = items_of(left, budget);
    const std::vector<Value> more = items_of(right, budget);
    items.insert(items.end(), more.begin(), more.end());
    return Value::list(std::move(items));
  }
  const auto a = whole(left);
  const auto b = whole(right);
  if (name == "*" && left.text() != nullptr && b) return repeated(*left.text(), *b, budget);
  if (name == "*" && right.text() != nullptr && a) return repeated(*right.text(), *a, budget);
  // '/' of two integers is a real.
  if (a && b && name != "/") return of_integers(name == "//" ? '/' : name[0], *a, *b);
  const auto x = real(left);
  const auto y = real(right);
  if (x && y) return of_reals(name, *x, *y);
  refuse("computes " + std::string(left.kind()) + " " + name + " " + right.kind());
}

}  // namespace

Value compute_binary(const std::string& name, const Value& left, const Value& right,
                     Budget& budget) {
  if (name == "~") return concatenated(to_text(left), to_text(right), budget);
  if (name == "==") return equal(left, right, budget);
  if (name == "!=") return !equal(left, right, budget);
  if (name == "in") return contains(right, left, budget);
  if (name == "<") return less(left, right);
  if (name == ">") return less(right, left);
  if (name == "<=") return !less(right, left);
  if (name == ">=") return !less(left, right);
  return arithmetic(name, left, right, budget);
}

}  // namespace sluice::jinja
