#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <string>

#include "lib/bytes.h"
#include "sluice/topology.h"
#include "tools/commands.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

std::string gigabytes_per_second(double rate) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f GB/s", rate * 1e-9);
  return text.data();
}

std::string describe(const Topology& topology) {
  std::string text = "processor          " + topology.processor + "\n";
  text += "instruction sets   " + topology.instruction_sets + "\n";
  text += "usable             " + std::to_string(topology.usable_cores) + " cores, " +
          std::to_string(topology.usable_processing_units) + " threads, " +
          std::to_string(topology.packages) + " packages\n";
  text += "caches             L2 " + format_bytes(topology.l2_bytes) + ", L3 " +
          format_bytes(topology.l3_bytes) + "\n";
  text += "memory             " + format_bytes(topology.memory_bytes) + ", " +
          format_bytes(topology.available_bytes) + " available\n";
  for (const NumaNode& node : topology.nodes) {
    text += "NUMA node " + std::to_string(node.index) + "        " +
            format_bytes(node.memory_bytes) + ", " + std::to_string(node.cores) + " cores\n";
  }
  return text;
}

std::string describe(const Bandwidth& bandwidth) {
  return "bandwidth          " + std::to_string(bandwidth.threads) + " threads: read " +
         gigabytes_per_second(bandwidth.read_bytes_per_second) + ", copy " +
         gigabytes_per_second(bandwidth.copy_bytes_per_second) + "\n";
}

}  // namespace

Command add_topology(CLI::App& app) {
  const auto size = std::make_shared<std::string>("1GiB");
  app.add_option("--size", *size, "memory to stream through when measuring; 0 measures nothing")
      ->capture_default_str();
  return [size] {
    const std::uint64_t wanted = parse_bytes(*size, "--size");
    const Topology topology = detect_topology();
    print(describe(topology));
    const std::uint64_t bytes = std::min(wanted, topology.available_bytes / 4);
    if (bytes == 0) return 0;
    print(describe(measure_bandwidth(1, bytes)));
    if (topology.usable_cores > 1) print(describe(measure_bandwidth(0, bytes)));
    return 0;
  };
}

}  // namespace sluice::tools
