// select() on CUDA against what its definition says of the f16 logits in fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <vector>

#include "sluice/half.h"
#include "tests/kernels/select/fixture.h"
#include "tests/support/random.h"

namespace sluice::cuda {
namespace {

TEST_P(Select, KeepsWhatItsDefinitionSays) {
  const std::uint64_t seed = testing::seed(11);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  // What is short takes one block wherever it may.
  const std::int64_t factor = is_clustered() ? 5 : 1;
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const auto most = std::to_array<std::int64_t>({40, 400, 5000, 9000});
    const std::int64_t count = random.integer(1, most[static_cast<std::size_t>(round % 4)]);
    check_case(random_case(random, factor * count));
    if (HasFailure()) return;
  }
}

TEST_P(Select, LongRows) {
  const std::uint64_t seed = testing::seed(12);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 16; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    // The longest may not fit a block.
    const bool is_small = GetParam() == Path::block;
    const Case c =
        random_case(random, random.integer(is_small ? 10000 : 20000, is_small ? 30000 : 200000));
    check_case(c);
    if (HasFailure()) return;
  }
}

TEST_P(Select, AMillionLogits) {
  if (GetParam() == Path::block || GetParam() == Path::cluster) GTEST_SKIP() << "does not fit";
  Random random(testing::seed(13));
  for (const int kind : {2, 4, 5, 7, 9}) {
    SCOPED_TRACE("kind " + std::to_string(kind));
    Case c = case_of(1, 2, 1 << 20);
    c.prune = Pruner::top_p;
    c.p = 0.95f;
    for (int row = 0; row < 2; ++row) {
      const std::vector<float> logits = row_of(random, c.columns, kind);
      c.logits.insert(c.logits.end(), logits.begin(), logits.end());
    }
    check_case(c);
    c.cap.share.tokens = 256;
    check_case(c);
    c.prune = Pruner::top_k;
    c.k.share.tokens = 4096;
    check_case(c);
  }
}

// Where a cluster has a digest alone, it reads what may be kept, or all of it.
TEST_P(Select, FewOfMany) {
  if (GetParam() != Path::digested_cluster && GetParam() != Path::digested_chain) GTEST_SKIP();
  const std::uint64_t seed = testing::seed(22);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 40; ++round) {
    const std::int64_t most = round == 20 ? 1600000 : round % 4 == 3 ? 500000 : 90000;
    Case c = few_of_many(random, random.integer(round == 20 ? 1400000 : most / 4, most));
    SCOPED_TRACE("round " + std::to_string(round) + ", " + std::to_string(c.context) + " tokens, " +
                 std::to_string(c.shape.group()) + " query heads");
    check_case(c);
    c.prune = c.prune == Pruner::top_k ? Pruner::top_p : Pruner::top_k;
    check_case(c);
    if (HasFailure()) return;
  }
}

// So few that one block finds them: of rows of any kind, and where it must begin anew, as all weigh
// much the same, rise or fall, or nearly all nothing.
TEST_P(Select, AFewOfMany) {
  if (GetParam() != Path::digested_cluster && GetParam() != Path::digested_chain) GTEST_SKIP();
  const std::uint64_t seed = testing::seed(23);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto longest = std::to_array<std::int64_t>({300, 9000, 60000, 262000});
  for (int round = 0; round < 120; ++round) {
    // One block on a multiprocessor, or two.
    if (is_clustered()) limits_.multiprocessors = round % 8 < 4 ? 1 << 20 : 1;
    const std::int64_t most = longest[static_cast<std::size_t>(round % 4)];
    Case c = few_of_many(random, random.integer(1, most));
    const std::int64_t few = random.integer(1, 64);
    c.prune = Pruner::top_k;
    c.k = {{few, 0}, {}, 0};
    if (random.integer(0, 9) == 0) c.k = Quota::nothing();
    c.sinks = random.integer(0, 1) * random.integer(0, 40);
    c.recent = random.integer(0, 1) * random.integer(0, 24);
    c.capacity = 64 + random.integer(0, 9);
    const auto shape = static_cast<int>(random.integer(0, 5));
    for (std::int64_t i = 0; shape > 0 && i < std::ssize(c.logits); ++i) {
      float& x = c.logits[static_cast<std::size_t>(i)];
      if (!(x == x)) continue;
      const auto at = static_cast<float>(i % c.columns) / static_cast<float>(c.columns);
      const float slope = shape == 1 ? at : shape == 2 ? -at : shape == 3 ? 0.0f : 20.0f * at;
      // The last of them is beyond what weights can tell apart.
      x = f16_to_float(float_to_f16(shape == 5 ? -300.0f * slope : slope));
    }
    SCOPED_TRACE("round " + std::to_string(round) + ", " + std::to_string(c.context) + " tokens, " +
                 std::to_string(c.shape.group()) + " query heads, shape " + std::to_string(shape));
    check_case(c);
    if (HasFailure()) return;
  }
}

