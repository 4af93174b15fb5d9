// Policies as JSON.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "sluice/policy.h"
#include "tests/support/refusal.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using testing::Refusal;
using testing::refusal;

std::string refused_json(std::string_view json) {
  return refusal([&] { policy_from_json(json); });
}

TEST(PolicyJson, HasTheSameWordsAsKeys) {
  EXPECT_EQ(to_json(Policy{}), R"({"select":"dense"})");
  EXPECT_EQ(to_json(parse_policy("tidaldecode sinks=4 correct=64")),
            R"-({"select":"exact","prune":"top_k(512)","sinks":4,"dense":[0,1],)-"
            R"-("anchors":[2,7],"anchors_attend":"all","correct":64})-");
  EXPECT_EQ(to_json(parse_policy("sluice bits=2 prefill=zipvl(0.5)")),
            R"-({"select":"sparq","candidates":"1/16","prune":"top_p(0.95)","cap":256,)-"
            R"-("compensate":"mean_value","prefill":"zipvl(0.5)","bits":2})-");
  EXPECT_EQ(to_json(parse_policy("prefill=pages(0.9)")),
            R"-({"select":"dense","prefill":"pages(0.9)"})-");
}

TEST(PolicyJson, ReadsDefaultsAndSpaces) {
  EXPECT_EQ(policy_from_json("{}"), Policy{});
  EXPECT_EQ(policy_from_json(R"({"candidates":"none","cap":"none","dense":[],"correct":"never"})"),
            Policy{});
  EXPECT_EQ(policy_from_json(R"({"dense":[0,2,7]})"), parse_policy("dense=0,2,7"));
  EXPECT_EQ(policy_from_json(R"-( {"prune": "top_k( 1/8 )", "select": "sparq( r = 4 )"} )-"),
            parse_policy("select=sparq(r=4) prune=top_k(1/8)"));
}

TEST(PolicyJson, RefusesEverythingElse) {
  const std::vector<Refusal> refusals = {
      {"", "policy: not JSON: it breaks off at byte 1"},
      {"select=dense", "not JSON: it goes wrong at byte 1"},
      {"{", "not JSON: it breaks off at byte 2"},
      {R"({"sinks":4} x)", "not JSON: it goes wrong at byte 13"},
      {"{\"select\":\"\xff\"}", "not JSON: it goes wrong at byte 12"},
      {R"({"sinks":1e999})", "not JSON: it has a number that no type can hold"},
      {std::string_view("{}\0", 3), "not JSON: it has a NUL byte"},
      {"[]", "the JSON is not an object; its keys may be select, candidates"},
      {"null", "the JSON is not an object"},
      {"\"dense\"", "the JSON is not an object"},
      {R"({"window":4})", "'window' is no setting; settings are select, candidates"},
      {R"({"":4})", "'' is no setting"},
      {R"({"sinks":4,"sinks":4})", "the JSON has the key 'sinks' twice"},
      {R"({"select":4})", "the JSON's select is '4'; it has to be a string: dense, streaming"},
      {R"({"select":null})", "the JSON's select is 'null'; it has to be a string"},
      {R"({"select":["dense"]})", "the JSON's select is 'array'; it has to be a string"},
      {R"({"sinks":"4"})",
       "the JSON's sinks is '\"4\"'; it has to be an integer: a number of "
       "tokens from 0 to 2147483648"},
      {R"({"sinks":4.0})", "the JSON's sinks is '4.0'; it has to be an integer"},
      {R"({"sinks":true})", "the JSON's sinks is 'true'; it has to be an integer"},
      {R"({"cap":{}})", "the JSON's cap is 'object'; it has to be an integer or a string"},
      {R"({"dense":0})", "the JSON's dense is '0'; it has to be an array of integers"},
      {R"({"dense":"none"})", "it has to be an array of integers: the layers' numbers"},
      {R"({"dense":[0,"1"]})", "the JSON's dense is 'array'; it has to be an array of integers"},
      {R"({"dense":[[0]]})", "it has to be an array of integers"},
      {R"({"dense":[4294967296]})", "'dense=4294967296' is not understood"},
      {R"({"sinks":18446744073709551615})", "'sinks=18446744073709551615' is not understood"},
      {R"({"select":"magic"})", "'select=magic' is not understood; select takes dense"},
      {R"({"select":"dense sinks=4"})", "'select=dense sinks=4' is not understood"},
      {R"({"select":"dense\u0000"})", "'select=dense\\x00' is not understood"},
      {R"({"cap":0})", "'cap=0' is not understood"},
      {R"({"bits":5})", "bits is 5; it has to be 4, 3, 2 or 1"},
      {R"({"bits":3.5})", "bits is '3.5'; it has to be an integer: 4, 3, 2 or 1"},
      {R"({"bits":"3"})", "it has to be an integer: 4, 3, 2 or 1"},
      {R"({"select":"sparq"})", "needs prune=top_k(N)"},
  };
  for (const Refusal& refusal : refusals) {
    EXPECT_THAT(refused_json(refusal.text), HasSubstr(refusal.message)) << refusal.text;
  }
  EXPECT_THAT(refused_json(std::string(40, '[')), HasSubstr("not JSON"));
  EXPECT_THAT(refused_json(std::string(200000, '[')), HasSubstr("200000 bytes; it may have 65536"));
}

TEST(PolicyJson, OfManyPartsIsRefusedAtOnce) {
  constexpr std::string_view kWhy = "more keys, objects and arrays than all settings take";
  std::string keys;
  std::string objects;
  for (int i = 0; i < 6000; ++i) {
    keys += (i == 0 ? "" : ",") + ("\"" + std::to_string(i) + "\":1");
    objects += i == 0 ? "{}" : ",{}";
  }
  const std::string deep = std::string(20000, '[') + std::string(20000, ']');
  EXPECT_THAT(refused_json("{" + keys + "}"), HasSubstr(kWhy));
  EXPECT_THAT(refused_json(R"({"dense":[)" + objects + "]}"), HasSubstr(kWhy));
  EXPECT_THAT(refused_json(R"({"dense":)" + deep + "}"), HasSubstr(kWhy));
}

}  // namespace
}  // namespace sluice
