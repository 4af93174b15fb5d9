#include "model/chat_template.h"

#include <algorithm>
#include <array>

#include "lib/text.h"
#include "model/template_sketch.h"

namespace sluice {
namespace {

using std::string_literals::operator""s;

const std::string kValue(1, mark::kValue);
const std::string kTrimmed(1, mark::kTrimmed);
const std::string kEos(1, mark::kEos);

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

bool is_mark(char c) { return c >= mark::kValue && c <= mark::kComputed; }

constexpr std::size_t kLongestMarker = 96;  // bytes; those in use have up to 30

// The literal stretch that begins at `begin`, up to so many bytes.
std::string_view literal_at(std::string_view text, std::size_t begin,
                            std::size_t most = std::string_view::npos) {
  const std::string_view rest = text.substr(begin, most);
  return {rest.begin(), std::find_if(rest.begin(), rest.end(), is_mark)};
}

// What a template of another family is known by: the first thing in brackets that it writes, or
// its first words.
std::string first_marker(std::string_view text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '<' && text[i] != '[') continue;
    const std::string_view piece = literal_at(text, i, kLongestMarker);
    const std::size_t end = piece.find(text[i] == '<' ? '>' : ']');
    if (end != std::string_view::npos) return in_quotes(piece.substr(0, end + 1));
  }
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::string_view piece = literal_at(text, i);
    if (piece.find_first_not_of(" \n\t") != std::string_view::npos) return in_quotes(piece);
    i += piece.size();
  }
  return "nothing";
}

// Markers in the style of control tokens that a family does not have: images, or another form.
void require_known_markers(std::string_view text, const std::vector<std::string_view>& known) {
  for (std::size_t i = text.find("<|"); i != std::string_view::npos; i = text.find("<|", i + 1)) {
    const std::string_view piece = literal_at(text, i, kLongestMarker);
    const std::size_t end = piece.find("|>");
    if (end == std::string_view::npos) continue;
    const std::string_view marker = piece.substr(0, end + 2);
    if (std::find(known.begin(), known.end(), marker) == known.end()) {
      refuse_template("writes " + in_quotes(marker) + ", which is not known here");
    }
  }
}

// A line break behind a tag, say, would be part of every message.
void require_nothing_behind(const TemplateSketch& sketch, const std::string& form) {
  const std::size_t end = sketch.text.find(form) + form.size();
  if (end < sketch.text.size() && !is_mark(sketch.text[end]) && sketch.text[end] != '<') {
    refuse_template("writes " + in_quotes(literal_at(sketch.text, end)) + " behind a message");
  }
}

// Whether `form` is written, and nothing around it.
bool writes(const TemplateSketch& sketch, const std::string& form) {
  const std::size_t at = sketch.text.find(form);
  if (at == std::string::npos) return false;
  require_nothing_behind(sketch, form);
  const bool indented = at > 0 && (sketch.text[at - 1] == ' ' || sketch.text[at - 1] == '\n');
  if (indented) refuse_template("writes white space in front of a message");
  return true;
}

// Which of two forms a template has; the other one beside it would depend on what is not known.
bool trims(const TemplateSketch& sketch, const std::string& before, const std::string& after) {
  const bool as_it_is = writes(sketch, before + kValue + after);
  const bool trimmed = writes(sketch, before + kTrimmed + after);
  if (as_it_is == trimmed) refuse_template("does not write a message as its family does");
  return trimmed;
}

// A default text of the system that stands in a variable, not between markers.
void read_assigned_system(const TemplateSketch& sketch, ChatTemplate& result) {
  const auto names_system = [](const std::string& name) { return has(name, "system"); };
  for (const auto& [name, expression] : sketch.computed) {
    const bool literal = has(expression, "'") || has(expression, "\"");
    const bool composed = has(expression, "+") || has(expression, " if ");
    if (names_system(name) && literal && composed) result.needs_system = true;
  }
  for (const auto& [name, text] : sketch.assigned) {
    if (names_system(name) && !text.empty()) result.needs_system = true;
  }
}

