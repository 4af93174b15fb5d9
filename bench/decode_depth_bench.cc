// Decoding behind more and more tokens of a book, under several policies, one after the other. Each
// policy has its own plan and sessions, gets the whole cap and reads the book itself. With
// --sequences N a step decodes one token of each of N sequences, which start at different offsets
// of the book and have 1/N, 2/N ... N/N of the depth, or with --equal all of it. They share rows
// for as many tokens as they need, or for --pool-tokens, which suffice if prompts evict.
//
//   decode_depth_bench [--model DIR] [--weights int8|int4] [--kv-dtype int8] [--device cuda]
//                      [--device-memory BYTES] [--host-memory BYTES] [--row-cache BYTES]
//                      [--tokens N...] [--sequences N] [--equal] [--pool-tokens N]
//                      [--policy LINE...] [--chunk N] [--warm-up STEPS] [--benchmark_out=FILE ...]
//
// Warm-up steps fill the row cache, if there is one, before the timed steps.
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

#include "engine/utf8.h"
#include "sluice/engine.h"
#include "sluice/format_names.h"

namespace sluice {
namespace {

constexpr std::int64_t kBytesPerToken = 6;  // upper bound for English

struct Settings {
  std::filesystem::path model = std::filesystem::path(SLUICE_SOURCE_DIR) / "models/sluice-22m";
  std::filesystem::path text = std::filesystem::path(SLUICE_SOURCE_DIR) / "data/war-and-peace.txt";
  std::string device = "cpu";
  std::optional<WeightFormat> weights;
  RowFormat kv_dtype = DType::bf16;
  std::optional<std::uint64_t> device_memory;
  std::optional<std::uint64_t> host_memory;
  std::optional<std::uint64_t> row_cache;
  int chunk = 0;
  int sequences = 1;
  bool equal = false;
  std::optional<std::int64_t> pool_tokens;
  std::int64_t warm_up = 0;
  std::int64_t steps = 32;
  std::vector<std::int64_t> tokens = {8 << 10, 32 << 10, 128 << 10};
  std::vector<std::string> policies = {"dense", "values", "sluice", "sparq", "twilight"};
};

// Rows and bytes that decoding read, by tier.
struct Reads {
  std::uint64_t found = 0;          // rows, on the device or in the only tier
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

// The model, and the book it reads.
struct Library {
  Engine engine;
  std::vector<TokenId> ids;
};

// Tokens that a sequence needs room for.
std::int64_t context_of(const Settings& settings) {
  return *std::max_element(settings.tokens.begin(), settings.tokens.end()) + settings.warm_up +
         settings.steps;
}

Library open(const Settings& settings) {
  EngineConfig config;
  config.model = settings.model;
  config.device = settings.device;
  config.weights = settings.weights;
  config.kv_dtype = settings.kv_dtype;
  config.device_memory = settings.device_memory;
  config.host_memory = settings.host_memory;
  config.row_cache = settings.row_cache;
  config.chunk = settings.chunk;
  Library library{Engine::open(config), {}};
  std::ifstream file(settings.text);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const std::int64_t context = context_of(settings);
  // Twice the bytes of one sequence, because sequences start at different offsets.
  const auto bytes = static_cast<std::size_t>(2 * kBytesPerToken * context);
  std::string part = text.substr(0, bytes);  // may end within a character
  library.ids = library.engine.encode_prompt(take_valid_utf8(part));
  if (std::ssize(library.ids) < context) {
    throw Error(ErrorCode::usage, "--text has too few tokens");
  }
  return library;
}

// Sessions under one policy that have read the first tokens of a book, each from its own offset.
class Readers {
 public:
  Readers(const Settings& settings, Library& library, const std::string& policy)
      : settings_(settings), library_(library), policy_(policy) {
    const SessionOptions wanted = options(settings, policy);
    std::cerr << policy << "\n" << library.engine.plan(wanted).to_table();
    sessions_.push_back(library.engine.new_session(wanted));
    while (std::ssize(sessions_) < settings.sequences) {
      sessions_.push_back(sessions_.front().sibling());
    }
  }

