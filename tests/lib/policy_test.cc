#include "sluice/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/errors.h"
#include "tests/support/refusal.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using testing::Refusal;
using testing::refusal;

constexpr KvShape kShape = {.layers = 8, .query_heads = 8, .kv_heads = 2, .head_dim = 64};

std::string refused_text(std::string_view text) {
  return refusal([&] { parse_policy(text); });
}

std::string refused(const Policy& policy) {
  return refusal([&] { validate(policy); });
}

TEST(Budget, IsACountOrAShareAndNeverMoreThanTheContext) {
  EXPECT_EQ((Budget{128, 0}.of(1000)), 128);
  EXPECT_EQ((Budget{128, 0}.of(100)), 100);
  EXPECT_EQ((Budget{0, 16}.of(1600)), 100);
  EXPECT_EQ((Budget{0, 16}.of(1601)), 101) << "shares are rounded up";
  EXPECT_EQ((Budget{0, 16}.of(1)), 1);
  EXPECT_EQ((Budget{0, 1}.of(77)), 77);
  EXPECT_EQ((Budget{0, 16}.of(0)), 0);
  EXPECT_EQ(Budget{}.of(1000), 1000);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ((Budget{0, 2}.of(kMost)), kMost / 2 + 1);
  EXPECT_FALSE(Budget{}.limited());
  EXPECT_TRUE((Budget{1, 0}.limited()));
  EXPECT_TRUE((Budget{0, 1}.limited()));
}

TEST(Policy, LayersAreDenseSelectOrFollow) {
  const Policy plain = parse_policy("select=quest prune=top_k(8) dense=0,3");
  EXPECT_TRUE(plain.is_dense(0) && plain.is_dense(3));
  EXPECT_FALSE(plain.selects(0) || plain.selects(3));
  EXPECT_TRUE(plain.selects(1) && plain.selects(2) && plain.selects(4));
  EXPECT_FALSE(plain.is_dense(1) || plain.is_dense(4));

  const Policy anchored = parse_policy("select=int4 prune=top_k(8) dense=0,1,4 anchors=2,6");
  for (int layer = 0; layer < 8; ++layer) {
    EXPECT_EQ(anchored.is_dense(layer), layer <= 1 || layer == 4) << layer;
    EXPECT_EQ(anchored.selects(layer), layer == 2 || layer == 6) << layer;
  }

  const Policy both = change_policy(anchored, "anchors_attend=all");
  for (int layer = 0; layer < 8; ++layer) {
    EXPECT_EQ(both.is_dense(layer), anchored.is_dense(layer) || anchored.selects(layer)) << layer;
    EXPECT_EQ(both.selects(layer), anchored.selects(layer)) << layer;
  }

  EXPECT_TRUE(Policy{}.is_dense(5));
  EXPECT_FALSE(Policy{}.selects(5));
  EXPECT_TRUE(parse_policy("streaming").selects(5));
}

TEST(PolicyText, EverySettingIsRead) {
  const Policy policy = parse_policy(
      "select=sparq(r=32) candidates=1/16 prune=top_p(0.95) cap=256 sinks=4 recent=32 "
      "compensate=mean_value dense=0,1 anchors=2,7 correct=1024 prefill=zipvl(0.9) bits=2");
  Policy expected;
  expected.select = {"sparq", {{"r", 32}}};
  expected.candidates = {0, 16};
  expected.prune = Pruner::top_p;
  expected.p = 0.95;
  expected.cap = {256, 0};
  expected.sinks = 4;
  expected.recent = 32;
  expected.compensate = Compensation::mean_value;
  expected.dense_layers = {0, 1};
  expected.anchors = {2, 7};
  expected.correct = 1024;
  expected.prefill = {0.9, false};
  expected.bits = 2;
  EXPECT_EQ(policy, expected);
}

