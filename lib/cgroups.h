// Finds the control groups that limit this process. Limits of groups above its own apply, too.
// Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct Cgroup {
  std::string folder;  // of its files
  std::string name;    // as /proc/self/cgroup has it: "/a/b"
};

// The hierarchy of cgroup v2.
inline constexpr std::string_view kUnified;

// The process's group in the v1 hierarchy of `controller`, or in that of v2, and all mounted groups
// above it. `root` is the folder with proc and sys. Folders need not exist.
std::vector<Cgroup> cgroups_of_process(const std::string& root, std::string_view controller);

}  // namespace sluice
