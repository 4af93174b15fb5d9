// Tasks in files of the user: JSON lines in the form of RULER, of LongBench, or of plain text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/eval_tasks.h"

namespace sluice::tools {

// Told apart by a field that the others do not have. A file has one form.
enum class Form : std::uint8_t {
  ruler,      // `input` and `outputs`
  longbench,  // `context`, `input` and `answers`
  text,       // `text`
};

struct DataLine {
  Form form = Form::text;
  std::string prompt;  // of `text`: the text with its continuation
  Reference reference;
};

// A line of a file. Fields that no form needs are ignored. Throws Error{prompt} that begins with
// `place` and names the field that is missing, empty or of a wrong type.
DataLine parse_data_line(std::string_view line, const std::string& place);

// Turns prompts into tokens.
struct DataReader {
  const Tokenizer* tokenizer = nullptr;
  std::vector<TokenId> prefix;  // in front of every prompt
  std::vector<TokenId> ends;    // that end an answer
  int tokens = 0;               // most of an answer; of a text, the last, which are predicted
  std::int64_t most = 0;        // of a prompt with its answer; 0: any number
  std::string limit;            // where that comes from, for messages
};

struct DataSet {
  Task task = Task::agreement;
  std::int64_t context = 0;  // tokens of the longest prompt or text
  std::vector<Passage> passages;
};

// Most lines of a file.
inline constexpr std::size_t kMaxDataLines = 10000;

// The tasks of a file, one per line that is not empty. Throws Error{prompt} naming the file, the
// line and the field; Error{not_found}, {io} or {corrupt} as read_text_file() does.
DataSet read_data(const std::string& path, const DataReader& reader);

}  // namespace sluice::tools
