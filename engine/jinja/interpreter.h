// Runs the statements of a template.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/jinja/ast.h"
#include "engine/jinja/library.h"
#include "engine/jinja/value.h"

namespace sluice::jinja {

// The variables that a template, a round of a loop or a call of a macro has set.
class Scope {
 public:
  // Lookups among many variables are charged to the budget.
  Scope(const Scope* outer, Budget& budget) : outer_(outer), budget_(&budget) {}

  const Value* find(std::string_view name) const;
  void set(std::string_view name, Value value);

 private:
  const Scope* outer_;
  Budget* budget_;
  Dict own_;
};

class Interpreter {
 public:
  Interpreter(const std::tm& now, Budget& budget) : now_(&now), budget_(&budget) {}

  // Appends their output to `out` and sets their variables in `scope`, which macros see.
  void run(const std::vector<Statement>& statements, Scope& scope, Text& out);

 private:
  enum class Flow : std::uint8_t { on, leave_loop, next_round };

  Flow execute(const std::vector<Statement>& statements, Scope& scope, Text& out);
  Flow execute(const Statement& statement, Scope& scope, Text& out);
  Flow choose(const Statement& statement, Scope& scope, Text& out);
  void loop(const Statement& statement, Scope& scope, Text& out);
  void assign(const std::vector<std::string>& targets, const Value& value, Scope& scope);
  void write(const Text& text, Text& out);

  Value evaluate(const Expression& expression, const Scope& scope);
  Value compute(const Expression& expression, const Scope& scope);
  Value name(const Expression& expression, const Scope& scope);
  Value attribute(const Expression& expression, const Scope& scope);
  Value slice(const Expression& expression, const Scope& scope);
  Value conditional(const Expression& expression, const Scope& scope);
  Value prefix(const Expression& expression, const Scope& scope);
  Value binary(const Expression& expression, const Scope& scope);
  Value collection(const Expression& expression, const Scope& scope);
  Value call(const Expression& expression, const Scope& scope);
  Value call_macro(const Statement& macro, const Arguments& arguments);
  Arguments arguments_of(const Expression& expression, const Scope& scope);

  const Scope* global_ = nullptr;
  const std::tm* now_;
  Budget* budget_;
  std::size_t calls_ = 0;  // depth of nested macro calls
};

// left name right, for + - * / // % ~ and comparisons.
Value compute_binary(const std::string& name, const Value& left, const Value& right,
                     Budget& budget);

}  // namespace sluice::jinja
