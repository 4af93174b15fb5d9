#include "io/page_store.h"

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "io/file.h"
#include "io/pool_disk.h"
#include "io/sector_buffer.h"
#include "io/sector_sums.h"
#include "tests/io/test_files.h"
#include "tests/support/random.h"
#include "tests/support/silent_disk.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::expect_error;
using testing::Random;
using testing::TempDir;

constexpr std::uint64_t kRegions = 4;
constexpr std::uint64_t kRegionBytes = 96 * kSectorBytes;
constexpr std::size_t kSectors = kRegions * kRegionBytes / kSectorBytes;

void fill(std::span<std::byte> bytes, Random& random) {
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.integer(0, 255));
}

class PageStoreTest : public testing::OnDisk {
 protected:
  PageStoreConfig config(std::size_t directories = 1) const {
    PageStoreConfig config;
    config.directories.assign(directories, parent_);
    config.regions = kRegions;
    config.region_bytes = kRegionBytes;
    config.stripe_bytes = 4 * kSectorBytes;
    return config;
  }
  std::string mode() const { return PageStore(config()).descriptions().front(); }
};

// Every way of access that works here, over one file and over three.
class PageStoreModes : public PageStoreTest,
                       public ::testing::WithParamInterface<std::tuple<DiskAccess, std::size_t>> {
 protected:
  std::unique_ptr<PageStore> open() {
    PageStoreConfig settings = config(std::get<1>(GetParam()));
    settings.access = std::get<0>(GetParam());
    settings.arenas = {memory_.span()};
    try {
      return std::make_unique<PageStore>(settings);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsupported) throw;
      return nullptr;
    }
  }

  SectorBuffer memory_{kSectors * kSectorBytes};
};

TEST_P(PageStoreModes, GivesBackWhatWasWritten) {
  const std::unique_ptr<PageStore> store = open();
  if (!store) GTEST_SKIP() << "refused here";
  const std::uint64_t seed = testing::seed(11);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  SectorBuffer model(kSectors * kSectorBytes);
  fill(model.span(), random);
  std::vector<PageWrite> writes;
  for (std::uint64_t region = 0; region < kRegions; ++region) {
    for (std::uint64_t position = 0; position < kRegionBytes; position += 8 * kSectorBytes) {
      const std::uint64_t address = store->address(region, position);
      writes.push_back({address, model.span().subspan(address, 8 * kSectorBytes)});
    }
  }
  store->write(writes).wait();
  store->flush().wait();
  for (int round = 0; round < 50; ++round) {
    std::vector<PageRead> reads;
    std::size_t sector = 0;
    while (sector < kSectors) {
      const auto count = static_cast<std::size_t>(random.integer(1, 5));
      const std::size_t in_region = 96 - sector % 96;
      const std::size_t taken = std::min({count, in_region, kSectors - sector});
      if (random.integer(0, 3) == 0) {
        reads.push_back({sector * kSectorBytes, memory_.sectors(sector, taken)});
      }
      sector += taken;
    }
    std::shuffle(reads.begin(), reads.end(), random.engine());
    std::fill(memory_.span().begin(), memory_.span().end(), std::byte{0});
    store->read(reads, round % 2 == 0 ? DiskPriority::urgent : DiskPriority::background).wait();
    for (const PageRead& read : reads) {
      const auto expected = model.span().subspan(read.address, read.destination.size());
      ASSERT_TRUE(std::ranges::equal(read.destination, expected)) << read.address;
    }
  }
  // A request may be as large as its region, and larger than one operation.
  store->read(std::vector<PageRead>{{0, memory_.span().first(kRegionBytes)}}, DiskPriority::urgent)
      .wait();
  EXPECT_TRUE(
      std::ranges::equal(memory_.span().first(kRegionBytes), model.span().first(kRegionBytes)));
  EXPECT_EQ(store->counts().failures, 0u);
  EXPECT_EQ(store->descriptions().size(), std::get<1>(GetParam()));
}