TEST(PolicyText, ValuesInAFewBits) {
  const Policy policy =
      parse_policy("select=int4 prune=top_k(16) compensate=values( bits=3, pages=0.8 )");
  EXPECT_EQ(policy.compensate, Compensation::values);
  EXPECT_EQ(policy.values, (ValueBits{3, 0.8}));
  EXPECT_EQ(to_string(policy), "select=int4 prune=top_k(16) compensate=values(bits=3,pages=0.8)");
  EXPECT_EQ(policy_from_json(to_json(policy)), policy);
  const Policy half =
      parse_policy("select=int4 prune=top_k(16) compensate=values(pages=0.8, components = half)");
  EXPECT_TRUE(half.values.half);
  EXPECT_EQ(to_string(half),
            "select=int4 prune=top_k(16) compensate=values(components=half,pages=0.8)");
  EXPECT_EQ(parse_policy(to_string(half)), half);
  EXPECT_EQ(parse_policy("select=int4 prune=top_k(16) compensate=values(components=all)"),
            parse_policy("select=int4 prune=top_k(16) compensate=values"));
  const Policy plain = parse_policy("select=int4 prune=none compensate=values(pages=0.9,bits=2)");
  EXPECT_EQ(plain.prune, Pruner::none);
  EXPECT_EQ(plain.values, ValueBits{});
  EXPECT_EQ(to_string(plain), "select=int4 prune=none compensate=values");
  EXPECT_EQ(to_string(change_policy(policy, "compensate=none")), "select=int4 prune=top_k(16)");
  EXPECT_EQ(change_policy(policy, "prune=top_p(0.9)").k, Budget{});
}

TEST(PolicyText, EverySelectorHasItsName) {
  EXPECT_EQ(parse_policy("select=dense").select.name, "dense");
  EXPECT_EQ(parse_policy("select=streaming recent=1").select.name, "streaming");
  EXPECT_EQ(parse_policy("select=exact prune=top_k(1)").select.name, "exact");
  EXPECT_EQ(parse_policy("select=int4 prune=top_k(1)").select.name, "int4");
  EXPECT_EQ(parse_policy("select=quest prune=top_k(1)").select.name, "quest");
  EXPECT_EQ(parse_policy("select=sparq prune=top_k(1)").select.name, "sparq");
}

TEST(PolicyText, ValuesThatMeanTheDefaultAreLeftOut) {
  EXPECT_EQ(to_string(Policy{}), "select=dense");
  EXPECT_EQ(parse_policy("select=dense candidates=none cap=none sinks=0 recent=0 compensate=none "
                         "dense=none anchors=none correct=never prefill=dense bits=4"),
            Policy{});
  EXPECT_EQ(parse_policy("select=dense correct=0 prefill=dense"), Policy{});
  EXPECT_EQ(to_string(parse_policy("bits=4 prefill=zipvl(0.50,demote) select=dense")),
            "select=dense prefill=zipvl(0.5)");
  EXPECT_EQ(to_string(parse_policy("prefill=pages( 0.90 )")), "select=dense prefill=pages(0.9)");
  EXPECT_EQ(to_string(parse_policy("cap=1/64 prune=top_p(1.0) select=int4")),
            "select=int4 prune=top_p(1) cap=1/64");
}

TEST(PolicyText, SpacesAreToleratedBetweenWordsAndInsideParentheses) {
  EXPECT_EQ(parse_policy("  select=sparq( r = 32 )   prune=top_k( 1/8 )  "),
            parse_policy("select=sparq(r=32) prune=top_k(1/8)"));
  EXPECT_EQ(parse_policy("prefill=zipvl( 0.5 , evict )"), parse_policy("prefill=zipvl(0.5,evict)"));
}

