#include "lib/cgroups.h"

#include <algorithm>
#include <optional>

#include "lib/system_files.h"

namespace sluice {
namespace {

// The mount point of a part of a hierarchy.
struct Mount {
  std::string group;  // the group mounted there
  std::string point;
};

// mountinfo writes a space as \040, and so on.
std::string unescaped(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto octal = [&](std::size_t at) { return text[at] >= '0' && text[at] <= '7'; };
    if (text[i] == '\\' && i + 3 < text.size() && octal(i + 1) && octal(i + 2) && octal(i + 3)) {
      plain += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 +
                                 (text[i + 3] - '0'));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

bool has_item(std::string_view list, std::string_view item) {
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(','), list.size());
    if (list.substr(0, end) == item) return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

// Lines are "36 35 98:0 GROUP POINT options [tags] - cgroup source rw,memory".
std::optional<Mount> parse_mount(std::string_view line, std::string_view controller) {
  const std::vector<std::string_view> words = words_of(line);
  const auto dash = std::find(words.begin(), words.end(), "-");
  if (dash - words.begin() < 6 || words.end() - dash < 4) return std::nullopt;
  const bool is_wanted = controller == kUnified
                             ? dash[1] == "cgroup2"
                             : dash[1] == "cgroup" && has_item(dash[3], controller);
  if (!is_wanted) return std::nullopt;
  return Mount{unescaped(words[3]), unescaped(words[4])};
}

std::vector<Mount> mounts_of(const std::string& root, std::string_view controller) {
  std::vector<Mount> mounts;
  const std::string text = system_text(joined(root, "proc/self/mountinfo"));
  for (const std::string_view line : lines_of(text)) {
    if (const std::optional<Mount> mount = parse_mount(line, controller)) mounts.push_back(*mount);
  }
  // The usual mount points, for containers that do not show their mounts.
  const std::string usual = "/sys/fs/cgroup";
  if (controller == kUnified) {
    mounts.push_back({"/", usual});
  } else {
    mounts.push_back({"/", usual + "/" + std::string(controller)});
  }
  return mounts;
}

// Lines are "4:cpu,cpuacct:/a/b" in v1 and "0::/a/b" in v2.
std::string own_group(const std::string& root, std::string_view controller) {
  const std::string text = system_text(joined(root, "proc/self/cgroup"));
  for (const std::string_view line : lines_of(text)) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == line.npos ? first : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const bool is_wanted = controller == kUnified
                               ? line.substr(0, first) == "0" && controllers.empty()
                               : has_item(controllers, controller);
    if (is_wanted) return std::string(line.substr(second + 1));
  }
  return "/";
}

// The part of a group's name below `above`; nullopt if it is not below. Names that begin with ".."
// are outside the process's namespace.
std::optional<std::string> below(const std::string& group, const std::string& above) {
  if (group.find("/..") != group.npos) return std::nullopt;
  if (above == "/") return group == "/" ? "" : group;
  if (!group.starts_with(above)) return std::nullopt;
  const std::string rest = group.substr(above.size());
  return rest.empty() || rest.front() == '/' ? std::optional(rest) : std::nullopt;
}

}  // namespace

std::vector<Cgroup> cgroups_of_process(const std::string& root, std::string_view controller) {
  const std::string own = own_group(root, controller);
  std::vector<Cgroup> groups;
  for (const Mount& mount : mounts_of(root, controller)) {
    const std::string point = joined(root, mount.point);
    // The mount of another group is that of a container whose namespace begins elsewhere: the
    // process is in the mounted group or below it.
    std::string rest = below(own, mount.group).value_or("");
    while (true) {
      Cgroup group = {joined(point, rest),
                      mount.group == "/" && !rest.empty() ? rest : mount.group + rest};
      const bool is_new = std::none_of(groups.begin(), groups.end(), [&](const Cgroup& other) {
        return other.folder == group.folder;
      });
      if (is_new) groups.push_back(std::move(group));
      if (rest.empty()) break;
      rest.resize(rest.rfind('/'));
    }
  }
  return groups;
}

}  // namespace sluice
