// A file of --data, with the tokenizer of sluice-22m. The tasks of a file that is accepted fit the
// limits that they were read under, and answers to them have scores from 0 to 1.
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/shipped_tokenizer.h"
#include "tools/eval_data.h"

namespace sluice::fuzz {
namespace {

using tools::DataReader;
using tools::DataSet;
using tools::Passage;
using tools::Reference;

DataReader reader() {
  DataReader reader;
  reader.tokenizer = &tokenizer();
  reader.prefix = {0};
  reader.ends = {1};
  reader.tokens = 2;
  reader.most = 64;
  reader.limit = "--length is";
  return reader;
}

void hold_reference(const Reference& reference, std::string_view input) {
  std::string all;
  for (const std::string& text : reference.texts) {
    all += text + " ";
    const double score = score_answer(reference, text);
    require(score > 0.0 || !tools::has_words(text), "a reference has a score");
    require(score <= 1.0, "a score is at most 1");
  }
  const double whole = score_answer(reference, all);
  require(reference.metric != tools::Metric::matches || whole == 1.0, "all outputs are found");
  const double any = score_answer(reference, input);  // need not be UTF-8
  require(any >= 0.0 && any <= 1.0, "a score is from 0 to 1");
}

std::string hold(const DataSet& set, std::string_view input) {
  require(!set.passages.empty(), "a file has a task");
  for (const Passage& passage : set.passages) {
    require(!passage.context.empty() && passage.probes.size() == 1, "a task has a context");
    const tools::Probe& probe = passage.probes.front();
    const tools::Turn& turn = probe.turns.front();
    require(turn.answer_tokens() == 2, "answers are as long as --tokens");
    const std::size_t all = passage.context.size() + turn.given.size() + turn.answer_tokens();
    require(all <= 64, "a task fits");
    hold_reference(probe.reference, input);
  }
  return std::string(to_string(set.task)) + std::string(set.passages.size(), '.');
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "tasks.jsonl";
  write_file(path, input);
  return answer_of(
      {ErrorCode::prompt, ErrorCode::corrupt}, [&] { return tools::read_data(path, reader()); },
      [&](const DataSet& set) { return hold(set, input); });
}

}  // namespace sluice::fuzz