TEST(PolicyText, WordsReplaceAPresetsSettings) {
  EXPECT_EQ(to_string(parse_policy("twilight dense=0 prune=top_k(64)")),
            "select=quest candidates=1/4 prune=top_k(64) dense=0");
  EXPECT_EQ(to_string(parse_policy("sluice cap=none select=sparq(r=8) compensate=none")),
            "select=sparq(r=8) candidates=1/16 prune=top_p(0.95)");
  EXPECT_EQ(to_string(parse_policy("twilight anchors=2,7")),
            "select=quest candidates=1/4 prune=top_p(0.95) dense=0,1 anchors=2,7");
}

std::string early_of(const char* line) {
  const Policy policy = parse_policy(line);
  std::string all;
  for (int layer = 0; layer < 6; ++layer) all += "nhl"[static_cast<int>(policy.early_at(layer))];
  return all;
}

TEST(PolicyText, LayersChooseEarlyWhereTheyCan) {
  EXPECT_EQ(early_of("values"), "nnnnnn");
  EXPECT_EQ(early_of("values early=half"), "nhhhhh");
  EXPECT_EQ(early_of("values early=layer"), "nhhlll");
  EXPECT_EQ(early_of("values early=layer 0,4:early=half 5:early=none"), "nhhlhn");
  EXPECT_EQ(early_of("values 3:early=layer 1:early=half"), "nhnlnn");
  EXPECT_EQ(early_of("twilight early=layer"), "nnhlll");
  // Followers know their rows from the anchor before, half a layer early at the most.
  EXPECT_EQ(early_of("tidaldecode anchors=2,4 early=layer"), "nnnhnh");
  EXPECT_EQ(early_of("tidaldecode select=int4 anchors=2,4 anchors_attend=selected early=half"),
            "nnhhhh");
  EXPECT_EQ(to_string(parse_policy("select=int4 prune=top_k(9) early=layer 3:early=none")),
            "select=int4 prune=top_k(9) early=layer 3:early=none");
  EXPECT_EQ(policy_from_json(R"-({"select":"quest","prune":"top_k(9)","early":"half"})-"),
            parse_policy("select=quest prune=top_k(9) early=half"));
}

