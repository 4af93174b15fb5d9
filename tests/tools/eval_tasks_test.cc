#include "tools/eval_tasks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
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
#include "tools/eval_data.h"
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

TEST(EvalScore, MatchesAreOfAnyCase) {
  const std::vector<std::string> outputs = {"481926", "Prince Andréy"};
  EXPECT_EQ(matches(outputs, "It is 481926, PRINCE ANDRÉY."), 1.0);
  EXPECT_EQ(matches(outputs, "It is 4819267"), 0.5);
  EXPECT_EQ(matches(outputs, ""), 0.0);
}

// What qa_f1_score and normalize_answer of LongBench's metrics.py give.
TEST(EvalScore, WordsAreComparedAsLongBenchDoes) {
  const auto f1 = [](const std::string& said, const std::string& right) {
    return best_f1(std::vector{right}, said);
  };
  EXPECT_EQ(f1("The Prince, Andréy!", "prince andréy"), 1.0);
  EXPECT_DOUBLE_EQ(f1("PRINCE ANDRÉY went", "Prince Andréy"), 0.8);
  EXPECT_DOUBLE_EQ(f1("yes yes no", "yes no no"), 2.0 / 3.0);
  EXPECT_EQ(f1("it's the theory-an idea", "its theoryan idea"), 1.0);
  EXPECT_DOUBLE_EQ(f1("a—an—the ‘the’ end", "‘ ’ end"), 0.75);
  EXPECT_EQ(f1("\u3000x\u00a0y\u2028z", "x y z"), 1.0);
  EXPECT_EQ(f1("a_the", "athe"), 1.0);
  EXPECT_EQ(f1("the2 a2 an", "the2 a2"), 1.0);
  EXPECT_EQ(f1("Σίσυφος", "σίσυφος"), 1.0);
  EXPECT_EQ(f1("a an the", "the"), 0.0);
  EXPECT_EQ(f1("", "x"), 0.0);
  EXPECT_EQ(best_f1(std::vector<std::string>{"no", "yes sir"}, "Yes, sir."), 1.0);
  EXPECT_FALSE(has_words("The, a!"));
}

TEST(EvalData, FormsAreToldApart) {
  const DataLine ruler =
      parse_data_line(R"({"index": 3, "input": "A b", "outputs": ["1", "2"], "length": 9})", "f");
  EXPECT_EQ(ruler.form, Form::ruler);
  EXPECT_EQ(ruler.prompt, "A b");
  EXPECT_EQ(ruler.reference.metric, Metric::matches);
  EXPECT_THAT(ruler.reference.texts, ::testing::ElementsAre("1", "2"));
  const DataLine bench = parse_data_line(
      R"({"_id": 1, "context": "A b", "input": "C?", "answers": ["d"], "all_classes": null})", "f");
  EXPECT_EQ(bench.form, Form::longbench);
  EXPECT_EQ(bench.prompt, "A b\n\nC?");
  EXPECT_EQ(bench.reference.metric, Metric::f1);
  const DataLine nothing_asked =
      parse_data_line(R"({"context": "A b", "input": "", "answers": ["d"]})", "f");
  EXPECT_EQ(nothing_asked.prompt, "A b");
  const DataLine text = parse_data_line(R"({"text": "A b", "title": "C"})", "f");
  EXPECT_EQ(text.form, Form::text);
  EXPECT_EQ(text.prompt, "A b");
  EXPECT_EQ(text.reference.metric, Metric::none);
}

// A temporary file, named after its test because tests run beside each other.
struct DataFile {
  explicit DataFile(const std::string& text)
      : path(std::filesystem::path(::testing::TempDir()) /
             (std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()) +
              ".jsonl")) {
    std::ofstream(path, std::ios::binary) << text;
  }
  ~DataFile() { std::filesystem::remove(path); }
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;

  std::filesystem::path path;
};

DataReader reader() {
  DataReader reader;
  reader.tokenizer = &source().tokenizer;
  reader.prefix = {0};
  reader.ends = {1};
  reader.tokens = 4;
  reader.most = 20;
  reader.limit = "--length is";
  return reader;
}

TEST(EvalData, PromptsAreReadUpToTheirLastToken) {
  const DataFile file(
      "\n{\"input\": \"The secret number is\", \"outputs\": [\"5\"]}\r\n \n"
      "{\"input\": \"Well, Prince\", \"outputs\": [\"6\"]}");
  const DataSet set = read_data(file.path, reader());
  EXPECT_EQ(set.task, Task::ruler);
  ASSERT_EQ(set.passages.size(), 2);
  const Passage& passage = set.passages.front();
  const Turn& turn = passage.probes.front().turns.front();
  std::vector<TokenId> all = passage.context;
  EXPECT_EQ(all.front(), 0);
  all.insert(all.end(), turn.given.begin(), turn.given.end());
  EXPECT_EQ(std::ssize(all), set.context);
  EXPECT_EQ(decoded(std::span(all).subspan(1)), "The secret number is");
  EXPECT_EQ(turn.given.size(), 1);
  EXPECT_EQ(turn.answer_tokens(), 4);
  EXPECT_EQ(passage.writer, Writer::dense);
  EXPECT_THAT(passage.ends, ::testing::ElementsAre(1));
  EXPECT_THAT(set.passages[1].probes.front().reference.texts, ::testing::ElementsAre("6"));
}