// What is written last, to open an answer.
std::string opening(const TemplateSketch& sketch) {
  std::string text = sketch.text.substr(sketch.generation);
  text.erase(std::remove(text.begin(), text.end(), mark::kStatement), text.end());
  return text;
}

void read_thinking(const TemplateSketch& sketch, ChatTemplate& result) {
  if (!has(sketch.code, "</think>")) return;
  std::string code = sketch.code;
  std::replace(code.begin(), code.end(), '"', '\'');
  const bool known = has(code, "split('</think>')[-1].lstrip('\\n')") ||
                     has(code, "split('</think>')[-1]|trim") ||
                     has(code, "split('</think>')[-1] | trim");
  if (!known || !has(code, "last_query_index")) {
    refuse_template("keeps what a model thinks aloud in a way not known here");
  }
  result.drops_thinking = true;
}

void read_answer_opening(const TemplateSketch& sketch, ChatTemplate& result) {
  const std::string thinks = "<think>\n";
  const std::string no_thoughts = "<think>\n\n</think>\n\n";
  const std::string text = opening(sketch);
  const bool optional = has(sketch.code, "enable_thinking is defined and enable_thinking is false");
  const bool is_end = sketch.generation > 0 || text.ends_with(result.answer_before);
  result.answer_opens = result.answer_before;
  if (sketch.generation > 0 && text == result.answer_before + thinks) {
    result.answer_opens += thinks;
  } else if (sketch.generation > 0 && text != result.answer_before &&
             !(optional && text == result.answer_before + no_thoughts)) {
    refuse_template("opens an answer with " + in_quotes(text));
  } else if (!is_end) {
    refuse_template("does not open an answer");
  }
}

ChatTemplate chatml(const TemplateSketch& sketch) {
  const std::string open = "<|im_start|>";
  const std::string close = "<|im_end|>";
  require_known_markers(sketch.text, {open, close, "<|endoftext|>"});
  if (has(sketch.code, "strftime_now")) refuse_template("writes the date");
  ChatTemplate result;
  result.family = "ChatML";
  result.controls = {open, close};
  result.ends = {close};
  const std::string any_role = open + kValue + "\n";
  const bool by_variable =
      has(sketch.text, any_role + kValue) || has(sketch.text, any_role + kTrimmed);
  const bool trimmed = trims(sketch, by_variable ? any_role : open + "user\n", close + "\n");
  result.trims_system = result.trims_question = result.trims_answer = trimmed;
  result.system_before = open + "system\n";
  result.question_before = open + "user\n";
  result.answer_before = open + "assistant\n";
  result.system_after = result.question_after = result.answer_after = close + "\n";
  for (std::size_t at = sketch.text.find(result.system_before); at != std::string::npos;
       at = sketch.text.find(result.system_before, at + 1)) {
    const std::string_view message =
        literal_at(sketch.text, at).substr(result.system_before.size());
    const std::size_t end = message.find(close);
    if (end != std::string_view::npos) result.default_system = message.substr(0, end);
  }
  if (!result.default_system) read_assigned_system(sketch, result);
  read_thinking(sketch, result);
  read_answer_opening(sketch, result);
  return result;
}