TEST(PolicyText, RefusesWhatIsNotInTheGrammar) {
  const std::vector<Refusal> refusals = {
      {"",
       "policy: the text is empty; write a preset (dense, streaming, quest, sparq, twilight, "
       "tidaldecode, double_sparsity, snapkv, h2o, zipvl, sluice, values, compact, tiny, "
       "quantized) or "
       "select=dense"},
      {"   ", "the text is empty"},
      {"fast",
       "'fast' is neither a preset (dense, streaming, quest, sparq, twilight, tidaldecode, "
       "double_sparsity, snapkv, h2o, zipvl, sluice, values, compact, tiny, quantized) nor "
       "key=value; "
       "settings are select, "
       "candidates, prune, "
       "cap, sinks, "
       "recent, compensate, dense, anchors, anchors_attend, correct, prefill, early, bits"},
      {"Dense", "'Dense' is neither a preset"},
      {"quest fast", "'fast' is not key=value, and only the first word may be a preset's name"},
      {"sinks=4 quest", "'quest' is not key=value"},
      {"window=4", "'window=4' is no setting; settings are select, candidates, prune, cap"},
      {"=4", "'=4' is no setting"},
      {"sparq(r=32)", "'sparq(r=32)' is no setting"},
      {"recent=4 sinks=1 recent=5", "recent is given twice, again as 'recent=5'"},
      {"recent=4 recent=4", "recent is given twice"},
      {"quest dense=0 dense=1", "dense is given twice, again as 'dense=1'"},
      {"select=magic",
       "policy: 'select=magic' is not understood; select takes dense, streaming, "
       "exact, int4, quest, sparq, sparq(r=1..head_dim), double_sparsity, "
       "double_sparsity(r=1..head_dim), snapkv, "
       "snapkv(kernel=1..1023,rows=1..1048576,window=1..1024), h2o or h2o(rows=256..1048576)"},
      {"select=h2o(rows=255)", "'select=h2o(rows=255)' is not understood"},
      {"select=h2o(rows=1048577)", "h2o or h2o(rows=256..1048576)"},
      {"select=h2o(rows=256.5)", "h2o or h2o(rows=256..1048576)"},
      {"select=h2o(window=9)", "h2o or h2o(rows=256..1048576)"},
      {"select=", "'select=' is not understood"},
      {"select=quest(r=4)", "'select=quest(r=4)' is not understood"},
      {"select=sparq()", "select takes dense, streaming"},
      {"select=sparq(32)", "select takes dense, streaming"},
      {"select=sparq(r=0)", "sparq(r=1..head_dim)"},
      {"select=sparq(r=-1)", "sparq(r=1..head_dim)"},
      {"select=sparq(r=99999999999)", "sparq(r=1..head_dim)"},
      {"select=sparq(r=3 2)", "'select=sparq(r=3 2)' is not understood"},
      {"select=sparq(r=3,r=3)", "select takes dense, streaming"},
      {"select=sparq(r=3", "'select=sparq(r=3' is not understood"},
      {"select=sparq(r=32", "select takes dense, streaming"},
      {"prune=top_k(128 cap=4", "'prune=top_k(128 cap=4' is not understood"},
      {"select=sparq(r=3)x", "'select=sparq(r=3)x' is not understood"},
      {"select=sparq (r=3)", "'(r=3)' is no setting"},
      {"candidates=many",
       "policy: 'candidates=many' is not understood; candidates takes a number "
       "of tokens such as 256, a share of the context such as 1/16, or none"},
      {"candidates=0", "'candidates=0' is not understood"},
      {"candidates=1/0", "candidates takes a number"},
      {"candidates=2/3", "candidates takes a number"},
      {"candidates=1/", "candidates takes a number"},
      {"candidates=+3", "candidates takes a number"},
      {"cap=0.5", "'cap=0.5' is not understood; cap takes a number of tokens"},
      {"cap=-1", "cap takes a number of tokens"},
      {"prune=128",
       "policy: 'prune=128' is not understood; prune takes top_k(N), top_k(1/N), "
       "top_p(P) or none, N of 1 or more, P above 0 and up to 1"},
      {"prune=nothing", "prune takes top_k(N)"},
      {"prune=top_k", "prune takes top_k(N)"},
      {"prune=top_k()", "prune takes top_k(N)"},
      {"prune=top_k(0)", "prune takes top_k(N)"},
      {"prune=top_k(1/0)", "prune takes top_k(N)"},
      {"prune=top_k(0.5)", "prune takes top_k(N)"},
      {"prune=top_k(1,2)", "prune takes top_k(N)"},
      {"prune=top_p(x)", "prune takes top_k(N)"},
      {"prune=top_p(1/2)", "prune takes top_k(N)"},
      {"prune=top_p(1e-999)", "prune takes top_k(N)"},
      {"sinks=four",
       "'sinks=four' is not understood; sinks takes a number of tokens from 0 to "
       "2147483648"},
      {"recent=4.5", "recent takes a number of tokens from 0 to 2147483648"},
      {"recent=99999999999999999999", "recent takes a number of tokens from 0 to 2147483648"},
      {"compensate=mean",
       "'compensate=mean' is not understood; compensate takes none, "
       "mean_value or values(bits=B,components=C,pages=P), B from 1 to 4, C all or half, P above 0 "
       "and up to 1"},
      {"compensate=values(bits=0)", "compensate takes none"},
      {"compensate=values(bits=5)", "compensate takes none"},
      {"compensate=values(bits=2.5)", "compensate takes none"},
      {"compensate=values(bits=2,bits=3)", "compensate takes none"},
      {"compensate=values(components=0.5)", "compensate takes none"},
      {"compensate=values(components=half,components=half)", "compensate takes none"},
      {"compensate=values(half)", "compensate takes none"},
      {"compensate=values(share=1)", "compensate takes none"},
      {"compensate=values(2)", "compensate takes none"},
      {"dense=1,",
       "'dense=1,' is not understood; dense takes the layers' numbers in ascending "
       "order such as 2,7, or none"},
      {"dense=", "dense takes the layers' numbers"},
      {"dense=99999999999", "dense takes the layers' numbers"},
      {"anchors=a", "'anchors=a' is not understood; anchors takes the layers' numbers"},
      {"correct=always",
       "'correct=always' is not understood; correct takes a number of tokens "
       "from 1 to 2147483648, or never"},
      {"prefill=zipvl",
       "'prefill=zipvl' is not understood; prefill takes dense, pages(SHARE), zipvl(TAU), "
       "zipvl(TAU,demote) or zipvl(TAU,evict), SHARE and TAU above 0 and up to 1"},
      {"prefill=zipvl(0)", "prefill takes dense"},
      {"prefill=pages(0.0)", "prefill takes dense"},
      {"prefill=zipvl()", "prefill takes dense"},
      {"prefill=zipvl(0.5,keep)", "prefill takes dense"},
      {"prefill=zipvl(0.5,evict,evict)", "prefill takes dense"},
      {"prefill=dense(0.5)", "prefill takes dense"},
      {"values early=soon",
       "'early=soon' is not understood; early takes none, half (after the previous layer's "
       "attention) or layer (the previous layer's input)"},
      {"values early=", "early takes none"},
      {"values early=half early=layer", "early is given twice"},
      {"dense early=half", "select=dense has nothing to choose; it takes early=none"},
      {"streaming early=half", "select=streaming has nothing to choose"},
      {"zipvl early=layer", "select=dense has nothing to choose"},
      {"quantized early=layer", "prune=none fetches none; it takes early=none"},
      {"values early=half 2:prune=none", "in layer 2: early chooses rows"},
      {"select=exact prune=top_k(9) early=half",
       "select=exact reads keys that are not there before a layer's turn"},
      {"prefill=pages", "prefill takes dense"},
      {"prefill=pages()", "prefill takes dense"},
      {"prefill=pages(half)", "prefill takes dense"},
      {"prefill=pages(0.5,evict)", "prefill takes dense"},
      {"bits=three", "'bits=three' is not understood; bits takes 4, 3, 2 or 1"},
      {"bits=3.5", "'bits=3.5' is not understood; bits takes 4, 3, 2 or 1"},
      {"bits=", "bits takes 4, 3, 2 or 1"},
  };
  for (const Refusal& refusal : refusals) {
    EXPECT_THAT(refused_text(refusal.text), HasSubstr(refusal.message)) << refusal.text;
  }
}

