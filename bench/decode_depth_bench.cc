// Decoding behind more and more of a book, under several policies: one prompt, read piece by piece,
// serves all of them. With --sequences a step has a token of each of so many sequences, which read
// the book from different places on, 1/n, 2/n ... n/n of the depth.
//
//   decode_depth_bench [--model DIR] [--device cuda] [--device-memory BYTES] [--row-cache BYTES]
//                      [--tokens N...] [--sequences N] [--policy LINE...] [--chunk N]
//                      [--warm-up STEPS] [--benchmark_out=FILE ...]
//
// What a cap leaves is shared out among all policies of a run: one alone may have more of it.
// Steps before those that are timed fill the row cache, if there is one.
#include <benchmark/benchmark.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/engine.h"

namespace sluice {
namespace {

constexpr std::int64_t kBytesPerToken = 6;  // of English, at the most

struct Settings {
  std::filesystem::path model = std::filesystem::path(SLUICE_SOURCE_DIR) / "models/sluice-22m";
  std::filesystem::path text = std::filesystem::path(SLUICE_SOURCE_DIR) / "data/war-and-peace.txt";
  std::string device = "cpu";
  std::optional<std::uint64_t> device_memory;
  std::optional<std::uint64_t> row_cache;
  int chunk = 0;
  int sequences = 1;
  std::int64_t warm_up = 0;
  std::int64_t steps = 32;
  std::vector<std::int64_t> tokens = {8 << 10, 32 << 10, 128 << 10};
  std::vector<std::string> policies = {"dense", "values", "sluice", "sparq", "twilight"};
};

// What decoding read, and from where.
struct Reads {
  std::uint64_t found = 0;          // rows, on the device or in the only tier that there is
  std::uint64_t fetched = 0;        // rows
  std::uint64_t fetched_bytes = 0;  // of rows
  std::uint64_t read_bytes = 0;     // of rows, key index and value tiles

  void add(const Ledger& ledger) {
    for (const Tier tier : {Tier::host, Tier::device}) {
      for (const Cause cause : {Cause::hit, Cause::index_read, Cause::value_read}) {
        const Traffic traffic = ledger.total(Phase::decode, tier, tier, cause);
        read_bytes += traffic.bytes;
        if (cause == Cause::hit) found += traffic.rows;
      }
    }
    const Traffic missed = ledger.total(Phase::decode, Tier::host, Tier::device, Cause::miss);
    fetched += missed.rows;
    fetched_bytes += missed.bytes;
    read_bytes += missed.bytes;
  }
};

// Sessions that have read the first tokens of a book, each from another place.
class Readers {
 public:
  explicit Readers(const Settings& settings)
      : settings_(settings), engine_(open(settings)), ids_(ids_of(settings, engine_)) {
    std::cerr << engine_.plan(options(settings)).to_table();
    sessions_.push_back(engine_.new_session(options(settings)));
    while (std::ssize(sessions_) < settings.sequences) {
      sessions_.push_back(sessions_.front().sibling());
    }
  }

  // Reads on to `tokens`, or goes back to there.
  void go_to(std::int64_t tokens) {
    for (std::size_t i = 0; i < sessions_.size(); ++i) {
      const std::int64_t depth = tokens * static_cast<std::int64_t>(i + 1) / settings_.sequences;
      Session& session = sessions_[i];
      if (session.length() > depth) session.truncate(depth);
      session.use(parse_policy(settings_.policies.front()));  // prompts are dense in all of them
      if (session.length() == depth) continue;
      session.prefill(
          from(i, session.length()).first(static_cast<std::size_t>(depth - session.length())));
      std::cerr << "read " << depth << " tokens\n";  // which may take minutes
    }
  }
  void use(const std::string& policy) {
    for (Session& session : sessions_) session.use(parse_policy(policy));
  }
  // The next token of the book, each.
  void decode() {
    if (sessions_.size() == 1) {
      sessions_[0].decode(next(0), sampler_, {});
      return;
    }
    std::vector<StepToken> tokens;
    for (std::size_t i = 0; i < sessions_.size(); ++i) {
      tokens.push_back({&sessions_[i], next(i), &sampler_});
    }
    for (const StepResult& result : engine_.step(tokens)) {
      if (result.error) throw Error(*result.error);
    }
  }
  Reads reads() const {
    Reads reads;
    for (const Session& session : sessions_) reads.add(session.ledger());
    return reads;
  }
  // What is needed to decode so far behind the deepest prompt.
  static SessionOptions options(const Settings& settings) {
    SessionOptions options;
    const std::int64_t decoded = settings.warm_up + settings.steps;
    const std::int64_t longest = *std::max_element(settings.tokens.begin(), settings.tokens.end());
    options.context = longest + decoded;
    options.sequences = settings.sequences;
    options.tokens = std::min(
        options.context * settings.sequences,
        longest * (settings.sequences + 1) / 2 + (decoded + kPageTokens) * settings.sequences);
    for (const std::string& policy : settings.policies) {
      options.policies.push_back(parse_policy(policy));
    }
    return options;
  }