// The lines on dates that begin every system message from Llama 3.1 on.
std::string dates_of(const TemplateSketch& sketch, const std::string& today) {
  const std::string cutoff = "Cutting Knowledge Date: ";
  const std::string date = "Today Date: ";
  const std::size_t at = sketch.text.find(cutoff);
  const bool has_date = has(sketch.text, date + kValue + "\n\n");
  if (at == std::string::npos && !has(sketch.text, date)) {
    if (has(sketch.code, "strftime_now")) refuse_template("writes the date");
    return {};
  }
  const auto fixed = sketch.assigned.find("date_string");
  const bool by_clock = has(sketch.code, "strftime_now");
  const bool known_form = !by_clock || has(sketch.code, "strftime_now(\"%d %b %Y\")") ||
                          has(sketch.code, "strftime_now('%d %b %Y')");
  if (at == std::string::npos || !has_date || !known_form ||
      (!by_clock && fixed == sketch.assigned.end())) {
    refuse_template("writes dates in a way not known here");
  }
  const std::string_view literal = literal_at(sketch.text, at);
  const std::string line(literal.substr(0, literal.find('\n') + 1));
  const std::string_view rest = literal.substr(line.size());
  if (line.empty() || (!rest.empty() && rest != date)) {
    refuse_template("writes dates in a way not known here");
  }
  return line + date + (by_clock ? today : fixed->second) + "\n\n";
}

ChatTemplate llama3(const TemplateSketch& sketch, const std::string& today) {
  const std::string open = "<|start_header_id|>";
  const std::string middle = "<|end_header_id|>";
  const std::string close = "<|eot_id|>";
  require_known_markers(sketch.text, {open, middle, close, "<|eom_id|>", "<|python_tag|>",
                                      "<|begin_of_text|>", "<|end_of_text|>"});
  ChatTemplate result;
  result.family = "Llama 3";
  result.controls = {open, middle, close};
  result.ends = {close};
  const bool trimmed = trims(sketch, open + kValue + middle + "\n\n", close);
  result.trims_system = result.trims_question = result.trims_answer = trimmed;
  const auto header = [&](const char* role) { return open + role + middle + "\n\n"; };
  result.system_before = header("system");
  result.question_before = header("user");
  result.answer_before = header("assistant");
  result.system_after = result.question_after = result.answer_after = close;
  result.system_preamble = dates_of(sketch, today);
  result.always_system = !result.system_preamble.empty();
  read_assigned_system(sketch, result);
  read_thinking(sketch, result);
  read_answer_opening(sketch, result);
  return result;
}

// White space is part of Mistral's templates in one version and not in the next.
struct Spaced {
  std::string before;
  std::string after;
  bool trims = false;
};

// The form that `before` value `after` has in the text, with or without spaces inside.
Spaced spaced(const TemplateSketch& sketch, const std::string& before, const std::string& after) {
  std::optional<Spaced> found;
  for (const std::string& left : {""s, " "s}) {
    for (const std::string& right : {""s, " "s}) {
      for (const bool trimmed : {false, true}) {
        const Spaced form = {before + left, right + after, trimmed};
        std::string text = form.before;
        text += trimmed ? kTrimmed : kValue;
        text += form.after;
        if (!has(sketch.text, text)) continue;
        if (found) refuse_template("writes a message in two ways");
        require_nothing_behind(sketch, text);
        found = form;
      }
    }
  }
  if (!found) refuse_template("does not write a message as its family does");
  return *found;
}

// White space in front of a question, up to the tag before it.
std::string space_before(const TemplateSketch& sketch, const std::string& form) {
  const std::size_t at = sketch.text.find(form);
  std::size_t begin = at;
  while (begin > 0 && (sketch.text[begin - 1] == ' ' || sketch.text[begin - 1] == '\n')) --begin;
  if (begin > 0 && sketch.text[begin - 1] != mark::kStatement) {
    refuse_template("begins a question in a way not known here");
  }
  return sketch.text.substr(begin, at - begin);
}