TEST_P(PageStoreModes, ServesAThreadThatDecodesAndOneThatPrefetches) {
  const std::unique_ptr<PageStore> store = open();
  if (!store) GTEST_SKIP() << "refused here";
  std::atomic<int> wrong = 0;
  const auto work = [&](std::uint64_t region, DiskPriority priority) {
    Random random(region);
    SectorBuffer written(kRegionBytes);
    SectorBuffer read(kRegionBytes);
    for (int round = 0; round < 100; ++round) {
      const auto sector = static_cast<std::uint64_t>(random.integer(0, 95));
      const std::uint64_t address = store->address(region, sector * kSectorBytes);
      fill(written.sectors(sector, 1), random);
      store->write(std::vector<PageWrite>{{address, written.sectors(sector, 1)}}, priority).wait();
      const DiskTicket ticket =
          store->read(std::vector<PageRead>{{address, read.sectors(sector, 1)}}, priority);
      while (!ticket.done()) std::this_thread::yield();
      ticket.wait();
      if (!std::ranges::equal(read.sectors(sector, 1), written.sectors(sector, 1))) ++wrong;
    }
  };
  std::thread decode(work, 0, DiskPriority::urgent);
  std::thread prefetch(work, 1, DiskPriority::background);
  decode.join();
  prefetch.join();
  EXPECT_EQ(wrong, 0);
}

std::string name_of(const ::testing::TestParamInfo<PageStoreModes::ParamType>& info) {
  return std::string(std::get<0>(info.param) == DiskAccess::uring ? "uring" : "pool") + "_files_" +
         std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(All, PageStoreModes,
                         ::testing::Combine(::testing::Values(DiskAccess::uring, DiskAccess::pool),
                                            ::testing::Values(std::size_t{1}, std::size_t{3})),
                         name_of);

TEST_F(PageStoreTest, SectorsWithoutATenantAreCorrupt) {
  PageStore store(config());
  SectorBuffer memory(2 * kSectorBytes);
  const std::vector<PageRead> reads = {{0, memory.sectors(0, 1)},
                                       {kRegionBytes, memory.sectors(1, 1)}};
  EXPECT_EQ(store.read(reads, DiskPriority::urgent).failures().size(), 2u) << "never written";
  store
      .write(
          std::vector<PageWrite>{{0, memory.sectors(0, 1)}, {kRegionBytes, memory.sectors(1, 1)}})
      .wait();
  EXPECT_NO_THROW(store.read(reads, DiskPriority::urgent).wait());
  SectorBuffer large(kRegionBytes);
  EXPECT_EQ(
      store.read(std::vector<PageRead>{{0, large.span()}}, DiskPriority::urgent).failures().size(),
      1u)
      << "one for a request of several operations";
  store.forget(0);
  const std::vector<DiskFailure> failures = store.read(reads, DiskPriority::urgent).failures();
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0].request, 0u);
  EXPECT_EQ(failures[0].error.code(), ErrorCode::corrupt);
}

TEST_F(PageStoreTest, TwoInOneDirectoryAreApart) {
  PageStore one(config());
  PageStore other(config());
  SectorBuffer a(kSectorBytes);
  SectorBuffer b(kSectorBytes);
  Random random(1);
  fill(a.span(), random);
  fill(b.span(), random);
  one.write(std::vector<PageWrite>{{0, a.span()}}).wait();
  other.write(std::vector<PageWrite>{{0, b.span()}}).wait();
  SectorBuffer read(kSectorBytes);
  one.read(std::vector<PageRead>{{0, read.span()}}, DiskPriority::urgent).wait();
  EXPECT_TRUE(std::ranges::equal(read.span(), a.span()));
  other.read(std::vector<PageRead>{{0, read.span()}}, DiskPriority::urgent).wait();
  EXPECT_TRUE(std::ranges::equal(read.span(), b.span()));
}

// A store whose files' descriptors the test knows.
struct Opened {
  std::vector<int> descriptors;
  std::unique_ptr<PageStore> store;
};

Opened open_with_descriptor(PageStoreConfig config) {
  Opened opened;
  config.factory = [&](const SpillFile& file, const DiskLimits& limits,
                       auto) -> std::unique_ptr<Disk> {
    opened.descriptors.push_back(file.descriptor());
    return std::make_unique<PoolDisk>(file.descriptor(), limits.depth, 2);
  };
  opened.store = std::make_unique<PageStore>(config);
  return opened;
}