TEST(PolicyText, RefusesWhatMakesNoSense) {
  const std::vector<Refusal> refusals = {
      {"select=sparq prune=top_k(8) bits=1",
       "policy: bits=1 is for rotated keys, whose channels select=sparq cannot read; it takes bits "
       "4, "
       "3 or 2"},
      {"bits=5", "policy: bits is 5; it has to be 4, 3, 2 or 1"},
      {"bits=0", "policy: bits is 0; it has to be 4, 3, 2 or 1"},
      {"bits=-3", "policy: bits is -3; it has to be 4, 3, 2 or 1"},
      {"sinks=-1", "policy: sinks is -1; it has to be from 0 to 2147483648"},
      {"recent=2147483649", "recent is 2147483649; it has to be from 0 to 2147483648"},
      {"correct=-4", "correct is -4; it has to be from 0 to 2147483648"},
      {"correct=4", "correct has nothing to correct with select=dense, which takes correct=never"},
      {"select=streaming", "sinks + recent has to be 1 or more"},
      {"streaming prune=top_k(4)",
       "prune needs estimates; it takes select=exact, int4, quest, sparq, "
       "double_sparsity, snapkv or h2o"},
      {"streaming prune=top_p(0.5)", "prune needs estimates"},
      {"dense prune=top_k(4)", "prune needs estimates"},
      {"streaming candidates=4",
       "select=exact, int4, quest, sparq, double_sparsity, snapkv or h2o"},
      {"dense candidates=1/4", "select=exact, int4, quest, sparq, double_sparsity, snapkv or h2o"},
      {"select=sparq", "a selector other than dense and streaming needs prune=top_k(N)"},
      {"select=exact",
       "needs prune=top_k(N), top_k(1/N) or top_p(P), N of 1 or more, P above 0 "
       "and up to 1"},
      {"select=int4 prune=top_p(0)", "prune=top_p has to be above 0 and up to 1"},
      {"select=int4 prune=top_p(-0.5)", "prune=top_p has to be above 0 and up to 1"},
      {"select=int4 prune=top_p(1.01)", "prune=top_p has to be above 0 and up to 1"},
      {"select=int4 prune=top_p(nan)", "prune=top_p has to be above 0 and up to 1"},
      {"select=int4 prune=top_p(inf)", "prune=top_p has to be above 0 and up to 1"},
      {"select=int4 prune=top_k(2147483649)", "N from 1 to 2147483648"},
      {"select=int4 prune=top_k(4) cap=8",
       "cap limits what top_p keeps; it takes prune=top_p(P), "
       "and cap=none with top_k"},
      {"cap=8", "cap limits what top_p keeps"},
      {"select=int4 prune=top_p(1) cap=2147483649", "cap has to be N tokens or a share 1/N"},
      {"select=int4 prune=top_k(64) candidates=63",
       "candidates is 63, fewer than top_k keeps; it "
       "has to be 64 or more"},
      {"select=int4 prune=top_k(1/4) candidates=1/5",
       "candidates is 1/5, less than top_k keeps; "
       "it has to be 1/4 or more"},
      {"quest compensate=mean_value",
       "compensate=mean_value needs the weight of every token; it "
       "takes select=exact, int4, sparq or double_sparsity"},
      {"quest compensate=values",
       "compensate=values needs the weight of every token; it takes select=exact, int4, sparq or "
       "double_sparsity"},
      {"select=int4 prune=top_k(9) compensate=values(pages=0)",
       "the pages of compensate=values have to be a share above 0 and up to 1"},
      {"select=int4 prune=top_k(9) compensate=values(pages=1.1)", "a share above 0 and up to 1"},
      {"select=int4 prune=top_k(9) compensate=values(pages=nan)", "a share above 0 and up to 1"},
      {"select=int4 prune=none",
       "prune=none keeps nothing that is estimated; it takes compensate=values"},
      {"select=int4 prune=none candidates=64 compensate=values",
       "prune=none takes candidates=none"},
      {"select=int4 prune=none cap=64 compensate=values", "cap limits what top_p keeps"},
      {"streaming prune=none", "takes compensate=values"},
      {"streaming compensate=mean_value", "it takes select=exact, int4, sparq or double_sparsity"},
      {"dense compensate=mean_value", "it takes select=exact, int4, sparq or double_sparsity"},
      {"dense=1,0", "dense has to list layers of 0 to 1023 in ascending order, each once"},
      {"dense=1,1", "dense has to list layers of 0 to 1023 in ascending order, each once"},
      {"dense=-1,1", "dense has to list layers of 0 to 1023"},
      {"dense=0,1024", "dense has to list layers of 0 to 1023"},
      {"quest anchors=3,2", "anchors has to list layers of 0 to 1023 in ascending order"},
      {"quest anchors=2,2", "anchors has to list layers of 0 to 1023 in ascending order"},
      {"quest anchors=1,2",
       "layer 1 has to be in dense or in anchors, not in both; anchors_attend=all is for both"},
      {"quest anchors_attend=all", "anchors_attend=all needs anchors that do"},
      {"quest anchors=2 anchors_attend=none",
       "'anchors_attend=none' is not understood; anchors_attend takes selected or all"},
      {"quest dense=none anchors=2",
       "policy: layer 0 follows no anchor: dense has to list every "
       "layer before the first anchor, 2"},
      {"quest dense=0,2 anchors=3", "layer 1 follows no anchor"},
      {"quest anchors=1023", "layer 2 follows no anchor"},
      {"dense anchors=0",
       "anchors share a selection; they take select=exact, int4, quest, sparq, double_sparsity, "
       "snapkv or h2o"},
      {"streaming anchors=0", "anchors share a selection"},
      {"prefill=zipvl(1.1)", "the share of prefill=zipvl has to be above 0 and up to 1"},
      {"prefill=zipvl(-0.1)", "the share of prefill=zipvl has to be above 0 and up to 1"},
      {"prefill=zipvl(nan)", "the share of prefill=zipvl has to be above 0 and up to 1"},
      {"prefill=pages(1.1)", "the share of prefill=pages has to be above 0 and up to 1"},
      {"prefill=pages(-0.1)", "the share of prefill=pages has to be above 0 and up to 1"},
      {"prefill=pages(nan)", "the share of prefill=pages has to be above 0 and up to 1"},
      {"prefill=zipvl(0,evict)", "prefill takes dense"},
      {"tidaldecode prefill=zipvl(0.9,evict)", "evict takes anchors=none"},
      {"sparq correct=9 prefill=zipvl(0.9,evict)", "evict takes correct=never"},
  };
  for (const Refusal& refusal : refusals) {
    EXPECT_THAT(refused_text(refusal.text), HasSubstr(refusal.message)) << refusal.text;
  }
}

