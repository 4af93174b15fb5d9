#include "lib/process_limits.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "lib/bytes.h"
#include "lib/cgroups.h"
#include "lib/system_files.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::string_view kMemory = "memory";
constexpr std::string_view kProcessors = "cpu";

// cgroup v1 writes "no limit" as the largest multiple of a page. No machine has an EiB.
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;

std::optional<std::uint64_t> limit_in(const std::string& file) {
  const std::string text = system_text(file);
  const std::vector<std::string_view> words = words_of(text);
  if (words.empty()) return std::nullopt;
  const std::optional<std::uint64_t> number = number_of(words.front());
  return number && *number < kNoLimit ? number : std::nullopt;
}

// The bytes of a line of /proc/self/status or /proc/meminfo, which is in kB; 0 without the line.
std::uint64_t kib_after(std::string_view text, std::string_view key) {
  const std::uint64_t kib = number_after(text, key).value_or(0);
  return kib < kNoLimit / 1024 ? kib * 1024 : 0;
}

// The names of the same files and lines in both versions of cgroups.
struct MemoryFiles {
  std::string_view controller;
  std::span<const char* const> limits;
  const char* usage;
  const char* inactive_file;
  const char* active_file;
};
constexpr std::array kLimitsOfV1 = {"memory.limit_in_bytes"};
constexpr std::array kLimitsOfV2 = {"memory.max", "memory.high"};
constexpr MemoryFiles kFilesOfV1 = {kMemory, kLimitsOfV1, "memory.usage_in_bytes",
                                    "total_inactive_file", "total_active_file"};
constexpr MemoryFiles kFilesOfV2 = {kUnified, kLimitsOfV2, "memory.current", "inactive_file",
                                    "active_file"};

// Bytes that a group holds and cannot give back. Cached pages of files do not count, because the
// kernel drops them when memory is needed. `resident`, the bytes of this process, if no file says.
std::uint64_t used_in(const std::string& folder, const MemoryFiles& files, std::string_view stat,
                      std::uint64_t resident) {
  const std::string usage = system_text(joined(folder, files.usage));
  const std::vector<std::string_view> words = words_of(usage);
  const std::optional<std::uint64_t> used = words.empty() ? std::nullopt : number_of(words.front());
  if (!used) return resident;
  std::uint64_t left = *used;
  for (const char* const cached : {files.inactive_file, files.active_file}) {
    left -= std::min(left, number_after(stat, cached).value_or(0));
  }
  return left;
}

void add_cgroups(const std::string& root, const MemoryFiles& files, std::uint64_t resident,
                 std::vector<MemoryLimit>& limits) {
  for (const Cgroup& group : cgroups_of_process(root, files.controller)) {
    const std::string stat = system_text(joined(group.folder, "memory.stat"));
    const std::uint64_t used = used_in(group.folder, files, stat, resident);
    const auto add = [&](const std::string& file, std::optional<std::uint64_t> bytes) {
      if (!bytes || *bytes >= kNoLimit) return;
      limits.push_back({"the container's memory limit (" + file + " of " + group.name + ")", *bytes,
                        *bytes - std::min(*bytes, used), true});
    };
    for (const char* const file : files.limits) add(file, limit_in(joined(group.folder, file)));
    // The limit of groups above that are not mounted here; v1 only.
    add("hierarchical_memory_limit", number_after(stat, "hierarchical_memory_limit"));
  }
}

void add_resource_limits(std::string_view limits_text, std::string_view status,
                         std::vector<MemoryLimit>& limits) {
  const auto add = [&](const char* line, const char* source, const char* used_line) {
    const std::optional<std::uint64_t> bytes = number_after(limits_text, line);
    if (!bytes || *bytes >= kNoLimit) return;
    const std::uint64_t used = kib_after(status, used_line);
    limits.push_back({source, *bytes, *bytes - std::min(*bytes, used), false});
  };
  add("Max address space", "the process's limit of address space (RLIMIT_AS, ulimit -v)",
      "VmSize:");
  add("Max data size", "the process's limit of data (RLIMIT_DATA, ulimit -d)", "VmData:");
}

void add_machine(const std::string& root, ProcessLimits& limits) {
  const std::string text = system_text(joined(root, "proc/meminfo"));
  limits.machine_bytes = kib_after(text, "MemTotal:");
  if (limits.machine_bytes == 0 || !number_after(text, "MemAvailable:")) return;
  const std::uint64_t available = kib_after(text, "MemAvailable:");
  limits.memory.push_back({"the free memory of this machine", limits.machine_bytes,
                           std::min(available, limits.machine_bytes), true});
}

