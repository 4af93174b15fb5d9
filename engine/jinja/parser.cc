#include <algorithm>
#include <array>

#include "engine/jinja/ast.h"
#include "engine/jinja/expression_parser.h"
#include "engine/jinja/token_stream.h"
#include "lib/text.h"

namespace sluice::jinja {
namespace {

constexpr std::size_t kMostStatementDepth = 32;

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokenize(source)), expressions_(tokens_) {}

  std::vector<Statement> run() {
    std::vector<Statement> body = statements({});
    if (!tokens_.at(Token::Kind::end_of_file)) tokens_.fail_unexpected();
    return body;
  }

 private:
  using Words = std::vector<std::string_view>;

  // Reads statements up to a tag that begins with one of the words `ends`; the word stays unread.
  std::vector<Statement> statements(const Words& ends) {
    if (++depth_ > kMostStatementDepth) tokens_.fail("nests statements too deeply");
    std::vector<Statement> body;
    while (true) {
      if (tokens_.at(Token::Kind::end_of_file)) {
        if (!ends.empty())
          tokens_.fail("lacks " + in_quotes("{% " + std::string(ends.back()) + " %}"));
        break;
      }
      const Token token = tokens_.next();
      if (token.kind == Token::Kind::statement) {
        if (std::any_of(ends.begin(), ends.end(),
                        [this](std::string_view end) { return tokens_.at_name(end); })) {
          break;
        }
        body.push_back(statement());
      } else if (token.kind == Token::Kind::output) {
        body.push_back(made(Statement::Kind::output));
        body.back().value = expressions_.parse_list();
        tokens_.expect_end_of_tag();
      } else {
        body.push_back(made(Statement::Kind::text));
        body.back().text = Text(token.text);
      }
    }
    --depth_;
    return body;
  }

  Statement made(Statement::Kind kind) const {
    Statement statement;
    statement.kind = kind;
    statement.line = tokens_.current().line;
    return statement;
  }

  Statement statement() {
    const std::string word = tokens_.at_name("if") ? tokens_.next().text : tokens_.expect_name();
    if (word == "if") return choice();
    if (word == "for") return loop();
    if (word == "set") return assignment();
    if (word == "macro") return macro();
    if (word == "generation") return group();
    if (word == "break" || word == "continue") {
      if (loops_ == 0) tokens_.fail("has " + in_quotes(word) + " outside of a loop");
      tokens_.expect_end_of_tag();
      return made(word == "break" ? Statement::Kind::leave_loop : Statement::Kind::next_round);
    }
    tokens_.fail("has a statement that is not known here, " + in_quotes(word) + ",");
  }

  std::vector<Statement> body_up_to(const Words& ends) {
    tokens_.expect_end_of_tag();
    return statements(ends);
  }

  Statement choice() {
    Statement result = made(Statement::Kind::choice);
    do {
      Branch branch;
      branch.condition = expressions_.parse();
      branch.body = body_up_to({"elif", "else", "endif"});
      result.branches.push_back(std::move(branch));
    } while (tokens_.take_name("elif"));
    if (tokens_.take_name("else")) result.otherwise = body_up_to({"endif"});
    end("endif");
    return result;
  }

  Statement loop() {
    Statement result = made(Statement::Kind::loop);
    result.targets = targets();
    if (!tokens_.take_name("in")) tokens_.fail_unexpected();
    result.value = expressions_.parse_without_if();
    if (tokens_.take_name("if")) result.condition.push_back(expressions_.parse());
    if (tokens_.at_name("recursive")) tokens_.fail("has a recursive loop");
    ++loops_;
    result.body = body_up_to({"else", "endfor"});
    --loops_;
    if (tokens_.take_name("else")) result.otherwise = body_up_to({"endfor"});
    end("endfor");
    return result;
  }

  Statement assignment() {
    Statement result = made(Statement::Kind::set);
    result.targets = targets();
    if (tokens_.take_symbol("=")) {
      result.value = expressions_.parse_list();
      tokens_.expect_end_of_tag();
      return result;
    }
    result.kind = Statement::Kind::set_block;
    if (result.targets.size() > 1) tokens_.fail_unexpected();
    if (tokens_.at_symbol("|")) tokens_.fail("filters what it sets");
    result.body = body_up_to({"endset"});
    end("endset");
    return result;
  }

  Statement macro() {
    Statement result = made(Statement::Kind::macro);
    result.name = tokens_.expect_name();
    tokens_.expect_symbol("(");
    while (!tokens_.take_symbol(")")) {
      result.targets.push_back(tokens_.expect_name());
      if (tokens_.take_symbol("=")) {
        result.defaults.push_back(expressions_.parse());
      } else if (!result.defaults.empty()) {
        tokens_.fail("has a parameter without a default behind one with a default");
      }
      if (!tokens_.at_symbol(")")) tokens_.expect_symbol(",");
    }
    // A macro's body may not leave a loop around the macro.
    const std::size_t loops = std::exchange(loops_, 0);
    result.body = body_up_to({"endmacro"});
    loops_ = loops;
    end("endmacro");
    return result;
  }

  Statement group() {
    Statement result = made(Statement::Kind::group);
    result.body = body_up_to({"endgeneration"});
    end("endgeneration");
    return result;
  }

  void end(std::string_view word) {
    if (!tokens_.take_name(word)) tokens_.fail_unexpected();
    if (word == "endmacro" && tokens_.at(Token::Kind::name)) tokens_.next();
    tokens_.expect_end_of_tag();
  }

  // Names separated by commas, perhaps in parentheses, or a member of a namespace.
  std::vector<std::string> targets() {
    const bool in_brackets = tokens_.take_symbol("(");
    std::vector<std::string> names;
    do {
      names.push_back(tokens_.expect_name());
      if (tokens_.take_symbol(".")) {
        names.back() += '.';
        names.back() += tokens_.expect_name();
      }
    } while (tokens_.take_symbol(","));
    if (in_brackets) tokens_.expect_symbol(")");
    return names;
  }

  TokenStream tokens_;
  ExpressionParser expressions_;
  std::size_t depth_ = 0;
  std::size_t loops_ = 0;  // around the statement
};

}  // namespace

std::vector<Statement> parse(std::string_view source) { return Parser(source).run(); }

}  // namespace sluice::jinja
