#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "lib/bytes.h"
#include "sluice/errors.h"
#include "tests/support/plan.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

constexpr KvShape kSmall{12, 8, 2, 64, DType::bf16};
constexpr KvShape kLlama8B{32, 32, 8, 128, DType::bf16};

TEST(Planner, RowsArePaddedToCacheLines) {
  EXPECT_EQ(kLlama8B.row_bytes(), 512u);
  EXPECT_EQ((KvShape{1, 1, 1, 80, DType::bf16}.row_bytes()), 320u);
  EXPECT_EQ((KvShape{1, 1, 1, 40, DType::bf16}.row_bytes()), 192u);
  EXPECT_EQ((KvShape{1, 1, 1, 32, DType::f32}.row_bytes()), 256u);
}

TEST(Planner, WithoutACapRowsStayWhereTheyLie) {
  const KvPlan plan = testing::plan_of(kSmall, 1000, 512, std::nullopt, true);
  EXPECT_TRUE(plan.in_place);
  EXPECT_EQ(plan.device_bytes, 0u);
  EXPECT_GE(plan.host_bytes, kSmall.token_bytes() * 1000);
  EXPECT_EQ(plan.dense_bytes(), kSmall.token_bytes() * 1000);
}

TEST(Planner, WithoutACapADeviceWithItsOwnMemoryHoldsEverything) {
  const KvPlan plan = testing::plan_of(kSmall, 1000, 512, std::nullopt, false);
  EXPECT_FALSE(plan.in_place);
  EXPECT_EQ(plan.resident_tokens, 1000);
}

TEST(Planner, AMillionTokensOfAn8BModelFitHalfAGigabyteOfDevice) {
  const KvPlan plan = testing::plan_of(kLlama8B, 1 << 20, 512, std::uint64_t{512} << 20, false);
  EXPECT_LE(plan.device_bytes, std::uint64_t{512} << 20);
  EXPECT_TRUE(plan.tails);
  EXPECT_EQ(plan.chunk, 512);
  EXPECT_EQ(plan.dense_bytes(), std::uint64_t{128} << 30);
}

TEST(Planner, FourPagesPerKvHeadAreEnough) {
  for (const KvShape& shape : {kSmall, kLlama8B, KvShape{1, 1, 1, 64, DType::f32}}) {
    const std::uint64_t cap =
        4 * kPageTokens * shape.row_bytes() * static_cast<std::uint64_t>(shape.kv_heads);
    EXPECT_LE(testing::plan_of(shape, 100000, 512, cap, true).device_bytes, cap);
  }
}

TEST(Planner, ARefusalNamesACapThatWorks) {
  try {
    testing::plan_of(kSmall, 100000, 512, 1000, true);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("`device_memory`"));
    const std::string message = error.what(), before = "at least ";
    ASSERT_THAT(message, ::testing::HasSubstr(before));
    const std::string rest = message.substr(message.find(before) + before.size());
    const std::uint64_t least = parse_bytes(rest.substr(0, rest.find('B') + 1), "least");
    EXPECT_LE(testing::plan_of(kSmall, 100000, 512, least, true).device_bytes, least);
    EXPECT_THROW(testing::plan_of(kSmall, 100000, 512, least - 1, true), Error);
  }
}

TEST(Planner, RefusesImpossibleShapes) {
  const auto refused = [](KvShape shape, std::int64_t context, std::int64_t chunk) {
    try {
      testing::plan_of(shape, context, chunk, std::nullopt, true);
      return false;
    } catch (const Error& error) {
      return error.code() == ErrorCode::usage;
    }
  };
  EXPECT_TRUE(refused({0, 1, 1, 64}, 10, 1));
  EXPECT_TRUE(refused({1, 3, 2, 64}, 10, 1));
  EXPECT_TRUE(refused({1, 2, 0, 64}, 10, 1));
  EXPECT_TRUE(refused({1, 2, 2, 63}, 10, 1));
  EXPECT_TRUE(refused({1, 2, 2, 512}, 10, 1));
  EXPECT_TRUE(refused({1, 2, 2, 64}, 0, 1));
  EXPECT_TRUE(refused({1, 2, 2, 64}, std::int64_t{1} << 40, 1));
  EXPECT_TRUE(refused({1, 2, 2, 64}, 10, 0));
}

