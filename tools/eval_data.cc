#include "tools/eval_data.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "engine/utf8.h"
#include "io/file.h"
#include "io/json.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::tools {
namespace {

struct FormInfo {
  Form form;
  const char* field;  // that tells it from the others
  const char* source;
  const char* prompt;  // fields that the prompt comes from
};
constexpr std::array<FormInfo, 3> kForms = {
    {{Form::ruler, "outputs", "RULER", "'input' has"},
     {Form::longbench, "answers", "LongBench", "'context' and 'input' have"},
     {Form::text, "text", "plain text", "'text' has"}}};

const FormInfo& info_of(Form form) { return kForms.at(static_cast<std::size_t>(form)); }

[[noreturn]] void refuse_line(const std::string& place, const std::string& why) {
  throw Error(ErrorCode::prompt, place + ": " + why);
}

std::string name_of(const char* field) { return in_quotes(field); }

// "RULER ('outputs')"
std::string label_of(Form form) {
  return std::string(info_of(form).source) + " (" + name_of(info_of(form).field) + ")";
}

// Errors of the parser are those of a corrupt file; here a line of the user's is wrong.
nlohmann::json parse(std::string_view line, const std::string& place) {
  if (const auto at = find_invalid_utf8(line)) {
    refuse_line(place,
                "is not UTF-8 from byte " + std::to_string(*at + 1) + " on; convert the file");
  }
  try {
    return parse_json(std::string(line), place, "give one JSON object per line");
  } catch (const Error& error) {
    throw Error(ErrorCode::prompt, error.what());
  }
}

Form form_of(const nlohmann::json& object, const std::string& place) {
  std::optional<Form> found;
  for (const FormInfo& info : kForms) {
    if (!object.contains(info.field)) continue;
    if (found) {
      refuse_line(place, "has both " + name_of(info_of(*found).field) + " and " +
                             name_of(info.field) + "; they tell the form, so give one of them");
    }
    found = info.form;
  }
  if (found) return *found;
  refuse_line(place,
              "has neither 'outputs' (as RULER's files), 'answers' (LongBench's) nor 'text' (plain "
              "text); give one of them");
}

std::string text_of(const nlohmann::json& object, const char* field, const std::string& place) {
  const auto at = object.find(field);
  if (at == object.end()) refuse_line(place, name_of(field) + " is missing; give a string");
  if (!at->is_string()) {
    refuse_line(place, name_of(field) + " is of the type " + at->type_name() + "; give a string");
  }
  return at->get<std::string>();
}

std::string filled_text_of(const nlohmann::json& object, const char* field,
                           const std::string& place) {
  std::string text = text_of(object, field, place);
  if (text.empty()) refuse_line(place, name_of(field) + " is empty; give text");
  return text;
}

std::vector<std::string> texts_of(const nlohmann::json& object, const char* field,
                                  const std::string& place) {
  const nlohmann::json& list = object.at(field);
  if (!list.is_array()) {
    refuse_line(
        place, name_of(field) + " is of the type " + list.type_name() + "; give a list of strings");
  }
  if (list.empty())
    refuse_line(place, name_of(field) + " is an empty list; give at least one string");
  std::vector<std::string> texts;
  for (const nlohmann::json& text : list) {
    if (!text.is_string()) {
      refuse_line(place, name_of(field) + " has an item of the type " + text.type_name() +
                             "; give strings only");
    }
    texts.push_back(text.get<std::string>());
  }
  return texts;
}

DataLine ruler_line(const nlohmann::json& object, const std::string& place) {
  DataLine line = {Form::ruler,
                   filled_text_of(object, "input", place),
                   {Metric::matches, texts_of(object, "outputs", place)}};
  if (std::ranges::find(line.reference.texts, "") != line.reference.texts.end()) {
    refuse_line(place, "'outputs' has an empty string, which stands in every answer; leave it out");
  }
  return line;
}

DataLine longbench_line(const nlohmann::json& object, const std::string& place) {
  const std::string context = filled_text_of(object, "context", place);
  const std::string input = text_of(object, "input", place);  // empty where nothing is asked
  DataLine line = {Form::longbench,
                   context + (input.empty() ? "" : "\n\n" + input),
                   {Metric::f1, texts_of(object, "answers", place)}};
  if (std::ranges::none_of(line.reference.texts, has_words)) {
    refuse_line(place, "'answers' has no word that could be compared; give an answer with one");
  }
  return line;
}

std::string tokens_text(std::int64_t count) {
  return std::to_string(count) + (count == 1 ? " token" : " tokens");
}

void require_fits(const DataReader& reader, Form form, std::int64_t own, std::int64_t all,
                  const std::string& place) {
  if (reader.most == 0 || all <= reader.most) return;
  const std::string answer =
      all > own ? ", and --tokens leaves " + std::to_string(all - own) + " for the answer" : "";
  refuse_line(place, std::string(info_of(form).prompt) + " " + tokens_text(own) + answer +
                         ", but " + reader.limit + " " + std::to_string(reader.most) +
                         "; shorten it");
}

// All of a prompt but its last token is the context, so that every policy reads it as `generate`
// reads a prompt.
Passage question_of(const DataReader& reader, DataLine line, std::vector<TokenId> tokens,
                    const std::string& place) {
  const std::int64_t size = std::ssize(tokens);
  if (size < 2) {
    refuse_line(place, std::string(info_of(line.form).prompt) + " " + tokens_text(size) +
                           "; give at least 2");
  }
  require_fits(reader, line.form, size, size + reader.tokens, place);
  Turn turn;
  turn.given = {tokens.back()};
  turn.length = static_cast<std::size_t>(reader.tokens);
  tokens.pop_back();
  Passage passage;
  passage.context = std::move(tokens);
  passage.probes.push_back({{turn}, std::move(line.reference)});
  passage.writer = Writer::dense;
  passage.ends = reader.ends;
  return passage;
}

Passage continuation_of(const DataReader& reader, std::vector<TokenId> tokens,
                        const std::string& place) {
  const std::int64_t size = std::ssize(tokens);
  const std::int64_t least = std::ssize(reader.prefix) + reader.tokens + 2;
  if (size < least) {
    refuse_line(place, "'text' has " + tokens_text(size) + ", but --tokens " +
                           std::to_string(reader.tokens) + " needs at least " +
                           std::to_string(least) + "; give a longer text or fewer --tokens");
  }
  require_fits(reader, Form::text, size, size, place);
  const auto split = tokens.end() - reader.tokens - 1;
  Turn turn;
  turn.given = {*split};
  turn.answer.assign(split + 1, tokens.end());
  Passage passage;
  passage.context.assign(tokens.begin(), split);
  passage.probes.push_back({{turn}, {}});
  return passage;
}

Passage passage_of(const DataReader& reader, DataLine line, const std::string& place) {
  std::vector<TokenId> tokens = reader.prefix;
  const std::vector<TokenId> own = reader.tokenizer->encode(line.prompt);
  tokens.insert(tokens.end(), own.begin(), own.end());
  return line.form == Form::text ? continuation_of(reader, std::move(tokens), place)
                                 : question_of(reader, std::move(line), std::move(tokens), place);
}

Task task_of(Form form) {
  if (form == Form::ruler) return Task::ruler;
  return form == Form::longbench ? Task::longbench : Task::agreement;
}

// Tokens of a prompt, or of a text with its continuation.
std::int64_t length_of(const Passage& passage) {
  const Turn& turn = passage.probes.front().turns.front();
  return std::ssize(passage.context) + std::ssize(turn.given) + std::ssize(turn.answer);
}

}  // namespace

