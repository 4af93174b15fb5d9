#include "sluice/constraint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/random.h"
#include "tests/support/schema_oracle.h"

namespace sluice {
namespace {

using testing::expect_error;
using ::testing::HasSubstr;
using testing::OrderedJson;
using testing::Random;
using testing::SchemaMaker;
using testing::SchemaOracle;

const Tokenizer& tokenizer() {
  static const Tokenizer kTokenizer = Tokenizer::load_checkpoint(testing::kModel, 4096);
  return kTokenizer;
}
constexpr TokenId kEnd = 1;

const Constraints& constraints() {
  static const Constraints kConstraints(tokenizer());
  return kConstraints;
}

// The tokens that the mask allows, ascending; kEnd among them if the text may end.
std::vector<TokenId> allowed(ConstraintCursor& cursor) {
  std::vector<float> logits(4096, 0.0f);
  const TokenId end = kEnd;
  cursor.mask(std::span(&end, 1), logits);
  std::vector<TokenId> tokens;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] == 0.0f) tokens.push_back(static_cast<TokenId>(i));
  }
  return tokens;
}

bool may_follow(ConstraintCursor& cursor, TokenId token) {
  const std::vector<TokenId> all = allowed(cursor);
  return std::binary_search(all.begin(), all.end(), token);
}

// The token of a single byte.
TokenId token_of(std::uint8_t byte) {
  static const std::vector<TokenId> kTokens = [] {
    std::vector<TokenId> tokens(256, -1);
    for (TokenId id = 0; id < tokenizer().size(); ++id) {
      const std::string_view bytes = tokenizer().bytes(id);
      if (bytes.size() == 1) tokens[static_cast<std::uint8_t>(bytes[0])] = id;
    }
    return tokens;
  }();
  return kTokens[byte];
}

// Follows the bytes by take() alone. Nothing if one of them is refused; else whether the text is
// whole.
std::optional<bool> follow(const Constraint& constraint, std::string_view text) {
  ConstraintCursor cursor(constraint);
  for (const char byte : text) {
    try {
      cursor.take(token_of(static_cast<std::uint8_t>(byte)));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      return std::nullopt;
    }
  }
  return cursor.is_complete();
}
bool accepts(const Constraint& constraint, std::string_view text) {
  return follow(constraint, text).value_or(false);
}

// Draws random tokens under the mask until the text ends, closing what is open after a while.
std::string random_text(ConstraintCursor& cursor, Random& random) {
  std::string text;
  for (int i = 0; i < 3000; ++i) {
    std::vector<TokenId> tokens = allowed(cursor);
    EXPECT_FALSE(tokens.empty()) << text;
    const bool may_end = std::binary_search(tokens.begin(), tokens.end(), kEnd);
    EXPECT_EQ(may_end, cursor.is_complete());
    EXPECT_EQ(tokens == std::vector<TokenId>{kEnd}, cursor.is_final());
    if (tokens.empty() ||
        (may_end && (i > 60 || tokens.size() == 1 || random.integer(0, 3) == 0))) {
      return text;
    }
    std::erase(tokens, kEnd);
    if (i > 60 || random.integer(0, 1) == 0) {
      std::vector<TokenId> closing;
      // The letters complete strings whose pattern is not matched yet.
      const std::string_view order = text.ends_with('a') ? "\"ba}]:,0" : "\"ab}]:,0";
      for (const char byte : order) {
        const TokenId id = token_of(static_cast<std::uint8_t>(byte));
        if (std::find(tokens.begin(), tokens.end(), id) != tokens.end()) {
          closing.push_back(id);
          if (i > 60) break;
        }
      }
      if (!closing.empty()) tokens = closing;
    }
    const TokenId next =
        tokens[static_cast<std::size_t>(random.integer(0, std::ssize(tokens) - 1))];
    cursor.take(next);
    text += tokenizer().bytes(next);
  }
  ADD_FAILURE() << "no end: " << text.substr(0, 300);
  return text;
}

// ---- JSON schemas

TEST(Constraint, WhateverIsDrawnIsValid) {
  const std::uint64_t first = testing::seed(20261128);
  for (std::uint64_t seed = first; seed < first + 60; ++seed) {
    SchemaMaker maker(seed);
    const OrderedJson schema = maker.schema();
    SCOPED_TRACE(testing::seed_message(seed) + " " + schema.dump());
    const Constraint constraint = constraints().json_schema(schema.dump());
    for (int i = 0; i < 4; ++i) {
      ConstraintCursor cursor(constraint);
      const std::string text = random_text(cursor, maker.random());
      OrderedJson value;
      ASSERT_NO_THROW(value = OrderedJson::parse(text)) << text;
      EXPECT_TRUE(SchemaOracle(schema).is_valid(value)) << text;
    }
  }
}

