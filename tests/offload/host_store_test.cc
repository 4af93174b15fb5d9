#include "offload/tiers/host_store.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "cpu/reference/backend.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr KvShape kShape{2, 4, 2, 64, DType::bf16};  // rows of 256 B in 4 regions

TEST(HostStore, RowsKeepTheirPlaceAndContentWhileItGrows) {
  cpu::ReferenceBackend backend;
  HostStore store(backend, kShape, 100000);
  store.grow(1);
  std::byte* const first = store.row(1, 1, 0);
  std::memset(first, 7, kShape.row_bytes());
  for (const std::int64_t tokens : {100, 1000, 20000, 99999, 100000}) {
    store.grow(tokens);
    EXPECT_GE(store.committed_rows(), tokens);
    EXPECT_EQ(store.row(1, 1, 0), first);
    EXPECT_EQ(first[255], std::byte{7});
    std::memset(store.row(0, 0, tokens - 1), 1, kShape.row_bytes());
  }
  EXPECT_EQ(store.row(0, 0, 1) - store.row(0, 0, 0), 256);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % kRowAlignment, 0u);
}

TEST(HostStore, ChargesWhatItCommitsAndReturnsIt) {
  cpu::ReferenceBackend backend;
  {
    HostStore store(backend, kShape, 1000);
    EXPECT_EQ(backend.account(Tier::host).used(), 0u) << "reserving takes no memory";
    store.grow(1000);
    EXPECT_GE(backend.account(Tier::host).used(), kShape.token_bytes() * 1000);
    EXPECT_LE(backend.account(Tier::host).used(), kShape.token_bytes() * 1000 + 4 * 4096);
  }
  EXPECT_EQ(backend.account(Tier::host).used(), 0u);
}

TEST(HostStore, StopsAtTheHostCapAndKeepsWhatItHas) {
  cpu::ReferenceBackend backend(MemoryAccount::kNoCap, 4 * 256 * 1024);
  HostStore store(backend, kShape, 100000);
  store.grow(512);
  std::memset(store.row(1, 1, 511), 9, kShape.row_bytes());
  try {
    store.grow(5000);
    FAIL() << "grew past the cap";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory);
  }
  EXPECT_EQ(store.row(1, 1, 511)[0], std::byte{9});
  EXPECT_LE(backend.account(Tier::host).peak(), 4u * 256 * 1024);
}

TEST(HostStore, ChargesForAllLayersAndCommitsThemOneByOne) {
  cpu::ReferenceBackend backend(MemoryAccount::kNoCap, std::uint64_t{64} << 20);
  HostStore store(backend, kShape, 300000);
  store.grow(100);
  std::memset(store.row(1, 0, 99), 5, kShape.row_bytes());
  store.charge(20000);
  const std::uint64_t charged = backend.account(Tier::host).used();
  EXPECT_GE(charged, kShape.token_bytes() * 20000);
  EXPECT_LT(store.committed_rows(), 20000);
  EXPECT_THROW(store.charge(100000), Error) << "the cap";
  EXPECT_EQ(backend.account(Tier::host).used(), charged);
  store.commit(0, 20000);
  EXPECT_EQ(store.row(0, 1, 19999)[0], std::byte{0});
  EXPECT_LT(store.committed_rows(), 20000);
  store.grow(300);  // no more than that
  EXPECT_EQ(store.row(1, 1, 299)[0], std::byte{0});
  EXPECT_LT(store.committed_rows(), 2000);
  EXPECT_EQ(backend.account(Tier::host).used(), charged);
  store.commit(1, 20000);
  EXPECT_EQ(store.row(1, 1, 19999)[0], std::byte{0});
  EXPECT_EQ(store.row(1, 0, 99)[0], std::byte{5});
  EXPECT_EQ(backend.account(Tier::host).used(), charged);
}

