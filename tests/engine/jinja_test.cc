// Templates: what Jinja writes is what is written here, what it refuses is refused, and nothing
// that a template holds costs more than its budget.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <random>

#include "engine/jinja/template.h"
#include "engine/utf8.h"
#include "tests/io/test_files.h"

namespace sluice::jinja {
namespace {

using Json = nlohmann::ordered_json;
using testing::expect_error;

constexpr std::uint64_t kBudget = 1'000'000;

Value value_of(const Json& json) {
  if (json.is_string()) return Text(json.get<std::string>(), 1);
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<std::int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_null()) return nullptr;
  if (json.is_array()) {
    std::vector<Value> items;
    for (const Json& item : json) items.push_back(value_of(item));
    return Value::list(std::move(items));
  }
  Dict dict;
  for (const auto& [key, item] : json.items()) dict.set(key, value_of(item));
  return Value::dict(std::move(dict));
}

Dict variables_of(const Json& json) {
  Dict dict;
  for (const auto& [key, item] : json.items()) dict.set(key, value_of(item));
  return dict;
}

Text render(const std::string& source, const Dict& variables = {}, std::uint64_t budget = kBudget) {
  std::tm now{};
  now.tm_mday = 5;
  now.tm_mon = 2;
  now.tm_year = 125;
  return Template(source).render(variables, now, budget);
}

std::string written(const std::string& source, const Dict& variables = {}) {
  return render(source, variables).bytes();
}

TEST(Jinja, WritesWhatJinjaWrites) {
  const Json recorded = Json::parse(testing::read_bytes(SLUICE_TEST_DATA "/jinja_cases.json"));
  const Dict variables = variables_of(recorded["variables"]);
  int texts = 0;
  int refused = 0;
  for (const Json& expected : recorded["cases"]) {
    const std::string source = expected["template"];
    SCOPED_TRACE(source);
    if (expected.contains("error")) {
      EXPECT_THROW(render(source, variables), Error);
      continue;
    }
    ++texts;
    try {
      EXPECT_EQ(written(source, variables), expected["text"].get<std::string>());
    } catch (const Error& error) {
      // Made-up ones also do what no template does, such as writing lists as Python shows them.
      if (!expected.contains("generated")) ADD_FAILURE() << error.what();
      ++refused;
    }
  }
  EXPECT_GT(texts, 400);
  EXPECT_LT(refused, 60);
}

std::string nested(const std::string& open, const std::string& inside, const std::string& close,
                   int depth) {
  std::string text;
  for (int i = 0; i < depth; ++i) text += open;
  text += inside;
  for (int i = 0; i < depth; ++i) text += close;
  return text;
}

void expect_refused(const std::string& source, const std::string& part) {
  SCOPED_TRACE(source.substr(0, 200));
  expect_error(ErrorCode::unsupported, part, [&] { render(source); });
}

// What Jinja has and chat templates do not, by its name and place.
TEST(Jinja, WhatIsNotKnownIsRefusedByName) {
  for (const std::string word : {"block x", "include 'x'", "import 'x' as y", "extends 'x'", "raw",
                                 "filter upper", "call m()", "with", "do x", "autoescape true"}) {
    expect_refused("\n{% " + word + " %}", "'" + word.substr(0, word.find(' ')) + "', in line 2");
  }
  for (const char* text : {"stra\u00dfe", "\ufb01", "\u0130", "\u039f\u03a3", "\u0149"}) {
    for (const char* change : {"upper", "lower", "capitalize"}) {
      expect_refused("{{ '" + std::string(text) + "' | " + change + " }}", "changes the case of");
    }
  }
  expect_refused("a\n\n{{ 2 ** 3 }}", "raises to a power in line 3");
  expect_refused("{{ 1 < 2 < 3 }}", "compares three values at once in line 1");
  expect_refused("{{ 'a' | indent(2) }}", "the filter 'indent', which is not known here in line 1");
  expect_refused("{{ 'a' is filter }}", "the test 'filter'");
  expect_refused("{{ 'a'.zfill(3) }}", "the method 'zfill' of text");
  expect_refused("{{ {}.update(a=1) }}", "the method 'update' of a dictionary");
  expect_refused("{{ {'a': 1}.items }}", "the method 'items' without calling it");
  expect_refused("{{ [1] }}", "writes a list");
  expect_refused("{{ {'a': 1} }}", "writes a dictionary");
  expect_refused("{{ namespace() }}", "writes a namespace");
  expect_refused("{{ range }}", "writes a function");
  expect_refused("{{ [1] | tojson(indent=2) }}", "writes JSON in lines");
  expect_refused("{{ range(*[1]) }}", "hands over a list as arguments");
  expect_refused("{% for x in [1] recursive %}{% endfor %}", "a recursive loop");
  expect_refused("{{ 0x10 }}", "a number of an unknown form");
  expect_refused("{{ 1e3 }}", "a number of an unknown form");
  expect_refused("{{ 99999999999999999999 }}", "a number that is too large");
  expect_refused("{{ 9223372036854775807 + 1 }}", "computes a number that is too large");
  expect_refused("{{ (0 - 9223372036854775807 - 1) // -1 }}",
                 "computes a number that is too large");
  expect_refused(R"({{ '\N{BULLET}' }})", "the escape '\\N'");
  expect_refused(R"({{ '\ud800' }})", "an escape that is no character");
  expect_refused("{{ xs[] }}", "has ']' where something else is expected");
  expect_refused("{% if a %}x", "lacks '{% endif %}'");
  expect_refused("{% for a in b %}", "lacks '{% endfor %}'");
  expect_refused("{% for a in b %}{% endif %}", "not known here, 'endif', in line 1");
}

TEST(Jinja, DatesAreTheGivenOnes) {
  EXPECT_EQ(written("{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%-d.%m.%y%%') }}"),
            "05 Mar 2025|5.03.25%");
  for (const char* format : {"%999999999d", "%E", "%", "%-", "%Q", "a\\x00b"}) {
    expect_refused("{{ strftime_now('" + std::string(format) + "') }}",
                   "a date in an unknown form");
  }
}

TEST(Jinja, AnExceptionOfTheTemplateIsThePromptsFault) {
  expect_error(ErrorCode::prompt, "refuses this conversation: 'Roles must\\x0aalternate'",
               [] { render("{{ raise_exception('Roles must\\nalternate') }}"); });
}

// Every byte keeps the number of who wrote it, whatever is done with it.
TEST(Jinja, BytesRememberWhoWroteThem) {
  Dict variables;
  variables.set("a", Text(" one<two", 1));
  variables.set("b", Text("<B>", 2));
  const auto marked = [&](const std::string& expression) {
    const Text text = render("<{{ " + expression + " }}>", variables);
    std::string origins;
    for (const Origin origin : text.origins()) origins += static_cast<char>('0' + origin);
    return text.bytes() + " " + origins;
  };
  EXPECT_EQ(marked("a + '<' + b"), "< one<two<<B>> 01111111102220");
  EXPECT_EQ(marked("(a ~ b) | trim | upper"), "<ONE<TWO<B>> 011111112220");
  EXPECT_EQ(marked("a.split('<')[1] + b[1:]"), "<twoB>> 0111220");
  EXPECT_EQ(marked("a.replace('<', b)"), "< one<B>two> 011112221110");
  EXPECT_EQ(marked("[a, b] | join('-')"), "< one<two-<B>> 01111111102220");
  EXPECT_EQ(marked("b | reverse | list | join"), "<>B<> 02220");
  EXPECT_EQ(marked("b * 2"), "<<B><B>> 02222220");
  EXPECT_EQ(marked("b | tojson"), "<\"<B>\"> 0022200");
  EXPECT_EQ(marked("'%s' ~ b.lower().capitalize()"), "<%s<b>> 0002220");
  EXPECT_EQ(marked("b.splitlines()[0] if a else ''"), "<<B>> 02220");
}

// Whatever a template is, it ends, and the memory that it takes is bounded.
TEST(Jinja, NothingCostsMoreThanTheBudget) {
  const std::string steps = "takes implausibly many steps";
  const std::string grow = "{% set q = namespace(a='aaaaaaaa') %}{% for i in range(100) %}";
  const auto start = std::chrono::steady_clock::now();
  expect_refused(grow + "{% set q.a = q.a + q.a %}{% endfor %}", steps);
  expect_refused(grow + "{% set q.a = q.a * 50 %}{% endfor %}", steps);
  expect_refused(grow + "{% set q.a = q.a.replace('a', q.a) %}{% endfor %}", steps);
  expect_refused(grow + "{% set q.a = q.a | list | join(q.a) %}{% endfor %}", steps);
  expect_refused("{{ 'a' * 9223372036854775807 }}", steps);
  expect_refused("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
                 steps);
  expect_refused("{% set x = 'a' * 400000 %}{% for i in range(9999) %}{{ x in x }}{% endfor %}",
                 steps);
  std::string many;
  for (int i = 0; i < 5000; ++i) many += "{% set a" + std::to_string(i) + " = 1 %}";
  expect_refused("{% for i in range(9999) %}" + many + "{% endfor %}", steps);
  expect_refused("{% set x = 'a' * 400000 %}{% for i in range(9999) %}{{ x[-1] }}{% endfor %}",
                 steps);
  expect_refused(
      "{% set q = namespace(a=[1]) %}{% for i in range(60) %}{% set q.a = [q.a, q.a] %}"
      "{% endfor %}{{ q.a == q.a }}",
      steps);
  expect_refused(
      "{% set q = namespace(a=[1]) %}{% for i in range(60) %}{% set q.a = [q.a, q.a] %}"
      "{% endfor %}{{ q.a | tojson }}",
      steps);
  expect_refused(
      "{% set q = namespace(a=1) %}{% for i in range(99) %}{% set q.a = [q.a] %}"
      "{% endfor %}",
      "more than 64 deep");
  expect_refused("{% set q = namespace() %}{% set q.a = q %}", "puts a namespace into a value");
  expect_refused("{% set q = namespace() %}{% set x = [q] %}", "puts a namespace into a value");
  expect_refused("{{ range(1000000) | length }}", "a range that is too long");
  expect_refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls macros in each other");
  expect_refused("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
                 "calls macros in each other");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(Jinja, NestingIsBounded) {
  constexpr int kDeep = 20'000;
  expect_refused("{{ " + nested("(", "1", ")", kDeep) + " }}", "nests expressions too deeply");
  expect_refused("{{ " + nested("[", "1", "]", kDeep) + " }}", "nests expressions too deeply");
  expect_refused("{{ " + nested("not ", "1", "", kDeep) + " }}", "nests expressions too deeply");
  expect_refused("{{ " + nested("-", "1", "", kDeep) + " }}", "nests expressions too deeply");
  expect_refused("{{ " + nested("1 if 1 else ", "1", "", kDeep) + " }}", "nests expressions");
  expect_refused("{{ " + nested("", "1", " + 1", kDeep) + " }}", "nests expressions too deeply");
  expect_refused("{{ " + nested("", "a", ".a", kDeep) + " }}", "nests expressions too deeply");
  expect_refused("{{ " + nested("", "a", "|trim", kDeep) + " }}", "nests expressions too deeply");
  expect_refused("{{ " + nested("a(", "1", ")", kDeep) + " }}", "nests expressions too deeply");
  expect_refused(nested("{% if 1 %}", "x", "{% endif %}", kDeep), "nests statements too deeply");
  expect_refused(nested("{% for a in b %}", "x", "{% endfor %}", kDeep),
                 "nests statements too deeply");
  // The deepest that is read is also run.
  const std::string deepest = "{{ " + nested("(1 + ", "1", ")", 45) + " }}";
  EXPECT_EQ(written(nested("{% for i in [1] %}", deepest, "{% endfor %}", 30)), "46");
}

// Every cut of the recorded templates, and random changes of single bytes: a text or an error.
TEST(Jinja, DamageIsNeverMoreThanAnError) {
  const Json recorded = Json::parse(testing::read_bytes(SLUICE_TEST_DATA "/jinja_cases.json"));
  const Dict variables = variables_of(recorded["variables"]);
  std::mt19937_64 random(19);  // the seed
  int texts = 0;
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    const Json& entry = recorded["cases"][random() % recorded["cases"].size()];
    std::string damaged = entry["template"];
    if (damaged.empty()) continue;
    for (std::size_t n = 1 + random() % 3; n > 0; --n) {
      damaged[random() % damaged.size()] = static_cast<char>(' ' + random() % 95);
    }
    if (i % 4 == 0) damaged.resize(random() % damaged.size());
    if (find_invalid_utf8(damaged)) continue;
    try {
      render(damaged, variables);
      ++texts;
    } catch (const Error& error) {
      ++refused;
      ASSERT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
    }
  }
  EXPECT_GT(texts, 1000);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace sluice::jinja
