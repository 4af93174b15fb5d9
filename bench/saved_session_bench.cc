// Saving a long session and loading it again, beside writing and reading as many bytes of a file in
// the same directory. Every read comes from the disk: the page cache is told to drop the files.
//
//   saved_session_bench --directory DIR [--model DIR] [--text FILE] [--tokens N]
//                       [--policy LINE...] [--host-memory BYTES...] [--prefill SETTING]
//                       [--rounds N] --json FILE
//
// Every policy has its own session, and its own cap on host memory or the last one given. The index
// is in host memory, and what the cap leaves beside it is for pages that are read when loading.
// `load` reads the rows to host memory; `first_token` leaves them in the file, as with --disk, and
// decodes a token; `sequential` is what four threads get by O_DIRECT, in pieces of 1 MiB.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "io/sector_buffer.h"
#include "sluice/engine.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kThreads = 4;
constexpr std::size_t kPieceBytes = 1 << 20;
constexpr std::int64_t kBytesPerToken = 6;  // upper bound for English

struct Settings {
  fs::path model = fs::path(SLUICE_SOURCE_DIR) / "models/sluice-22m";
  fs::path text = fs::path(SLUICE_SOURCE_DIR) / "data/war-and-peace.txt";
  fs::path directory;
  fs::path json;
  std::int64_t tokens = 128 << 10;
  std::vector<std::string> policies = {"values"};
  std::string prefill = "prefill=pages(0.1)";
  std::vector<std::uint64_t> host_memory = {256 << 20};
  int rounds = 3;

  fs::path session() const { return directory / "saved_session_bench"; }
};

struct Taken {
  double seconds = 0;
  std::uint64_t read = 0;  // bytes, from the disk
};

std::uint64_t bytes_read() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::uint64_t>(usage.ru_inblock) * 512;
}

Taken take(const std::function<void()>& work) {
  const std::uint64_t before = bytes_read();
  const auto start = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return {seconds.count(), bytes_read() - before};
}

nlohmann::json json_of(const Taken& taken, std::uint64_t bytes) {
  return {{"seconds", taken.seconds},
          {"bytes_per_second", static_cast<double>(bytes) / taken.seconds},
          {"read_bytes", taken.read}};
}

void require(bool done, const fs::path& path) {
  if (!done) throw Error(ErrorCode::io, path.string() + ": " + std::strerror(errno));
}

std::uint64_t bytes_of(const fs::path& directory) {
  std::uint64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(directory)) bytes += entry.file_size();
  return bytes;
}

void drop_from_cache(const fs::path& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    const int file = ::open(entry.path().c_str(), O_RDONLY);
    require(file >= 0 && ::fsync(file) == 0, entry.path());
    require(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0, entry.path());
    ::close(file);
  }
}

// Calls move(memory, offset) for all pieces of a file, in kThreads threads.
void for_pieces(std::uint64_t bytes, const std::function<void(std::byte*, off_t)>& move) {
  std::vector<std::jthread> threads;
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      SectorBuffer memory(kPieceBytes);
      std::ranges::fill(memory.span(), static_cast<std::byte>(thread + 1));
      for (std::uint64_t at = thread * kPieceBytes; at < bytes; at += kThreads * kPieceBytes) {
        move(memory.span().data(), static_cast<off_t>(at));
      }
    });
  }
}

// What the disk does without Sluice: reserves, writes and syncs a file, and reads it.
nlohmann::json sequential(const Settings& settings, std::uint64_t bytes) {
  const fs::path path = settings.directory / "saved_session_bench.sequential";
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
  require(file >= 0, path);
  const std::uint64_t whole = bytes / kPieceBytes * kPieceBytes;
  const Taken write = take([&] {
    require(::fallocate(file, 0, 0, static_cast<off_t>(whole)) == 0, path);
    for_pieces(whole, [&](std::byte* memory, off_t at) {
      require(::pwrite(file, memory, kPieceBytes, at) == static_cast<ssize_t>(kPieceBytes), path);
    });
    require(::fsync(file) == 0, path);
  });
  const Taken read = take([&] {
    for_pieces(whole, [&](std::byte* memory, off_t at) {
      require(::pread(file, memory, kPieceBytes, at) == static_cast<ssize_t>(kPieceBytes), path);
    });
  });
  ::close(file);
  fs::remove(path);
  return {{"write", json_of(write, whole)}, {"read", json_of(read, whole)}};
}

SessionOptions options_for(const Engine& engine, const Settings& settings,
                           const std::string& policy) {
  SessionOptions options;
  options.context = settings.tokens + 16;
  options.policies = {engine.policy(policy)};
  return options;
}