// The number of processors in a list such as "0-3,8"; 0 if it is not a list.
int processors_in(std::string_view list) {
  int count = 0;
  constexpr std::uint64_t kMost = 1 << 20;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(','), list.size());
    const std::string_view range = list.substr(0, end);
    const std::size_t dash = std::min(range.find('-'), range.size());
    const std::optional<std::uint64_t> first = number_of(range.substr(0, dash));
    const std::optional<std::uint64_t> last =
        dash == range.size() ? first : number_of(range.substr(dash + 1));
    if (!first || !last || *last < *first || *last >= kMost) return 0;
    count += static_cast<int>(*last - *first + 1);
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return count;
}

ProcessorLimit affinity(std::string_view status) {
  constexpr std::string_view kKey = "Cpus_allowed_list:";
  int count = 0;
  for (const std::string_view line : lines_of(status)) {
    if (!line.starts_with(kKey)) continue;
    const std::vector<std::string_view> words = words_of(line.substr(kKey.size()));
    if (!words.empty()) count = processors_in(words.front());
  }
  if (count == 0) count = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return {"the affinity mask", static_cast<double>(count)};
}

std::optional<double> quota_of(std::string_view quota_word, std::string_view period_word) {
  constexpr std::uint64_t kUsualPeriod = 100000;  // microseconds, as is the quota
  const std::optional<std::uint64_t> quota = number_of(quota_word);
  const std::optional<std::uint64_t> period =
      period_word.empty() ? kUsualPeriod : number_of(period_word);
  if (!quota || !period || *quota == 0 || *period == 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

void add_quotas(const std::string& root, std::vector<ProcessorLimit>& limits) {
  const auto add = [&](const char* file, const Cgroup& group, std::optional<double> quota) {
    if (quota) {
      limits.push_back(
          {"the container's quota (" + std::string(file) + " of " + group.name + ")", *quota});
    }
  };
  const auto word = [](const std::vector<std::string_view>& words, std::size_t i) {
    return i < words.size() ? words[i] : std::string_view();
  };
  for (const Cgroup& group : cgroups_of_process(root, kUnified)) {
    const std::string text = system_text(joined(group.folder, "cpu.max"));
    const std::vector<std::string_view> words = words_of(text);
    add("cpu.max", group, quota_of(word(words, 0), word(words, 1)));
  }
  for (const Cgroup& group : cgroups_of_process(root, kProcessors)) {
    const std::string quota = system_text(joined(group.folder, "cpu.cfs_quota_us"));
    const std::string period = system_text(joined(group.folder, "cpu.cfs_period_us"));
    add("cpu.cfs_quota_us", group, quota_of(word(words_of(quota), 0), word(words_of(period), 0)));
  }
}

}  // namespace

int ProcessLimits::threads() const {
  constexpr double kMost = 1 << 20;
  const double least = processors.empty() ? 1.0 : processors.front().processors;
  return static_cast<int>(std::clamp(std::ceil(least), 1.0, kMost));
}

ProcessLimits process_limits(const std::string& root) {
  const std::string status = system_text(joined(root, "proc/self/status"));
  ProcessLimits limits;
  const std::uint64_t resident = kib_after(status, "VmRSS:");
  add_cgroups(root, kFilesOfV2, resident, limits.memory);
  add_cgroups(root, kFilesOfV1, resident, limits.memory);
  add_resource_limits(system_text(joined(root, "proc/self/limits")), status, limits.memory);
  add_machine(root, limits);
  std::sort(limits.memory.begin(), limits.memory.end(),
            [](const MemoryLimit& a, const MemoryLimit& b) { return a.left < b.left; });
  limits.processors.push_back(affinity(status));
  add_quotas(root, limits.processors);
  std::sort(
      limits.processors.begin(), limits.processors.end(),
      [](const ProcessorLimit& a, const ProcessorLimit& b) { return a.processors < b.processors; });
  return limits;
}

void require_memory(std::uint64_t bytes, Counted counted, const std::string& what,
                    const std::string& remedy) {
  for (const MemoryLimit& limit : process_limits().memory) {
    const Counted other = limit.is_resident ? Counted::reserved : Counted::resident;
    const bool counts = counted != other;
    if (!counts || bytes <= limit.left) continue;
    std::string message = what + " another " + format_bytes(bytes) + ", more than ";
    message += limit.source + ": " + format_bytes(limit.left) + " left; " + remedy;
    throw Error(ErrorCode::memory, message);
  }
}

}  // namespace sluice
