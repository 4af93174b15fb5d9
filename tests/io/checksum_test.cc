#include "io/checksum.h"

#include <gtest/gtest.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include "tests/support/random.h"

namespace sluice {
namespace {

std::vector<std::byte> some_bytes(std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(testing::seed(1)));
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST(Checksum, EqualsTheHashOfAllBytesAtOnce) {
  const std::vector<std::byte> bytes = some_bytes(100000);
  for (const std::uint64_t seed : {0ull, 1ull, 0x123456789abcdef0ull}) {
    Checksum sum(seed);
    sum.add(std::span(bytes).first(1));
    sum.add(std::span(bytes).subspan(1, 70001));
    sum.add(std::span(bytes).subspan(70002));
    EXPECT_EQ(sum.value(), XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed));
  }
}

// A checksum in memory that an earlier one with the same seed has left, partly overwritten since.
TEST(Checksum, DoesNotDependOnWhatItsMemoryHeld) {
  const std::vector<std::byte> bytes = some_bytes(4096);
  constexpr std::uint64_t kSeed = 12345;
  const std::uint64_t expected = XXH3_64bits_withSeed(bytes.data(), bytes.size(), kSeed);
  constexpr std::align_val_t kAlignment{alignof(XXH3_state_t)};
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(checksum_of(bytes, kSeed), expected);
    void* const same = ::operator new(sizeof(XXH3_state_t), kAlignment);
    std::memset(same, 0xa5, offsetof(XXH3_state_t, buffer));
    ::operator delete(same, kAlignment);
  }
}

}  // namespace
}  // namespace sluice