class Measurement {
 public:
  Measurement(const Settings& settings, const std::string& policy, std::uint64_t host_memory)
      : settings_(settings),
        policy_(policy),
        host_memory_(host_memory),
        plain_(open(false)),
        behind_disk_(open(true)) {}
  Measurement(const Measurement&) = delete;
  Measurement& operator=(const Measurement&) = delete;
  ~Measurement() {
    std::error_code ignored;
    fs::remove_all(settings_.session(), ignored);
  }

  nlohmann::json run() {
    std::ifstream file(settings_.text);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    std::vector<TokenId> ids = plain_.encode_prompt(
        text.substr(0, static_cast<std::size_t>(kBytesPerToken * settings_.tokens)));
    if (std::ssize(ids) < settings_.tokens) {
      throw Error(ErrorCode::usage, "--text has too few tokens");
    }
    ids.resize(static_cast<std::size_t>(settings_.tokens));
    Session session =
        plain_.new_session(options_for(plain_, settings_, policy_ + " " + settings_.prefill));
    const Taken prefill = take([&] { session.prefill(ids); });
    std::cerr << "read " << ids.size() << " tokens in " << prefill.seconds << " s\n";
    nlohmann::json rounds = nlohmann::json::array();
    for (int i = 0; i < settings_.rounds; ++i) rounds.push_back(round(session));
    return {{"policy", policy_},
            {"host_memory", host_memory_},
            {"prefill_seconds", prefill.seconds},
            {"session_bytes", bytes_of(settings_.session())},
            {"rounds", rounds}};
  }

 private:
  Engine open(bool on_disk) const {
    EngineConfig config;
    config.model = settings_.model;
    if (on_disk) {
      config.host_memory = host_memory_;
      config.disk = DiskConfig{{settings_.directory}, {}};
    }
    return Engine::open(config);
  }

  nlohmann::json round(Session& session) {
    const Taken save = take([&] { session.save(settings_.session()); });
    const std::uint64_t bytes = bytes_of(settings_.session());
    drop_from_cache(settings_.session());
    const Taken load = take(
        [&] { plain_.load_session(settings_.session(), options_for(plain_, settings_, policy_)); });
    drop_from_cache(settings_.session());
    const Taken first = take([&] {
      Session loaded = behind_disk_.load_session(settings_.session(),
                                                 options_for(behind_disk_, settings_, policy_));
      if (!loaded.plan().on_disk) {
        throw Error(ErrorCode::usage, "--host-memory holds all rows: give less");
      }
      loaded.decode(1);
    });
    nlohmann::json first_token = json_of(first, first.read);
    first_token["share"] = static_cast<double>(first.read) / static_cast<double>(bytes);
    double load_average = 0;  // of a minute
    ::getloadavg(&load_average, 1);
    return {{"load_average", load_average},
            {"save", json_of(save, bytes)},
            {"load", json_of(load, bytes)},
            {"first_token", first_token},
            {"sequential", sequential(settings_, bytes)}};
  }

  const Settings& settings_;
  std::string policy_;
  std::uint64_t host_memory_;
  Engine plain_;
  Engine behind_disk_;
};

int run(int argc, char** argv) {
  Settings settings;
  CLI::App app("Saving and loading a long session, beside the disk's sequential rates.");
  app.add_option("--directory", settings.directory)->required();
  app.add_option("--model,-m", settings.model);
  app.add_option("--text", settings.text);
  app.add_option("--tokens", settings.tokens)->check(CLI::Range(256, 1 << 20));
  app.add_option("--policy", settings.policies);
  app.add_option("--prefill", settings.prefill);
  app.add_option("--host-memory", settings.host_memory)->transform(CLI::AsSizeValue(false));
  app.add_option("--rounds", settings.rounds)->check(CLI::Range(1, 100));
  app.add_option("--json", settings.json)->required();
  CLI11_PARSE(app, argc, argv);
  try {
    nlohmann::json report = {{"command", "build/release/bin/saved_session_bench"}};
    for (int i = 1; i < argc; ++i) {
      report["command"] = report["command"].get<std::string>() + " " + argv[i];
    }
    report["tokens"] = settings.tokens;
    report["prefill"] = settings.prefill;
    settings.host_memory.resize(settings.policies.size(), settings.host_memory.back());
    for (std::size_t i = 0; i < settings.policies.size(); ++i) {
      Measurement measurement(settings, settings.policies[i], settings.host_memory[i]);
      report["policies"].push_back(measurement.run());
    }
    std::ofstream(settings.json) << report.dump(1) << "\n";
  } catch (const Error& error) {
    std::cerr << "saved_session_bench: " << error.what() << "\n";
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::run(argc, argv); }