TEST(Constraint, EveryValidDocumentCanBeWritten) {
  const std::uint64_t first = testing::seed(77001);
  for (std::uint64_t seed = first; seed < first + 150; ++seed) {
    SchemaMaker maker(seed);
    const OrderedJson schema = maker.schema();
    SCOPED_TRACE(testing::seed_message(seed) + " " + schema.dump());
    const Constraint constraint = constraints().json_schema(schema.dump());
    for (int i = 0; i < 4; ++i) {
      const OrderedJson value = maker.document(schema, schema);
      ASSERT_TRUE(SchemaOracle(schema).is_valid(value)) << value.dump();
      const std::string text = value.dump(static_cast<int>(maker.number(-1, 3)));
      EXPECT_TRUE(accepts(constraint, text)) << text;
      ConstraintCursor cursor(constraint);
      for (const TokenId token : tokenizer().encode(text)) {
        ASSERT_TRUE(may_follow(cursor, token)) << tokenizer().bytes(token) << " in " << text;
        cursor.take(token);
      }
      EXPECT_TRUE(cursor.is_complete()) << text;
    }
  }
}

// Documents of one schema under another, and documents that were changed.
TEST(Constraint, NothingInvalidIsAccepted) {
  const std::uint64_t first = testing::seed(4711);
  int refused = 0;
  for (std::uint64_t seed = first; seed < first + 200; ++seed) {
    SchemaMaker maker(seed);
    const OrderedJson schema = maker.schema();
    const OrderedJson other = maker.schema();
    SCOPED_TRACE(testing::seed_message(seed) + " " + schema.dump());
    const Constraint constraint = constraints().json_schema(schema.dump());
    for (int i = 0; i < 8; ++i) {
      std::string text = maker.document(other, i % 2 == 0 ? schema : other).dump();
      if (i > 3) {
        const auto at = static_cast<std::size_t>(maker.number(0, std::ssize(text) - 1));
        text[at] = "\"{}[],:0a\\ "[maker.number(0, 10)];
      }
      if (!accepts(constraint, text)) {
        ++refused;
        continue;
      }
      OrderedJson value;
      ASSERT_NO_THROW(value = OrderedJson::parse(text)) << text;
      EXPECT_TRUE(SchemaOracle(schema).is_valid(value)) << text;
    }
  }
  EXPECT_GT(refused, 400);
}

TEST(Constraint, TheMaskIsWhatTakeAccepts) {
  SchemaMaker maker(testing::seed(99));
  const Constraint constraint = constraints().json_schema(
      R"({"type":"object","properties":{"é":{"type":"string","maxLength":3},
          "n":{"type":"number"}},"required":["n"]})");
  ConstraintCursor cursor(constraint);
  for (int i = 0; i < 40; ++i) {
    const std::vector<TokenId> tokens = allowed(cursor);
    std::vector<TokenId> taken;
    for (TokenId id = 0; id < 4096; ++id) {
      ConstraintCursor next = cursor;
      try {
        next.take(id);
        taken.push_back(id);
      } catch (const Error&) {
        if (id == kEnd && cursor.is_complete()) taken.push_back(id);
      }
    }
    ASSERT_EQ(tokens, taken);
    if (cursor.is_final()) break;
    TokenId next = kEnd;
    while (next == kEnd)
      next = tokens[static_cast<std::size_t>(maker.number(0, std::ssize(tokens) - 1))];
    cursor.take(next);
  }
}

TEST(Constraint, PropertiesKeepTheOrderOfTheSchema) {
  const Constraint constraint = constraints().json_schema(
      R"({"type":"object","properties":{"z":{"type":"integer"},"a":{"type":"integer"},
          "m":{"type":"integer"}},"required":["a"],"additionalProperties":false})");
  EXPECT_TRUE(accepts(constraint, R"({"z":1,"a":2,"m":3})"));
  EXPECT_TRUE(accepts(constraint, R"({"a":2,"m":3})"));
  EXPECT_TRUE(accepts(constraint, R"({"a":2})"));
  EXPECT_FALSE(accepts(constraint, R"({"a":2,"z":1})"));
  EXPECT_FALSE(accepts(constraint, R"({"z":1})"));
  EXPECT_FALSE(accepts(constraint, R"({"a":2,})"));
  EXPECT_FALSE(accepts(constraint, R"({"a":2,"b":1})"));
  EXPECT_FALSE(accepts(constraint, R"({"a":2,"a":3})"));
}

