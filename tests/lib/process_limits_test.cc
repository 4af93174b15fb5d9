// Limits of made-up machines: a folder with proc and sys as the kernel would write them.
#include "lib/process_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/random.h"
#include "tests/support/temp_dir.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr const char* kUnifiedMount =
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

std::string bytes(std::uint64_t mebibytes) { return std::to_string(mebibytes * kMiB) + "\n"; }

// 8 processors, 1000 MiB of memory free, no limits.
class Machine : public ::testing::Test {
 protected:
  Machine() {
    write("proc/self/status",
          "Name:\tsluice\nVmSize:\t  409600 kB\nVmRSS:\t   51200 kB\nVmData:\t  102400 kB\n"
          "Cpus_allowed:\tff\nCpus_allowed_list:\t0-5,8-9\n");
    write("proc/self/limits", limits("unlimited", "unlimited"));
    write("proc/meminfo",
          "MemTotal:        2048000 kB\nMemFree:  4 kB\nMemAvailable:    1024000 kB\n");
  }

  static std::string limits(const std::string& data, const std::string& address_space) {
    return "Limit                     Soft Limit           Hard Limit           Units     \n"
           "Max data size             " +
           data +
           "            unlimited            bytes     \n"
           "Max processes             94000                94000                processes \n"
           "Max address space         " +
           address_space + "            unlimited            bytes     \n";
  }

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_.path() / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  // In group `own` of cgroup v2.
  void unified(const std::string& own) {
    write("proc/self/cgroup", "0::" + own + "\n");
    write("proc/self/mountinfo",
          "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + std::string(kUnifiedMount));
  }

  // In group `own` of the hierarchies of cgroup v1, of which `mounted` is mounted.
  void separate(const std::string& own, const std::string& mounted) {
    write("proc/self/cgroup",
          "9:memory:" + own + "\n4:cpu,cpuacct:" + own + "\n1:name=systemd:/x\n");
    write("proc/self/mountinfo",
          "31 23 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
          "35 31 0:31 " +
              mounted +
              " /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
              "36 31 0:32 " +
              mounted + " /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n");
  }

  ProcessLimits read() const { return process_limits(root_.path().string()); }
  MemoryLimit tightest() const { return read().memory.front(); }
  std::uint64_t left() const { return tightest().left / kMiB; }
  std::string source() const { return tightest().source; }
  int threads() const { return read().threads(); }

  testing::TempDir root_;
};

TEST_F(Machine, HasItsMemoryAndProcessorsWithoutLimits) {
  EXPECT_EQ(left(), 1000u);
  EXPECT_EQ(source(), "the free memory of this machine");
  EXPECT_EQ(read().machine_bytes, 2000 * kMiB);
  EXPECT_EQ(threads(), 8);
  EXPECT_EQ(read().processors.front().source, "the affinity mask");
}

TEST_F(Machine, ThatShowsNothingHasNoLimitsAndAThread) {
  std::filesystem::remove_all(root_.path() / "proc");
  EXPECT_TRUE(read().memory.empty());
  EXPECT_EQ(read().machine_bytes, 0u);
  EXPECT_GE(threads(), 1);
}

TEST_F(Machine, IsBoundByTheRootOfACgroupNamespace) {
  unified("/");
  write("sys/fs/cgroup/memory.max", bytes(128));
  write("sys/fs/cgroup/memory.current", bytes(32));
  write("sys/fs/cgroup/cpu.max", "100000 100000\n");
  EXPECT_EQ(left(), 96u);
  EXPECT_EQ(tightest().bytes, 128 * kMiB);
  EXPECT_TRUE(tightest().is_resident);
  EXPECT_EQ(source(), "the container's memory limit (memory.max of /)");
  EXPECT_EQ(threads(), 1);
  EXPECT_EQ(read().processors.front().source, "the container's quota (cpu.max of /)");
}

TEST_F(Machine, IsBoundByItsOwnGroup) {
  unified("/a/b");
  write("sys/fs/cgroup/a/memory.max", "max\n");
  write("sys/fs/cgroup/a/b/memory.max", bytes(200));
  write("sys/fs/cgroup/a/b/memory.current", bytes(50));
  write("sys/fs/cgroup/a/cpu.max", "max 100000\n");
  write("sys/fs/cgroup/a/b/cpu.max", "300000 100000\n");
  write("sys/fs/cgroup/other/memory.max", bytes(1));
  EXPECT_EQ(left(), 150u);
  EXPECT_EQ(source(), "the container's memory limit (memory.max of /a/b)");
  EXPECT_EQ(threads(), 3);
}

// What its siblings use is gone for it, too.
TEST_F(Machine, IsBoundByAGroupAboveItsOwn) {
  unified("/a/b/c");
  write("sys/fs/cgroup/a/memory.max", bytes(500));
  write("sys/fs/cgroup/a/memory.current", bytes(460));
  write("sys/fs/cgroup/a/b/c/memory.max", bytes(300));
  write("sys/fs/cgroup/a/b/c/memory.current", bytes(10));
  write("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  write("sys/fs/cgroup/a/b/c/cpu.max", "600000 100000\n");
  EXPECT_EQ(left(), 40u);
  EXPECT_EQ(source(), "the container's memory limit (memory.max of /a)");
  EXPECT_EQ(threads(), 2);
  EXPECT_EQ(read().processors.front().source, "the container's quota (cpu.max of /a)");
}

TEST_F(Machine, IsBoundByThrottlingAsByALimit) {
  unified("/a");
  write("sys/fs/cgroup/a/memory.max", bytes(500));
  write("sys/fs/cgroup/a/memory.high", bytes(100));
  write("sys/fs/cgroup/a/memory.current", bytes(30));
  EXPECT_EQ(left(), 70u);
  EXPECT_EQ(source(), "the container's memory limit (memory.high of /a)");
}

TEST_F(Machine, CountsCachedFilesAsLeft) {
  unified("/a");
  write("sys/fs/cgroup/a/memory.max", bytes(100));
  write("sys/fs/cgroup/a/memory.current", bytes(90));
  write("sys/fs/cgroup/a/memory.stat",
        "anon 1\nfile 999999999\ninactive_file " + bytes(40) + "active_file " + bytes(20));
  EXPECT_EQ(left(), 70u);
  // Counters that are read one after the other need not agree.
  write("sys/fs/cgroup/a/memory.stat", "inactive_file " + bytes(80) + "active_file " + bytes(70));
  EXPECT_EQ(left(), 100u);
}

TEST_F(Machine, IsBoundByVersion1) {
  separate("/docker/1", "/");
  write("sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", bytes(256));
  write("sys/fs/cgroup/memory/docker/1/memory.usage_in_bytes", bytes(100));
  write("sys/fs/cgroup/memory/docker/1/memory.stat",
        "inactive_file 0\ntotal_inactive_file " + bytes(20) + "total_active_file " + bytes(4) +
            "hierarchical_memory_limit 9223372036854771712\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us", "250000\n");
  write("sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(left(), 180u);
  EXPECT_EQ(source(), "the container's memory limit (memory.limit_in_bytes of /docker/1)");
  EXPECT_EQ(threads(), 3);
  EXPECT_EQ(read().processors.front().source,
            "the container's quota (cpu.cfs_quota_us of /docker/1)");
}

// Docker without a namespace of cgroups mounts the container's group over the hierarchy.
TEST_F(Machine, IsBoundByTheGroupThatIsMounted) {
  separate("/docker/1/job", "/docker/1");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", bytes(64));
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", bytes(16));
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", bytes(80));
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", bytes(2));
  write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(left(), 48u);
  EXPECT_EQ(source(), "the container's memory limit (memory.limit_in_bytes of /docker/1)");
  EXPECT_EQ(threads(), 8);
  separate("/elsewhere", "/docker/1");
  EXPECT_EQ(left(), 48u);
}

TEST_F(Machine, IsBoundByGroupsOfVersion1ThatAreNotMounted) {
  separate("/docker/1", "/docker/1");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", bytes(10));
  write("sys/fs/cgroup/memory/memory.stat", "hierarchical_memory_limit " + bytes(70));
  EXPECT_EQ(left(), 60u);
  EXPECT_THAT(source(), HasSubstr("hierarchical_memory_limit of /docker/1"));
}

// Systemd's hybrid mode: processors by v1, memory by v2, of another mount point.
TEST_F(Machine, IsBoundByBothVersions) {
  write("proc/self/cgroup", "4:cpu,cpuacct:/slice\n1:name=systemd:/x\n0::/slice/unit\n");
  write("proc/self/mountinfo",
        "36 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "41 31 0:41 / /sys/fs/cgroup/two\\040words rw - cgroup2 cgroup2 rw\n");
  write("sys/fs/cgroup/cpu,cpuacct/slice/cpu.cfs_quota_us", "50000\n");
  write("sys/fs/cgroup/cpu,cpuacct/slice/cpu.cfs_period_us", "100000\n");
  write("sys/fs/cgroup/two words/slice/unit/memory.max", bytes(99));
  write("sys/fs/cgroup/two words/slice/unit/memory.current", bytes(9));
  EXPECT_EQ(left(), 90u);
  EXPECT_EQ(threads(), 1);
}

TEST_F(Machine, IsBoundWhereTheMountsAreNotShown) {
  write("sys/fs/cgroup/memory.max", bytes(77));
  write("sys/fs/cgroup/memory.current", bytes(7));
  EXPECT_EQ(left(), 70u);
}

// A process that moved out of the namespace's root has a name that begins with "..".
TEST_F(Machine, IsNotBoundByFilesOutsideItsMount) {
  unified("/../../../proc");
  write("sys/fs/cgroup/memory.max", bytes(50));
  write("sys/fs/cgroup/memory.current", bytes(5));
  write("memory.max", bytes(1));
  EXPECT_EQ(left(), 45u);
  EXPECT_EQ(read().memory.size(), 2u);
}

TEST_F(Machine, IsNotBoundByWhatIsNoLimit) {
  unified("/a");
  write("sys/fs/cgroup/a/memory.current", bytes(5));
  for (const char* const text :
       {"max\n", "", "\n", "-1\n", "-4096\n", "12abc\n", "0x10\n", "99999999999999999999999999\n",
        "18446744073709551615\n", "9223372036854771712\n", "lots\n"}) {
    write("sys/fs/cgroup/a/memory.max", text);
    EXPECT_EQ(left(), 1000u) << text;
  }
  for (const char* const text :
       {"max 100000\n", "max\n", "", "-1 100000\n", "0 100000\n", "100000 0\n", "100000 -5\n",
        "x y\n", "100000 x\n", "18446744073709551616 100000\n", "18446744073709551615 1\n"}) {
    write("sys/fs/cgroup/a/cpu.max", text);
    EXPECT_EQ(threads(), 8) << text;
  }
}

TEST_F(Machine, IsNotBoundByWhatCannotBeRead) {
  unified("/a");
  // Folders in the place of files are unreadable to the superuser, too.
  for (const char* const file :
       {"memory.max", "memory.high", "memory.current", "memory.stat", "cpu.max"}) {
    std::filesystem::create_directories(root_.path() / "sys/fs/cgroup/a" / file);
  }
  EXPECT_EQ(left(), 1000u);
  EXPECT_EQ(threads(), 8);
  // Without an account of the group there is that of the process.
  write("sys/fs/cgroup/memory.max", bytes(150));
  EXPECT_EQ(left(), 100u);
}

TEST_F(Machine, MayBeUsedUp) {
  unified("/a");
  write("sys/fs/cgroup/a/memory.max", "0\n");
  EXPECT_EQ(left(), 0u);
  write("sys/fs/cgroup/a/memory.max", bytes(10));
  write("sys/fs/cgroup/a/memory.current", bytes(11));
  EXPECT_EQ(left(), 0u);
}

TEST_F(Machine, RoundsQuotasUp) {
  unified("/a");
  for (const auto& [text, expected] : {std::pair{"150000 100000", 2},
                                       {"50000 100000", 1},
                                       {"1000 100000", 1},
                                       {"100000 100000", 1},
                                       {"100001 100000", 2},
                                       {"20000 10000", 2},
                                       {"400000", 4},
                                       {"6400000 100000", 8}}) {
    write("sys/fs/cgroup/a/cpu.max", text);
    EXPECT_EQ(threads(), expected) << text;
  }
}

TEST_F(Machine, IsBoundByResourceLimits) {
  write("proc/self/limits", limits("unlimited", std::to_string(600 * kMiB)));
  EXPECT_EQ(left(), 200u);
  EXPECT_THAT(source(), HasSubstr("RLIMIT_AS"));
  EXPECT_FALSE(tightest().is_resident);
  write("proc/self/limits", limits(std::to_string(150 * kMiB), std::to_string(600 * kMiB)));
  EXPECT_EQ(left(), 50u);
  EXPECT_THAT(source(), HasSubstr("RLIMIT_DATA"));
}

TEST_F(Machine, ShrinksWhileRunning) {
  unified("/a");
  write("sys/fs/cgroup/a/memory.current", bytes(50));
  write("sys/fs/cgroup/a/memory.max", bytes(500));
  write("sys/fs/cgroup/a/cpu.max", "400000 100000");
  EXPECT_EQ(left(), 450u);
  EXPECT_EQ(threads(), 4);
  write("sys/fs/cgroup/a/memory.max", bytes(60));
  write("sys/fs/cgroup/a/cpu.max", "200000 100000");
  EXPECT_EQ(left(), 10u);
  EXPECT_EQ(threads(), 2);
  std::filesystem::remove_all(root_.path() / "sys");
  EXPECT_EQ(left(), 1000u);
}

TEST_F(Machine, SurvivesAnyText) {
  const std::uint64_t seed = testing::seed(3);
  SCOPED_TRACE(testing::seed_message(seed));
  testing::Random random(seed);
  const std::string letters = "0123456789 \n\t-:,/\\amx.KkB\x01\xff";
  const auto garbage = [&] {
    std::string text(static_cast<std::size_t>(random.integer(0, 200)), ' ');
    for (char& c : text) {
      c = letters[static_cast<std::size_t>(
          random.integer(0, static_cast<std::int64_t>(letters.size()) - 1))];
    }
    return text;
  };
  for (int round = 0; round < 50; ++round) {
    write("proc/self/cgroup", round % 2 == 0 ? garbage() : "0::/" + garbage());
    write("proc/self/mountinfo", garbage() + kUnifiedMount + garbage());
    write("proc/self/status", "VmRSS:" + garbage() + "\nCpus_allowed_list:" + garbage());
    write("proc/self/limits", "Max address space " + garbage());
    write("proc/meminfo", "MemTotal: " + garbage() + "\nMemAvailable: " + garbage());
    for (const char* const file : {"memory.max", "memory.current", "memory.stat", "cpu.max"}) {
      write(std::string("sys/fs/cgroup/") + file, garbage());
    }
    const ProcessLimits limits = read();
    EXPECT_GE(limits.threads(), 1);
    for (const MemoryLimit& limit : limits.memory) EXPECT_LE(limit.left, limit.bytes);
  }
}

TEST(RequireMemory, NamesTheLimitThatIsTooTight) {
  testing::expect_error(ErrorCode::memory, "the rows need another", [] {
    require_memory(std::uint64_t{1} << 59, Counted::resident, "the rows need", "have fewer");
  });
  require_memory(0, Counted::all, "nothing needs", "");
  // Limits of memory do not concern address space.
  for (const MemoryLimit& limit : process_limits().memory) {
    if (!limit.is_resident) return;
  }
  require_memory(std::uint64_t{1} << 59, Counted::reserved, "stacks need", "have fewer");
}

}  // namespace
}  // namespace sluice