TEST_F(PageStoreTest, SeesBytesThatChangedOnDisk) {
  const Opened opened = open_with_descriptor(config());
  SectorBuffer memory(kRegionBytes);
  Random random(2);
  fill(memory.span(), random);
  opened.store->write(std::vector<PageWrite>{{kRegionBytes, memory.span()}}).wait();
  const std::uint64_t place = kRegionBytes + 5 * kSectorBytes + 77;
  const std::byte flipped = memory.span()[5 * kSectorBytes + 77] ^ std::byte{4};
  ASSERT_EQ(::pwrite(opened.descriptors.at(0), &flipped, 1, static_cast<off_t>(place)), 1);
  const DiskTicket ticket = opened.store->read(std::vector<PageRead>{{kRegionBytes, memory.span()}},
                                               DiskPriority::urgent);
  expect_error(ErrorCode::corrupt,
               parent_.string() + ": the sector at byte " +
                   std::to_string(kRegionBytes + 5 * kSectorBytes) + " of the spill file",
               [&] { ticket.wait(); });
}

class KeepingDisk : public testing::SilentDisk {
 public:
  KeepingDisk(std::size_t sectors, std::shared_ptr<const testing::Silence> silence,
              std::shared_ptr<SectorBuffer> memory)
      : SilentDisk(sectors, std::move(silence)), memory_(std::move(memory)) {}

 private:
  std::shared_ptr<SectorBuffer> memory_;
};

TEST_F(PageStoreTest, AFileThatIsCutOffUnderItIsAnError) {
  const Opened opened = open_with_descriptor(config());
  SectorBuffer memory(kRegionBytes);
  opened.store->write(std::vector<PageWrite>{{0, memory.span()}}).wait();
  ASSERT_EQ(::ftruncate(opened.descriptors.at(0), 10 * kSectorBytes + 5), 0);
  const std::vector<PageRead> reads = {{0, memory.sectors(0, 10)},
                                       {20 * kSectorBytes, memory.sectors(20, 1)}};
  const std::vector<DiskFailure> failures =
      opened.store->read(reads, DiskPriority::urgent).failures();
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0].request, 1u);
  EXPECT_EQ(failures[0].error.code(), ErrorCode::io);
}

class CountingDisk : public PoolDisk {
 public:
  CountingDisk(int descriptor, std::atomic<int>& operations)
      : PoolDisk(descriptor, 64, 2), operations_(operations) {}
  bool start(const DiskOperation& operation) override {
    ++operations_;
    return PoolDisk::start(operation);
  }

 private:
  std::atomic<int>& operations_;
};

TEST_F(PageStoreTest, MergesNeighboursInAnyOrder) {
  std::atomic<int> operations = 0;
  PageStoreConfig settings = config();
  settings.factory = [&](const SpillFile& file, auto, auto) -> std::unique_ptr<Disk> {
    return std::make_unique<CountingDisk>(file.descriptor(), operations);
  };
  PageStore store(settings);
  SectorBuffer memory(6 * kSectorBytes);
  std::vector<PageWrite> writes;
  for (const std::size_t sector : {3u, 0u, 5u, 1u, 4u, 2u}) {
    writes.push_back({sector * kSectorBytes, memory.sectors(sector, 1)});
  }
  store.write(writes).wait();
  EXPECT_EQ(operations, 1);
}

// Answers until it is told to break for good.
class BreakingDisk : public PoolDisk {
 public:
  BreakingDisk(int descriptor, const std::atomic<bool>& broken)
      : PoolDisk(descriptor, 64, 2), broken_(broken) {}
  std::size_t retire(std::span<DiskResult> results, bool wait) override {
    const std::size_t count = PoolDisk::retire(results, wait);
    if (broken_) throw Error(ErrorCode::io, "the ring broke");
    return count;
  }

 private:
  const std::atomic<bool>& broken_;
};

