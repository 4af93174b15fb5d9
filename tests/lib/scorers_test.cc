// The registry of scorers, and policies that name one that is not Sluice's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/errors.h"
#include "sluice/scorer.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

class Named : public Scorer {
 public:
  using Scorer::Scorer;
  void score(const RunScorer& /*call*/) const override {}
  std::uint64_t bytes_read(const ScorerUse& /*use*/, const ScanExtent& /*extent*/) const override {
    return 0;
  }
};

template <typename Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    const std::string message = error.what();
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  }
  ADD_FAILURE() << "accepted";
  return "";
}

std::shared_ptr<const Scorer> named(ScorerInfo info) {
  return std::make_shared<Named>(std::move(info));
}

ScorerInfo sketch() {
  return {"sketch",
          ScorerInfo::Kind::bounds,
          {{.name = "bits", .least = 1, .most = 64, .range = "1 to 64"},
           {.name = "decay", .least = 0, .most = 1, .whole = false, .range = "0 to 1"}}};
}

TEST(Scorers, AddedOnesAreNamedByPolicies) {
  Scorers scorers;
  scorers.add(named(sketch()));
  for (const char* text : {"select=sketch prune=top_k(8)", "select=sketch(bits=8) prune=top_k(8)",
                           "select=sketch(bits=64,decay=0.125) prune=top_k(8) dense=0 anchors=1"}) {
    const Policy policy = parse_policy(text, scorers);
    EXPECT_EQ(policy.select.name, "sketch");
    EXPECT_EQ(to_string(policy), text);
    EXPECT_EQ(parse_policy(to_string(policy), scorers), policy);
    EXPECT_EQ(policy_from_json(to_json(policy), scorers), policy);
    EXPECT_THROW(parse_policy(text), Error) << "known where it was not added";
    EXPECT_THROW(validate(policy), Error);
  }
  EXPECT_EQ(change_policy(parse_policy("quest"), "select=sketch", scorers).select.name, "sketch");
}

TEST(Scorers, RefusalsSayWhatThereIs) {
  Scorers scorers;
  scorers.add(named(sketch()));
  const auto refused = [&](const char* text) {
    return refusal([&] { parse_policy(text, scorers); });
  };
  const std::string accepted =
      "snapkv(kernel=1..1023,rows=1..1048576,window=1..1024), h2o, h2o(rows=256..1048576), sketch "
      "or sketch(bits=1..64,"
      "decay=0..1)";
  for (const char* text :
       {"select=magic", "select=sketch(bits=0)", "select=sketch(bits=65)",
        "select=sketch(bits=1.5)", "select=sketch(decay=nan)", "select=sketch(decay=-0.1)",
        "select=sketch(width=1)", "select=sketch(bits=1,bits=2)", "select=sketch()"}) {
    EXPECT_THAT(refused(text), HasSubstr(accepted)) << text;
  }
  EXPECT_THAT(refused("select=sketch prune=top_k(8) compensate=mean_value"),
              HasSubstr("it takes select=exact, int4, sparq or double_sparsity"))
      << "bounds are no weights";
  EXPECT_THAT(refused("dense prune=top_k(4)"),
              HasSubstr("exact, int4, quest, sparq, double_sparsity, snapkv, h2o or sketch"));
}

TEST(Scorers, OfDifferentEnginesShareSluicesOwn) {
  const Scorers scorers;
  for (const char* name : {"dense", "streaming", "exact", "int4", "quest", "sparq",
                           "double_sparsity", "snapkv", "h2o"}) {
    EXPECT_TRUE(own_scorers().has(*scorers.find(name))) << name;
  }
}

TEST(Scorers, CopiesShareWhatThereIsAndNotWhatIsAdded) {
  Scorers one;
  Scorers two = one;
  one.add(named(sketch()));
  EXPECT_NE(one.find("sketch"), nullptr);
  EXPECT_EQ(two.find("sketch"), nullptr);
  EXPECT_EQ(own_scorers().find("sketch"), nullptr);
  const Scorers three = one;
  EXPECT_EQ(three.find("sketch"), one.find("sketch"));
}

TEST(Scorers, RefusesNamesThatCannotStandInAPolicy) {
  Scorers scorers;
  const auto refused = [&](ScorerInfo info) {
    return refusal([&] { scorers.add(named(std::move(info))); });
  };
  for (const char* name : {"", "Mine", "a b", "a=b", "a(b", "a,b", "\n"}) {
    EXPECT_THAT(refused({name}), HasSubstr("lower-case letters")) << name;
  }
  EXPECT_THAT(refused({"int4"}), HasSubstr("there is a 'int4' already"));
  EXPECT_THAT(refused({"mine", ScorerInfo::Kind::dense}), HasSubstr("cannot be dense"));
  EXPECT_THAT(refused({"mine", ScorerInfo::Kind::logits, {{.name = "", .range = "1 to 2"}}}),
              HasSubstr("needs a name"));
  EXPECT_THAT(refused({"mine", ScorerInfo::Kind::logits, {{.name = "n"}}}), HasSubstr("range"));
  EXPECT_THAT(refusal([&] { scorers.add(nullptr); }), HasSubstr("there is none"));
}

TEST(Scorers, NumbersAreWrittenAsTheyAreRead) {
  EXPECT_EQ(to_string(Method{"a", {}}), "a");
  EXPECT_EQ(to_string(Method{"a", {{"r", 100000}, {"p", 0.1}}}), "a(p=0.1,r=100000)");
}

}  // namespace
}  // namespace sluice
