#include "engine/batch/prefix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/support/random.h"

namespace sluice::batch {
namespace {

std::int64_t common(const std::vector<TokenId>& a, const std::vector<TokenId>& b,
                    std::uint64_t a_kind = 0, std::uint64_t b_kind = 0) {
  return common_prefix(a, PageHashes(a, a_kind), b, PageHashes(b, b_kind));
}

// Against a comparison token by token.
TEST(Prefix, EqualsAPlainComparison) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    testing::Random random(seed);
    std::vector<TokenId> a(static_cast<std::size_t>(random.integer(0, 600 - 1)));
    for (TokenId& id : a) id = static_cast<TokenId>(random.integer(0, 3 - 1));
    std::vector<TokenId> b = a;
    b.resize(static_cast<std::size_t>(random.integer(0, 600 - 1)), 1);
    const auto change = static_cast<std::size_t>(random.integer(0, 700 - 1));
    if (change < b.size()) b[change] += 1;
    const auto end = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first;
    EXPECT_EQ(common(a, b), end - a.begin()) << "seed " << seed;
  }
}

// Hashes of the whole list, as for a prompt whose last token is not looked for.
TEST(Prefix, EndsWithTheListWhateverTheHashesAreOf) {
  const std::vector<TokenId> tokens(256, 5);
  const PageHashes pages(tokens, 0);
  const auto all = std::span<const TokenId>(tokens);
  EXPECT_EQ(common_prefix(tokens, pages, all.first(255), pages), 255);
  EXPECT_EQ(common_prefix(all.first(100), pages, tokens, pages), 100);
}

TEST(Prefix, OfDifferentKindsIsEmpty) {
  const std::vector<TokenId> tokens(300, 5);
  EXPECT_EQ(common(tokens, tokens, 1, 1), 300);
  EXPECT_EQ(common(tokens, tokens, 1, 2), 0);
}

}  // namespace
}  // namespace sluice::batch