// What a backend cannot select among is refused before there is anything to lose.
TEST(Planner, RefusesWhatTheBackendDoesNotTake) {
  const auto plan = [](const char* text, int group, std::int64_t context) {
    const Policy policy = parse_policy(text);
    KvRequest request;
    request.shape = {4, 2 * group, 2, 64, DType::bf16};
    request.context = context;
    request.policies = {&policy, 1};
    request.on.logits.most_group = 64;
    request.on.logits.most_tokens = 100000;
    request.on.logits.most_tile_tokens = 50000;
    return plan_kv(request);
  };
  const auto refused = [&](const char* text, int group, std::int64_t context) {
    try {
      plan(text, group, context);
      return std::string();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
      return std::string(error.what());
    }
  };
  EXPECT_EQ(refused("dense", 65, 200000), "");
  for (const char* text : {"values", "sparq", "streaming", "dense prefill=zipvl(0.9)"}) {
    EXPECT_EQ(refused(text, 64, 50000), "") << text;
    EXPECT_THAT(refused(text, 65, 50000), ::testing::HasSubstr("up to 64 query heads per KV head"));
  }
  EXPECT_EQ(refused("sparq", 8, 100000), "");
  EXPECT_EQ(refused("streaming", 8, 200000), "");
  EXPECT_THAT(refused("sparq", 8, 100001), ::testing::HasSubstr("up to 100000 tokens"));
  EXPECT_THAT(refused("values", 8, 50001), ::testing::HasSubstr("up to 50000 tokens"));
  EXPECT_THAT(refused("sparq 3:compensate=values", 8, 50001),
              ::testing::HasSubstr("up to 50000 tokens"));
}

// A bit of every key channel makes 16 bytes per page and channel, in the layers that have it.
TEST(Planner, CountsTheBitsOfEveryLayersKeys) {
  const std::int64_t context = 100000;
  const auto index = [&](const char* text) {
    const Policy policy = parse_policy(text);
    return testing::plan_of(kSmall, context, 512, std::nullopt, false, {&policy, 1}).index_bytes;
  };
  const std::int64_t tiles = (context / kPageTokens + 1) / kTilePages;
  const auto bit = static_cast<std::uint64_t>(tiles * kTilePages * kSmall.kv_heads *
                                              kSmall.head_dim * kPageTokens / 8);
  const std::uint64_t four = index("values bits=4");
  EXPECT_EQ(four - index("values bits=3"), 12 * bit);
  EXPECT_EQ(four - index("values bits=2"), 24 * bit);
  EXPECT_EQ(four - index("values bits=3 1,2:bits=4 3:bits=2"), 11 * bit);
  // At head_dim 128: 52 bytes of keys and 36 of values per token, 36 and 18, 20 and 18.
  EXPECT_EQ(four - index("values"), 12 * bit);
  EXPECT_EQ(four - index("compact"), 12 * (2 * bit + 9 * bit / 8));
  EXPECT_EQ(four - index("tiny"), 12 * (3 * bit + 9 * bit / 8));
}

// All of a layer's if there is room, and as many as there is room for beside other rows.
TEST(Planner, LeavesRoomForImportantRows) {
  const Policy policy = parse_policy("zipvl");
  const auto plan = [&](std::optional<std::uint64_t> cap) {
    return testing::plan_of(kSmall, 100000, 512, cap, false, {&policy, 1});
  };
  EXPECT_EQ(testing::plan_of(kSmall, 100000, 512, {}, false).compact_rows, 0);
  EXPECT_EQ(plan(std::nullopt).compact_rows, 100000);
  const std::uint64_t all = plan(std::nullopt).device_bytes;
  EXPECT_EQ(plan(all).compact_rows, 100000);
  const KvPlan less = plan(all - 1000 * kSmall.row_bytes());
  EXPECT_EQ(less.compact_rows, 99500) << "1000 rows of two KV heads";
  EXPECT_EQ(less.resident_tokens, 100000);
  EXPECT_EQ(plan(all / 2).compact_rows, 100000) << "before more rows are resident";
  std::int64_t rows = 100000;
  for (std::uint64_t cap = all / 2; cap > all / 40; cap = cap * 9 / 10) {
    const KvPlan some = plan(cap);
    EXPECT_LE(some.device_bytes, cap);
    EXPECT_LT(some.compact_rows, rows + rows / 8) << "smaller streaming buffers leave some more";
    EXPECT_GE(some.compact_rows, 1024);
    rows = some.compact_rows;
  }
  EXPECT_LT(rows, 100000);
}

