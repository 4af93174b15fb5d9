#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>

#include "io/disk_rates.h"
#include "lib/bytes.h"
#include "lib/text.h"
#include "sluice/errors.h"
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

std::string limit_line(const std::string& limit, const std::string& source) {
  return "  limit            " + limit + ": " + one_line(source) + "\n";
}

std::string describe(const Topology& topology) {
  std::string text = "processor          " + topology.processor + "\n";
  text += "instruction sets   " + topology.instruction_sets + "\n";
  text += "usable             " + std::to_string(topology.usable_cores) + " cores, " +
          std::to_string(topology.usable_processing_units) + " threads, " +
          std::to_string(topology.packages) + " packages\n";
  text += "caches             L2 " + format_bytes(topology.l2_bytes) + ", L3 " +
          format_bytes(topology.l3_bytes) + "\n";
  text += "computes with      " + std::to_string(topology.threads) +
          (topology.threads == 1 ? " thread\n" : " threads\n");
  for (const ProcessorLimit& limit : topology.processor_limits) {
    text += limit_line(
        digits(limit.processors) + (limit.processors == 1.0 ? " processor" : " processors"),
        limit.source);
  }
  text += "memory             " + format_bytes(topology.memory_bytes) + ", " +
          format_bytes(topology.available_bytes) + " available\n";
  for (const MemoryLimit& limit : topology.memory_limits) {
    text += limit_line(format_bytes(limit.bytes) + ", " + format_bytes(limit.left) + " left",
                       limit.source);
  }
  for (const NumaNode& node : topology.nodes) {
    text += "NUMA node " + std::to_string(node.index) + "        " +
            format_bytes(node.memory_bytes) + ", " + std::to_string(node.cores) + " cores\n";
  }
  return text;
}

std::string describe(const Bandwidth& bandwidth, std::uint64_t bytes) {
  return "bandwidth          " + std::to_string(bandwidth.threads) + " threads: read " +
         gigabytes_per_second(bandwidth.read_bytes_per_second) + ", copy " +
         gigabytes_per_second(bandwidth.copy_bytes_per_second) + ", over " + format_bytes(bytes) +
         "\n";
}

std::string describe(const DeviceTopology& device) {
  return "GPU                " + device.name + ", " + device.description + "\n" +
         "GPU memory         " + format_bytes(device.memory_bytes) + ", made for " +
         gigabytes_per_second(device.memory_rate) + "\n" + "from host memory   copies " +
         gigabytes_per_second(device.copied) + ", rows read " + gigabytes_per_second(device.read) +
         "\n" + "row cache          where a layer selects " + format_bytes(device.cached_bytes) +
         " of rows or more\n";
}

std::string describe(const DiskRates& disk) {
  std::string text;
  for (const std::string& line : disk.descriptions) text += "disk               " + line + "\n";
  return text + "disk               reads " + std::to_string(std::llround(disk.sectors)) +
         " times 4 KiB a second, " + gigabytes_per_second(disk.pages) + " in 64 KiB, writes " +
         gigabytes_per_second(disk.written) + ", over " + format_bytes(disk.bytes) + "\n";
}

// A device that cannot be used is reported with the reason instead of an error.
std::string describe_if_there(const std::string& device) {
  try {
    return describe(detect_device(device));
  } catch (const Error& error) {
    return "GPU                none: " + with_flags(error.what()) + "\n";
  }
}

}  // namespace

Command add_topology(CLI::App& app) {
  const auto size = std::make_shared<std::string>("1GiB");
  app.add_option("--size", *size,
                 "memory to stream through when measuring, up to a quarter of the memory that is "
                 "available; 0 measures nothing")
      ->capture_default_str();
  const auto device = std::make_shared<std::string>();
  app.add_option("--device", *device, "GPU to show: cuda or cuda:N; the first without it");
  const auto disk = std::make_shared<std::string>();
  app.add_option("--disk", *disk,
                 "a directory that is to hold rows: show how it is read, and measure it with a "
                 "file of --size that has no name");
  return [size, device, disk] {
    const std::uint64_t wanted = parse_bytes(*size, "--size");
    const std::string gpu =
        device->empty() ? describe_if_there("cuda") : describe(detect_device(*device));
    const Topology topology = detect_topology();
    const std::string rates = disk->empty() ? "" : describe(measure_disk(*disk, wanted));
    print(describe(topology) + gpu + rates);
    const std::uint64_t bytes = std::min(wanted, topology.available_bytes / 4);
    if (bytes == 0) return 0;
    print(describe(measure_bandwidth(1, bytes), bytes));
    if (topology.threads > 1) print(describe(measure_bandwidth(0, bytes), bytes));
    return 0;
  };
}

}  // namespace sluice::tools
