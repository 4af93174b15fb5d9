#include "engine/jinja/token_stream.h"

#include <algorithm>
#include <array>

#include "engine/jinja/value.h"
#include "lib/text.h"

namespace sluice::jinja {
namespace {

bool is_reserved(std::string_view name) {
  constexpr std::array<std::string_view, 13> kWords = {"and",  "or",    "not",  "in",    "is",
                                                       "if",   "else",  "true", "false", "none",
                                                       "True", "False", "None"};
  return std::find(kWords.begin(), kWords.end(), name) != kWords.end();
}

}  // namespace

void TokenStream::fail(const std::string& does) const {
  refuse(does + " in line " + std::to_string(current().line));
}

void TokenStream::fail_unexpected() const {
  switch (current().kind) {
    case Token::Kind::end_of_tag:
      fail("has a tag that ends too early");
    case Token::Kind::data:
    case Token::Kind::output:
    case Token::Kind::statement:
    case Token::Kind::end_of_file:
      fail("has a part without an end");
    default:
      fail("has " + in_quotes(current().text) + " where something else is expected");
  }
}

void TokenStream::expect_symbol(std::string_view symbol) {
  if (!take_symbol(symbol)) fail_unexpected();
}

void TokenStream::expect_end_of_tag() {
  if (!at(Token::Kind::end_of_tag)) fail_unexpected();
  next();
}

std::string TokenStream::expect_name() {
  if (!at(Token::Kind::name) || is_reserved(current().text)) fail_unexpected();
  return next().text;
}

}  // namespace sluice::jinja