TEST(EvalData, TextsGoOnAsTheBookDoes) {
  const std::string text = "Well, Prince, so Genoa and Lucca are now";
  const DataFile file("{\"text\": \"" + text + "\"}\n");
  const DataSet set = read_data(file.path, reader());
  EXPECT_EQ(set.task, Task::agreement);
  const Passage& passage = set.passages.front();
  const Turn& turn = passage.probes.front().turns.front();
  EXPECT_EQ(turn.answer.size(), 4);
  std::vector<TokenId> all = passage.context;
  all.insert(all.end(), turn.given.begin(), turn.given.end());
  all.insert(all.end(), turn.answer.begin(), turn.answer.end());
  EXPECT_EQ(std::ssize(all), set.context);
  EXPECT_EQ(decoded(std::span(all).subspan(1)), text);
  EXPECT_EQ(passage.writer, Writer::text);
}

TEST(EvalData, RefusesWhatIsWrongByLineAndField) {
  const std::string good = "{\"input\": \"Well\", \"outputs\": [\"5\"]}\n";
  std::string many;
  for (int i = 0; i < 30; ++i) many += "Prince ";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{\"outputs\": [\"5\"]}", "'input' is missing"},
      {"{\"input\": \"\", \"outputs\": [\"5\"]}", "'input' is empty"},
      {"{\"input\": 5, \"outputs\": [\"5\"]}", "'input' is of the type number"},
      {"{\"input\": \"Well\", \"outputs\": \"5\"}", "'outputs' is of the type string"},
      {"{\"input\": \"Well\", \"outputs\": []}", "'outputs' is an empty list"},
      {"{\"input\": \"Well\", \"outputs\": [5]}", "'outputs' has an item of the type number"},
      {"{\"input\": \"Well\", \"outputs\": [\"5\", \"\"]}", "'outputs' has an empty string"},
      {"{\"input\": \"Well\"}", "neither 'outputs' (as RULER's files), 'answers'"},
      {"{\"input\": \"Well\", \"outputs\": [\"5\"], \"answers\": [\"5\"]}",
       "both 'outputs' and 'answers'"},
      {"{\"context\": \"Well\", \"answers\": [\"5\"]}", "'input' is missing"},
      {"{\"input\": \"Well\", \"answers\": [\"5\"]}", "'context' is missing"},
      {"{\"context\": \"Well\", \"input\": \"\", \"answers\": [\"The\"]}", "'answers' has no word"},
      {"{\"context\": \"Well\", \"input\": \"\", \"answers\": [\"5\"]}",
       "form of LongBench ('answers'), the lines before have that of RULER ('outputs')"},
      {"{\"text\": []}", "'text' is of the type array"},
      {"{\"text\": \"Well\"}", "form of plain text ('text')"},
      {"[1]", "is of the type array"},
      {"{\"input\": \"Well\",", "is not JSON"},
      {"{\"input\": \"Well\xff\", \"outputs\": [\"5\"]}", "is not UTF-8 from byte 16 on"},
      {"{\"input\": \"" + many + "\", \"outputs\": [\"5\"]}", "but --length is 20; shorten it"},
  };
  for (const auto& [line, words] : cases) {
    SCOPED_TRACE(line);
    const DataFile file(good + "\n" + line + "\n" + good);
    try {
      read_data(file.path, reader());
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::prompt);
      EXPECT_THAT(error.what(), ::testing::StartsWith(file.path.string() + ": line 3: "));
      EXPECT_THAT(error.what(), ::testing::HasSubstr(words));
    }
  }
  const std::vector<std::pair<std::string, std::string>> whole = {
      {"\n \n", "has no line with a task"},
      {"{\"text\": \"Well\"}", "line 1: 'text' has 3 tokens, but --tokens 4 needs at least 7"}};
  for (const auto& [text, words] : whole) {
    const DataFile file(text);
    try {
      read_data(file.path, reader());
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::prompt);
      EXPECT_THAT(error.what(), ::testing::HasSubstr(words));
    }
  }
}

TEST(EvalData, FilesHaveALimitOfLines) {
  std::string lines;
  for (std::size_t i = 0; i <= kMaxDataLines; ++i) {
    lines += "{\"input\": \"Well\", \"outputs\": [\"5\"]}\n";
  }
  const DataFile file(lines);
  try {
    read_data(file.path, reader());
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("line 10001: is past the 10000 tasks"));
  }
}

}  // namespace
}  // namespace sluice::tools
