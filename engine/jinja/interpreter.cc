#include "engine/jinja/interpreter.h"

#include <algorithm>

#include "engine/jinja/template.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::jinja {
namespace {

constexpr std::size_t kMostCalls = 10;  // depth of nested macro calls
constexpr std::size_t kPerStep = 16;    // variables looked up per step of the budget

// The variable `loop` of a round.
Value round_of(const std::vector<Value>& items, std::size_t index) {
  const auto number = [](std::size_t n) { return Value(static_cast<std::int64_t>(n)); };
  const bool is_last = index + 1 == items.size();
  Dict loop;
  loop.entries = {{"index", number(index + 1)},
                  {"index0", number(index)},
                  {"revindex", number(items.size() - index)},
                  {"revindex0", number(items.size() - index - 1)},
                  {"first", Value(index == 0)},
                  {"last", Value(is_last)},
                  {"length", number(items.size())},
                  // Always 1, because recursive loops are refused.
                  {"depth", number(1)},
                  {"depth0", number(0)},
                  {"previtem", index == 0 ? Value(Undefined{"loop.previtem"}) : items[index - 1]},
                  {"nextitem", is_last ? Value(Undefined{"loop.nextitem"}) : items[index + 1]}};
  return Value::dict(std::move(loop));
}

// Indices of the items in a slice of `size` items. Source: Python's slice.indices().
std::vector<std::size_t> places_of(std::int64_t size, const Value& start, const Value& stop,
                                   const Value& step_value) {
  const std::int64_t step = step_value.is_none() ? 1 : integer_of(step_value, "a step of a slice");
  if (step == 0) refuse("has a slice with a step of 0");
  const std::int64_t lowest = step > 0 ? 0 : -1;
  const std::int64_t highest = step > 0 ? size : size - 1;
  const auto bound = [&](const Value& value, std::int64_t missing) {
    if (value.is_none()) return missing;
    const std::int64_t given = integer_of(value, "a bound of a slice");
    if (given >= 0) return std::min(given, highest);
    return given < -size ? lowest : std::max(given + size, lowest);
  };
  const std::int64_t end = bound(stop, step > 0 ? highest : lowest);
  std::vector<std::size_t> places;
  for (std::int64_t i = bound(start, step > 0 ? lowest : highest); step > 0 ? i < end : i > end;) {
    places.push_back(static_cast<std::size_t>(i));
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return places;
}

}  // namespace

const Value* Scope::find(std::string_view name) const {
  for (const Scope* scope = this; scope != nullptr; scope = scope->outer_) {
    budget_->charge(scope->own_.entries.size() / kPerStep);
    if (const Value* const value = scope->own_.find(name)) return value;
  }
  return nullptr;
}

void Scope::set(std::string_view name, Value value) {
  budget_->charge(own_.entries.size() / kPerStep);
  own_.set(name, std::move(value));
}

void Interpreter::run(const std::vector<Statement>& statements, Scope& scope, Text& out) {
  global_ = &scope;
  execute(statements, scope, out);
}

Interpreter::Flow Interpreter::execute(const std::vector<Statement>& statements, Scope& scope,
                                       Text& out) {
  for (const Statement& statement : statements) {
    const Flow flow = execute(statement, scope, out);
    if (flow != Flow::on) return flow;
  }
  return Flow::on;
}

void Interpreter::write(const Text& text, Text& out) {
  budget_->charge(text.size());
  out.append(text);
}

Interpreter::Flow Interpreter::execute(const Statement& statement, Scope& scope, Text& out) {
  budget_->charge(1);
  switch (statement.kind) {
    case Statement::Kind::text:
      write(statement.text, out);
      break;
    case Statement::Kind::output:
      write(to_text(evaluate(statement.value, scope)), out);
      break;
    case Statement::Kind::set:
      assign(statement.targets, evaluate(statement.value, scope), scope);
      break;
    case Statement::Kind::set_block: {
      Scope inner(&scope, *budget_);
      Text text;
      execute(statement.body, inner, text);
      assign(statement.targets, text, scope);
      break;
    }
    case Statement::Kind::loop:
      loop(statement, scope, out);
      break;
    case Statement::Kind::choice:
      return choose(statement, scope, out);
    case Statement::Kind::macro:
      scope.set(statement.name, Function{statement.name, &statement});
      break;
    case Statement::Kind::group: {
      Scope inner(&scope, *budget_);
      return execute(statement.body, inner, out);
    }
    case Statement::Kind::leave_loop:
      return Flow::leave_loop;
    case Statement::Kind::next_round:
      return Flow::next_round;
  }
  return Flow::on;
}

Interpreter::Flow Interpreter::choose(const Statement& statement, Scope& scope, Text& out) {
  for (const Branch& branch : statement.branches) {
    if (is_true(evaluate(branch.condition, scope))) return execute(branch.body, scope, out);
  }
  return execute(statement.otherwise, scope, out);
}

void Interpreter::loop(const Statement& statement, Scope& scope, Text& out) {
  std::vector<Value> items = items_of(evaluate(statement.value, scope), *budget_);
  if (!statement.condition.empty()) {
    const auto is_left_out = [&](const Value& item) {
      Scope round(&scope, *budget_);
      assign(statement.targets, item, round);
      return !is_true(evaluate(statement.condition.front(), round));
    };
    items.erase(std::remove_if(items.begin(), items.end(), is_left_out), items.end());
  }
  if (items.empty()) {
    execute(statement.otherwise, scope, out);
    return;
  }
  for (std::size_t i = 0; i < items.size(); ++i) {
    budget_->charge(10);
    // Variables set in a round end with it.
    Scope round(&scope, *budget_);
    round.set("loop", round_of(items, i));
    assign(statement.targets, items[i], round);
    if (execute(statement.body, round, out) == Flow::leave_loop) return;
  }
}

void Interpreter::assign(const std::vector<std::string>& targets, const Value& value,
                         Scope& scope) {
  if (targets.size() > 1) {
    const std::vector<Value> parts = items_of(value, *budget_);
    if (parts.size() != targets.size()) {
      refuse("sets " + std::to_string(targets.size()) + " variables to " +
             std::to_string(parts.size()) + " values");
    }
    for (std::size_t i = 0; i < parts.size(); ++i) assign({targets[i]}, parts[i], scope);
    return;
  }
  const std::string& target = targets.front();
  const std::size_t point = target.find('.');
  if (point == std::string::npos) return scope.set(target, value);
  const std::string owner = target.substr(0, point);
  const Value* const found = scope.find(owner);
  if (found == nullptr || found->members() == nullptr) {
    refuse("sets a member of " + in_quotes(owner) + ", which is no namespace");
  }
  Dict& members = *found->members();
  budget_->charge(members.entries.size());
  // Refuses a namespace inside itself, which would never be freed, and values nested too deeply.
  Value::list({value});
  members.set(target.substr(point + 1), value);
}

Value Interpreter::evaluate(const Expression& expression, const Scope& scope) {
  budget_->charge(1);
  try {
    return compute(expression, scope);
  } catch (const Error& error) {
    // The innermost expression adds the line, so outer ones do not.
    const std::string message = error.what();
    if (message.find(" in line ") != std::string::npos) throw;
    throw Error(error.code(), message + " in line " + std::to_string(expression.line));
  }
}

Value Interpreter::compute(const Expression& expression, const Scope& scope) {
  const auto operand = [&](std::size_t i) { return evaluate(expression.operands[i], scope); };
  switch (expression.kind) {
    case Expression::Kind::literal:
      return expression.value;
    case Expression::Kind::name:
      return name(expression, scope);
    case Expression::Kind::list:
    case Expression::Kind::dict:
      return collection(expression, scope);
    case Expression::Kind::attribute:
      return attribute(expression, scope);
    case Expression::Kind::item:
      return member_of(operand(0), operand(1), *budget_);
    case Expression::Kind::slice:
      return slice(expression, scope);
    case Expression::Kind::call:
      return call(expression, scope);
    case Expression::Kind::filter:
      return apply_filter(expression.name, operand(0), arguments_of(expression, scope), *budget_);
    case Expression::Kind::test:
      return apply_test(expression.name, operand(0), arguments_of(expression, scope), *budget_);
    case Expression::Kind::prefix:
      return prefix(expression, scope);
    case Expression::Kind::binary:
      return binary(expression, scope);
    case Expression::Kind::logical: {
      Value left = operand(0);
      return is_true(left) == (expression.name == "or") ? left : operand(1);
    }
    case Expression::Kind::conditional:
      return conditional(expression, scope);
  }
  return {};
}

Value Interpreter::name(const Expression& expression, const Scope& scope) {
  if (const Value* const found = scope.find(expression.name)) return *found;
  if (is_function(expression.name)) return Function{expression.name};
  return Undefined{expression.name};
}

Value Interpreter::attribute(const Expression& expression, const Scope& scope) {
  const Value object = evaluate(expression.operands[0], scope);
  if (has_method(object, expression.name)) {
    refuse("has the method " + in_quotes(expression.name) + " without calling it");
  }
  return member_of(object, Text(expression.name), *budget_);
}

Value Interpreter::collection(const Expression& expression, const Scope& scope) {
  std::vector<Value> values;
  for (const Expression& operand : expression.operands) values.push_back(evaluate(operand, scope));
  if (expression.kind == Expression::Kind::list) return Value::list(std::move(values));
  Dict dict;
  for (std::size_t i = 0; i < values.size(); i += 2) {
    budget_->charge(dict.entries.size());
    dict.set(text_of(values[i], "a key").bytes(), values[i + 1]);
  }
  return Value::dict(std::move(dict));
}

Value Interpreter::slice(const Expression& expression, const Scope& scope) {
  const Value object = evaluate(expression.operands[0], scope);
  if (object.text() == nullptr && object.list() == nullptr) {
    refuse(std::string("takes a slice of ") + object.kind());
  }
  const std::vector<Value> items = items_of(object, *budget_);
  const std::vector<std::size_t> places =
      places_of(static_cast<std::int64_t>(items.size()), evaluate(expression.operands[1], scope),
                evaluate(expression.operands[2], scope), evaluate(expression.operands[3], scope));
  std::vector<Value> taken;
  Text text;
  for (const std::size_t place : places) {
    if (object.text() != nullptr) {
      text.append(*items[place].text());
    } else {
      taken.push_back(items[place]);
    }
  }
  return object.text() != nullptr ? Value(std::move(text)) : Value::list(std::move(taken));
}

Value Interpreter::conditional(const Expression& expression, const Scope& scope) {
  if (is_true(evaluate(expression.operands[1], scope))) {
    return evaluate(expression.operands[0], scope);
  }
  if (expression.operands.size() < 3) return Undefined{"what has no else"};
  return evaluate(expression.operands[2], scope);
}

Value Interpreter::prefix(const Expression& expression, const Scope& scope) {
  const Value value = evaluate(expression.operands[0], scope);
  if (expression.name == "not") return !is_true(value);
  return compute_binary(expression.name, std::int64_t{0}, value, *budget_);
}

Value Interpreter::binary(const Expression& expression, const Scope& scope) {
  const Value left = evaluate(expression.operands[0], scope);
  return compute_binary(expression.name, left, evaluate(expression.operands[1], scope), *budget_);
}

Arguments Interpreter::arguments_of(const Expression& expression, const Scope& scope) {
  Arguments arguments;
  const std::size_t count = expression.operands.size();
  const std::size_t first_named = count - expression.keywords.size();
  for (std::size_t i = 1; i < count; ++i) {
    Value value = evaluate(expression.operands[i], scope);
    if (i < first_named) {
      arguments.values.push_back(std::move(value));
    } else {
      arguments.named.emplace_back(expression.keywords[i - first_named], std::move(value));
    }
  }
  return arguments;
}

Value Interpreter::call(const Expression& expression, const Scope& scope) {
  const Expression& callee = expression.operands[0];
  if (callee.kind == Expression::Kind::attribute) {
    const Value object = evaluate(callee.operands[0], scope);
    return call_method(object, callee.name, arguments_of(expression, scope), *budget_);
  }
  const Value value = evaluate(callee, scope);
  const Function* const function = value.function();
  if (function == nullptr) {
    refuse(callee.kind == Expression::Kind::name && value.undefined() != nullptr
               ? "calls " + in_quotes(callee.name) + ", which is not known here"
               : std::string("calls ") + value.kind());
  }
  const Arguments arguments = arguments_of(expression, scope);
  if (function->macro != nullptr) return call_macro(*function->macro, arguments);
  return call_function(function->name, arguments, *now_, *budget_);
}

Value Interpreter::call_macro(const Statement& macro, const Arguments& arguments) {
  const std::vector<std::string_view> parameters(macro.targets.begin(), macro.targets.end());
  if (++calls_ > kMostCalls) refuse("calls macros in each other too deeply");
  const std::vector<const Value*> given = arguments.match(macro.name, parameters);
  Scope scope(global_, *budget_);
  const std::size_t required = macro.targets.size() - macro.defaults.size();
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (given[i] != nullptr) {
      scope.set(macro.targets[i], *given[i]);
    } else if (i >= required) {
      scope.set(macro.targets[i], evaluate(macro.defaults[i - required], scope));
    } else {
      scope.set(macro.targets[i], Undefined{macro.targets[i]});
    }
  }
  Text out;
  execute(macro.body, scope, out);
  --calls_;
  return out;
}

Text Template::render(const Dict& variables, const std::tm& now, std::uint64_t budget) const {
  Budget left(budget);
  Scope given(nullptr, left);
  for (const auto& [name, value] : variables.entries) given.set(name, value);
  Scope scope(&given, left);
  Text out;
  Interpreter(now, left).run(statements_, scope, out);
  return out;
}

}  // namespace sluice::jinja