void read_mistral_answer(const TemplateSketch& sketch, ChatTemplate& result) {
  std::optional<Spaced> found;
  for (std::size_t at = sketch.text.find(kEos); at != std::string::npos;
       at = sketch.text.find(kEos, at + 1)) {
    std::size_t value = at;
    while (value > 0 && sketch.text[value - 1] == ' ') --value;
    if (value == 0) continue;
    const char content = sketch.text[value - 1];
    if (content != mark::kValue && content != mark::kTrimmed) continue;
    std::size_t begin = value - 1;
    while (begin > 0 && sketch.text[begin - 1] == ' ') --begin;
    // Calls of tools end like this, too, behind other text.
    if (begin > 0 && sketch.text[begin - 1] != mark::kStatement) continue;
    if (found) refuse_template("writes an answer in two ways");
    const std::string_view rest = literal_at(sketch.text, at + 1);
    found = {sketch.text.substr(begin, value - 1 - begin),
             sketch.text.substr(value, at - value) + result.ends.front() + std::string(rest),
             content == mark::kTrimmed};
  }
  if (!found) refuse_template("does not write an answer as its family does");
  result.answer_before = found->before;  // which the model writes, too
  result.answer_after = found->after;
  result.trims_answer = found->trims;
}

void read_mistral_system(const TemplateSketch& sketch, ChatTemplate& result) {
  const std::string open = "[SYSTEM_PROMPT]";
  const std::string close = "[/SYSTEM_PROMPT]";
  read_assigned_system(sketch, result);
  if (has(sketch.text, open)) {
    result.controls.insert(result.controls.end(), {open, close});
    const Spaced form = spaced(sketch, open, close);
    result.system_before = form.before;
    result.system_after = form.after;
    result.trims_system = form.trims;
    return;
  }
  const std::string joined = result.question_before + kValue + "\n\n";
  if (!has(sketch.text, joined)) {
    result.system = SystemPlace::none;
  } else if (has(sketch.code, "loop.last and system_message")) {
    result.system = SystemPlace::last_question;
  } else if (has(sketch.code, "loop.first and system_message") ||
             has(sketch.code, "loop.index0 == 0 and system_message")) {
    result.system = SystemPlace::first_question;
  } else {
    refuse_template("puts the text of the system in a place not known here");
  }
}

ChatTemplate mistral(const TemplateSketch& sketch, const std::string& eos) {
  if (eos.empty())
    refuse_template("ends answers with an EOS token, but tokenizer_config.json has none");
  if (has(sketch.text, "<<SYS>>") || has(sketch.text, "[MODEL_SETTINGS]")) {
    refuse_template("writes " +
                    std::string(has(sketch.text, "<<SYS>>") ? "'<<SYS>>'" : "model settings"));
  }
  require_known_markers(sketch.text, {});
  ChatTemplate result;
  result.family = "Mistral";
  result.controls = {"[INST]", "[/INST]", eos};
  result.ends = {eos};
  const Spaced question = spaced(sketch, "[INST]", "[/INST]");
  result.question_before = question.before;
  result.question_after = question.after;
  result.trims_question = question.trims;
  result.question_before.insert(0, space_before(sketch, question.before));
  read_mistral_answer(sketch, result);
  read_mistral_system(sketch, result);
  return result;
}

}  // namespace

ChatTemplate recognise_template(std::string_view source, const TemplateTokens& tokens) {
  const TemplateSketch sketch = sketch_template(source);
  const auto family = [&] {
    if (has(sketch.text, "<|im_start|>") && has(sketch.text, "<|im_end|>")) return chatml(sketch);
    if (has(sketch.text, "<|start_header_id|>") && has(sketch.text, "<|eot_id|>")) {
      return llama3(sketch, tokens.today);
    }
    if (has(sketch.text, "[INST]") && has(sketch.text, "[/INST]")) {
      return mistral(sketch, tokens.eos);
    }
    refuse_template("is of another family: it writes " + first_marker(sketch.text));
  };
  ChatTemplate result = family();
  const std::string literal_bos = "<|begin_of_text|>";
  if (has(sketch.text, std::string(1, mark::kBos))) {
    result.start = tokens.bos;
  } else if (has(sketch.text, literal_bos)) {
    result.start = literal_bos;
  }
  if (!result.start.empty()) result.controls.push_back(result.start);
  return result;
}

}  // namespace sluice
