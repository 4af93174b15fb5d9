#include "model/template_sketch.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <functional>
#include <vector>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::string_view kWhite = " \t\n\r";
constexpr int kMaxDepth = 32;            // of brackets; those in use have up to 5
constexpr std::size_t kLongestTag = 60;  // of what a message shows of one

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

std::string_view stripped(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kWhite);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kWhite) - begin + 1);
}

// Where the string literal that begins at `begin` ends, behind its quote.
std::size_t literal_end(std::string_view code, std::size_t begin) {
  for (std::size_t i = begin + 1; i < code.size(); ++i) {
    if (code[i] == '\\') {
      ++i;
    } else if (code[i] == code[begin]) {
      return i + 1;
    }
  }
  refuse_template("has a string that does not end");
}

// A literal's text, without its quotes.
std::string unescaped(std::string_view literal) {
  std::string text;
  for (std::size_t i = 1; i + 1 < literal.size(); ++i) {
    if (literal[i] != '\\') {
      text += literal[i];
      continue;
    }
    switch (literal[++i]) {
      case 'n':
        text += '\n';
        break;
      case 't':
        text += '\t';
        break;
      case '\\':
      case '\'':
      case '"':
        text += literal[i];
        break;
      default:
        refuse_template(std::string("has the escape \\") + literal[i] + " in a string");
    }
  }
  return text;
}

// Calls each(position, depth) for every character that is not in a string literal; a literal
// counts as its first quote.
template <typename Each>
void scan(std::string_view code, Each&& each) {
  int depth = 0;
  for (std::size_t i = 0; i < code.size();) {
    const char c = code[i];
    if (c == ')' || c == ']' || c == '}') --depth;
    each(i, depth);
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (depth < 0 || depth > kMaxDepth) refuse_template("has brackets that do not match");
    i = c == '\'' || c == '"' ? literal_end(code, i) : i + 1;
  }
  if (depth != 0) refuse_template("has brackets that do not match");
}

// Whether one of the words stands outside of brackets and literals.
bool has_operator(std::string_view code) {
  constexpr std::array<std::string_view, 7> kWords = {"if", "and", "or", "not", "in", "is", "else"};
  bool found = false;
  scan(code, [&](std::size_t at, int depth) {
    if (depth > 0) return;
    if (std::string_view("<>=!*/%,-").find(code[at]) != std::string_view::npos) found = true;
    if (!is_name(code[at]) || (at > 0 && is_name(code[at - 1]))) return;
    const std::size_t end = static_cast<std::size_t>(
        std::find_if_not(code.begin() + static_cast<std::ptrdiff_t>(at), code.end(), is_name) -
        code.begin());
    const std::string_view word = code.substr(at, end - at);
    if (std::find(kWords.begin(), kWords.end(), word) != kWords.end()) found = true;
  });
  return found;
}

// The operands of + and ~.
std::vector<std::string_view> operands(std::string_view code) {
  std::vector<std::string_view> parts;
  std::size_t begin = 0;
  scan(code, [&](std::size_t at, int depth) {
    if (depth > 0 || (code[at] != '+' && code[at] != '~')) return;
    parts.push_back(stripped(code.substr(begin, at - begin)));
    begin = at + 1;
  });
  parts.push_back(stripped(code.substr(begin)));
  return parts;
}

bool take_suffix(std::string_view& code, std::string_view suffix) {
  if (!code.ends_with(suffix)) return false;
  code = stripped(code.substr(0, code.size() - suffix.size()));
  return true;
}

// A name, and members and elements of it: message['content'], messages[0].content.
bool is_variable(std::string_view code) {
  if (code.empty() || !is_name(code.front()) || std::isdigit(code.front()) != 0) return false;
  bool plain = true;
  scan(code, [&](std::size_t at, int depth) {
    if (depth > 0) return;
    if (!is_name(code[at]) && std::string_view(".[]").find(code[at]) == std::string_view::npos) {
      plain = false;
    }
  });
  return plain;
}