// Few entries stand out, on pages that every row finds and of which teams of threads bring some
// more than once; the others are hardly apart, or weigh nothing.
TEST_P(Select, FewHeavyOfMany) {
  if (GetParam() != Path::digested_cluster && GetParam() != Path::digested_chain) GTEST_SKIP();
  for (const int group : {1, 2, 3, 4, 5, 6, 7, 8}) {
    for (const std::int64_t heavy : {3, 40}) {
      for (const bool is_rest_nothing : {false, true}) {
        SCOPED_TRACE(std::to_string(group) + " query heads, " + std::to_string(heavy) + " heavy" +
                     (is_rest_nothing ? ", nothing else" : ""));
        Case c = case_of(1, group, 131072);
        c.k.share.tokens = 64;
        for (std::int64_t i = 0; i < group * c.columns; ++i) {
          const std::int64_t at = i % c.columns;
          const bool is_heavy = at % (9 * kPageTokens) == 77 && at / (9 * kPageTokens) < heavy;
          const float light = is_rest_nothing ? -std::numeric_limits<float>::infinity()
                                              : -1e-5f * static_cast<float>(at);
          c.logits.push_back(is_heavy ? 9.0f : f16_to_float(float_to_f16(light)));
        }
        check_case(c);
        if (HasFailure()) return;
      }
    }
  }
}

// All weigh much the same: far more reach what the digest tells of the heaviest than can be listed.
TEST_P(Select, FewOfManyAlike) {
  if (GetParam() != Path::digested_cluster && GetParam() != Path::digested_chain) GTEST_SKIP();
  const std::uint64_t seed = testing::seed(24);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (const int group : {1, 3, 8}) {
    for (const float deviation : {0.02f, 0.2f, 0.7f}) {
      const std::int64_t context = random.integer(270000, 1048576 / group + 270000);
      SCOPED_TRACE(std::to_string(group) + " query heads, deviation " + std::to_string(deviation) +
                   ", " + std::to_string(context) + " tokens");
      Case c = case_of(1, group, context);
      for (const float x : random.normal(group * c.columns, deviation)) {
        c.logits.push_back(f16_to_float(float_to_f16(x)));
      }
      for (const std::int64_t few : {1, 64, 256}) {
        c.prune = Pruner::top_k;
        c.k.share.tokens = few;
        check_case(c);
        c.prune = Pruner::top_p;
        c.p = 0.95f;
        c.cap.share.tokens = few;
        check_case(c);
        if (HasFailure()) return;
      }
    }
  }
}

// More neighbours are wanted than a block of a cluster lists, but no more than may be kept.
TEST_P(Select, ManyNeighboursOfMany) {
  if (GetParam() != Path::digested_cluster && GetParam() != Path::digested_chain) GTEST_SKIP();
  for (const std::int64_t heavy : {2040, 2056, 3000, 4090, 4200}) {
    SCOPED_TRACE(std::to_string(heavy) + " heavy neighbours");
    Case c = case_of(1, 1, 262144);
    c.k.share.tokens = c.cap.share.tokens = 4096;
    for (std::int64_t i = 0; i < c.columns; ++i) {
      c.logits.push_back(i >= 1000 && i < 1000 + heavy ? 8.0f : -10.0f);
    }
    check_case(c);
    c.prune = Pruner::top_p;
    c.p = 0.9f;
    check_case(c);
  }
}

TEST_P(Select, SettlesTiesOfSumsToTheOlder) {
  Case c = case_of(1, 4, 3072);
  c.k.share.tokens = 100;
  for (int i = 0; i < 4 * 3072; ++i) c.logits.push_back(i % 3072 % 7 == 0 ? 1.0f : 0.0f);
  const Answer a = run(c);
  ASSERT_EQ(a.heads[0].count, 100);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(a.positions[0][static_cast<std::size_t>(i)], 7 * i);
}

// More candidates weigh the same than are gathered, or just about as many as are kept.
TEST_P(Select, ManyThatWeighTheSame) {
  for (const int group : {1, 8}) {
    for (const std::int64_t heavy : {0, 90, 100, 110, 3000, 40000}) {
      SCOPED_TRACE(std::to_string(group) + " query heads, " + std::to_string(heavy) + " heavier");
      Case c = case_of(1, group, GetParam() == Path::block ? 6016 : 48000);
      c.sinks = 3;
      c.k.share.tokens = c.cap.share.tokens = 100;
      for (std::int64_t i = 0; i < group * c.columns; ++i) {
        c.logits.push_back(i % c.columns * 7919 % c.columns < heavy ? 2.5f : -1.0f);
      }
      check_case(c);
      c.prune = Pruner::top_p;
      for (const float p : {0.3f, 0.9f, 1.0f}) {
        c.p = p;
        check_case(c);
      }
    }
  }
}

