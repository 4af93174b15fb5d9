#include "tools/eval_questions.h"

#include <array>
#include <unordered_set>

#include "lib/check.h"

namespace sluice::tools {
namespace {

constexpr std::array<std::string_view, 16> kAdjectives = {
    "amber",  "silver", "crimson", "hidden", "quiet",  "golden", "broken", "distant",
    "frozen", "gentle", "hollow",  "iron",   "purple", "velvet", "wooden", "yellow"};
constexpr std::array<std::string_view, 16> kNouns = {
    "falcon", "river",  "castle", "lantern", "garden", "mountain", "whistle", "compass",
    "anchor", "bridge", "candle", "dragon",  "forest", "harbour",  "mirror",  "wagon"};

constexpr std::size_t kHops = 2;  // from the thing in the question to the one with a number

struct Thing {
  std::string name;
  std::string number;
};

std::string number_of(Dice& dice, int digits) {
  std::string number = std::to_string(1 + dice.below(9));
  while (static_cast<int>(number.size()) < digits) number += std::to_string(dice.below(10));
  return number;
}

// Names are distinct. With `alike`, each shares one word with others: it differs from some only in
// the first word and from some only in the second. Otherwise up to 16 names differ from each other
// in both words.
std::vector<Thing> make_things(Dice& dice, std::size_t count, int digits, bool alike = false) {
  std::size_t side = 1;
  while (side * side < count) ++side;
  const std::uint64_t adjective = dice.below(kAdjectives.size());
  const std::uint64_t noun = dice.below(kNouns.size());
  std::vector<Thing> things;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t first = alike ? i / side : i;
    const std::size_t second = alike ? i % side : 3 * i + i / kNouns.size();
    things.push_back({std::string(kAdjectives[(adjective + first) % kAdjectives.size()]) + " " +
                          std::string(kNouns[(noun + second) % kNouns.size()]),
                      number_of(dice, digits)});
  }
  return things;
}

std::string statement(const std::string& name, const std::string& is) {
  return "The secret number of the " + name + " is " + is + ". Remember it.\n";
}

Question ask(const Thing& thing, std::size_t line) {
  return {"\nQuestion: What is the secret number of the " + thing.name + "?\nAnswer: ",
          thing.number,
          {{thing.number, line}}};
}

// `items` separated by commas, with `last` before the last one.
std::string enumerated(const std::vector<std::string>& items, const std::string& last) {
  std::string text;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i > 0) text += i + 1 < items.size() ? ", " : last;
    text += items[i];
  }
  return text;
}

QuestionSet single(const std::vector<Thing>& things) {
  QuestionSet set;
  for (std::size_t i = 0; i < things.size(); ++i) {
    set.lines.push_back(statement(things[i].name, things[i].number));
    set.probes.push_back({ask(things[i], i)});
  }
  return set;
}

// The questions of `single` one after another, in another order than the lines.
QuestionSet in_turn(const std::vector<Thing>& things, Dice& dice) {
  QuestionSet set = single(things);
  std::vector<Question> turns;
  for (const std::vector<Question>& probe : set.probes) turns.push_back(probe.front());
  dice.shuffle(turns);
  for (std::size_t i = 1; i < turns.size(); ++i) turns[i].given.insert(0, "\n");
  set.probes = {turns};
  return set;
}

// One question for all things; the sentences of the answer are given up to their numbers.
QuestionSet at_once(const std::vector<Thing>& things, Dice& dice) {
  QuestionSet set = single(things);
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < things.size(); ++i) order.push_back(i);
  dice.shuffle(order);
  std::vector<std::string> names;
  for (const std::size_t i : order) names.push_back("the " + things[i].name);
  std::string given =
      "\nQuestion: What are the secret numbers of " + enumerated(names, " and ") + "?\nAnswer: ";
  std::vector<Question> turns;
  for (const std::size_t i : order) {
    given += "The secret number of the " + things[i].name + " is ";
    turns.push_back({given, things[i].number, {{things[i].number, i}}});
    given = ". ";
  }
  set.probes = {turns};
  return set;
}

QuestionSet all_of_one(const std::vector<Thing>& things) {
  const std::string& name = things.front().name;
  QuestionSet set;
  Question question = {
      "\nQuestion: What are all the secret numbers of the " + name + "?\nAnswer: ", "", {}};
  std::vector<std::string> numbers;
  for (std::size_t i = 0; i < things.size(); ++i) {
    set.lines.push_back("One of the secret numbers of the " + name + " is " + things[i].number +
                        ". Remember it.\n");
    numbers.push_back(things[i].number);
    question.wanted.push_back({things[i].number, i});
  }
  question.answer = enumerated(numbers, ", ");
  set.probes = {{question}};
  return set;
}

// Parallel chains. The first `chains` things have numbers; each later one shares the number of
// another, kHops times over.
QuestionSet followed(const std::vector<Thing>& things, std::size_t chains) {
  QuestionSet set;
  for (std::size_t i = 0; i < things.size(); ++i) {
    set.lines.push_back(statement(
        things[i].name, i < chains ? things[i].number : "that of the " + things[i - chains].name));
  }
  for (std::size_t i = 0; i < chains; ++i) {
    const Thing last = {things[i + kHops * chains].name, things[i].number};
    set.probes.push_back({ask(last, i)});
  }
  return set;
}

}  // namespace

QuestionSet make_questions(Task task, const TaskOptions& options, Dice& dice) {
  const auto count = static_cast<std::size_t>(options.needles);
  const auto things = [&](std::size_t many, bool alike = false) {
    return make_things(dice, many, options.digits, alike);
  };
  switch (task) {
    case Task::needle:
      return single(things(count));
    case Task::multikey:
      return single(things(count, true));
    case Task::multivalue:
      return all_of_one(things(count));
    case Task::multiquery:
      return at_once(things(count), dice);
    case Task::multiturn:
      return in_turn(things(count), dice);
    case Task::variable_tracking:
      return followed(things((1 + kHops) * count), count);
    default:
      check(false, "no task about hidden lines");
      return {};
  }
}

Question ask_for_words(const std::vector<std::string>& common) {
  Question question = {"\nQuestion: What are the " + std::to_string(common.size()) +
                           " most common words of this list?\nAnswer:",
                       " " + enumerated(common, ", "),
                       {}};
  for (const std::string& word : common) question.wanted.push_back({word, 0});
  return question;
}

std::vector<std::string> distinct_words(std::string_view text) {
  constexpr std::size_t kShortest = 5;
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz";
  std::vector<std::string> words;
  std::unordered_set<std::string> seen;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find_first_of(" \n\t", at), text.size());
    const std::string word(text.substr(at, end - at));
    const bool plain = word.find_first_not_of(kLetters) == std::string::npos;
    if (word.size() >= kShortest && plain && seen.insert(word).second) words.push_back(word);
    at = end + 1;
  }
  return words;
}

}  // namespace sluice::tools