// What a variable is the mark of, by its name.
using MarkOf = std::function<char(std::string_view)>;

char mark_of(std::string_view operand, const MarkOf& variable) {
  if (operand == "bos_token") return mark::kBos;
  if (operand == "eos_token") return mark::kEos;
  if (is_variable(operand)) return variable(operand);
  const bool trims = take_suffix(operand, ".strip()") ||
                     (take_suffix(operand, "trim") && take_suffix(operand, "|"));
  return trims && is_variable(operand) ? mark::kTrimmed : mark::kComputed;
}

// What an expression writes.
std::string sketch_expression(std::string_view code, const MarkOf& variable, int depth = 0) {
  if (depth > kMaxDepth) refuse_template("has brackets that do not match");
  if (has_operator(code)) return {mark::kComputed};
  std::string text;
  for (const std::string_view operand : operands(code)) {
    const bool quoted = !operand.empty() && (operand.front() == '\'' || operand.front() == '"');
    if (quoted && literal_end(operand, 0) == operand.size()) {
      text += unescaped(operand);
    } else if (operand.starts_with('(') && operand.ends_with(')') &&
               operand.find(')') == operand.size() - 1) {
      text +=
          sketch_expression(stripped(operand.substr(1, operand.size() - 2)), variable, depth + 1);
    } else {
      text += mark_of(operand, variable);
    }
  }
  return text;
}

bool has_marks(std::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return c >= mark::kValue && c <= mark::kComputed; });
}

// Statements whose text is written where and as it stands, or not at all.
void require_known_statement(std::string_view code) {
  constexpr std::array<std::string_view, 9> kKnown = {
      "if", "elif", "else", "endif", "for", "endfor", "set", "generation", "endgeneration"};
  const auto end = std::find_if_not(code.begin(), code.end(), is_name);
  const std::string_view word = code.substr(0, static_cast<std::size_t>(end - code.begin()));
  const bool known = std::find(kKnown.begin(), kKnown.end(), word) != kKnown.end();
  const bool drops_messages = word == "for" && code.find("[-") != std::string_view::npos;
  if (!known || drops_messages || (word == "set" && code.find('=') == std::string_view::npos)) {
    refuse_template("has a tag that is not known here: " + in_quotes(code.substr(0, kLongestTag)));
  }
}

class Sketcher {
 public:
  explicit Sketcher(std::string_view source) : source_(source) {}

  TemplateSketch run() {
    while (at_ < source_.size()) {
      const std::size_t tag = next_tag();
      add_data(tag);
      if (tag < source_.size()) add_tag(tag);
    }
    return std::move(sketch_);
  }

 private:
  std::size_t next_tag() const {
    for (std::size_t i = at_; i + 1 < source_.size(); ++i) {
      if (source_[i] != '{') continue;
      if (source_[i + 1] == '{' || source_[i + 1] == '%' || source_[i + 1] == '#') return i;
    }
    return source_.size();
  }

  // The text up to a tag, as white space control leaves it.
  void add_data(std::size_t tag) {
    std::string_view data = source_.substr(at_, tag - at_);
    bool at_line_start = at_ == 0;
    if (strips_) {
      data.remove_prefix(std::min(data.find_first_not_of(kWhite), data.size()));
    } else if (ends_block_ && data.starts_with('\n')) {
      data.remove_prefix(1);
      at_line_start = true;
    }
    if (tag < source_.size()) strip_before(tag, at_line_start, data);
    at_ = tag;
    sketch_.text += data;
  }

  void strip_before(std::size_t tag, bool at_line_start, std::string_view& data) const {
    const char control = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
    if (control == '-') {
      data = data.substr(0, data.find_last_not_of(kWhite) + 1);
    } else if (control != '+' && source_[tag + 1] != '{') {
      const std::size_t content = data.find_last_not_of(" \t");
      const bool line_start =
          content == std::string_view::npos ? at_line_start : data[content] == '\n';
      if (line_start) data = data.substr(0, content + 1);
    }
  }