TEST_F(PageStoreTest, ADeviceThatBreaksFailsEveryRequestAndNeverHangs) {
  std::atomic<bool> broken = false;
  PageStoreConfig settings = config();
  settings.factory = [&](const SpillFile& file, auto, auto) -> std::unique_ptr<Disk> {
    return std::make_unique<BreakingDisk>(file.descriptor(), broken);
  };
  PageStore store(settings);
  SectorBuffer memory(kSectorBytes);
  store.write(std::vector<PageWrite>{{0, memory.span()}}).wait();
  broken = true;
  for (int i = 0; i < 3; ++i) {
    const DiskTicket ticket =
        store.read(std::vector<PageRead>{{0, memory.span()}}, DiskPriority::urgent);
    ASSERT_TRUE(ticket.wait_for(std::chrono::seconds(20)));
    expect_error(ErrorCode::io, "the ring broke", [&] { ticket.wait(); });
  }
}

// Pages of a file that was there before, in one batch with the store's own.
TEST_F(PageStoreTest, ReadsPagesOfAnotherFile) {
  constexpr std::uint64_t kFile = 77;
  constexpr std::size_t kPages = 12;
  constexpr std::size_t kFirst = 3;  // sectors before them
  const std::uint64_t seed = testing::seed(19);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  SectorBuffer own(kPages * kSectorBytes);
  SectorBuffer saved((kFirst + kPages) * kSectorBytes);
  fill(own.span(), random);
  fill(saved.span(), random);
  std::vector<std::uint64_t> sums;
  for (std::size_t i = 0; i < kPages; ++i) {
    sums.push_back(SavedSums::sum(kFile, i, saved.sectors(kFirst + i, 1).first<kSectorBytes>()));
  }
  TempDir temp;
  const std::filesystem::path path = temp.path() / "rows";
  const auto put = [&] {
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(saved.span().data()),
               static_cast<std::streamsize>(saved.span().size()));
  };
  put();
  PageStore store(config(2));
  const auto file =
      store.open(File::open(path), kFirst * kSectorBytes, std::make_shared<SavedSums>(kFile, sums));
  EXPECT_EQ(file->bytes(), kPages * kSectorBytes);
  std::vector<PageWrite> writes;
  for (std::size_t i = 0; i < kPages; ++i) writes.push_back({i * kSectorBytes, own.sectors(i, 1)});
  store.write(writes).wait();
  SectorBuffer memory(2 * kPages * kSectorBytes);
  std::vector<PageRead> reads;
  for (std::size_t i = 0; i < kPages; ++i) {
    reads.push_back({i * kSectorBytes, memory.sectors(2 * i, 1)});
    reads.push_back({i * kSectorBytes, memory.sectors(2 * i + 1, 1), file});
  }
  store.read(reads, DiskPriority::urgent).wait();
  for (std::size_t i = 0; i < kPages; ++i) {
    ASSERT_TRUE(std::ranges::equal(memory.sectors(2 * i, 1), own.sectors(i, 1)));
    ASSERT_TRUE(std::ranges::equal(memory.sectors(2 * i + 1, 1), saved.sectors(kFirst + i, 1)));
  }
  // A sector that another byte, or another sector, has taken the place of.
  saved.sectors(kFirst + 4, 1)[100] ^= std::byte{8};
  std::swap_ranges(saved.sectors(kFirst + 7, 1).begin(), saved.sectors(kFirst + 7, 1).end(),
                   saved.sectors(kFirst + 8, 1).begin());
  put();
  const std::vector<DiskFailure> failures = store.read(reads, DiskPriority::urgent).failures();
  std::vector<std::size_t> failed;
  for (const DiskFailure& failure : failures) {
    EXPECT_EQ(failure.error.code(), ErrorCode::corrupt);
    EXPECT_NE(std::string(failure.error.what()).find(path.string()), std::string::npos);
    failed.push_back(failure.request);
  }
  EXPECT_EQ(failed, (std::vector<std::size_t>{9, 15, 17}));
  // A file that was cut off.
  std::filesystem::resize_file(path, (kFirst + 2) * kSectorBytes);
  const PageRead beyond = {5 * kSectorBytes, memory.sectors(0, 1), file};
  expect_error(ErrorCode::io, path.string(), [&] {
    store.read({&beyond, 1}, DiskPriority::urgent).wait();
  });
}