// Single heavy entries stand out of what weighs more together.
TEST_P(Select, ManyLightBesideFewHeavy) {
  for (const int group : {1, 3, 6}) {
    SCOPED_TRACE(std::to_string(group) + " query heads");
    Case c = case_of(1, group, GetParam() == Path::block ? 6016 : 40064);
    c.prune = Pruner::top_p;
    for (std::int64_t i = 0; i < group * c.columns; ++i) {
      const std::int64_t at = i % c.columns + i / c.columns * 32;
      c.logits.push_back(at / 16 % 2 == 0 ? (at % 16 == 5 ? 0.0f : -12.0f) : -4.0f);
    }
    for (const float p : {0.7f, 0.9f, 0.95f}) {
      c.p = p;
      check_case(c);
    }
  }
}

TEST_P(Select, CapsAboutWhatIsWanted) {
  const std::uint64_t seed = testing::seed(17);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const std::int64_t most = round % 8 == 7 && GetParam() != Path::block ? 90000 : 9000;
    Case c = random_case(random, random.integer(most / 2, most));
    c.prune = Pruner::top_p;
    c.cap = {};
    const std::vector<HeadSelection> heads = run(c).heads;
    const std::int64_t wanted = heads[0].count;
    for (const std::int64_t cap : {wanted / 2, wanted - 1, wanted, wanted + 1}) {
      SCOPED_TRACE("cap " + std::to_string(cap));
      c.cap.share.tokens = std::max<std::int64_t>(cap, 1);
      check_case(c);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Select, KeepsWhatItMustBeyondItsLimit) {
  Random random(testing::seed(19));
  for (const Pruner prune : {Pruner::top_k, Pruner::top_p}) {
    Case c;
    c.shape = shape_of(2, 4);
    c.tokens = {{0, 7000}};  // of 54 whole pages
    c.context = c.columns = c.capacity = 7001;
    c.prune = prune;
    c.p = 0.9f;
    c.sinks = 20;
    c.recent = 301;
    c.logits = random.normal(8 * 7001, 3.0f);
    for (float& x : c.logits) x = f16_to_float(float_to_f16(x));
    for (const std::int64_t keep : {1, 231, 232, 233, 300}) {
      c.k.share.tokens = c.cap.share.tokens = keep;
      check_case(c);
      const Answer a = run(c);
      EXPECT_EQ(a.heads[0].count, std::max<std::int64_t>(keep, 232));
    }
  }
}

TEST_P(Select, ReportsWhatIsNoNumber) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float strange : {std::nanf(""), kInfinity}) {
    for (const Pruner prune : {Pruner::top_k, Pruner::top_p}) {
      Case c = case_of(3, 2, 8960);
      c.prune = prune;
      c.k.share.tokens = 10;
      c.logits.assign(6 * 8960, 0.5f);
      c.logits[3 * 8960 + 4321] = strange;
      std::fill_n(c.logits.begin() + 4 * 8960, 8960, -kInfinity);
      check_case(c);
      const Answer a = run(c);
      EXPECT_EQ(a.heads[0].bad, 0);
      EXPECT_EQ(a.heads[1].bad, 1);
      EXPECT_EQ(a.heads[2].bad, 1);
    }
  }
}

// Blocks have spans of several strips per warp, some of which keep all and some hardly anything.
TEST_P(Select, FewHereAndManyThere) {
  if (GetParam() == Path::block || GetParam() == Path::cluster) GTEST_SKIP() << "does not fit";
  const std::uint64_t seed = testing::seed(22);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  // So few that one strip per warp would not do.
  limits_.multiprocessors = 8;
  for (const int group : {1, 3, 4}) {
    SCOPED_TRACE(std::to_string(group) + " query heads");
    Case c;
    c.shape = shape_of(3, group);
    c.tokens = {{0, 150000}};
    c.context = 150001;
    c.columns = c.capacity = 150016;
    c.sinks = 5;
    c.recent = 1001;
    c.prune = Pruner::top_p;
    c.logits = random.normal(3 * group * c.columns, 3.0f);
    for (std::int64_t i = 0; i < 3 * group * c.columns; ++i) {
      float& x = c.logits[static_cast<std::size_t>(i)];
      const std::int64_t at = i % c.columns;
      x = f16_to_float(float_to_f16(at >= 40000 && at < 50000 ? x + 4.0f : x));
    }
    for (const float p : {0.5f, 0.95f, 0.999f}) {
      c.p = p;
      check_case(c);
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, Select, ::testing::ValuesIn(kPaths), name_of);

}  // namespace
}  // namespace sluice::cuda
