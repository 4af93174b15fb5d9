#include "tools/eval_tasks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "io/file.h"
#include "sluice/errors.h"
#include "tools/eval_questions.h"

namespace sluice::tools {
namespace {

constexpr int kVocabulary = 4096;
const std::vector<Task> kHidden = {Task::needle,     Task::multikey,  Task::multivalue,
                                   Task::multiquery, Task::multiturn, Task::variable_tracking};

TaskOptions options_of(std::uint64_t seed) {
  TaskOptions options;
  options.context = 4000;
  options.rounds = 2;
  options.seed = seed;
  return options;
}

std::string trace(Task task, std::uint64_t seed) {
  return std::string(to_string(task)) + ", seed " + std::to_string(seed);
}

// Both words of the thing that each line is about.
std::vector<std::pair<std::string, std::string>> names_of(const std::vector<std::string>& lines) {
  std::vector<std::pair<std::string, std::string>> names;
  for (const std::string& line : lines) {
    std::smatch words;
    EXPECT_TRUE(std::regex_search(line, words, std::regex("of the (\\w+) (\\w+) is"))) << line;
    names.emplace_back(words[1], words[2]);
  }
  return names;
}

QuestionSet questions(Task task, const TaskOptions& options) {
  Dice dice(options.seed, 0);
  return make_questions(task, options, dice);
}

TEST(EvalQuestions, NamesAreNearlyTheSameAndDistinct) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    TaskOptions options = options_of(seed);
    options.needles = 2 + static_cast<int>(seed % 15);
    SCOPED_TRACE(trace(Task::multikey, seed));
    const auto names = names_of(questions(Task::multikey, options).lines);
    ASSERT_EQ(std::ssize(names), options.needles);
    EXPECT_EQ(std::set(names.begin(), names.end()).size(), names.size());
    for (const auto& [first, second] : names) {
      const auto alike = std::count_if(names.begin(), names.end(), [&](const auto& other) {
        return (other.first == first) != (other.second == second);
      });
      EXPECT_GE(alike, 1) << first << " " << second;
    }
  }
}

TEST(EvalQuestions, NamesOfNeedlesDifferInBothWords) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    TaskOptions options = options_of(seed);
    options.needles = 16;
    SCOPED_TRACE(trace(Task::needle, seed));
    std::set<std::string> words;
    for (const auto& [first, second] : names_of(questions(Task::needle, options).lines)) {
      words.insert({first, second});
    }
    EXPECT_EQ(words.size(), 32);
  }
}

TEST(EvalQuestions, VariablesLeadToTheirNumber) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    TaskOptions options = options_of(seed);
    options.needles = 1 + static_cast<int>(seed % 16);
    SCOPED_TRACE(trace(Task::variable_tracking, seed));
    const QuestionSet set = questions(Task::variable_tracking, options);
    std::map<std::string, std::string> values;
    for (const std::string& line : set.lines) {
      std::smatch parts;
      ASSERT_TRUE(std::regex_search(
          line, parts, std::regex("of the (\\w+ \\w+) is (?:that of the )?([\\w ]+)\\.")));
      EXPECT_TRUE(values.emplace(parts[1], parts[2]).second) << line;
    }
    ASSERT_EQ(std::ssize(set.probes), options.needles);
    for (const std::vector<Question>& probe : set.probes) {
      std::smatch asked;
      ASSERT_TRUE(
          std::regex_search(probe.front().given, asked, std::regex("of the (\\w+ \\w+)\\?")));
      std::string value = asked[1];
      int hops = -1;
      for (; values.count(value) > 0; ++hops) value = values.at(value);
      EXPECT_EQ(value, probe.front().answer);
      EXPECT_EQ(hops, 2);
    }
  }
}

TEST(EvalQuestions, DistinctWordsAreLongAndPlain) {
  EXPECT_THAT(distinct_words("Where there were three\nthere, other\tthings there été words-apart"),
              ::testing::ElementsAre("there", "three", "other", "things"));
  EXPECT_THAT(distinct_words(""), ::testing::IsEmpty());
}