// What was asked for ends with an error, as does all that comes later, and the store ends, too.
TEST_F(PageStoreTest, ASilentDiskIsGivenUpAndNeverHangs) {
  const auto silence = std::make_shared<testing::Silence>();
  const auto clock = std::make_shared<testing::TestClock>();
  const auto memory = std::make_shared<SectorBuffer>(kSectors * kSectorBytes);
  PageStoreConfig settings = config(2);
  settings.patience.clock = clock;
  settings.factory = [&](const SpillFile& file, const DiskLimits&, auto) {
    // The disk keeps the memory, because it may answer after the test.
    return std::unique_ptr<Disk>(
        std::make_unique<KeepingDisk>(file.size() / kSectorBytes, silence, memory));
  };
  auto store = std::make_unique<PageStore>(settings);
  std::vector<PageWrite> writes;
  std::vector<PageRead> reads;
  for (std::uint64_t sector = 0; sector < 8; sector += 2) {
    writes.push_back({sector * kSectorBytes, memory->sectors(sector, 2)});
    reads.push_back({sector * kSectorBytes, memory->sectors(32 + sector, 2)});
  }
  store->write(writes).wait();
  silence->is_silent = true;
  auto read = std::make_unique<DiskTicket>(store->read(reads, DiskPriority::urgent));
  auto dropped = std::make_unique<DiskTicket>(store->write(writes));
  EXPECT_FALSE(read->wait_for(std::chrono::milliseconds(20)));
  clock->passes = true;
  const std::vector<DiskFailure> failures = read->failures();
  ASSERT_EQ(failures.size(), reads.size());
  for (const DiskFailure& failure : failures) EXPECT_EQ(failure.error.code(), ErrorCode::io);
  EXPECT_TRUE(store->has_given_up());
  EXPECT_EQ(clock->waited, std::chrono::nanoseconds(settings.patience.most).count());
  silence->is_silent = false;  // too late
  expect_error(ErrorCode::io, "has not answered for 60 s",
               [&] { store->read(reads, DiskPriority::urgent).wait(); });
  expect_error(ErrorCode::io, "has not answered for 60 s", [&] { store->write(writes).wait(); });
  EXPECT_THROW(store->flush().wait(), Error);
  silence->is_silent = true;
  read.reset();
  dropped.reset();
  store.reset();
  silence->is_silent = false;
}

TEST_F(PageStoreTest, RefusesSizesThatMakeNoSense) {
  const auto refused = [&](const std::string& part, auto change) {
    PageStoreConfig settings = config();
    change(settings);
    expect_error(ErrorCode::usage, part, [&] { PageStore store(settings); });
    expect_error(ErrorCode::usage, part, [&] { PageStore::memory_bytes(settings); });
    expect_error(ErrorCode::usage, part, [&] { PageStore::bytes_per_directory(settings); });
  };
  refused("no directory", [](auto& settings) { settings.directories.clear(); });
  refused("more than 64", [](auto& s) { s.directories.assign(65, s.directories[0]); });
  refused("multiples of 4096", [](auto& settings) { settings.region_bytes += 512; });
  refused("multiples of 4096", [](auto& settings) { settings.region_bytes = 0; });
  refused("multiples of 4096", [](auto& settings) { settings.stripe_bytes = 64; });
  refused("no regions", [](auto& settings) { settings.regions = 0; });
  refused("2^60", [](auto& settings) { settings.regions = ~std::uint64_t{0}; });
  refused("in flight", [](auto& settings) { settings.limits.depth = 1; });
  refused("in flight", [](auto& settings) { settings.limits.depth = 5000; });
  refused("512.0 KiB have to be in flight", [](auto& s) { s.limits.bytes_in_flight = 4096; });
}

TEST_F(PageStoreTest, CountsItsBytesForAPlan) {
  PageStoreConfig settings = config(3);
  // 96 stripes of 16 KiB over three files.
  EXPECT_EQ(PageStore::bytes_per_directory(settings), 32u * 16384);
  settings.directories.resize(1);
  EXPECT_EQ(PageStore::bytes_per_directory(settings), kRegions * kRegionBytes);
  EXPECT_GE(PageStore::memory_bytes(settings), 8 * kSectors);
  settings.regions = 256;
  settings.region_bytes = 512 << 20;
  EXPECT_LE(PageStore::memory_bytes(settings), (256u << 20) + (1u << 20)) << "128 GiB on disk";
}

