#include "io/disk_mode.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/io/test_files.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::expect_error;
using ::testing::HasSubstr;
using ::testing::Not;

class DiskModeTest : public testing::OnDisk {};

constexpr std::size_t kFileBytes = 1 << 20;

TEST_F(DiskModeTest, SaysHowTheDiskIsUsed) {
  SpillFile file = SpillFile::create(parent_, kFileBytes);
  const DiskMode mode = choose_disk_mode(file, DiskAccess::automatic, {});
  EXPECT_NE(mode.access, DiskAccess::automatic);
  EXPECT_EQ(mode.direct, file.direct());
  EXPECT_THAT(mode.description, HasSubstr(parent_.string() + " (" + file.file_system() + "): "));
  EXPECT_THAT(mode.description, Not(HasSubstr("\n")));
}

TEST_F(DiskModeTest, TakesThePoolWhenAsked) {
  SpillFile file = SpillFile::create(parent_, kFileBytes);
  const DiskMode mode = choose_disk_mode(file, DiskAccess::pool, {});
  EXPECT_EQ(mode.access, DiskAccess::pool);
  EXPECT_THAT(mode.description, HasSubstr("pread pool"));
}

TEST_F(DiskModeTest, WorksWithAFileOfOneSector) {
  SpillFile file = SpillFile::create(parent_, kSectorBytes);
  EXPECT_NO_THROW(choose_disk_mode(file, DiskAccess::automatic, {}));
}

TEST_F(DiskModeTest, AFileThatCannotBeWrittenIsAnError) {
  SpillFile file = SpillFile::create(parent_, kFileBytes);
  ASSERT_EQ(::ftruncate(file.descriptor(), 0), 0);
  const std::string path = "/proc/self/fd/" + std::to_string(file.descriptor());
  const int read_only = ::open(path.c_str(), O_RDONLY);
  ASSERT_GE(read_only, 0);
  ASSERT_GE(::dup2(read_only, file.descriptor()), 0);
  ::close(read_only);
  expect_error(ErrorCode::io, "spilled rows cannot be written and read",
               [&] { choose_disk_mode(file, DiskAccess::automatic, {}); });
}

// Makes io_uring_setup() fail as seccomp profiles of containers do. For this process, for good.
bool forbid_io_uring(int error) {
  const std::array<sock_filter, 4> rules = {
      sock_filter{BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(seccomp_data, nr)},
      sock_filter{BPF_JMP | BPF_JEQ | BPF_K, 0, 1, __NR_io_uring_setup},
      sock_filter{BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)},
      sock_filter{BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW}};
  const sock_fprog program = {rules.size(), const_cast<sock_filter*>(rules.data())};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// 0: as expected, 1: not, 2: no filter can be set here.
int fall_back(const std::filesystem::path& directory, int error) {
  if (!forbid_io_uring(error)) return 2;
  SpillFile file = SpillFile::create(directory, kFileBytes);
  const std::string line = choose_disk_mode(file, DiskAccess::automatic, {}).description;
  const bool says_so =
      line.find("pread pool") != std::string::npos && line.find("io_uring") != std::string::npos;
  try {
    choose_disk_mode(file, DiskAccess::uring, {});
    return 1;
  } catch (const Error& refusal) {
    return says_so && refusal.code() == ErrorCode::unsupported ? 0 : 1;
  }
}

TEST_F(DiskModeTest, FallsBackWhereContainersForbidIoUring) {
  for (const int error : {EPERM, ENOSYS}) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) std::_Exit(fall_back(parent_, error));
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    if (WEXITSTATUS(status) == 2) GTEST_SKIP() << "no seccomp filter can be set here";
    EXPECT_EQ(WEXITSTATUS(status), 0) << error;
  }
}

}  // namespace
}  // namespace sluice