// What contexts are cut from.
struct Source {
  std::filesystem::path root = SLUICE_SOURCE_DIR;
  Tokenizer tokenizer = Tokenizer::load(root / "models/sluice-22m/tokenizer.json", kVocabulary);
  std::string text =
      read_text_file(root / "data/war-and-peace.txt", kMaxTextBytes).substr(0, 150000);
};

const Source& source() {
  static const Source loaded;
  return loaded;
}

Passage build(Task task, const TaskOptions& options, int round = 0) {
  return PassageBuilder(source().tokenizer, {1}, source().text, options).build(task, round);
}

std::string decoded(std::span<const TokenId> tokens) { return source().tokenizer.decode(tokens); }

// The tokens of a context up to the end of `text`, which stands there once.
std::size_t tokens_to(const std::string& text, const std::vector<TokenId>& context) {
  const std::string all = decoded(context);
  EXPECT_NE(all.find(text), std::string::npos) << text;
  EXPECT_EQ(all.find(text), all.rfind(text)) << text;
  std::size_t least = 0;
  std::size_t most = context.size();
  while (least + 1 < most) {
    const std::size_t middle = (least + most) / 2;
    const bool there = decoded(std::span(context).first(middle)).find(text) != std::string::npos;
    (there ? most : least) = middle;
  }
  return most;
}

TEST(EvalTasks, FactsStandWhereTheyAreSaidTo) {
  for (const Task task : kHidden) {
    for (const std::uint64_t seed : {1, 2, 3}) {
      SCOPED_TRACE(trace(task, seed));
      const TaskOptions options = options_of(seed);
      const Passage passage = build(task, options, 1);
      EXPECT_EQ(std::ssize(passage.context), options.context);
      EXPECT_EQ(passage.context.front(), 1);
      const auto lines = static_cast<double>(questions(task, options).lines.size());
      std::size_t facts = 0;
      for (const Probe& probe : passage.probes) {
        for (const Turn& turn : probe.turns) {
          EXPECT_THAT(turn.given, ::testing::Not(::testing::IsEmpty()));
          for (const Fact& fact : turn.facts) {
            EXPECT_THAT(decoded(turn.answer), ::testing::HasSubstr(fact.text));
            // Depths are of the text without the hidden lines, of up to 30 tokens.
            const auto at = static_cast<double>(tokens_to(fact.text, passage.context));
            EXPECT_NEAR(at / static_cast<double>(options.context), fact.depth,
                        30.0 * lines / static_cast<double>(options.context));
            ++facts;
          }
        }
      }
      EXPECT_EQ(static_cast<int>(facts), options.needles);
    }
  }
}

TEST(EvalTasks, QuestionsInOneProbeOrInMany) {
  const TaskOptions options = options_of(5);
  for (const Task task : {Task::needle, Task::multikey, Task::variable_tracking}) {
    EXPECT_EQ(build(task, options).probes.size(), 8) << to_string(task);
  }
  for (const Task task : {Task::multiquery, Task::multiturn}) {
    const Passage passage = build(task, options);
    ASSERT_EQ(passage.probes.size(), 1) << to_string(task);
    EXPECT_EQ(passage.probes.front().turns.size(), 8) << to_string(task);
  }
  EXPECT_EQ(build(Task::multivalue, options).probes.front().turns.front().facts.size(), 8);
}

