#include "sluice/topology.h"

#include <hwloc.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>
#include <numeric>
#include <utility>

#include "cpu/runtime/threads.h"
#include "lib/bytes.h"
#include "lib/check.h"
#include "lib/process_limits.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

using HwlocTopology = std::unique_ptr<hwloc_topology, decltype(&hwloc_topology_destroy)>;

HwlocTopology load_hwloc() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) {
    throw Error(ErrorCode::unsupported, "hwloc cannot describe this machine");
  }
  HwlocTopology topology(raw, &hwloc_topology_destroy);
  // RESTRICT_TO_CPUBINDING, because hwloc otherwise shows processors that `taskset` excluded.
  hwloc_topology_set_flags(
      raw, HWLOC_TOPOLOGY_FLAG_IS_THISSYSTEM | HWLOC_TOPOLOGY_FLAG_RESTRICT_TO_CPUBINDING);
  if (hwloc_topology_load(raw) != 0) {
    throw Error(ErrorCode::unsupported, "hwloc cannot describe this machine");
  }
  return topology;
}

std::uint64_t largest_cache(hwloc_topology_t topology, hwloc_obj_type_t type) {
  std::uint64_t largest = 0;
  hwloc_obj_t cache = nullptr;
  while ((cache = hwloc_get_next_obj_by_type(topology, type, cache)) != nullptr) {
    largest = std::max<std::uint64_t>(largest, cache->attr->cache.size);
  }
  return largest;
}

std::string instruction_sets() {
  std::string sets;
  const auto add = [&](bool present, const char* name) {
    if (!present) return;
    if (!sets.empty()) sets += ' ';
    sets += name;
  };
  __builtin_cpu_init();
  add(__builtin_cpu_supports("avx2") != 0, "AVX2");
  add(__builtin_cpu_supports("avx512f") != 0, "AVX-512");
  add(__builtin_cpu_supports("avx512bf16") != 0, "AVX512-BF16");
  std::ifstream file("/proc/cpuinfo");
  for (std::string word; file >> word;) {
    if (word != "amx_bf16") continue;
    add(true, "AMX-BF16");
    break;
  }
  return sets;
}

std::vector<NumaNode> numa_nodes(hwloc_topology_t topology) {
  std::vector<NumaNode> nodes;
  hwloc_obj_t node = nullptr;
  while ((node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr) {
    nodes.push_back(
        {static_cast<int>(node->os_index), node->attr->numanode.local_memory,
         hwloc_get_nbobjs_inside_cpuset_by_type(topology, node->cpuset, HWLOC_OBJ_CORE)});
  }
  return nodes;
}

constexpr std::uint64_t kMostMeasured = std::uint64_t{1} << 40;

}  // namespace

Topology detect_topology() {
  const HwlocTopology hwloc = load_hwloc();
  hwloc_topology_t topology = hwloc.get();
  Topology result;
  const hwloc_obj_t package = hwloc_get_obj_by_type(topology, HWLOC_OBJ_PACKAGE, 0);
  const char* name = package ? hwloc_obj_get_info_by_name(package, "CPUModel") : nullptr;
  result.processor = name != nullptr ? name : "unknown processor";
  result.instruction_sets = instruction_sets();
  result.packages = std::max(1, hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PACKAGE));
  result.usable_processing_units = std::max(1, hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PU));
  result.usable_cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
  if (result.usable_cores <= 0) result.usable_cores = result.usable_processing_units;
  result.l2_bytes = largest_cache(topology, HWLOC_OBJ_L2CACHE);
  result.l3_bytes = largest_cache(topology, HWLOC_OBJ_L3CACHE);
  ProcessLimits limits = process_limits();
  result.threads = std::min(result.usable_cores, limits.threads());
  result.memory_bytes = limits.machine_bytes;
  result.available_bytes = limits.memory.empty() ? 0 : limits.memory.front().left;
  result.memory_limits = std::move(limits.memory);
  result.processor_limits = std::move(limits.processors);
  result.nodes = numa_nodes(topology);
  return result;
}

Bandwidth measure_bandwidth(int threads, std::uint64_t bytes) {
  if (bytes > kMostMeasured) {
    throw Error(ErrorCode::usage,
                "bandwidth is measured with up to 1 TiB, not " + format_bytes(bytes));
  }
  if (threads < 0) {
    throw Error(ErrorCode::usage,
                "bandwidth is measured with 0 threads (as many as compute) or more, not " +
                    std::to_string(threads));
  }
  cpu::Threads pool(threads);
  const std::size_t words = std::max<std::uint64_t>(bytes / sizeof(std::uint64_t), 1);
  std::vector<std::uint64_t> source(words, 1);
  std::vector<std::uint64_t> target(words);
  const auto parts = static_cast<std::size_t>(pool.count());
  std::vector<std::uint64_t> sums(parts);
  Bandwidth best{pool.count(), 0.0, 0.0};
  for (int pass = 0; pass < 3; ++pass) {
    const auto rate = [&](const auto& work) {
      const auto start = std::chrono::steady_clock::now();
      pool.for_each(pool.count(), [&](std::int64_t part) {
        const auto index = static_cast<std::size_t>(part);
        work(index, words * index / parts, words * (index + 1) / parts);
      });
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      return static_cast<double>(words * sizeof(std::uint64_t)) / elapsed.count();
    };
    const double read = rate([&](std::size_t part, std::size_t begin, std::size_t end) {
      sums[part] = std::accumulate(source.data() + begin, source.data() + end, std::uint64_t{0});
    });
    const double copy = rate([&](std::size_t, std::size_t begin, std::size_t end) {
      std::copy(source.data() + begin, source.data() + end, target.data() + begin);
    });
    // The sum is used, so that the reads cannot be optimised away.
    check(std::accumulate(sums.begin(), sums.end(), std::uint64_t{0}) == words,
          "a read went wrong");
    best.read_bytes_per_second = std::max(best.read_bytes_per_second, read);
    best.copy_bytes_per_second = std::max(best.copy_bytes_per_second, copy);
  }
  return best;
}

}  // namespace sluice