  // Where a tag's closing brackets begin.
  std::size_t closing(std::size_t begin, std::string_view brackets) const {
    for (std::size_t i = begin; i < source_.size();) {
      if (source_.substr(i).starts_with(brackets)) return i;
      const bool quoted = brackets.front() != '#' && (source_[i] == '\'' || source_[i] == '"');
      i = quoted ? literal_end(source_, i) : i + 1;
    }
    refuse_template("has a tag that does not end");
  }

  void add_tag(std::size_t tag) {
    const char kind = source_[tag + 1];
    const std::string brackets = {kind == '{' ? '}' : kind, '}'};
    const std::size_t end = closing(tag + 2, brackets);
    std::string_view code = source_.substr(tag + 2, end - tag - 2);
    strips_ = code.ends_with('-');
    ends_block_ = kind != '{';
    at_ = end + 2;
    if (code.starts_with('-') || code.starts_with('+')) code.remove_prefix(1);
    if (code.ends_with('-') || code.ends_with('+')) code.remove_suffix(1);
    code = stripped(code);
    if (kind == '#') return;
    note_code(code);
    if (kind == '{') {
      sketch_.text += sketch(code);
    } else {
      add_statement(code);
    }
  }

  void add_statement(std::string_view code) {
    require_known_statement(code);
    sketch_.text += mark::kStatement;
    const std::size_t equals = code.find('=');
    if (code.starts_with("set ") && equals != std::string_view::npos) {
      const std::string name(stripped(code.substr(4, equals - 4)));
      const std::string_view value = stripped(code.substr(equals + 1));
      const std::string text = sketch(value);
      const auto known = marks_.try_emplace(name, text).first;
      if (known->second != text) known->second = {mark::kValue};  // one thing here, another there
      if (has_marks(text)) {
        sketch_.computed[name] = value;
      } else {
        sketch_.assigned[name] = text;
      }
      sketch_.text += text + mark::kStatement;
    }
    if (code.find("add_generation_prompt") != std::string_view::npos) {
      sketch_.generation = sketch_.text.size();
    }
  }

  // What an expression writes; for a variable that is always a value without the white space around
  // it, that.
  std::string sketch(std::string_view code) const {
    return sketch_expression(code, [&](std::string_view name) {
      const auto set = marks_.find(name);
      const bool trimmed = set != marks_.end() && set->second == std::string(1, mark::kTrimmed);
      return trimmed ? mark::kTrimmed : mark::kValue;
    });
  }

  void note_code(std::string_view code) {
    for (const char c : code) {
      const bool white = kWhite.find(c) != std::string_view::npos;
      if (!white || !sketch_.code.ends_with(' ')) sketch_.code += white ? ' ' : c;
    }
    sketch_.code += '\n';
  }

  std::string_view source_;
  std::size_t at_ = 0;
  bool strips_ = false;      // the last tag takes the white space behind it along
  bool ends_block_ = false;  // it takes a line break
  std::map<std::string, std::string, std::less<>> marks_;  // what variables were set to, if alike
  TemplateSketch sketch_;
};

}  // namespace

void refuse_template(const std::string& what) {
  throw Error(ErrorCode::unsupported,
              "the chat template " + what +
                  "; Sluice knows those of ChatML, Llama 3 and Mistral. For others give generate a "
                  "prompt that is written as the model expects it");
}

TemplateSketch sketch_template(std::string_view source) {
  for (const char c : source) {
    if (static_cast<unsigned char>(c) < 0x20 && kWhite.find(c) == std::string_view::npos) {
      refuse_template("has control characters");
    }
  }
  std::string lines;
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      if (!source.substr(i + 1).starts_with('\n')) lines += '\n';
    } else {
      lines += source[i];
    }
  }
  if (lines.ends_with('\n')) lines.pop_back();  // as Jinja does
  return Sketcher(lines).run();
}

}  // namespace sluice
