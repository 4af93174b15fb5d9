// Expressions of Jinja, by its grammar: filters and tests bind closest, then ** * / // % ~ + -,
// comparisons, not, and, or, if.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "engine/jinja/ast.h"
#include "engine/jinja/token_stream.h"

namespace sluice::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(TokenStream& tokens) : tokens_(&tokens) {}

  // One expression; throws Error{unsupported}.
  Expression parse() { return conditional(); }
  // One expression without an "if": the operand of a for loop.
  Expression parse_without_if() { return disjunction(); }
  // One expression, or several separated by commas, which form a list.
  Expression parse_list();

 private:
  using Part = Expression (ExpressionParser::*)();

  Expression conditional();
  Expression disjunction();
  Expression conjunction();
  Expression negation();
  Expression comparison();
  Expression sum();
  Expression concatenation();
  Expression product();
  Expression power();
  Expression unary(bool with_filters = true);
  Expression primary();
  Expression postfix(Expression operand);
  Expression filters_and_tests(Expression operand);
  Expression filter(Expression operand);
  Expression test(Expression operand);
  Expression subscript(Expression operand);
  Expression bracketed();
  Expression dict();
  Expression literal(Value value);
  // Operands with one of `symbols` between them, from the left.
  Expression chain(Part part, const std::vector<std::string_view>& symbols);
  void arguments(Expression& call);

  // A node with these operands; refuses trees too deep for the recursive interpreter.
  Expression node(Expression::Kind kind, std::string name, std::vector<Expression> operands) const;
  void grow(Expression& parent, Expression operand) const;

  class Nesting;

  TokenStream* tokens_;
  std::size_t nesting_ = 0;
};

}  // namespace sluice::jinja