TEST(PolicyText, ListsOfLayersAreShort) {
  std::string layers = "0";
  for (int layer = 1; layer < 1024; ++layer) layers += "," + std::to_string(layer);
  const Policy policy = parse_policy("dense=" + layers);
  EXPECT_EQ(policy_from_json(to_json(policy)), policy) << "a policy's JSON is never too long";
  // Every other of 150,000: searching one list for each layer of the other would take seconds.
  std::string dense = "dense=0";
  std::string anchors = " anchors=1";
  for (int layer = 2; layer < 150'000; layer += 2) {
    dense += "," + std::to_string(layer);
    anchors += "," + std::to_string(layer + 1);
  }
  EXPECT_THAT(refused_text("quest " + dense + anchors), HasSubstr("layers of 0 to 1023"));
}

TEST(PolicyText, AcceptsTheEndsOfEveryRange) {
  for (const char* text :
       {"sinks=2147483648 recent=2147483648", "select=int4 prune=top_p(1)",
        "select=int4 prune=top_k(2147483648)", "select=int4 prune=top_k(1/1)",
        "select=int4 prune=top_p(1e-300)", "prefill=zipvl(1,evict)", "prefill=pages(1)",
        "prefill=pages(1e-300)", "select=int4 prune=top_k(64) candidates=64",
        "select=int4 prune=top_k(64) candidates=1/999",
        "select=int4 prune=top_k(1/4) candidates=1/4", "select=streaming sinks=1",
        "select=streaming recent=1 correct=2147483648", "select=sparq(r=1) prune=top_k(1)",
        "select=exact prune=top_k(1) anchors=0 compensate=mean_value", "bits=2"}) {
    EXPECT_NO_THROW(parse_policy(text)) << text;
  }
}

