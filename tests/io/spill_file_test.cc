#include "io/spill_file.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>

#include "tests/io/test_files.h"
#include "tests/support/small_disk.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::expect_error;
using testing::Mount;
using testing::TempDir;

class SpillFileOnDisk : public testing::OnDisk {};

constexpr std::uint64_t kMiB = 1 << 20;

TEST_F(SpillFileOnDisk, HasNoNameAndReservedSpaceForThisUserOnly) {
  const TempDir dir(parent_);
  const SpillFile file = SpillFile::create(dir.path(), 3 * kMiB);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  struct stat status {};
  ASSERT_EQ(::fstat(file.descriptor(), &status), 0);
  EXPECT_EQ(status.st_nlink, 0u);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
  EXPECT_EQ(status.st_size, static_cast<off_t>(3 * kMiB));
  EXPECT_GE(static_cast<std::uint64_t>(status.st_blocks) * 512, 3 * kMiB);
  EXPECT_EQ(file.size(), 3 * kMiB);
  EXPECT_FALSE(file.file_system().empty());
}

TEST_F(SpillFileOnDisk, MovesAndStaysOpen) {
  SpillFile a = SpillFile::create(parent_, 4096);
  SpillFile b = SpillFile::create(parent_, 8192);
  const int descriptor = b.descriptor();
  a = std::move(b);
  EXPECT_EQ(a.descriptor(), descriptor);
  EXPECT_EQ(a.size(), 8192u);
}

TEST(SpillFile, RefusesWhatIsNoDirectory) {
  const TempDir dir;
  expect_error(ErrorCode::not_found, "nothing: cannot be used for spilled rows: No such file",
               [&] { SpillFile::create(dir.path() / "nothing", kMiB); });
  dir.write("file", "");
  expect_error(ErrorCode::not_found, "file: is not a directory",
               [&] { SpillFile::create(dir.path() / "file", kMiB); });
  std::filesystem::create_symlink("loop", dir.path() / "loop");
  expect_error(ErrorCode::not_found, "loop: cannot be used",
               [&] { SpillFile::create(dir.path() / "loop", kMiB); });
}

TEST(SpillFile, RefusesFileSystemsInMemoryByName) {
  struct statfs status {};
  if (::statfs("/dev/shm", &status) != 0 || status.f_type != 0x01021994) {
    GTEST_SKIP() << "/dev/shm is not tmpfs here";
  }
  expect_error(ErrorCode::unsupported, "/dev/shm: is on tmpfs, which keeps files in memory",
               [] { SpillFile::create("/dev/shm", kMiB); });
}

TEST(SpillFile, RefusesAnOverlayOverMemory) {
  const TempDir memory("/dev/shm");
  for (const char* const name : {"lower", "upper", "work", "merged"}) {
    std::filesystem::create_directory(memory.path() / name);
  }
  const std::string root = memory.path().string();
  const std::string options =
      "lowerdir=" + root + "/lower,upperdir=" + root + "/upper,workdir=" + root + "/work";
  const std::filesystem::path merged = memory.path() / "merged";
  const Mount mount(merged, ::mount("overlay", merged.c_str(), "overlay", 0, options.c_str()) == 0);
  if (!mount.mounted()) GTEST_SKIP() << "no overlay can be mounted here: " << std::strerror(errno);
  expect_error(ErrorCode::unsupported, "is on overlay over tmpfs, which keeps files in memory",
               [&] { SpillFile::create(merged, kMiB); });
}

TEST(SpillFile, RefusesFileSystemsThatCannotHoldIt) {
  // Of the kernel's own: neither has unnamed files.
  for (const char* const directory : {"/proc", "/sys"}) {
    try {
      SpillFile::create(directory, kMiB);
      ADD_FAILURE() << directory << " was accepted";
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::unsupported || error.code() == ErrorCode::io);
      EXPECT_TRUE(std::string(error.what()).starts_with(directory)) << error.what();
    }
  }
}

TEST_F(SpillFileOnDisk, RefusesMoreThanThereIsRoomFor) {
  const std::uint64_t too_much = std::uint64_t{1} << 50;
  expect_error(ErrorCode::io, parent_.string() + ": needs 1024.0 TiB for spilled rows, and ",
               [&] { SpillFile::create(parent_, too_much); });
  expect_error(ErrorCode::io, "are free", [&] { SpillFile::create(parent_, too_much); });
  expect_error(ErrorCode::io, "are free", [&] { SpillFile::create(parent_, ~std::uint64_t{0}); });
}

TEST_F(SpillFileOnDisk, RefusesMoreThanTheLimitOfFileSizes) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = kMiB;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error(ErrorCode::io, "RLIMIT_FSIZE allows files of 1.00 MiB",
               [&] { SpillFile::create(parent_, 2 * kMiB); });
  EXPECT_NO_THROW(SpillFile::create(parent_, kMiB));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
}

TEST_F(SpillFileOnDisk, RefusesADirectoryThatIsReadOnly) {
  const TempDir dir(parent_);
  if (::geteuid() != 0) {
    std::filesystem::permissions(
        dir.path(), std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
    expect_error(ErrorCode::io, "Permission denied", [&] { SpillFile::create(dir.path(), kMiB); });
    return;
  }
  const char* const path = dir.path().c_str();
  const Mount mount(dir.path(), ::mount(path, path, nullptr, MS_BIND, nullptr) == 0 &&
                                    ::mount(nullptr, path, nullptr,
                                            MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) == 0);
  if (!mount.mounted()) GTEST_SKIP() << "root cannot mount here: " << std::strerror(errno);
  expect_error(ErrorCode::io, "Read-only file system",
               [&] { SpillFile::create(dir.path(), kMiB); });
}

TEST_F(SpillFileOnDisk, RefusesASmallDiskThatIsFull) {
  const testing::SmallDisk disk(parent_);
  if (!disk.mounted()) GTEST_SKIP() << "no loop device can be mounted here";
  const std::filesystem::path mounted = disk.path();
  expect_error(ErrorCode::io, "mounted: needs 64.0 MiB for spilled rows, and ",
               [&] { SpillFile::create(mounted, 64 * kMiB); });
  {
    const SpillFile fits = SpillFile::create(mounted, 16 * kMiB);
    expect_error(ErrorCode::io, "No space left on device",
                 [&] { SpillFile::create(mounted, 16 * kMiB); });
  }
  EXPECT_NO_THROW(SpillFile::create(mounted, 16 * kMiB));
}

}  // namespace
}  // namespace sluice