DataLine parse_data_line(std::string_view line, const std::string& place) {
  const nlohmann::json object = parse(line, place);
  if (!object.is_object()) {
    refuse_line(place,
                std::string("is of the type ") + object.type_name() + "; give a JSON object");
  }
  switch (form_of(object, place)) {
    case Form::ruler:
      return ruler_line(object, place);
    case Form::longbench:
      return longbench_line(object, place);
    case Form::text:
      break;
  }
  return {Form::text, filled_text_of(object, "text", place), {}};
}

DataSet read_data(const std::string& path, const DataReader& reader) {
  const std::string text = read_text_file(path, kMaxTextBytes);
  require_not_lfs_pointer(path, text);
  DataSet set;
  std::optional<Form> form;
  std::size_t number = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    const std::string place = path + ": line " + std::to_string(++number);
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    if (set.passages.size() == kMaxDataLines) {
      refuse_line(place, "is past the " + std::to_string(kMaxDataLines) +
                             " tasks that a file may have; split it");
    }
    DataLine data = parse_data_line(line, place);
    if (form.value_or(data.form) != data.form) {
      refuse_line(place, "has the form of " + label_of(data.form) +
                             ", the lines before have that of " + label_of(*form) +
                             "; give each form a file of its own");
    }
    form = data.form;
    set.passages.push_back(passage_of(reader, std::move(data), place));
    set.context = std::max(set.context, length_of(set.passages.back()));
  }
  if (!form) throw Error(ErrorCode::prompt, path + ": has no line with a task");
  set.task = task_of(*form);
  return set;
}

}  // namespace sluice::tools
