#include "tools/eval_tasks.h"

#include <algorithm>
#include <array>
#include <random>

#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice::tools {
namespace {

constexpr std::array<std::string_view, 16> kAdjectives = {
    "amber",  "silver", "crimson", "hidden", "quiet",  "golden", "broken", "distant",
    "frozen", "gentle", "hollow",  "iron",   "purple", "velvet", "wooden", "yellow"};
constexpr std::array<std::string_view, 16> kNouns = {
    "falcon", "river",  "castle", "lantern", "garden", "mountain", "whistle", "compass",
    "anchor", "bridge", "candle", "dragon",  "forest", "harbour",  "mirror",  "wagon"};

// Tokens of a passage that are quoted again: enough to be found by.
constexpr std::int64_t kQuoteTokens = 32;

// A generator whose sequence is the same with every standard library.
class Dice {
 public:
  Dice(std::uint64_t seed, int round) : engine_(seed * 1000003 + static_cast<unsigned>(round)) {}
  std::uint64_t below(std::uint64_t limit) { return engine_() % limit; }

 private:
  std::mt19937_64 engine_;
};

struct Needle {
  std::string name;
  std::string number;
};

// Needles whose names differ in both words.
std::vector<Needle> make_needles(Dice& dice, int count, int digits) {
  std::vector<Needle> needles;
  const std::uint64_t adjective = dice.below(kAdjectives.size());
  const std::uint64_t noun = dice.below(kNouns.size());
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(count); ++i) {
    Needle needle;
    needle.name = std::string(kAdjectives[(adjective + i) % kAdjectives.size()]) + " " +
                  std::string(kNouns[(noun + 3 * i) % kNouns.size()]);
    needle.number = std::to_string(1 + dice.below(9));
    while (static_cast<int>(needle.number.size()) < digits) {
      needle.number += std::to_string(dice.below(10));
    }
    needles.push_back(needle);
  }
  return needles;
}

void append(std::vector<TokenId>& to, const std::vector<TokenId>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

// The first line break at or after `at`, so that a needle gets a line of its own.
std::int64_t line_end(const Tokenizer& tokenizer, const std::vector<TokenId>& text,
                      std::int64_t at) {
  const auto size = static_cast<std::int64_t>(text.size());
  for (std::int64_t i = at; i < std::min(size, at + 400); ++i) {
    const std::string_view bytes = tokenizer.bytes(text[static_cast<std::size_t>(i)]);
    if (bytes.ends_with('\n')) return i + 1;
  }
  return std::min(at, size);
}

}  // namespace

void validate(const TaskOptions& options) {
  const auto require = [](bool holds, const char* message) {
    if (!holds) throw Error(ErrorCode::usage, message);
  };
  require(options.rounds >= 1 && options.rounds <= 10000, "--rounds must be 1 to 10000");
  require(options.needles >= 1 && options.needles <= 16, "--needles must be 1 to 16");
  require(options.digits >= 1 && options.digits <= 18, "--digits must be 1 to 18");
  require(options.tokens >= 1 && options.tokens <= 65536, "--tokens must be 1 to 65536");
  require(options.step_tokens >= 1 && options.step_tokens <= 64, "--step-tokens must be 1 to 64");
  require(options.context >= 16 && options.context <= (std::int64_t{1} << 30),
          "--length must be 16 to 1073741824");
}

std::string_view to_string(Task task) {
  switch (task) {
    case Task::needle:
      return "needle";
    case Task::perplexity:
      return "perplexity";
    case Task::agreement:
      return "agreement";
    case Task::repetition:
      return "repetition";
  }
  check(false, "unknown task");
  return {};
}

PassageBuilder::PassageBuilder(const Tokenizer& tokenizer, std::vector<TokenId> prefix,
                               std::string_view text, const TaskOptions& options)
    : tokenizer_(&tokenizer),
      prefix_(std::move(prefix)),
      text_(tokenizer.encode(text)),
      options_(options) {
  // Something to read, and something to predict.
  const auto shortest = static_cast<std::int64_t>(prefix_.size()) + 2;
  if (options.context < shortest) {
    throw Error(ErrorCode::usage, "--length " + std::to_string(options.context) +
                                      " is too short: the tokenizer puts " +
                                      std::to_string(prefix_.size()) +
                                      " tokens in front of every text, so it must be at least " +
                                      std::to_string(shortest));
  }
  const std::int64_t least = options.context + options.tokens + 1;
  if (static_cast<std::int64_t>(text_.size()) < least) {
    throw Error(ErrorCode::prompt, "--text has " + std::to_string(text_.size()) +
                                       " tokens, but contexts of " +
                                       std::to_string(options.context) + " need at least " +
                                       std::to_string(least) + "; give a longer text");
  }
}