TEST(PolicyText, BytesThatCannotBePrintedAreEscapedInMessages) {
  EXPECT_THAT(refused_text("a\n\x1b\xff"), HasSubstr("'a\\x0a\\x1b\\xff'"));
  EXPECT_THAT(refused_text(std::string_view("a\0b", 3)), HasSubstr("'a\\x00b'"));
  EXPECT_LT(refused_text(std::string(100000, 'x')).size(), 1000u);
}

// What text cannot say, callers can.
TEST(PolicyValidation, RefusesFieldsThatContradictEachOther) {
  Policy policy = parse_policy("select=int4 prune=top_k(8)");
  policy.p = 0.5;
  EXPECT_THAT(refused(policy), HasSubstr("with top_k it has to be 0"));

  policy = parse_policy("select=int4 prune=top_p(0.5)");
  policy.k = {8, 0};
  EXPECT_THAT(refused(policy), HasSubstr("k is of prune=top_k"));

  policy = parse_policy("select=int4 prune=top_k(8)");
  policy.select.parameters["r"] = 8;
  EXPECT_THAT(refused(policy), HasSubstr("select=int4 takes no parameter r"));
  for (const double channels : {-1.0, 0.0, 2.5, std::nan("")}) {
    policy.select = {"sparq", {{"r", channels}}};
    EXPECT_THAT(refused(policy), HasSubstr("has to be from 1 to head_dim"));
  }
  policy.select = {"magic", {}};
  EXPECT_THAT(refused(policy),
              HasSubstr("there is no select=magic; select takes dense, streaming"));

  for (const Budget budget : {Budget{8, 8}, Budget{-1, 0}, Budget{0, -1}}) {
    policy = parse_policy("select=int4 prune=top_k(8)");
    policy.k = budget;
    EXPECT_THAT(refused(policy), HasSubstr("the k of prune=top_k has to be N tokens or"));
    policy = parse_policy("select=int4 prune=top_k(8)");
    policy.candidates = budget;
    EXPECT_THAT(refused(policy), HasSubstr("candidates has to be N tokens or"));
  }
}