TEST(Constraint, StringsCountCharacters) {
  const Constraint constraint =
      constraints().json_schema(R"({"type":"string","minLength":2,"maxLength":3})");
  EXPECT_FALSE(accepts(constraint, "\"é\""));
  EXPECT_TRUE(accepts(constraint, "\"é\U0001F600\""));
  EXPECT_TRUE(accepts(constraint, R"("\ud83d\ude00\n")"));
  EXPECT_TRUE(accepts(constraint, R"("\u00e9ab")"));
  EXPECT_FALSE(accepts(constraint, R"("\ud83d\ude00")"));
  EXPECT_FALSE(accepts(constraint, "\"abcd\""));
  EXPECT_FALSE(follow(constraint, R"("\ud83dx)"));
  EXPECT_FALSE(follow(constraint, "\"\n"));
  EXPECT_FALSE(follow(constraint, "\"\xC0"));
  EXPECT_FALSE(follow(constraint, "\"\xED\xA0"));
}

TEST(Constraint, AnyObject) {
  const Constraint constraint = constraints().json_object();
  for (const char* text : {"{}", "{ }", R"({"a":[1,-2.5e3,true,null,{"b":"\u00e9"}]})",
                           "\n  {\n  \"a\": {\n    \"b\": []\n  }\n}"}) {
    EXPECT_TRUE(accepts(constraint, text)) << text;
  }
  for (const char* text : {"[]", "1", "{\"a\"}", "{\"a\":01}", "{\"a\":.5}", "{\"a\":+1}",
                           "{'a':1}", "{} ", "{\"a\":1e999}", "{\"a\":NaN}"}) {
    EXPECT_FALSE(accepts(constraint, text)) << text;
  }
}

// More states than are remembered at a time.
TEST(Constraint, LongTextsAreFollowed) {
  const Constraint constraint =
      constraints().json_schema(R"({"type":"string","minLength":30000,"maxLength":30001})");
  ConstraintCursor cursor(constraint);
  ConstraintCursor beside(constraint);
  beside.take(token_of('"'));
  cursor.take(token_of('"'));
  for (int i = 0; i < 29999; ++i) cursor.take(token_of('a'));
  EXPECT_FALSE(may_follow(cursor, token_of('"')));
  cursor.take(token_of('a'));
  EXPECT_TRUE(may_follow(cursor, token_of('"')));
  EXPECT_TRUE(may_follow(cursor, token_of('a')));
  cursor.take(token_of('a'));
  EXPECT_EQ(allowed(cursor), std::vector<TokenId>{token_of('"')});
  cursor.take(token_of('"'));
  EXPECT_TRUE(cursor.is_final());
  // One that stayed behind in what was remembered at first.
  EXPECT_FALSE(may_follow(beside, token_of('"')));
  EXPECT_TRUE(may_follow(beside, token_of('a')));
}

TEST(Constraint, DeepTextsAreFollowed) {
  const Constraint constraint = constraints().json_schema("{}");
  ConstraintCursor cursor(constraint);
  for (int i = 0; i < 20000; ++i) cursor.take(token_of('['));
  for (int i = 0; i < 19999; ++i) cursor.take(token_of(']'));
  EXPECT_FALSE(cursor.is_complete());
  cursor.take(token_of(']'));
  EXPECT_TRUE(cursor.is_final());
}

// ---- Regular expressions

TEST(Constraint, ExpressionsAreThoseOfEcma) {
  Random random(testing::seed(31337));
  const std::vector<std::string> atoms = {"a",    "b",   "[ab]", "[^a]", ".",          "(?:ab|b)",
                                          "(a|)", "\\d", "\\w",  "c?",   "(?:(a*b)*)", "\\."};
  const std::vector<std::string> quantifiers = {"",  "",    "",      "*",     "+",
                                                "?", "{2}", "{1,3}", "{0,2}?"};
  const auto pick = [&](const auto& list) {
    return list[static_cast<std::size_t>(random.integer(0, std::ssize(list) - 1))];
  };
  int matches = 0;
  for (int i = 0; i < 300; ++i) {
    std::string pattern;
    for (std::int64_t left = random.integer(1, 4); left > 0; --left) {
      const std::string atom = pick(atoms);
      pattern += atom + (atom == "c?" ? "" : pick(quantifiers));
      if (random.integer(0, 5) == 0) pattern += "|";
    }
    SCOPED_TRACE(pattern);
    std::optional<Constraint> constraint;
    try {
      constraint = constraints().regex(pattern);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("no text but the empty one"));
      continue;
    }
    const std::regex oracle(pattern);
    for (int j = 0; j < 40; ++j) {
      std::string text;
      for (std::int64_t left = random.integer(0, 6); left > 0; --left) {
        text += "aabbc0."[random.integer(0, 6)];
      }
      const bool expected = std::regex_match(text, oracle);
      matches += expected ? 1 : 0;
      EXPECT_EQ(accepts(*constraint, text), expected) << text;
    }
  }
  EXPECT_GT(matches, 300);
}

