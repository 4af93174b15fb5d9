#include "tools/eval_tasks.h"

#include <algorithm>

#include "lib/check.h"
#include "sluice/errors.h"
#include "tools/eval_questions.h"

namespace sluice::tools {
namespace {

// Tokens of a passage that are quoted again: enough to identify the passage.
constexpr std::int64_t kQuoteTokens = 32;
// Occurrences of a common word in a list, and of a rare one (as in RULER).
constexpr std::int64_t kCommon = 30;
constexpr std::int64_t kRare = 3;

void append(std::vector<TokenId>& to, const std::vector<TokenId>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

[[noreturn]] void refuse_length(Task task, const TaskOptions& options, const std::string& why) {
  throw Error(ErrorCode::usage, "--length " + std::to_string(options.context) +
                                    " is too short for --task " + std::string(to_string(task)) +
                                    ": " + why);
}

std::int64_t size_of(const std::vector<TokenId>& tokens) {
  return static_cast<std::int64_t>(tokens.size());
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

struct WordList {
  std::vector<std::size_t> places;  // index of the word at each place of the list
  std::size_t words = 0;            // distinct words in the list
};

// Lists words in order, the first `common` of them more often, until one does not fit into `room`
// tokens.
WordList fill(const std::vector<std::vector<TokenId>>& pieces, std::size_t common,
              std::int64_t times, std::int64_t room) {
  WordList list;
  for (; list.words < pieces.size(); ++list.words) {
    const std::int64_t repeats = times * (list.words < common ? kCommon : kRare);
    const std::int64_t tokens = repeats * size_of(pieces[list.words]);
    if (tokens > room) break;
    list.places.insert(list.places.end(), static_cast<std::size_t>(repeats), list.words);
    room -= tokens;
  }
  return list;
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
  if (task == Task::ruler) return "ruler";
  if (task == Task::longbench) return "longbench";
  return kTaskNames.at(static_cast<std::size_t>(task));
}

bool has_facts(Task task) { return task <= Task::common_words; }
bool has_score(Task task) { return task == Task::ruler || task == Task::longbench; }

PassageBuilder::PassageBuilder(const Tokenizer& tokenizer, std::vector<TokenId> prefix,
                               std::string_view text, const TaskOptions& options)
    : tokenizer_(&tokenizer),
      prefix_(std::move(prefix)),
      text_(tokenizer.encode(text)),
      options_(options) {
  // At least one token to read and one to predict.
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
  // Offsets are spread evenly, so that few rounds do not overlap.
  const std::int64_t first =
      options_.rounds > 1 ? room * (round % options_.rounds) / (options_.rounds - 1) : room / 2;
  return {text_.begin() + first, text_.begin() + first + count};
}

std::int64_t PassageBuilder::room() const { return options_.context - size_of(prefix_); }

Turn PassageBuilder::turn_of(const Question& question, const std::vector<double>& depths) const {
  Turn turn;
  turn.given = tokenizer_->encode(question.given);
  turn.answer = tokenizer_->encode(question.answer);
  for (const Wanted& wanted : question.wanted) {
    turn.facts.push_back({wanted.text, depths.empty() ? 0.0 : depths[wanted.line]});
  }
  return turn;
}

Passage PassageBuilder::questions(Task task, int round) const {
  Dice dice(options_.seed, round);
  const QuestionSet set = make_questions(task, options_, dice);
  std::vector<std::vector<TokenId>> lines;
  std::int64_t plain = room();
  for (const std::string& line : set.lines) {
    lines.push_back(tokenizer_->encode(line));
    plain -= size_of(lines.back());
  }
  const auto count = static_cast<std::int64_t>(lines.size());
  if (plain < 8 * count) {
    refuse_length(task, options_,
                  std::to_string(count) + " lines are to be hidden in it; give fewer --needles");
  }
  const std::vector<TokenId> hay = stretch(round, plain);
  Passage passage;
  passage.context = prefix_;
  std::vector<double> depths;
  std::int64_t taken = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    // One line at a random offset in each of `count` equal parts.
    const std::int64_t part = plain / count;
    const auto offset = static_cast<std::int64_t>(dice.below(static_cast<std::uint64_t>(part)));
    const std::int64_t at =
        std::max(taken, std::min(line_end(*tokenizer_, hay, i * part + offset), plain));
    passage.context.insert(passage.context.end(), hay.begin() + taken, hay.begin() + at);
    taken = at;
    append(passage.context, lines[static_cast<std::size_t>(i)]);
    depths.push_back(static_cast<double>(at) / static_cast<double>(plain));
  }
  passage.context.insert(passage.context.end(), hay.begin() + taken, hay.end());
  for (const std::vector<Question>& asked : set.probes) {
    Probe& probe = passage.probes.emplace_back();
    for (const Question& question : asked) probe.turns.push_back(turn_of(question, depths));
  }
  // Needle answers come from the text because `calibrate` needs the likelihood of right answers.
  passage.writer = task == Task::needle ? Writer::text : Writer::dense;
  return passage;
}

Passage PassageBuilder::words(int round) const {
  Dice dice(options_.seed, round);
  // A distinct word fills 3 places of the list, so the words come from a longer text.
  const std::int64_t source = std::min(4 * options_.context, size_of(text_));
  std::vector<std::string> words = distinct_words(tokenizer_->decode(stretch(round, source)));
  dice.shuffle(words);
  const auto common = static_cast<std::size_t>(options_.needles);
  if (words.size() < 2 * common) {
    throw Error(ErrorCode::prompt, "--text has " + std::to_string(words.size()) +
                                       " words of five lower-case letters or more in a part, but "
                                       "--task common_words needs at least " +
                                       std::to_string(2 * common) +
                                       "; give another text or fewer --needles");
  }
  std::vector<std::vector<TokenId>> pieces;
  std::int64_t once = 0;  // tokens of the list if every word had only its minimum count
  for (std::size_t i = 0; i < words.size(); ++i) {
    pieces.push_back(tokenizer_->encode(" " + words[i] + ","));
    once += (i < common ? kCommon : kRare) * size_of(pieces.back());
  }
  // A text with too few words for a long list repeats them until the list is full or all words fit.
  const std::int64_t times = once > 0 ? (room() + once - 1) / once : 1;
  WordList list = fill(pieces, common, times, room());
  if (list.words < 2 * common && times > 1) list = fill(pieces, common, times - 1, room());
  if (list.words < 2 * common) {
    refuse_length(
        Task::common_words, options_,
        std::to_string(common) + " words are to be the most common; give fewer --needles");
  }
  dice.shuffle(list.places);
  Passage passage;
  passage.context = prefix_;
  for (const std::size_t word : list.places) append(passage.context, pieces[word]);
  words.resize(common);
  passage.probes.push_back({{turn_of(ask_for_words(words), {})}});
  passage.writer = Writer::dense;
  return passage;
}

Passage PassageBuilder::continuation(Task task, int round) const {
  if (options_.tokens >= room()) {
    refuse_length(task, options_,
                  "--tokens " + std::to_string(options_.tokens) +
                      " of it are to be continued with, and leave nothing to read");
  }
  const std::vector<TokenId> tokens = stretch(round, room() + 1);
  const std::int64_t split = room() - options_.tokens;
  Passage passage;
  passage.context = prefix_;
  passage.context.insert(passage.context.end(), tokens.begin(), tokens.begin() + split);
  Turn turn;
  turn.given = {tokens[static_cast<std::size_t>(split)]};
  turn.answer.assign(tokens.begin() + split + 1, tokens.end());
  passage.probes.push_back({{turn}});
  passage.writer = task == Task::drift ? Writer::drawn : Writer::text;
  return passage;
}

Passage PassageBuilder::repetition(int round) const {
  Dice dice(options_.seed + 7, round);
  const std::vector<TokenId> tokens = stretch(round, room());
  Passage passage;
  passage.context = prefix_;
  append(passage.context, tokens);
  const std::int64_t length = kQuoteTokens + options_.tokens;
  const std::int64_t part = (room() - length) / options_.needles;
  if (part < 1) {
    refuse_length(Task::repetition, options_,
                  std::to_string(options_.needles) + " passages of " + std::to_string(length) +
                      " tokens are to be quoted from it");
  }
  for (int i = 0; i < options_.needles; ++i) {
    const std::int64_t at =
        i * part + static_cast<std::int64_t>(dice.below(static_cast<std::uint64_t>(part)));
    Turn turn;
    turn.given.assign(tokens.begin() + at, tokens.begin() + at + kQuoteTokens);
    turn.answer.assign(tokens.begin() + at + kQuoteTokens, tokens.begin() + at + length);
    passage.probes.push_back({{turn}});
  }
  return passage;
}

Passage PassageBuilder::build(Task task, int round) const {
  switch (task) {
    case Task::common_words:
      return words(round);
    case Task::perplexity:
    case Task::agreement:
    case Task::drift:
      return continuation(task, round);
    case Task::repetition:
      return repetition(round);
    default:
      return questions(task, round);
  }
}

}  // namespace sluice::tools