TEST(PolicyValidation, ChecksAgainstTheModel) {
  const auto refused_for_model = [](std::string_view text) {
    const Policy policy = parse_policy(text);
    return refusal([&] { validate(policy, kShape); });
  };
  EXPECT_THAT(refused_for_model("select=sparq(r=65) prune=top_k(8)"),
              HasSubstr("the r of sparq is 65; it has to be from 1 to 64"));
  EXPECT_THAT(refused_for_model("dense=0,8"),
              HasSubstr("dense lists layer 8; the model's layers are 0 to 7"));
  EXPECT_THAT(refused_for_model("select=int4 prune=top_k(8) anchors=0,9"),
              HasSubstr("anchors lists layer 9; the model's layers are 0 to 7"));
  KvShape narrow = kShape;
  narrow.head_dim = 40;
  try {
    validate(parse_policy("select=int4 bits=1 prune=top_k(8)"), narrow);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_THAT(error.what(), HasSubstr("a head_dim that is a multiple of 16; the model's is 40"));
  }
  Policy broken;
  broken.bits = 0;
  EXPECT_THAT(refusal([&] { validate(broken, kShape); }), HasSubstr("4, 3, 2 or 1"));

  EXPECT_NO_THROW(validate(parse_policy("select=sparq(r=64) prune=top_k(8) dense=7"), kShape));
  EXPECT_NO_THROW(validate(parse_policy("select=int4 prune=top_k(8) anchors=0,7"), kShape));
}

TEST(Presets, ReadAsTheirNamesSay) {
  std::vector<std::string_view> names;
  for (const Preset& preset : presets()) {
    names.push_back(preset.name);
    const Policy policy = parse_policy(preset.name);
    EXPECT_EQ(policy, parse_policy(preset.policy)) << preset.name;
    EXPECT_EQ(to_string(policy), preset.policy) << "is not written in the shortest way";
    EXPECT_NO_THROW(validate(policy, kShape)) << preset.name;
    EXPECT_FALSE(preset.description.empty() || preset.description.find('\n') != std::string::npos);
  }
  EXPECT_THAT(names,
              ::testing::ElementsAre("dense", "streaming", "quest", "sparq", "twilight",
                                     "tidaldecode", "double_sparsity", "snapkv", "h2o", "zipvl",
                                     "sluice", "values", "compact", "tiny", "quantized"));
}

}  // namespace
}  // namespace sluice