  // Reads on, or rewinds, to `tokens`.
  void go_to(std::int64_t tokens) {
    for (std::size_t i = 0; i < sessions_.size(); ++i) {
      const auto share = settings_.equal ? settings_.sequences : static_cast<std::int64_t>(i + 1);
      const std::int64_t depth = tokens * share / settings_.sequences;
      Session& session = sessions_[i];
      if (session.length() > depth) session.truncate(depth);
      if (session.length() == depth) continue;
      session.prefill(
          from(i, session.length()).first(static_cast<std::size_t>(depth - session.length())));
      std::cerr << "read " << depth << " tokens\n";  // may take minutes
    }
  }
  // Decodes the next token of the book in each session.
  void decode() {
    if (sessions_.size() == 1) {
      sessions_[0].decode(next(0), sampler_, {});
      return;
    }
    std::vector<StepToken> tokens;
    for (std::size_t i = 0; i < sessions_.size(); ++i) {
      tokens.push_back({&sessions_[i], next(i), &sampler_});
    }
    for (const StepResult& result : library_.engine.step(tokens)) {
      if (result.error) throw Error(*result.error);
    }
  }
  Reads reads() const {
    Reads reads;
    for (const Session& session : sessions_) reads.add(session.ledger());
    return reads;
  }
  const std::string& policy() const { return policy_; }

 private:
  // Options to decode behind the deepest prompt.
  static SessionOptions options(const Settings& settings, const std::string& policy) {
    SessionOptions options;
    const std::int64_t decoded = settings.warm_up + settings.steps;
    options.context = context_of(settings);
    const std::int64_t longest = options.context - decoded;
    options.sequences = settings.sequences;
    const std::int64_t prompts =
        settings.equal ? longest * settings.sequences : longest * (settings.sequences + 1) / 2;
    options.tokens = settings.pool_tokens.value_or(
        std::min(options.context * settings.sequences,
                 prompts + (decoded + kPageTokens) * settings.sequences));
    options.policies = {parse_policy(policy)};
    return options;
  }
  // The book from `position` of session i.
  std::span<const TokenId> from(std::size_t i, std::int64_t position) const {
    const std::size_t distance =
        (library_.ids.size() - static_cast<std::size_t>(context_of(settings_))) / sessions_.size();
    return std::span(library_.ids).subspan(i * distance + static_cast<std::size_t>(position));
  }
  TokenId next(std::size_t i) const { return from(i, sessions_[i].length()).front(); }

  const Settings& settings_;
  Library& library_;
  std::string policy_;
  std::vector<Session> sessions_;
  Sampler sampler_{SamplingParams{}};
};

// `readers` belong to the policy of the last benchmark.
void decode(benchmark::State& state, std::optional<Readers>& readers, const Settings& settings,
            Library& library, std::int64_t tokens, const std::string& policy) {
  try {
    if (!readers || readers->policy() != policy) {
      readers.reset();  // first, because both at once would share a cap
      readers.emplace(settings, library, policy);
    }
    readers->go_to(tokens);
    for (std::int64_t i = 0; i < settings.warm_up; ++i) readers->decode();
    const Reads before = readers->reads();
    for (auto _ : state) readers->decode();
    const Reads after = readers->reads();
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
  app.add_option_function<std::string>("--weights",
                                       [&settings](const std::string& name) {
                                         settings.weights =
                                             name == "int8" ? WeightCode::int8 : WeightCode::int4;
                                       })
      ->check(CLI::IsMember({"int8", "int4"}));
  app.add_option_function<std::string>("--kv-dtype",
                                       [&settings](const std::string& name) {
                                         settings.kv_dtype = parse_row_format(name, "--kv-dtype");
                                       })
      ->check(CLI::IsMember(row_format_names()));
  app.add_option("--device-memory", settings.device_memory)->transform(CLI::AsSizeValue(false));
  app.add_option("--host-memory", settings.host_memory)->transform(CLI::AsSizeValue(false));
  app.add_option("--row-cache", settings.row_cache)->transform(CLI::AsSizeValue(false));
  app.add_option("--chunk", settings.chunk);
  app.add_option("--sequences", settings.sequences)->check(CLI::Range(1, 64));
  app.add_flag("--equal", settings.equal);
  app.add_option("--pool-tokens", settings.pool_tokens)->check(CLI::PositiveNumber);
  app.add_option("--warm-up", settings.warm_up)->check(CLI::NonNegativeNumber);
  app.add_option("--steps", settings.steps)->check(CLI::PositiveNumber);
  app.add_option("--tokens", settings.tokens)->check(CLI::PositiveNumber);
  app.add_option("--policy", settings.policies);
  CLI11_PARSE(app, argc, argv);
  try {
    Library library = open(settings);
    std::optional<Readers> readers;
    for (const std::string& policy : settings.policies) {
      for (const std::int64_t tokens : settings.tokens) {
        benchmark::RegisterBenchmark(
            ("decode/" + policy + "/tokens:" + std::to_string(tokens)).c_str(),
            [&, tokens, policy](benchmark::State& state) {
              decode(state, readers, settings, library, tokens, policy);
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