// Each of a dense layer's rows is one less to fetch in every step, a cached row in some.
TEST(Planner, DenseLayersKeepTheirRowsBeforeOthersDo) {
  const Policy policy = parse_policy("select=int4 prune=top_k(4096) dense=0,5 recent=64");
  const std::int64_t context = 100000;
  const auto plan = [&](std::uint64_t cap) {
    return testing::plan_of(kSmall, context, 512, cap, false, {&policy, 1});
  };
  const std::uint64_t all = plan(std::uint64_t{1} << 40).device_bytes;
  const std::uint64_t of_dense = kSmall.token_bytes() / 12 * 2 * context;
  std::int64_t tokens = context;
  for (std::uint64_t cap = all - 1; cap > std::uint64_t{80} << 20; cap = cap * 9 / 10) {
    const KvPlan some = plan(cap);
    EXPECT_EQ(some.dense_layers, (std::vector<int>{0, 5}));
    EXPECT_EQ(some.set_of(5), 1);
    EXPECT_EQ(some.set_of(4), 0);
    EXPECT_LE(some.device_bytes, cap);
    EXPECT_LE(some.dense_resident_tokens, tokens);
    if (some.dense_resident_tokens < context) {
      EXPECT_EQ(some.resident_tokens, 0) << "before dense layers have all of theirs";
      EXPECT_EQ(some.dense_resident_tokens % kPageTokens, 0);
      EXPECT_LT(cap - some.device_bytes, kSmall.token_bytes() / 12 * 2 * kPageTokens);
    } else {
      EXPECT_GE(DeviceRowBytes(some).resident, of_dense);
    }
    tokens = some.dense_resident_tokens;
  }
  EXPECT_LT(tokens, context);
  EXPECT_GT(tokens, 0);
  for (const char* text : {"dense", "select=int4 prune=top_k(64) anchors=0"}) {
    const Policy alike = parse_policy(text);
    EXPECT_TRUE(
        testing::plan_of(kSmall, context, 512, all / 2, false, {&alike, 1}).dense_layers.empty());
  }
}

TEST(Planner, NeverPlansPastTheCap) {
  const std::uint64_t seed = sluice::testing::seed(1);
  SCOPED_TRACE(sluice::testing::seed_message(seed));
  sluice::testing::Random random(seed);
  const char* const policies[] = {"dense",
                                  "values",
                                  "sparq",
                                  "prefill=pages(0.9)",
                                  "twilight",
                                  "zipvl",
                                  "select=int4 prune=top_k(64) dense=0"};
  int planned = 0;
  for (int i = 0; i < 2000; ++i) {
    const int heads = static_cast<int>(random.integer(1, 8));
    const KvShape shape{static_cast<int>(random.integer(1, 40)),
                        heads * static_cast<int>(random.integer(1, 8)), heads,
                        static_cast<int>(random.integer(16, 128)) * 2, DType::bf16};
    const Policy policy = parse_policy(policies[random.integer(0, std::size(policies) - 1)]);
    KvRequest request;
    request.shape = shape;
    request.context = random.integer(1, 200000);
    request.chunk = random.integer(1, 2048);
    request.sequences = random.integer(1, 3);
    request.on.attends_host_rows = true;
    request.device_cap = static_cast<std::uint64_t>(random.integer(0, std::int64_t{1} << 28));
    if (random.integer(0, 1) == 0) request.cache_memory = *request.device_cap / 3;
    try {
      validate(policy, shape);
    } catch (const Error&) {
      continue;  // of other layers
    }
    request.policies = {&policy, 1};
    try {
      const KvPlan plan = plan_kv(request);
      EXPECT_LE(plan.device_bytes, *request.device_cap);
      EXPECT_EQ(plan.device_bytes,
                plan.index_bytes + plan.work_bytes + plan.table_bytes + DeviceRowBytes(plan).sum());
      for (const std::int64_t tokens : {plan.resident_tokens, plan.dense_resident_tokens}) {
        EXPECT_LE(tokens, plan.host_rows());
        EXPECT_TRUE(tokens == plan.host_rows() || tokens % kPageTokens == 0);
        EXPECT_TRUE(tokens == plan.host_rows() || plan.stream_tokens > 0 || tokens == 0);
      }
      ++planned;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::memory);
    }
  }
  EXPECT_GT(planned, 500);
}

}  // namespace
}  // namespace sluice