TEST(Constraint, ExpressionsKnowUnicode) {
  const Constraint constraint = constraints().regex("^[à-ü€]{2}\\u{1F600}[^\\x00-\\u07ff]$");
  EXPECT_TRUE(accepts(constraint, "é€\U0001F600中"));
  EXPECT_FALSE(accepts(constraint, "é€\U0001F600é"));
  EXPECT_FALSE(accepts(constraint, "e€\U0001F600中"));
  EXPECT_FALSE(accepts(constraint, "é€\U0001F601中"));
}

TEST(Constraint, PatternsOfSchemasMayMatchAnywhere) {
  const Constraint constraint =
      constraints().json_schema(R"({"type":"string","pattern":"b\"$|^x"})");
  EXPECT_TRUE(accepts(constraint, R"("aab\"")"));
  EXPECT_TRUE(accepts(constraint, R"("x\\\u0001")"));
  EXPECT_FALSE(accepts(constraint, R"("aab\"x")"));
  EXPECT_FALSE(accepts(constraint, R"("ax")"));
}

// ---- Grammars

TEST(Constraint, GrammarsNest) {
  const Constraint constraint = constraints().grammar(R"rules(
    # sums in brackets
    root ::= sum "\n"
    sum  ::= term
             ("+" term)*
    term ::= [0-9]+ | "(" sum ")" | name{1,2}
    name ::= [^-0-9+()\n\x5B])rules");
  for (const char* text : {"1\n", "1+(2+(3))+ab\n", "é\n"}) {
    EXPECT_TRUE(accepts(constraint, text)) << text;
  }
  for (const char* text : {"1", "(1\n", "1+\n", "abc\n", "()\n", "[\n"}) {
    EXPECT_FALSE(accepts(constraint, text)) << text;
  }
}

// ---- Refusals

TEST(Constraint, RefusesSchemasByTheirFault) {
  const struct {
    const char* schema;
    ErrorCode code;
    const char* text;
  } cases[] = {
      {"{", ErrorCode::usage, "not JSON"},
      {"3", ErrorCode::usage, "must be an object, true or false at #"},
      {"false", ErrorCode::usage, "no text that ever ends"},
      {R"({"type":"strin"})", ErrorCode::usage, "`type` must be"},
      {R"({"type":3})", ErrorCode::usage, "`type` must be"},
      {R"({"type":[]})", ErrorCode::usage, "`type` must be"},
      {R"({"type":"integer","multipleOf":2})", ErrorCode::unsupported,
       "'multipleOf' is not supported at #"},
      {R"({"type":"object","properties":{"a/b":{"type":"integer","minimum":2}}})",
       ErrorCode::unsupported, "'minimum' is not supported at #/properties/a~1b"},
      {R"({"type":"integer","maxLength":2})", ErrorCode::unsupported,
       "'maxLength' is not supported for this type"},
      {R"({"properties":{}})", ErrorCode::unsupported,
       "'properties' is not supported without `type`"},
      {R"({"oneOf":[true]})", ErrorCode::unsupported, "'oneOf'"},
      {R"({"allOf":[true,true]})", ErrorCode::unsupported, "`allOf` of several"},
      {R"({"anyOf":[true],"type":"null"})", ErrorCode::unsupported,
       "'type' is not supported beside 'anyOf'"},
      {R"({"anyOf":[]})", ErrorCode::usage, "`anyOf` must be an array"},
      {R"({"enum":[1],"minLength":2})", ErrorCode::unsupported,
       "'minLength' is not supported beside"},
      {R"({"enum":3})", ErrorCode::usage, "`enum` must be an array"},
      {R"({"enum":[1],"type":"string"})", ErrorCode::usage, "no text that ever ends"},
      {R"({"type":"string","minLength":-1})", ErrorCode::usage,
       "`minLength` must be a whole number"},
      {R"({"type":"string","maxLength":1e9})", ErrorCode::usage,
       "`maxLength` must be a whole number"},
      {R"({"type":"string","maxLength":1000000000})", ErrorCode::usage, "`maxLength` must be"},
      {R"({"type":"string","minLength":3,"maxLength":2})", ErrorCode::usage,
       "no text that ever ends"},
      {R"({"type":"string","pattern":"a","maxLength":2})", ErrorCode::unsupported,
       "`pattern` beside"},
      {R"({"type":"string","pattern":"("})", ErrorCode::usage, "a `)` is missing at #"},
      {R"({"type":"string","pattern":4})", ErrorCode::usage, "`pattern` must be a string"},
      {R"({"type":"object","required":"a"})", ErrorCode::usage, "`required` must be an array"},
      {R"({"type":"object","properties":[]})", ErrorCode::usage, "`properties` must be an object"},
      {R"({"type":"object","required":["a"],"additionalProperties":false})", ErrorCode::usage,
       "no text"},
      {R"({"type":"array","items":3})", ErrorCode::usage,
       "must be an object, true or false at #/items"},
      {R"({"type":"array","items":false,"minItems":1})", ErrorCode::usage,
       "no text that ever ends"},
      {R"({"$ref":"other.json"})", ErrorCode::unsupported, "outside of the schema"},
      {R"({"$ref":"#/$defs/a"})", ErrorCode::usage, "which is not there"},
      {R"({"$ref":"#/a~9"})", ErrorCode::usage, "which is not there"},
      {R"({"$ref":3})", ErrorCode::usage, "`$ref` must be a string"},
      {R"({"$ref":"#"})", ErrorCode::usage, "no text that ever ends"},
      {R"({"anyOf":[{"type":"null"},{"$ref":"#"}]})", ErrorCode::usage, "begins with itself"},
      {R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})", ErrorCode::usage,
       "no text"},
  };
  for (const auto& one : cases) {
    SCOPED_TRACE(one.schema);
    expect_error(one.code, one.text, [&] { constraints().json_schema(one.schema); });
  }
}

TEST(Constraint, RefusesHostileSchemas) {
  const auto refused = [](const std::string& schema, const char* text) {
    expect_error(ErrorCode::usage, text, [&] { constraints().json_schema(schema); });
  };
  refused(std::string(10 << 20, '['), "bytes; the most are");
  refused(std::string(1 << 20, '['), "nested more than 64 deep");
  std::string many = "{\"enum\":[0";
  for (int i = 0; i < 30000; ++i) many += ",1";
  refused(many + "]}", "more than 5000 names or 20000 values");
  // A chain of references, as long as they come, is no deeper for that.
  std::string chain = "{\"$ref\":\"#/$defs/0\",\"$defs\":{";
  for (int i = 0; i < 2000; ++i) {
    chain += "\"" + std::to_string(i) + "\":{\"$ref\":\"#/$defs/" + std::to_string(i + 1) + "\"},";
  }
  EXPECT_TRUE(accepts(constraints().json_schema(chain + "\"2000\":{\"type\":\"null\"}}}"), "null"));
  refused(chain + "\"2000\":{\"$ref\":\"#\"}}}", "no text that ever ends");
  std::string names = R"({"type":"object","properties":{)";
  for (int i = 0; i < 4000; ++i) {
    names += (i > 0 ? ",\"" : "\"") + std::to_string(i) + std::string(200, 'n') + "\":true";
  }
  refused(names + "}}", "too large");
}

TEST(Constraint, RefusesExpressions) {
  const struct {
    const char* pattern;
    ErrorCode code;
    const char* text;
  } cases[] = {
      {"(?=a)", ErrorCode::unsupported, "look-around"},
      {"(?<!a)b", ErrorCode::unsupported, "look-around"},
      {"(a)\\1", ErrorCode::unsupported, "back reference"},
      {"\\bword", ErrorCode::unsupported, "'\\b'"},
      {"\\p{L}", ErrorCode::unsupported, "'\\p'"},
      {"(?i)a", ErrorCode::unsupported, "flags"},
      {"a^b", ErrorCode::unsupported, "in the middle"},
      {"a$b", ErrorCode::unsupported, "in the middle"},
      {"a*+", ErrorCode::unsupported, "possessive"},
      {"a**", ErrorCode::usage, "before a quantifier"},
      {"*a", ErrorCode::usage, "before a quantifier"},
      {"a{2,1}", ErrorCode::usage, "below its least"},
      {"a{x}", ErrorCode::usage, "must begin a quantifier"},
      {"a{9999999}", ErrorCode::usage, "above"},
      {"(a", ErrorCode::usage, "`)` is missing"},
      {"a)", ErrorCode::usage, "too many"},
      {"[a", ErrorCode::usage, "`]` is missing"},
      {"[b-a]", ErrorCode::usage, "before it begins"},
      {"[\\d-z]", ErrorCode::usage, "range of classes"},
      {"a\\", ErrorCode::usage, "backslash"},
      {"\\xg0", ErrorCode::usage, "hexadecimal"},
      {"\\u{110000}", ErrorCode::usage, "above U+10FFFF"},
      {"\\ud800", ErrorCode::usage, "surrogate"},
      {"[]", ErrorCode::usage, "no text that ever ends"},
      {"", ErrorCode::usage, "empty one"},
      {"\xFF", ErrorCode::usage, "UTF-8"},
  };
  for (const auto& one : cases) {
    SCOPED_TRACE(one.pattern);
    expect_error(one.code, one.text, [&] { constraints().regex(one.pattern); });
  }
  expect_error(ErrorCode::usage, "nested", [] { constraints().regex(std::string(5000, '(')); });
  expect_error(ErrorCode::usage, "65536", [] { constraints().regex(std::string(100000, 'a')); });
}

TEST(Constraint, RefusesGrammars) {
  const struct {
    const char* rules;
    const char* text;
  } cases[] = {
      {"", "no rule `root`"},
      {"rot ::= \"a\"", "no rule `root`"},
      {"root ::= other", "'other' is used and not defined"},
      {"root ::= \"a\"\nroot ::= \"b\"", "line 2: the rule 'root' is defined twice"},
      {"root ::= root \"a\" | \"b\"", "begins with itself"},
      {"root ::= \"\" (a \"x\")\na ::= \"b\"?  root", "no text that ever ends"},
      {"root ::= \"a\" root", "no text that ever ends"},
      {"root ::= \"a", "a text has no end"},
      {"root ::= [a", "`]` is missing"},
      {"root ::= (\"a\"", "`)` is missing"},
      {"root ::= \"a\" )", "neither a part"},
      {"root = \"a\"", "NAME ::="},
      {"root ::= \"\\q\"", "unknown escape"},
      {"root ::= \"a\"{3,1}", "repetition such as"},
      {"root ::= \"a\"{}", "repetition such as"},
      {"root ::= [z-a]", "before it begins"},
      {"root ::= \"\\ud800\"", "names no character"},
      {"root ::= \"\"", "empty one"},
  };
  for (const auto& one : cases) {
    SCOPED_TRACE(one.rules);
    expect_error(ErrorCode::usage, one.text, [&] { constraints().grammar(one.rules); });
  }
}

TEST(Constraint, RefusesWhatIsTooAmbiguous) {
  expect_error(ErrorCode::unsupported, "too ambiguous",
               [] { constraints().regex("((a?){1000}){1000}b"); });
  // One that is so later on.
  const Constraint constraint = constraints().regex("x((a?){1000}){1000}b");
  ConstraintCursor cursor(constraint);
  expect_error(ErrorCode::unsupported, "too ambiguous", [&] { allowed(cursor); });
  expect_error(ErrorCode::unsupported, "too ambiguous", [&] { cursor.take(token_of('x')); });
}

TEST(Constraint, RefusesOtherTokensAndVocabularies) {
  ConstraintCursor cursor(constraints().regex("ab"));
  expect_error(ErrorCode::usage, "may not follow", [&] { cursor.take(token_of('b')); });
  expect_error(ErrorCode::usage, "may not follow", [&] { cursor.take(-1); });
  expect_error(ErrorCode::usage, "may not follow", [&] { cursor.take(1 << 20); });
  expect_error(ErrorCode::usage, "may not follow", [&] { cursor.take(kEnd); });
  std::vector<float> logits(100);
  expect_error(ErrorCode::usage, "another tokenizer", [&] { cursor.mask({}, logits); });
  cursor.take(token_of('a'));  // goes on after refusals
  EXPECT_EQ(allowed(cursor), std::vector<TokenId>{token_of('b')});
}

}  // namespace
}  // namespace sluice
