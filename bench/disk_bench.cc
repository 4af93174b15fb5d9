// Random reads of a page store, beside those of fio (if it is installed) from the same file. Both
// go past the page cache (O_DIRECT), both keep `depth` reads in flight; the store also verifies
// every sector, fio does not.
//
//   disk_bench [--directory DIR] [--size BYTES] [--seconds N] [--access uring|pool]
//              [--depth N...] [--bytes N...] [--no-fio] [--benchmark_out=FILE ...]
//
// Counters: reads/s; cpu_us, user and system time of the whole process per read; bytes_per_second.
#include <benchmark/benchmark.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/disk_rates.h"
#include "io/page_store.h"
#include "io/sector_buffer.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

struct Settings {
  std::filesystem::path directory = std::filesystem::temp_directory_path();
  std::uint64_t size = std::uint64_t{2} << 30;
  double seconds = 3;
  std::string access = "automatic";
  std::vector<std::size_t> depths = {1, 4, 16, 64, 128, 256};
  std::vector<std::size_t> bytes = {4 << 10, 64 << 10};
  bool fio = true;
};

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void report(benchmark::State& state, double reads, double seconds, double cpu, std::size_t bytes) {
  state.counters["reads/s"] = reads / seconds;
  state.counters["bytes_per_second"] = reads / seconds * static_cast<double>(bytes);
  state.counters["cpu_us"] = 1e6 * cpu / reads;
}

DiskAccess access_of(const std::string& name) {
  const std::map<std::string, DiskAccess> names = {{"automatic", DiskAccess::automatic},
                                                   {"uring", DiskAccess::uring},
                                                   {"pool", DiskAccess::pool}};
  return names.at(name);
}

// A store whose every sector was written with random bytes, and memory for its reads.
class Store {
 public:
  explicit Store(const Settings& settings) : store_(config(settings)) {
    fill_store(store_, settings.size, memory_.span());
    std::cerr << "disk_bench: " << store_.descriptions().front() << "\n";
  }

  PageStore& operator*() { return store_; }
  std::span<std::byte> memory() { return memory_.span(); }

 private:
  PageStoreConfig config(const Settings& settings) {
    PageStoreConfig config;
    config.directories = {settings.directory};
    config.regions = settings.size / kFillBytes;
    config.region_bytes = kFillBytes;
    config.limits.bytes_in_flight = 32 << 20;
    config.access = access_of(settings.access);
    config.arenas = {memory_.span()};
    return config;
  }

  SectorBuffer memory_{kFillBytes * 2};
  PageStore store_;
};

void read_store(benchmark::State& state, Store& store, const Settings& settings, std::size_t bytes,
                std::size_t depth) {
  try {
    for (auto _ : state) {
      const double cpu = cpu_seconds();
      const RandomReads reads =
          read_at_random(*store, settings.size, bytes, depth, settings.seconds, store.memory());
      report(state, reads.count, reads.seconds, cpu_seconds() - cpu, bytes);
    }
  } catch (const Error& error) {
    state.SkipWithError(error.what());
  }
}

// The output of a command; empty if it cannot be run.
std::string output_of(const std::string& command) {
  // NOLINTNEXTLINE(bugprone-command-processor): this file alone makes the command
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return "";
  std::string text;
  std::array<char, 4096> part;
  std::size_t size = 0;
  while ((size = std::fread(part.data(), 1, part.size(), pipe)) > 0) text.append(part.data(), size);
  return ::pclose(pipe) == 0 ? text : "";
}

// The store's file, which has no name, as another process opens it; empty if there is none.
std::string file_of_store(const std::filesystem::path& directory) {
  const std::string inside = std::filesystem::canonical(directory).string() + "/";
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with(inside) && target.ends_with(" (deleted)")) {
      return "/proc/" + std::to_string(::getpid()) + "/fd/" + entry.path().filename().string();
    }
  }
  return "";
}

void read_fio(benchmark::State& state, const Settings& settings, std::size_t bytes,
              std::size_t depth) {
  const std::string file = file_of_store(settings.directory);
  const std::string engine = settings.access == "pool" ? "psync" : "io_uring";
  const std::string command = "fio --name=reads --readonly --filename=" + file +
                              " --size=" + std::to_string(settings.size) +
                              " --rw=randread --direct=1 --norandommap --ioengine=" + engine +
                              " --bs=" + std::to_string(bytes) +
                              " --iodepth=" + std::to_string(depth) +
                              " --time_based --runtime=" + std::to_string(settings.seconds) +
                              "s --output-format=json 2>/dev/null";
  for (auto _ : state) {
    const auto json = nlohmann::json::parse(output_of(command), nullptr, false);
    if (json.is_discarded()) return state.SkipWithError("fio is not installed, or failed");
    const auto& job = json["jobs"][0];
    const double reads = job["read"]["total_ios"];
    const double seconds = job["read"]["runtime"].get<double>() / 1e3;
    const double share = job["usr_cpu"].get<double>() + job["sys_cpu"].get<double>();
    report(state, reads, seconds, share / 100 * seconds, bytes);
  }
}

int run(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  Settings settings;
  CLI::App app("Random reads of a page store, beside those of fio.");
  app.add_option("--directory", settings.directory);
  app.add_option("--size", settings.size)->transform(CLI::AsSizeValue(false));
  app.add_option("--seconds", settings.seconds)->check(CLI::Range(0.1, 600.0));
  app.add_option("--access", settings.access)->check(CLI::IsMember({"automatic", "uring", "pool"}));
  app.add_option("--depth", settings.depths)->check(CLI::Range(1, 256));
  app.add_option("--bytes", settings.bytes)->check(CLI::IsMember({4 << 10, 64 << 10}));
  app.add_flag("!--no-fio", settings.fio);
  CLI11_PARSE(app, argc, argv);
  settings.size = settings.size / kFillBytes * kFillBytes;
  try {
    Store store(settings);
    for (const std::size_t bytes : settings.bytes) {
      for (const std::size_t depth : settings.depths) {
        const std::string name =
            "/bytes:" + std::to_string(bytes) + "/depth:" + std::to_string(depth);
        const auto add = [&](const std::string& who, auto read) {
          benchmark::RegisterBenchmark((who + name).c_str(), read)->Iterations(1)->UseRealTime();
        };
        add("store", [&, bytes, depth](benchmark::State& state) {
          read_store(state, store, settings, bytes, depth);
        });
        if (!settings.fio) continue;
        add("fio", [&, bytes, depth](benchmark::State& state) {
          read_fio(state, settings, bytes, depth);
        });
      }
    }
    benchmark::AddCustomContext("directory", (*store).descriptions().front());
    benchmark::RunSpecifiedBenchmarks();
  } catch (const Error& error) {
    std::cerr << "disk_bench: " << error.what() << "\n";
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::run(argc, argv); }
