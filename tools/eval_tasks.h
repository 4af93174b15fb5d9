// What `sluice eval` asks: a long context, and after it short continuations that are known in
// advance, so that every policy answers the same questions about the same prefix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/tokenizer.h"
#include "sluice/types.h"

namespace sluice::tools {

// A continuation of a passage. After token `scored + i` of `tokens` the model should say
// `targets[i]`; those are tokens themselves, but for the last.
struct Probe {
  std::vector<TokenId> tokens;
  std::size_t scored = 0;
  std::vector<TokenId> targets;
  double depth = 0.0;  // where in the context the answer lies, 0 to 1
};

struct Passage {
  std::vector<TokenId> context;
  std::vector<Probe> probes;
};

// Of a text that contexts are cut from.
inline constexpr std::uint64_t kMaxTextBytes = std::uint64_t{1} << 30;

struct TaskOptions {
  std::int64_t context = 8192;  // tokens of every passage
  int rounds = 4;               // passages
  int needles = 8;              // per passage
  int digits = 6;               // of a needle's number
  int tokens = 256;             // that perplexity is measured over, and a repetition's length
  // Known tokens per decode step. More are faster; layers that attend densely then read rows once
  // for all of them, which the ledger shows.
  int step_tokens = 1;
  std::uint64_t seed = 1;
};

// Throws Error{usage} naming the flag and the accepted range.
void validate(const TaskOptions& options);

// Perplexity and agreement ask the same, and tell different things of the answers.
enum class Task : std::uint8_t { needle, perplexity, agreement, repetition };
std::string_view to_string(Task task);

// Builds passages out of one text, the same ones for the same options.
class PassageBuilder {
 public:
  // Throws Error{prompt} if `text` has fewer tokens than a passage needs.
  PassageBuilder(const Tokenizer& tokenizer, std::vector<TokenId> prefix, std::string_view text,
                 const TaskOptions& options);

  Passage build(Task task, int round) const;

 private:
  Passage needles(int round) const;
  Passage perplexity(int round) const;
  Passage repetition(int round) const;
  // `count` tokens of the text, a stretch of its own for every round.
  std::vector<TokenId> stretch(int round, std::int64_t count) const;

  const Tokenizer* tokenizer_;
  std::vector<TokenId> prefix_;
  std::vector<TokenId> text_;
  TaskOptions options_;
};

}  // namespace sluice::tools