 private:
  static Engine open(const Settings& settings) {
    EngineConfig config;
    config.model = settings.model;
    config.device = settings.device;
    config.device_memory = settings.device_memory;
    config.row_cache = settings.row_cache;
    config.chunk = settings.chunk;
    return Engine::open(config);
  }
  static std::vector<TokenId> ids_of(const Settings& settings, const Engine& engine) {
    std::ifstream file(settings.text);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const std::int64_t context = options(settings).context;
    // Twice as much as one reads: sequences begin at different places.
    const auto bytes = static_cast<std::size_t>(2 * kBytesPerToken * context);
    std::vector<TokenId> ids = engine.encode_prompt(text.substr(0, bytes));
    if (std::ssize(ids) < context) throw Error(ErrorCode::usage, "--text has too few tokens");
    return ids;
  }
  // The book from a position of session i on.
  std::span<const TokenId> from(std::size_t i, std::int64_t position) const {
    const std::size_t distance =
        (ids_.size() - static_cast<std::size_t>(options(settings_).context)) / sessions_.size();
    return std::span(ids_).subspan(i * distance + static_cast<std::size_t>(position));
  }
  TokenId next(std::size_t i) const { return from(i, sessions_[i].length()).front(); }

  Settings settings_;
  Engine engine_;
  std::vector<TokenId> ids_;
  std::vector<Session> sessions_;
  Sampler sampler_{SamplingParams{}};
};

void decode(benchmark::State& state, Readers& readers, const Settings& settings,
            std::int64_t tokens, const std::string& policy) {
  try {
    readers.go_to(tokens);
    readers.use(policy);
    for (std::int64_t i = 0; i < settings.warm_up; ++i) readers.decode();
    const Reads before = readers.reads();
    for (auto _ : state) readers.decode();
    const Reads after = readers.reads();
    const auto per_step = [&](std::uint64_t from, std::uint64_t to) {
      return static_cast<double>(to - from) / static_cast<double>(state.iterations());
    };
    state.counters["rows_found"] = per_step(before.found, after.found);
    state.counters["rows_fetched"] = per_step(before.fetched, after.fetched);
    state.counters["fetched_bytes"] = per_step(before.fetched_bytes, after.fetched_bytes);
    state.counters["bytes_read"] = per_step(before.read_bytes, after.read_bytes);
  } catch (const Error& error) {
    state.SkipWithError(error.what());
  }
}

int run(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  Settings settings;
  CLI::App app("Decoding behind more and more of a book.");
  app.add_option("-m,--model", settings.model);
  app.add_option("--text", settings.text);
  app.add_option("--device", settings.device);
  app.add_option("--device-memory", settings.device_memory)->transform(CLI::AsSizeValue(false));
  app.add_option("--row-cache", settings.row_cache)->transform(CLI::AsSizeValue(false));
  app.add_option("--chunk", settings.chunk);
  app.add_option("--sequences", settings.sequences)->check(CLI::Range(1, 64));
  app.add_option("--warm-up", settings.warm_up)->check(CLI::NonNegativeNumber);
  app.add_option("--steps", settings.steps)->check(CLI::PositiveNumber);
  app.add_option("--tokens", settings.tokens)->check(CLI::PositiveNumber);
  app.add_option("--policy", settings.policies);
  CLI11_PARSE(app, argc, argv);
  try {
    Readers readers(settings);
    for (const std::int64_t tokens : settings.tokens) {
      for (const std::string& policy : settings.policies) {
        benchmark::RegisterBenchmark(
            ("decode/" + policy + "/tokens:" + std::to_string(tokens)).c_str(),
            [&, tokens, policy](benchmark::State& state) {
              decode(state, readers, settings, tokens, policy);
            })
            ->Iterations(settings.steps)
            ->UseRealTime()
            ->Unit(benchmark::kMillisecond);
      }
    }
    benchmark::RunSpecifiedBenchmarks();
  } catch (const Error& error) {
    std::cerr << "decode_depth_bench: " << error.what() << "\n";
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::run(argc, argv); }
