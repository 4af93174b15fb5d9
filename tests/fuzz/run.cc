#include "tests/fuzz/run.h"

#include <sys/time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/heap.h"
#include "tests/fuzz/mutator.h"

namespace sluice::fuzz {
namespace {

constexpr std::int64_t kMostHeap = std::int64_t{64} << 20;  // bytes, for one input
constexpr double kMostSeconds = 2.0;                        // of a core, for one input
constexpr int kHangSeconds = 20;                            // then the system ends the process
constexpr std::size_t kMostKept = 2048;                     // inputs

double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The system ends the process with SIGPROF after kHangSeconds of computing without another call.
void watch_for_hang() {
  const itimerval timer{{0, 0}, {kHangSeconds, 0}};
  ::setitimer(ITIMER_PROF, &timer, nullptr);
}

struct Seed {
  std::string name;
  std::string text;
};

std::vector<Seed> read_corpus(const std::filesystem::path& folder) {
  std::vector<Seed> seeds;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    seeds.push_back({entry.path().filename().string(), {std::istreambuf_iterator<char>(file), {}}});
  }
  require(!seeds.empty(), "the corpus has files");
  std::sort(seeds.begin(), seeds.end(),
            [](const Seed& a, const Seed& b) { return a.name < b.name; });
  return seeds;
}

// The kind of an answer: its text without numbers and quotes, which shows the path through the
// code.
std::size_t kind_of(const Answer& answer) {
  constexpr std::string_view kQuotes = "'\"";
  const std::size_t first = std::min(answer.text.find_first_of(kQuotes), answer.text.size());
  const std::size_t last = answer.text.find_last_of(kQuotes);
  std::string kind = (answer.accepted ? "+" : "-") + answer.text.substr(0, first);
  if (last != std::string::npos) kind += answer.text.substr(last);
  std::erase_if(kind, [](char c) { return c >= '0' && c <= '9'; });
  return std::hash<std::string>()(kind);
}

class Trial {
 public:
  Trial(const std::filesystem::path& folder, Current& current)
      : folder_(&folder), current_(&current) {
    text_.reserve(kMaxLength);
  }

  // The outcome of the last run; valid until the next.
  bool accepted() const { return accepted_; }
  const std::string& text() const { return text_; }
  std::size_t kind() const { return kind_; }
  double longest() const { return longest_; }  // seconds

  void run(std::string_view input) {
    current_->set(input);
    limit_heap(kMostHeap);
    watch_for_hang();
    const double start = cpu_seconds();
    // An input leaks if every run grows the heap. A first run may keep something for later ones.
    if (grows(input) && grows(input)) require(!grows(input), "an input leaves no memory behind");
    const double seconds = cpu_seconds() - start;
    longest_ = std::max(longest_, seconds);
    require(seconds < kMostSeconds,
            "an input takes little time, not " + std::to_string(seconds) + " s");
    ++current_->runs;
  }

 private:
  bool grows(std::string_view input) {
    const std::int64_t before = heap_bytes();
    {
      const Answer result = answer(input, *folder_);
      accepted_ = result.accepted;
      kind_ = kind_of(result);
      text_.assign(result.text, 0, kMaxLength);
    }
    return heap_bytes() > before;
  }

  const std::filesystem::path* folder_;
  Current* current_;
  bool accepted_ = false;
  std::string text_;
  std::size_t kind_ = 0;
  double longest_ = 0.0;
};

struct Counts {
  std::uint64_t accepted = 0;
  std::uint64_t refused = 0;
  double seconds = 0.0;
};

void print_summary(const Options& options, const Counts& counts, std::size_t kinds,
                   double longest) {
  const std::uint64_t runs = counts.accepted + counts.refused;
  std::printf(
      "%s: %llu runs in %.1f s (%.0f a second), %llu accepted, %llu refused, %zu kinds of answers, "
      "longest %.1f ms, seed %llu\n",
      options.name.c_str(), static_cast<unsigned long long>(runs), counts.seconds,
      static_cast<double>(runs) / counts.seconds, static_cast<unsigned long long>(counts.accepted),
      static_cast<unsigned long long>(counts.refused), kinds, 1e3 * longest,
      static_cast<unsigned long long>(options.seed));
}

}  // namespace

void Current::set(std::string_view input) {
  length = std::min(input.size(), kMaxLength);
  std::memcpy(bytes, input.data(), length);
}

void run_input(std::string_view input, const std::filesystem::path& folder, Current& current) {
  Trial trial(folder, current);
  trial.run(input);
  std::printf("%s: %s\n", trial.accepted() ? "accepted" : "refused", trial.text().c_str());
}

bool run(const Options& options, Current& current) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  Trial trial(options.folder, current);
  std::vector<std::string> pool;
  std::set<std::size_t> kinds;
  for (const Seed& seed : read_corpus(options.corpus)) {
    trial.run(seed.text);
    require(trial.accepted() != seed.name.starts_with("refused"),
            "a file of the corpus is accepted unless its name says otherwise: " + seed.name + ": " +
                trial.text());
    kinds.insert(trial.kind());
    pool.push_back(seed.text);
  }
  const std::size_t seeds = pool.size();

  Mutator mutator(pool, options.seed, options.max_length);
  const auto any = [&] { return pool[mutator.below(mutator.below(2) == 0 ? seeds : pool.size())]; };
  Counts counts;
  for (std::uint64_t i = 0; options.runs > 0 ? i < options.runs : seconds() < options.seconds;
       ++i) {
    const std::string input = mutator.mutate(any(), any());
    trial.run(input);
    ++(trial.accepted() ? counts.accepted : counts.refused);
    if (!kinds.insert(trial.kind()).second) continue;
    if (pool.size() < kMostKept) {
      pool.push_back(input);
    } else {
      pool[seeds + mutator.below(pool.size() - seeds)] = input;
    }
  }
  counts.seconds = seconds();
  print_summary(options, counts, kinds.size(), trial.longest());
  return counts.accepted > 0 && counts.refused > 0;
}

}  // namespace sluice::fuzz