TEST(HostStore, GivesBackWhatNoLayerHas) {
  cpu::ReferenceBackend backend;
  HostStore store(backend, kShape, 300000);
  store.grow(100);
  const std::uint64_t used = backend.account(Tier::host).used();
  store.charge(200000);
  store.release_uncommitted();
  EXPECT_EQ(backend.account(Tier::host).used(), used);
  store.charge(200000);
  store.commit(1, 200000);
  store.release_uncommitted();  // layer 1 has it
  EXPECT_GE(backend.account(Tier::host).used(), kShape.token_bytes() * 200000);
  store.commit(0, 200000);
  EXPECT_EQ(store.row(0, 1, 199999)[0], std::byte{0});
}

// Pins a limited number of pieces, as a system with a limit on locked memory does.
class PinningBackend : public cpu::ReferenceBackend {
 public:
  void register_host(std::byte* data, std::size_t /*bytes*/) override {
    if (pinned.size() == limit) throw Error(ErrorCode::memory, "no more can be pinned");
    pinned.insert(data);
  }
  void unregister_host(std::byte* data) noexcept override { pinned.erase(data); }

  std::size_t limit = 1000;
  std::set<std::byte*> pinned;
};

TEST(HostStore, WhatCannotBePinnedIsGivenBack) {
  PinningBackend backend;
  {
    HostStore store(backend, kShape, 100000);
    store.grow(512);
    std::memset(store.row(1, 1, 511), 9, kShape.row_bytes());
    const std::uint64_t used = backend.account(Tier::host).used();
    const std::int64_t committed = store.committed_rows();
    const std::set<std::byte*> pinned = backend.pinned;
    backend.limit = pinned.size() + 2;
    EXPECT_THROW(store.grow(50000), Error);
    EXPECT_EQ(backend.account(Tier::host).used(), used);
    EXPECT_EQ(store.committed_rows(), committed);
    EXPECT_EQ(backend.pinned, pinned);
    EXPECT_EQ(store.row(1, 1, 511)[0], std::byte{9});
    backend.limit = 1000;
    store.grow(50000);
    EXPECT_EQ(store.row(1, 1, 49999)[0], std::byte{0});
  }
  EXPECT_TRUE(backend.pinned.empty());
}

TEST(HostStore, GrowsByMuchAtOnce) {
  cpu::ReferenceBackend backend;
  HostStore store(backend, kShape, 300000);
  store.grow(262144);  // 256 MiB: several threads
  for (int head = 0; head < 2; ++head) {
    for (std::int64_t row = 0; row < 262144; row += 8191) {
      ASSERT_EQ(store.row(1, head, row)[0], std::byte{0});
    }
  }
}

TEST(HostStore, ALayerThatCannotBePinnedIsGivenBackAlone) {
  PinningBackend backend;
  {
    HostStore store(backend, kShape, 100000);
    store.charge(50000);
    const std::uint64_t charged = backend.account(Tier::host).used();
    store.commit(0, 50000);
    backend.limit = backend.pinned.size() + 1;
    EXPECT_THROW(store.commit(1, 50000), Error);
    EXPECT_EQ(backend.pinned.size(), 2u);
    EXPECT_EQ(backend.account(Tier::host).used(), charged);
    backend.limit = 1000;
    store.commit(1, 50000);
    store.commit(1, 50000);
    EXPECT_EQ(backend.pinned.size(), 4u);
    EXPECT_EQ(store.row(1, 1, 49999)[0], std::byte{0});
  }
  EXPECT_TRUE(backend.pinned.empty());
  EXPECT_EQ(backend.account(Tier::host).used(), 0u);
}

TEST(HostStoreDeathTest, RowsBeyondTheCommittedPartAreABug) {
  cpu::ReferenceBackend backend;
  HostStore store(backend, kShape, 100000);
  store.grow(10);
  EXPECT_DEATH(store.row(0, 0, 50000), "committed");
  store.commit(1, 60000);
  EXPECT_DEATH(store.row(0, 0, 50000), "committed");
}

}  // namespace
}  // namespace sluice
