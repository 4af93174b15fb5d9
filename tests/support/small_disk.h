// A file system of a few MiB, to fill up.
#pragma once

#include <sys/mount.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/temp_dir.h"

namespace sluice::testing {

// Unmounts when it goes out of scope.
class Mount {
 public:
  Mount(const std::filesystem::path& target, bool mounted) : target_(target), mounted_(mounted) {}
  Mount(const Mount&) = delete;
  Mount& operator=(const Mount&) = delete;
  ~Mount() {
    if (mounted_) ::umount(target_.c_str());
  }
  bool mounted() const { return mounted_; }

 private:
  std::filesystem::path target_;
  bool mounted_;
};

// An ext4 on a loop device, of 32 MiB in a file below `parent`; only root can mount one.
class SmallDisk {
 public:
  explicit SmallDisk(const std::filesystem::path& parent) : dir_(parent) {}

  bool mounted() const { return mount_.mounted(); }
  std::filesystem::path path() const { return dir_.path() / "mounted"; }

 private:
  bool make() const {
    const std::string image = (dir_.path() / "image").string();
    std::filesystem::create_directory(path());
    const std::string command = "(truncate -s 32M " + image + " && mkfs.ext4 -q -m 0 -N 64 " +
                                image + " && mount -o loop " + image + " " + path().string() +
                                ") >/dev/null 2>&1";
    // NOLINTNEXTLINE(bugprone-command-processor): a loop device takes three programs to set up
    return std::system(command.c_str()) == 0;
  }

  TempDir dir_;
  Mount mount_{path(), make()};
};

}  // namespace sluice::testing
