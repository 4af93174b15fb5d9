// Settings that a policy's layers have of their own.
#include <gtest/gtest.h>

#include <string>

#include "sluice/policy.h"
#include "tests/support/refusal.h"

namespace sluice {
namespace {

using testing::refusal;

TEST(PolicyLayers, AreReadAndWrittenByTheirValues) {
  const Policy policy = parse_policy(
      "sluice 5:cap=none 0,3:cap=64 3:compensate=values(bits=3) 3:bits=2 4:prune=top_p(0.5) "
      "0:compensate=none");
  EXPECT_EQ(policy.cap.tokens, 256);
  ASSERT_EQ(policy.layers.size(), 4u);
  EXPECT_EQ(policy.layers.at(0).cap, (Budget{64, 0}));
  EXPECT_FALSE(policy.layers.at(0).bits);
  EXPECT_EQ(policy.layers.at(5).cap, Budget{});
  const Policy third = policy.at(3);
  EXPECT_TRUE(third.layers.empty());
  EXPECT_EQ(third.cap.tokens, 64);
  EXPECT_EQ(third.bits, 2);
  EXPECT_EQ(third.compensate, Compensation::values);
  EXPECT_EQ(third.values.bits, 3);
  EXPECT_EQ(third.p, 0.95);
  EXPECT_EQ(policy.at(4).p, 0.5);
  EXPECT_EQ(policy.at(4).cap.tokens, 256);
  EXPECT_EQ(policy.at(1), parse_policy("sluice"));
  const std::string line = to_string(policy);
  EXPECT_EQ(line, to_string(parse_policy("sluice")) +
                      " 4:prune=top_p(0.5) 0,3:cap=64 5:cap=none 0:compensate=none "
                      "3:compensate=values(bits=3) 3:bits=2");
  EXPECT_EQ(parse_policy(line), policy);
  EXPECT_EQ(policy_from_json(to_json(policy)), policy);
  EXPECT_EQ(to_json(parse_policy("select=int4 prune=top_k(8) 1,2:prune=top_k(4) 2:bits=2")),
            R"json({"select":"int4","prune":"top_k(8)","1,2:prune":"top_k(4)","2:bits":2})json");
}

TEST(PolicyLayers, StayWhenTheRestChanges) {
  const Policy base = parse_policy("sluice 1:cap=8");
  const Policy changed = change_policy(base, "cap=99 prune=top_p(0.8) 2:cap=4");
  EXPECT_EQ(changed.at(0).cap.tokens, 99);
  EXPECT_EQ(changed.at(1).cap.tokens, 8);
  EXPECT_EQ(changed.at(1).p, 0.8);
  EXPECT_EQ(changed.at(2).cap.tokens, 4);
  EXPECT_EQ(change_policy(changed, "1:cap=7").at(1).cap.tokens, 7);
}

TEST(PolicyLayers, CompensateAsTheyAreTold) {
  const Policy policy = parse_policy("values 1:compensate=mean_value 2:compensate=none dense=0");
  EXPECT_FALSE(policy.compensates(0, Compensation::values));
  EXPECT_TRUE(policy.compensates(1, Compensation::mean_value));
  EXPECT_FALSE(policy.compensates(1, Compensation::values));
  EXPECT_FALSE(policy.compensates(2, Compensation::values));
  EXPECT_TRUE(policy.compensates(3, Compensation::values));
}

TEST(PolicyLayers, WhatMakesNoSenseIsRefused) {
  const auto refused = [](const std::string& line, const std::string& part) {
    SCOPED_TRACE(line);
    const std::string message = refusal([&] { parse_policy(line); });
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  refused("sluice 0:sinks=4", "of their own layers may have prune, cap, compensate, early, bits");
  refused("sluice x:cap=4", "before the colon stand the layers' numbers");
  refused("sluice :cap=4", "before the colon stand the layers' numbers");
  refused("sluice 0,:cap=4", "before the colon stand the layers' numbers");
  refused("sluice 0:nonsense=4", "is no setting");
  refused("sluice 0:cap=4 0:cap=5", "0:cap is given twice, again as '0:cap=5'");
  refused("sluice 0,1:cap=4 1,2:cap=4", "1:cap is given twice");
  refused("sluice 1,1:cap=4", "1:cap is given twice");
  refused("sluice 0:cap=x", "'cap=x' is not understood");
  refused("sluice -1:cap=4", "layer -1 cannot have settings of its own; layers are 0 to 1023");
  refused("sluice 1024:cap=4", "layers are 0 to 1023");
  refused("sluice dense=0 0:cap=4", "layer 0 selects nothing");
  refused("sluice dense=0 anchors=1 2:cap=4", "layer 2 selects nothing");
  refused("dense 0:bits=2", "layer 0 selects nothing");
  refused("sluice 2:prune=top_k(8)", "in layer 2: cap limits what top_p keeps");
  refused("sluice 2:bits=5", "in layer 2: bits is 5; it has to be 4, 3, 2 or 1");
  refused("quest 2:compensate=values", "in layer 2: compensate=values needs the weight of every");
  refused("sluice 2:compensate=values(pages=2)", "in layer 2: the pages of compensate=values");
  std::string many = "sluice ";
  for (int layer = 0; layer < 257; ++layer) many += (layer > 0 ? "," : "") + std::to_string(layer);
  refused(many + ":cap=4", "257 layers have settings of their own; 256 may");
  const auto json = [](const std::string& text) {
    return refusal([&] { policy_from_json(text); });
  };
  const std::string base = R"json({"select":"int4","prune":"top_k(8)",)json";
  EXPECT_NE(json(base + R"("0,1:bits":2,"1,2:bits":2})").find("1:bits twice"), std::string::npos);
  EXPECT_NE(json(base + R"("1:bits":"2"})").find("it has to be an integer"), std::string::npos);
  const KvShape shape{.layers = 4, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
  EXPECT_NO_THROW(validate(parse_policy("sluice 3:cap=4"), shape));
  EXPECT_NE(refusal([&] {
              validate(parse_policy("sluice 4:cap=4"), shape);
            }).find("a setting of layers lists layer 4; the model's layers are 0 to 3"),
            std::string::npos);
}

TEST(PolicyLayers, AsManyAsMayDifferComeBackFromJson) {
  Policy policy = parse_policy("values");
  for (int layer = 0; layer < 256; ++layer) {
    LayerSettings& own = policy.layers[layer];
    own.prune = LayerSettings::Pruning{Pruner::top_k, {layer + 1, 0}, 0.0};
    own.cap = Budget{};
    own.bits = 2 + layer % 3;
    own.compensate = LayerSettings::Compensating{Compensation::values, {2, 1.0 / (layer + 1)}};
  }
  ASSERT_NO_THROW(validate(policy));
  EXPECT_EQ(policy_from_json(to_json(policy)), policy);
  EXPECT_EQ(parse_policy(to_string(policy)), policy);
}

}  // namespace
}  // namespace sluice
