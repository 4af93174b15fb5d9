#include "engine/jinja/expression_parser.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>

namespace sluice::jinja {
namespace {

using Kind = Expression::Kind;

// Both the parser and the interpreter recurse.
constexpr std::size_t kMostDepth = 100;    // of a tree
constexpr std::size_t kMostNesting = 200;  // of the grammar's rules, three of which read brackets

std::vector<Expression> operands_of(Expression a) {
  std::vector<Expression> operands;
  operands.push_back(std::move(a));
  return operands;
}

std::vector<Expression> operands_of(Expression a, Expression b) {
  std::vector<Expression> operands = operands_of(std::move(a));
  operands.push_back(std::move(b));
  return operands;
}

}  // namespace

class ExpressionParser::Nesting {
 public:
  explicit Nesting(ExpressionParser& parser) : parser_(&parser) {
    if (++parser_->nesting_ > kMostNesting) parser_->tokens_->fail("nests expressions too deeply");
  }
  ~Nesting() { --parser_->nesting_; }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

 private:
  ExpressionParser* parser_;
};

Expression ExpressionParser::node(Kind kind, std::string name,
                                  std::vector<Expression> operands) const {
  Expression made;
  made.kind = kind;
  made.name = std::move(name);
  made.line = tokens_->current().line;
  for (Expression& operand : operands) grow(made, std::move(operand));
  return made;
}

void ExpressionParser::grow(Expression& parent, Expression operand) const {
  parent.depth = std::max(parent.depth, operand.depth + 1);
  if (parent.depth > kMostDepth) tokens_->fail("nests expressions too deeply");
  parent.operands.push_back(std::move(operand));
}

Expression ExpressionParser::literal(Value value) {
  Expression made = node(Kind::literal, {}, {});
  made.value = std::move(value);
  return made;
}

Expression ExpressionParser::parse_list() {
  Expression first = conditional();
  if (!tokens_->at_symbol(",")) return first;
  Expression list = node(Kind::list, {}, operands_of(std::move(first)));
  while (tokens_->take_symbol(",")) {
    if (tokens_->at(Token::Kind::end_of_tag) || tokens_->at_symbol(")")) break;
    grow(list, conditional());
  }
  return list;
}

Expression ExpressionParser::conditional() {
  const Nesting nesting(*this);
  Expression value = disjunction();
  while (tokens_->take_name("if")) {
    Expression choice = node(Kind::conditional, {}, operands_of(std::move(value), disjunction()));
    if (tokens_->take_name("else")) grow(choice, conditional());
    value = std::move(choice);
  }
  return value;
}

Expression ExpressionParser::disjunction() {
  Expression left = conjunction();
  while (tokens_->take_name("or")) {
    left = node(Kind::logical, "or", operands_of(std::move(left), conjunction()));
  }
  return left;
}

Expression ExpressionParser::conjunction() {
  Expression left = negation();
  while (tokens_->take_name("and")) {
    left = node(Kind::logical, "and", operands_of(std::move(left), negation()));
  }
  return left;
}

Expression ExpressionParser::negation() {
  const Nesting nesting(*this);
  if (tokens_->take_name("not")) return node(Kind::prefix, "not", operands_of(negation()));
  return comparison();
}

Expression ExpressionParser::comparison() {
  constexpr std::array<std::string_view, 6> kSymbols = {"==", "!=", "<", ">", "<=", ">="};
  const auto next_operator = [&]() -> std::string {
    for (const std::string_view symbol : kSymbols) {
      if (tokens_->take_symbol(symbol)) return std::string(symbol);
    }
    if (tokens_->take_name("in")) return "in";
    if (tokens_->take_name("not")) {
      if (!tokens_->take_name("in")) tokens_->fail_unexpected();
      return "not in";
    }
    return {};
  };
  Expression left = sum();
  const std::string symbol = next_operator();
  if (symbol.empty()) return left;
  Expression made =
      node(Kind::binary, symbol == "not in" ? "in" : symbol, operands_of(std::move(left), sum()));
  if (symbol == "not in") made = node(Kind::prefix, "not", operands_of(std::move(made)));
  if (!next_operator().empty()) tokens_->fail("compares three values at once");
  return made;
}

Expression ExpressionParser::chain(Part part, const std::vector<std::string_view>& symbols) {
  Expression left = (this->*part)();
  while (true) {
    const auto found = std::find_if(symbols.begin(), symbols.end(), [this](std::string_view one) {
      return tokens_->take_symbol(one);
    });
    if (found == symbols.end()) return left;
    left = node(Kind::binary, std::string(*found), operands_of(std::move(left), (this->*part)()));
  }
}

Expression ExpressionParser::sum() { return chain(&ExpressionParser::concatenation, {"+", "-"}); }

Expression ExpressionParser::concatenation() { return chain(&ExpressionParser::product, {"~"}); }

Expression ExpressionParser::product() {
  return chain(&ExpressionParser::power, {"*", "/", "//", "%"});
}

Expression ExpressionParser::power() {
  Expression left = unary();
  if (tokens_->at_symbol("**")) tokens_->fail("raises to a power");
  return left;
}

Expression ExpressionParser::unary(bool with_filters) {
  const Nesting nesting(*this);
  for (const char* sign : {"-", "+"}) {
    if (!tokens_->take_symbol(sign)) continue;
    Expression made = postfix(node(Kind::prefix, sign, operands_of(unary(false))));
    return with_filters ? filters_and_tests(std::move(made)) : made;
  }
  Expression operand = postfix(primary());
  return with_filters ? filters_and_tests(std::move(operand)) : operand;
}

Expression ExpressionParser::primary() {
  const Token& token = tokens_->current();
  switch (token.kind) {
    case Token::Kind::name: {
      if (token.text == "true" || token.text == "True") return tokens_->next(), literal(true);
      if (token.text == "false" || token.text == "False") return tokens_->next(), literal(false);
      if (token.text == "none" || token.text == "None") return tokens_->next(), literal(nullptr);
      return node(Kind::name, tokens_->expect_name(), {});
    }
    case Token::Kind::string: {
      std::string text;
      while (tokens_->at(Token::Kind::string)) text += tokens_->next().text;
      return literal(Text(text));
    }
    case Token::Kind::integer: {
      std::int64_t number = 0;
      const char* const end = token.text.data() + token.text.size();
      if (std::from_chars(token.text.data(), end, number).ec != std::errc()) {
        tokens_->fail("has a number that is too large");
      }
      return tokens_->next(), literal(number);
    }
    case Token::Kind::real: {
      double number = 0.0;
      std::from_chars(token.text.data(), token.text.data() + token.text.size(), number);
      return tokens_->next(), literal(number);
    }
    default:
      return bracketed();
  }
}

Expression ExpressionParser::bracketed() {
  if (tokens_->take_symbol("(")) {
    if (tokens_->take_symbol(")")) return node(Kind::list, {}, {});
    Expression inside = parse_list();
    tokens_->expect_symbol(")");
    return inside;
  }
  if (tokens_->take_symbol("[")) {
    Expression list = node(Kind::list, {}, {});
    while (!tokens_->take_symbol("]")) {
      grow(list, conditional());
      if (!tokens_->at_symbol("]")) tokens_->expect_symbol(",");
    }
    return list;
  }
  if (tokens_->take_symbol("{")) return dict();
  tokens_->fail_unexpected();
}

Expression ExpressionParser::dict() {
  Expression made = node(Kind::dict, {}, {});
  while (!tokens_->take_symbol("}")) {
    grow(made, conditional());
    tokens_->expect_symbol(":");
    grow(made, conditional());
    if (!tokens_->at_symbol("}")) tokens_->expect_symbol(",");
  }
  return made;
}

Expression ExpressionParser::postfix(Expression operand) {
  while (true) {
    if (tokens_->take_symbol(".")) {
      if (tokens_->at(Token::Kind::integer)) {
        Expression index = primary();
        operand = node(Kind::item, {}, operands_of(std::move(operand), std::move(index)));
      } else {
        if (!tokens_->at(Token::Kind::name)) tokens_->fail_unexpected();
        std::string name = tokens_->next().text;
        operand = node(Kind::attribute, std::move(name), operands_of(std::move(operand)));
      }
    } else if (tokens_->take_symbol("[")) {
      operand = subscript(std::move(operand));
    } else if (tokens_->at_symbol("(")) {
      operand = node(Kind::call, {}, operands_of(std::move(operand)));
      arguments(operand);
    } else {
      return operand;
    }
  }
}

Expression ExpressionParser::subscript(Expression operand) {
  const auto bound = [this] {
    const bool is_missing = tokens_->at_symbol(":") || tokens_->at_symbol("]");
    return is_missing ? literal(nullptr) : conditional();
  };
  Expression first = bound();
  if (!tokens_->at_symbol(":")) {
    if (tokens_->current().text == "]" && first.kind == Kind::literal && first.value.is_none()) {
      tokens_->fail_unexpected();
    }
    tokens_->expect_symbol("]");
    return node(Kind::item, {}, operands_of(std::move(operand), std::move(first)));
  }
  Expression made = node(Kind::slice, {}, operands_of(std::move(operand), std::move(first)));
  tokens_->next();
  grow(made, bound());
  grow(made, tokens_->take_symbol(":") ? bound() : literal(nullptr));
  tokens_->expect_symbol("]");
  return made;
}

void ExpressionParser::arguments(Expression& call) {
  tokens_->expect_symbol("(");
  while (!tokens_->take_symbol(")")) {
    if (tokens_->at_symbol("*") || tokens_->at_symbol("**")) {
      tokens_->fail("hands over a list as arguments");
    }
    Expression argument = conditional();
    if (argument.kind == Kind::name && tokens_->take_symbol("=")) {
      call.keywords.push_back(std::move(argument.name));
      argument = conditional();
    } else if (!call.keywords.empty()) {
      tokens_->fail("has an argument without a name behind one with a name");
    }
    grow(call, std::move(argument));
    if (!tokens_->at_symbol(")")) tokens_->expect_symbol(",");
  }
}

Expression ExpressionParser::filters_and_tests(Expression operand) {
  while (true) {
    if (tokens_->take_symbol("|")) {
      operand = filter(std::move(operand));
    } else if (tokens_->take_name("is")) {
      operand = test(std::move(operand));
    } else if (tokens_->at_symbol("(")) {
      operand = node(Kind::call, {}, operands_of(std::move(operand)));
      arguments(operand);
    } else {
      return operand;
    }
  }
}

Expression ExpressionParser::filter(Expression operand) {
  std::string name = tokens_->expect_name();
  Expression made = node(Kind::filter, std::move(name), operands_of(std::move(operand)));
  if (tokens_->at_symbol("(")) arguments(made);
  return made;
}

Expression ExpressionParser::test(Expression operand) {
  const bool negated = tokens_->take_name("not");
  if (!tokens_->at(Token::Kind::name)) tokens_->fail_unexpected();
  std::string name = tokens_->next().text;
  Expression made = node(Kind::test, std::move(name), operands_of(std::move(operand)));
  const bool ends = tokens_->at_name("else") || tokens_->at_name("or") || tokens_->at_name("and") ||
                    tokens_->at_name("if");
  if (tokens_->at_name("is")) tokens_->fail("has one test behind another");
  if (tokens_->at_symbol("(")) {
    arguments(made);
  } else if ((tokens_->at(Token::Kind::name) && !ends) || tokens_->at(Token::Kind::string) ||
             tokens_->at(Token::Kind::integer) || tokens_->at(Token::Kind::real) ||
             tokens_->at_symbol("[") || tokens_->at_symbol("{")) {
    grow(made, postfix(primary()));
  }
  return negated ? node(Kind::prefix, "not", operands_of(std::move(made))) : made;
}

}  // namespace sluice::jinja