TEST_F(PageStoreTest, RefusesADirectoryThatIsTooSmallBeforeAnythingElse) {
  PageStoreConfig settings = config();
  settings.regions = std::uint64_t{1} << 28;
  settings.region_bytes = std::uint64_t{1} << 22;
  expect_error(ErrorCode::io, parent_.string() + ": needs 1024.0 TiB",
               [&] { PageStore store(settings); });
}

// Memory of this process that is pinned, in bytes: what io_uring has registered.
std::uint64_t pinned_bytes() {
  std::ifstream status("/proc/self/status");
  std::string name;
  while (status >> name) {
    std::uint64_t kilobytes = 0;
    if (name == "VmPin:" && status >> kilobytes) return kilobytes << 10;
  }
  return 0;
}

// The capability by which root locks as much memory as it likes.
void drop_capabilities() {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  const __user_cap_data_struct none[2] = {};
  if (::syscall(SYS_capset, &header, none) != 0) std::_Exit(5);
}

enum class Registers { yes, no, either };

// Writes and reads all of a store whose memory is to be registered. Ends the process: 0 if all
// bytes are right, and registered or not as they should be.
[[noreturn]] void use_store(PageStoreConfig settings, Registers registers) {
  SectorBuffer memory(kRegions * kRegionBytes);
  settings.arenas = {memory.span()};
  Random random(1);
  fill(memory.span(), random);
  const std::vector<std::byte> expected(memory.span().begin(), memory.span().end());
  PageStore store(settings);
  std::vector<PageWrite> writes;
  std::vector<PageRead> reads;
  for (std::uint64_t at = 0; at < kRegions * kRegionBytes; at += kRegionBytes) {
    writes.push_back({at, memory.span().subspan(at, kRegionBytes)});
    reads.push_back({at, memory.span().subspan(at, kRegionBytes)});
  }
  store.write(writes).wait();
  const bool has_pinned = pinned_bytes() >= memory.span().size();
  if (registers != Registers::either && has_pinned != (registers == Registers::yes)) {
    std::_Exit(2);
  }
  std::ranges::fill(memory.span(), std::byte{0});
  store.read(reads, DiskPriority::urgent).wait();
  std::_Exit(std::ranges::equal(memory.span(), expected) ? 0 : 3);
}

// Buffers that may not be registered are used as any other memory. Newer kernels count the ring,
// too: where it has no room, the store takes the next best way of access.
TEST_F(PageStoreTest, WorksWithLittleOrNoLockedMemory) {
  if (mode().find("io_uring") == std::string::npos) GTEST_SKIP() << "no io_uring here";
  constexpr rlim_t kForARing = 512 << 10;
  static_assert(kForARing < kRegions * kRegionBytes);
  struct Case {
    rlim_t limit;
    DiskAccess access;
    Registers registers;
  };
  for (const Case& c : {Case{RLIM_INFINITY, DiskAccess::uring, Registers::yes},
                        Case{kForARing, DiskAccess::uring, Registers::no},
                        Case{0, DiskAccess::automatic, Registers::either}}) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      if (c.limit != RLIM_INFINITY) {
        const rlimit most = {c.limit, c.limit};
        if (::setrlimit(RLIMIT_MEMLOCK, &most) != 0) std::_Exit(4);
        drop_capabilities();
      }
      PageStoreConfig settings = config();
      settings.access = c.access;
      use_store(settings, c.registers);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0) << "RLIMIT_MEMLOCK of " << c.limit;
  }
}

TEST_F(PageStoreTest, LeavesNoFileWhenKilled) {
  const TempDir dir(parent_);
  PageStoreConfig settings = config();
  settings.directories = {dir.path()};
  for (int round = 0; round < 10; ++round) {
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      PageStore store(settings);
      SectorBuffer memory(kRegionBytes);
      const char byte = 1;
      while (true) {
        std::vector<DiskTicket> tickets;
        for (std::uint64_t region = 0; region < kRegions; ++region) {
          tickets.push_back(
              store.write(std::vector<PageWrite>{{region * kRegionBytes, memory.span()}}));
        }
        if (::write(ready[1], &byte, 1) != 1) std::_Exit(1);
      }
    }
    char byte = 0;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
    ::close(ready[0]);
    ::close(ready[1]);
  }
}

}  // namespace
}  // namespace sluice
