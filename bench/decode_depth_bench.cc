// Decoding sluice-22m behind more and more of a book, under several policies: one prompt, read
// piece by piece, serves all of them. On the CPU, with all rows at hand.
#include <benchmark/benchmark.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "sluice/engine.h"

namespace sluice {
namespace {

constexpr std::int64_t kDecoded = 32;
constexpr std::int64_t kContext = 128 * 1024 + kDecoded;

// A session that has read the first tokens of War and Peace.
class Reader {
 public:
  explicit Reader(std::span<const std::string> policies)
      : engine_(open()), ids_(ids_of(engine_)), session_(engine_.new_session(options(policies))) {}

  // Reads on to `tokens`, or goes back to there.
  void go_to(std::int64_t tokens) {
    if (session_.length() > tokens) session_.truncate(tokens);
    session_.use(parse_policy("dense"));
    if (session_.length() == tokens) return;
    session_.prefill(from(session_.length(), tokens));
    std::cerr << "read " << tokens << " tokens\n";  // which takes minutes
  }
  void use(const std::string& policy) { session_.use(parse_policy(policy)); }
  // The next token of the book.
  void decode() { session_.decode(ids_[static_cast<std::size_t>(session_.length())]); }
  // By decoding: rows, key index and value tiles.
  std::uint64_t bytes_read() const {
    std::uint64_t bytes = 0;
    for (const Cause cause : {Cause::hit, Cause::index_read, Cause::value_read}) {
      bytes += session_.ledger().total(Phase::decode, Tier::host, Tier::host, cause).bytes;
    }
    return bytes;
  }

 private:
  static Engine open() {
    EngineConfig config;
    config.model = std::filesystem::path(SLUICE_SOURCE_DIR) / "models/sluice-22m";
    return Engine::open(config);
  }
  static std::vector<TokenId> ids_of(const Engine& engine) {
    std::ifstream file(std::filesystem::path(SLUICE_SOURCE_DIR) / "data/war-and-peace.txt");
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    return engine.encode_prompt(text.substr(0, std::size_t{6} * kContext));
  }
  static SessionOptions options(std::span<const std::string> policies) {
    SessionOptions options;
    options.context = kContext;
    for (const std::string& policy : policies) options.policies.push_back(parse_policy(policy));
    return options;
  }
  std::span<const TokenId> from(std::int64_t first, std::int64_t end) const {
    return std::span(ids_).subspan(static_cast<std::size_t>(first),
                                   static_cast<std::size_t>(end - first));
  }

  Engine engine_;
  std::vector<TokenId> ids_;
  Session session_;
};

const std::vector<std::string>& policies() {
  static const std::vector<std::string> all = {"dense", "values", "sluice", "sparq", "twilight"};
  return all;
}

// Arguments: tokens, number of the policy.
void decode(benchmark::State& state) {
  static Reader reader(policies());
  const std::string& policy = policies()[static_cast<std::size_t>(state.range(1))];
  reader.go_to(state.range(0));
  reader.use(policy);
  const std::uint64_t before = reader.bytes_read();
  for (auto _ : state) reader.decode();
  state.SetLabel(policy);
  state.counters["bytes_read"] =
      static_cast<double>(reader.bytes_read() - before) / static_cast<double>(state.iterations());
}

void depths(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"tokens", "policy"});
  for (const std::int64_t tokens : {8 << 10, 32 << 10, 128 << 10}) {
    for (std::int64_t policy = 0; policy < std::ssize(policies()); ++policy) {
      bench->Args({tokens, policy});
    }
  }
  bench->Iterations(kDecoded)->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK(decode)->Apply(depths);

}  // namespace
}  // namespace sluice
