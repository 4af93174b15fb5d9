// Tasks of `sluice eval`: a long context, and after it questions or a continuation, the same ones
// for every policy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/tokenizer.h"
#include "sluice/types.h"
#include "tools/eval_score.h"

namespace sluice::tools {

// A string that a right answer contains.
struct Fact {
  std::string text;
  double depth = 0.0;  // where in the context it stands, 0 to 1
};

// Tokens given to the model, and the expected answer.
struct Turn {
  std::vector<TokenId> given;   // at least one
  std::vector<TokenId> answer;  // as it should be; own answers are as long
  std::vector<Fact> facts;      // scored, anywhere in the answer; a continuation has none
  std::size_t length = 0;       // of own answers, in tokens, if there is no `answer`

  std::size_t answer_tokens() const { return answer.empty() ? length : answer.size(); }
};

// Turns behind a context: each begins where the answer before it ended.
struct Probe {
  std::vector<Turn> turns;
  Reference reference = {};  // of a file's question, whose answer is scored as a whole
};

// The source of the answers fed to every policy, so that likelihoods are of the same tokens.
enum class Writer : std::uint8_t {
  text,   // the right ones
  dense,  // what dense attention finds likeliest
  drawn,  // drawn from dense attention's distribution, because greedy tokens soon repeat
};

struct Passage {
  std::vector<TokenId> context;
  std::vector<Probe> probes;  // each of them follows the context, not the probe before
  Writer writer = Writer::text;
  std::vector<TokenId> ends;  // that end an own answer before its length
};

// Upper bound of a text that contexts are cut from.
inline constexpr std::uint64_t kMaxTextBytes = std::uint64_t{1} << 30;

struct TaskOptions {
  std::int64_t context = 8192;  // tokens of every passage
  int rounds = 4;               // passages
  int needles = 8;              // per passage
  int digits = 6;               // of a needle's number
  int tokens = 256;             // of a continuation or a repetition
  // Known tokens per decode step. More are faster; layers that attend densely then read rows once
  // for all of them, which the ledger shows.
  int step_tokens = 1;
  std::uint64_t seed = 1;
};

// Throws Error{usage} naming the flag and the accepted range.
void validate(const TaskOptions& options);

// In the order of kTaskNames. Names are those of RULER (Hsieh et al. 2024), section 3, and, for
// `multiturn`, of what SCBench (Li et al. 2024) asks on one shared context.
enum class Task : std::uint8_t {
  needle,             // numbers of things whose names differ in both words
  multikey,           // of things whose names differ in one word only
  multivalue,         // all numbers of one thing
  multiquery,         // the numbers of all things, in one answer
  multiturn,          // the same, by questions in turn
  variable_tracking,  // a number that has to be followed from thing to thing
  common_words,       // the most common words of a list
  perplexity,         // how likely the text's own continuation is
  agreement,          // the same; only compared with dense attention
  drift,              // a continuation of dense attention's own
  repetition,         // a passage of the context, word by word
  ruler,              // lines of a file; see tools/eval_data.h
  longbench,          // the same in another form
};
// Of the tasks that are made out of a text.
inline constexpr std::array<std::string_view, 11> kTaskNames = {
    "needle",       "multikey",   "multivalue", "multiquery", "multiturn", "variable_tracking",
    "common_words", "perplexity", "agreement",  "drift",      "repetition"};
std::string_view to_string(Task task);
// Returns true if answers are right or wrong.
bool has_facts(Task task);
// Returns true if answers have a score from 0 to 1.
bool has_score(Task task);

struct Question;

// Builds passages out of one text, the same ones for the same options.
class PassageBuilder {
 public:
  // Throws Error{prompt} if `text` has fewer tokens than a passage needs.
  PassageBuilder(const Tokenizer& tokenizer, std::vector<TokenId> prefix, std::string_view text,
                 const TaskOptions& options);

  // Throws Error{usage} if the task does not fit the context, Error{prompt} if the text has too few
  // words for common_words.
  Passage build(Task task, int round) const;

 private:
  Turn turn_of(const Question& question, const std::vector<double>& depths) const;
  Passage questions(Task task, int round) const;
  Passage words(int round) const;
  Passage continuation(Task task, int round) const;
  Passage repetition(int round) const;
  // `count` tokens of the text, a different stretch for every round.
  std::vector<TokenId> stretch(int round, std::int64_t count) const;
  // Tokens of a context minus the prefix that the tokenizer adds.
  std::int64_t room() const;

  const Tokenizer* tokenizer_;
  std::vector<TokenId> prefix_;
  std::vector<TokenId> text_;
  TaskOptions options_;
};

}  // namespace sluice::tools