TEST(EvalTasks, CommonWordsAreTenTimesAsCommon) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    for (const std::int64_t context : {2500, 35000}) {  // the longer has to repeat its words
      SCOPED_TRACE(trace(Task::common_words, seed) + ", " + std::to_string(context));
      TaskOptions options = options_of(seed);
      options.context = context;
      const Passage passage = build(Task::common_words, options);
      EXPECT_LE(std::ssize(passage.context), context);
      EXPECT_GT(std::ssize(passage.context), context * 9 / 10);
      std::map<std::string, int> counts;
      std::istringstream list(decoded(std::span(passage.context).subspan(1)));
      for (std::string word; list >> word;) ++counts[word.substr(0, word.size() - 1)];
      const Turn& turn = passage.probes.front().turns.front();
      ASSERT_EQ(turn.facts.size(), 8);
      const int most = counts.at(turn.facts.front().text);
      EXPECT_EQ(most % 30, 0);
      EXPECT_EQ(most > 30, context > 10000);
      for (const Fact& fact : turn.facts) {
        EXPECT_EQ(counts.at(fact.text), most);
        EXPECT_THAT(decoded(turn.answer), ::testing::HasSubstr(fact.text));
        counts.erase(fact.text);
      }
      EXPECT_GE(counts.size(), 8);
      for (const auto& [word, count] : counts) EXPECT_EQ(10 * count, most) << word;
    }
  }
}

// Two words, so that both have to fit whatever the length.
TEST(EvalTasks, FewWordsFillListsOfAnyLength) {
  TaskOptions options = options_of(1);
  options.needles = 1;
  std::string text;
  for (int i = 0; i < 8000; ++i) text += "banana orange ";
  for (options.context = 300; options.context < 1000; options.context += 13) {
    SCOPED_TRACE(std::to_string(options.context));
    const PassageBuilder builder(source().tokenizer, {1}, text, options);
    const std::string list = decoded(builder.build(Task::common_words, 0).context);
    EXPECT_THAT(list, ::testing::HasSubstr(" banana,"));
    EXPECT_THAT(list, ::testing::HasSubstr(" orange,"));
  }
}

TEST(EvalTasks, RefusesTextsWithoutWords) {
  TaskOptions options = options_of(1);
  std::string text;
  for (int i = 0; i < 8000; ++i) text += "1 2 3 4 ";
  try {
    PassageBuilder(source().tokenizer, {1}, text, options).build(Task::common_words, 0);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::prompt);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("--text has 0 words"));
  }
}

TEST(EvalTasks, ContinuationsAreTheTextsOwn) {
  TaskOptions options = options_of(1);
  options.tokens = 300;
  const Passage agreement = build(Task::agreement, options, 1);
  const Turn& turn = agreement.probes.front().turns.front();
  EXPECT_EQ(turn.answer.size(), 300);
  std::vector<TokenId> all(agreement.context.begin() + 1, agreement.context.end());
  all.insert(all.end(), turn.given.begin(), turn.given.end());
  EXPECT_EQ(std::ssize(all) + 1, options.context - 300 + 1);
  all.insert(all.end(), turn.answer.begin(), turn.answer.end());
  EXPECT_NE(source().text.find(decoded(all)), std::string::npos);

  const Passage drift = build(Task::drift, options, 1);
  EXPECT_EQ(drift.context, agreement.context);
  EXPECT_EQ(drift.writer, Writer::drawn);
  EXPECT_EQ(agreement.writer, Writer::text);
}

TEST(EvalTasks, SeedsDecide) {
  for (const Task task : {Task::multikey, Task::multiturn, Task::common_words}) {
    SCOPED_TRACE(to_string(task));
    const std::vector<TokenId> context = build(task, options_of(1)).context;
    EXPECT_EQ(context, build(task, options_of(1)).context);
    EXPECT_NE(context, build(task, options_of(2)).context);
  }
}

TEST(EvalTasks, RefusesLengthsThatAreTooShort) {
  TaskOptions options = options_of(1);
  options.context = 100;
  for (std::size_t i = 0; i < kTaskNames.size(); ++i) {
    const auto task = static_cast<Task>(i);
    SCOPED_TRACE(to_string(task));
    try {
      build(task, options);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("--length 100 is too short for --task " +
                                                     std::string(to_string(task))));
    }
  }
}

}  // namespace
}  // namespace sluice::tools