std::vector<TokenId> PassageBuilder::stretch(int round, std::int64_t count) const {
  const auto size = static_cast<std::int64_t>(text_.size());
  const std::int64_t room = size - count;
  // Spread evenly, so that few rounds do not overlap.
  const std::int64_t first =
      options_.rounds > 1 ? room * (round % options_.rounds) / (options_.rounds - 1) : room / 2;
  return {text_.begin() + first, text_.begin() + first + count};
}

Passage PassageBuilder::needles(int round) const {
  Dice dice(options_.seed, round);
  const std::vector<Needle> needles = make_needles(dice, options_.needles, options_.digits);
  std::vector<std::vector<TokenId>> lines;
  std::int64_t planted = 0;
  for (const Needle& needle : needles) {
    lines.push_back(tokenizer_->encode("The secret number of the " + needle.name + " is " +
                                       needle.number + ". Remember it.\n"));
    planted += static_cast<std::int64_t>(lines.back().size());
  }
  const auto prefix = static_cast<std::int64_t>(prefix_.size());
  const std::int64_t plain = options_.context - planted - prefix;
  if (plain < 8 * options_.needles) {
    throw Error(ErrorCode::usage, "a context of " + std::to_string(options_.context) +
                                      " tokens is too short for " +
                                      std::to_string(options_.needles) + " needles");
  }
  const std::vector<TokenId> hay = stretch(round, plain);
  Passage passage;
  passage.context = prefix_;
  std::int64_t taken = 0;
  for (int i = 0; i < options_.needles; ++i) {
    // One needle in each of as many equal parts, anywhere in it.
    const std::int64_t part = plain / options_.needles;
    const auto offset = static_cast<std::int64_t>(dice.below(static_cast<std::uint64_t>(part)));
    const std::int64_t at =
        std::max(taken, std::min(line_end(*tokenizer_, hay, i * part + offset), plain));
    passage.context.insert(passage.context.end(), hay.begin() + taken, hay.begin() + at);
    taken = at;
    append(passage.context, lines[static_cast<std::size_t>(i)]);

    const Needle& needle = needles[static_cast<std::size_t>(i)];
    Probe probe;
    probe.depth = static_cast<double>(at) / static_cast<double>(plain);
    probe.tokens = tokenizer_->encode("\nQuestion: What is the secret number of the " +
                                      needle.name + "?\nAnswer: ");
    probe.scored = probe.tokens.size() - 1;
    probe.targets = tokenizer_->encode(needle.number);
    probe.tokens.insert(probe.tokens.end(), probe.targets.begin(), probe.targets.end() - 1);
    passage.probes.push_back(probe);
  }
  passage.context.insert(passage.context.end(), hay.begin() + taken, hay.end());
  return passage;
}

Passage PassageBuilder::perplexity(int round) const {
  const auto prefix = static_cast<std::int64_t>(prefix_.size());
  const std::int64_t count = options_.context - prefix;
  const std::vector<TokenId> tokens = stretch(round, count + 1);
  const std::int64_t split = std::max<std::int64_t>(1, count - options_.tokens);
  Passage passage;
  passage.context = prefix_;
  passage.context.insert(passage.context.end(), tokens.begin(), tokens.begin() + split);
  Probe probe;
  probe.tokens.assign(tokens.begin() + split, tokens.end() - 1);
  probe.targets.assign(tokens.begin() + split + 1, tokens.end());
  probe.depth = 1.0;
  passage.probes.push_back(probe);
  return passage;
}

Passage PassageBuilder::repetition(int round) const {
  Dice dice(options_.seed + 7, round);
  const auto prefix = static_cast<std::int64_t>(prefix_.size());
  const std::int64_t count = options_.context - prefix;
  const std::vector<TokenId> tokens = stretch(round, count);
  Passage passage;
  passage.context = prefix_;
  append(passage.context, tokens);
  const std::int64_t length = kQuoteTokens + options_.tokens;
  for (int i = 0; i < options_.needles; ++i) {
    const std::int64_t part = (count - length) / options_.needles;
    if (part < 1) {
      throw Error(ErrorCode::usage, "a context of " + std::to_string(options_.context) +
                                        " tokens is too short for repetitions of " +
                                        std::to_string(length));
    }
    const std::int64_t at =
        i * part + static_cast<std::int64_t>(dice.below(static_cast<std::uint64_t>(part)));
    Probe probe;
    probe.depth = static_cast<double>(at) / static_cast<double>(count);
    probe.scored = kQuoteTokens - 1;
    probe.tokens.assign(tokens.begin() + at, tokens.begin() + at + length - 1);
    probe.targets.assign(tokens.begin() + at + kQuoteTokens, tokens.begin() + at + length);
    passage.probes.push_back(probe);
  }
  return passage;
}

Passage PassageBuilder::build(Task task, int round) const {
  switch (task) {
    case Task::needle:
      return needles(round);
    case Task::perplexity:
    case Task::agreement:
      return perplexity(round);
    case Task::repetition:
      return repetition(round);
  }
  check(false, "unknown task");
  return {};
}

}  // namespace sluice::tools
