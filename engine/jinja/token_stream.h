// The tokens of a template, one after the other.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/jinja/lexer.h"

namespace sluice::jinja {

class TokenStream {
 public:
  explicit TokenStream(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  const Token& current() const { return tokens_[at_]; }
  Token next() { return at_ + 1 < tokens_.size() ? std::move(tokens_[at_++]) : tokens_[at_]; }

  bool at(Token::Kind kind) const { return current().kind == kind; }
  bool at_symbol(std::string_view symbol) const {
    return at(Token::Kind::symbol) && current().text == symbol;
  }
  bool at_name(std::string_view name) const {
    return at(Token::Kind::name) && current().text == name;
  }
  // Takes the next token if it matches; returns true if it did.
  bool take_symbol(std::string_view symbol) { return at_symbol(symbol) && skip(); }
  bool take_name(std::string_view name) { return at_name(name) && skip(); }

  // Throw Error{unsupported} if something else is there.
  void expect_symbol(std::string_view symbol);
  void expect_end_of_tag();
  std::string expect_name();  // that is not a reserved word

  [[noreturn]] void fail(const std::string& does) const;
  [[noreturn]] void fail_unexpected() const;

 private:
  bool skip() {
    next();
    return true;
  }

  std::vector<Token> tokens_;  // the last one is end_of_file
  std::size_t at_ = 0;
};

}  // namespace sluice::jinja
