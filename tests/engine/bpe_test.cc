#include "engine/bpe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>

namespace sluice {
namespace {

using ::testing::ElementsAre;

std::array<TokenId, 256> identity() {
  std::array<TokenId, 256> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes.at(i) = static_cast<TokenId>(i);
  return bytes;
}

std::vector<TokenId> encode(const Bpe& bpe, std::string_view piece) {
  Bpe::Scratch scratch;
  std::vector<TokenId> ids;
  bpe.encode(piece, scratch, ids);
  return ids;
}

// The definition: while some neighbours merge, merge the leftmost pair of the lowest rank.
std::vector<TokenId> merge_by_definition(std::string_view piece,
                                         const std::vector<MergeRule>& rules) {
  std::vector<TokenId> ids;
  for (const char c : piece) ids.push_back(static_cast<unsigned char>(c));
  while (true) {
    std::size_t best_rank = rules.size();
    std::size_t best = 0;
    for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
      for (std::size_t rank = 0; rank < best_rank; ++rank) {
        if (rules[rank].left != ids[i] || rules[rank].right != ids[i + 1]) continue;
        best_rank = rank;
        best = i;
      }
    }
    if (best_rank == rules.size()) return ids;
    ids[best] = rules[best_rank].result;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

// Random merges of tokens made of few letters, each a new token.
std::vector<MergeRule> random_rules(std::mt19937_64& random, int count) {
  std::map<std::string, TokenId> ids = {{"a", 'a'}, {"b", 'b'}, {"c", 'c'}};
  std::vector<MergeRule> rules;
  while (static_cast<int>(rules.size()) < count) {
    const auto pick = [&] {
      return *std::next(ids.begin(), static_cast<std::ptrdiff_t>(random() % ids.size()));
    };
    const auto [left, left_id] = pick();
    const auto [right, right_id] = pick();
    const auto fresh = static_cast<TokenId>(256 + ids.size());
    const TokenId result = ids.try_emplace(left + right, fresh).first->second;
    const bool known = std::any_of(rules.begin(), rules.end(), [&](const MergeRule& rule) {
      return rule.left == left_id && rule.right == right_id;
    });
    if (!known) rules.push_back({left_id, right_id, result});
  }
  return rules;
}

TEST(MergeTable, FindsEveryRuleAndNothingElse) {
  std::vector<MergeRule> rules;
  for (TokenId i = 0; i < 1000; ++i) rules.push_back({i % 40, i / 40, 1000 + i});
  const MergeTable table(rules);
  for (TokenId i = 0; i < 1000; ++i) {
    EXPECT_EQ(table.find(i % 40, i / 40).rank, i);
    EXPECT_EQ(table.find(i % 40, i / 40).result, 1000 + i);
    EXPECT_EQ(table.find(i / 40 + 40, i % 40).rank, -1);
  }
  EXPECT_EQ(MergeTable({}).find(0, 0).rank, -1);
}

TEST(Bpe, MergesByRankThenFromTheLeft) {
  const std::vector<MergeRule> rules = {{'b', 'c', 300}, {'a', 'b', 301}, {'a', 'a', 302}};
  const Bpe bpe(identity(), rules);
  EXPECT_THAT(encode(bpe, ""), ElementsAre());
  EXPECT_THAT(encode(bpe, "abc"), ElementsAre('a', 300));
  EXPECT_THAT(encode(bpe, "abb"), ElementsAre(301, 'b'));
  EXPECT_THAT(encode(bpe, "aaa"), ElementsAre(302, 'a'));
  EXPECT_THAT(encode(bpe, "xyz"), ElementsAre('x', 'y', 'z'));
}

TEST(Bpe, AgreesWithTheDefinition) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::vector<MergeRule> rules = random_rules(random, 1 + static_cast<int>(random() % 30));
    const Bpe bpe(identity(), rules);
    std::string piece;
    for (std::size_t i = random() % 60; i > 0; --i) piece += static_cast<char>('a' + random() % 3);
    ASSERT_EQ(encode(bpe, piece), merge_by_definition(piece, rules)) << piece;
  }
}

TEST(Bpe, LongPiecesDoNotTakeQuadraticTime) {
  std::vector<MergeRule> rules = {{'a', 'a', 256}};
  for (TokenId id = 256; id < 276; ++id) rules.push_back({id, id, id + 1});
  const Bpe bpe(identity(), rules);
  const std::vector<TokenId> ids = encode(bpe, std::string((1 << 20) + 5, 'a'));
  EXPECT_THAT(ids, ElementsAre(275, 257, 'a'));
}

TEST(BpeDeathTest, RefusesAByteWithoutAToken) {
  std::array<TokenId, 256> bytes = identity();
  bytes.at(0xFF) = Bpe::kNone;
  const Bpe bpe(bytes, {});
  EXPECT_DEATH(encode(bpe, "\xFF"), "no token");
}

}  // namespace
}  // namespace sluice
