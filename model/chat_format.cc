#include <algorithm>
#include <array>
#include <ctime>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "io/file.h"
#include "io/json.h"
#include "lib/text.h"
#include "model/chat_template.h"
#include "model/utf8.h"
#include "sluice/chat.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxFile = std::uint64_t{16} << 20;   // tokenizer_config.json lists tokens
constexpr std::size_t kMaxTemplate = std::size_t{128} << 10;  // those in use have up to 20 KiB

[[noreturn]] void throw_broken(const std::filesystem::path& file, const std::string& what) {
  throw Error(ErrorCode::corrupt,
              file.string() + ": " + what + "; take the file of the checkpoint unchanged");
}

// A token is written as its text, or as an object that has it as "content".
std::string token_of(const Json& config, const char* key, const std::filesystem::path& file) {
  const auto found = config.find(key);
  if (found == config.end() || found->is_null()) return {};
  const Json* text = &*found;
  if (text->is_object() && text->contains("content")) text = &text->at("content");
  if (!text->is_string()) throw_broken(file, std::string(key) + " is no token");
  return text->get<std::string>();
}

// A template is a string, or the one that is called "default" in a list of them.
std::optional<std::string> template_of(const Json& value, const std::filesystem::path& file) {
  if (value.is_null()) return std::nullopt;
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) throw_broken(file, "chat_template is neither a string nor a list");
  for (const Json& entry : value) {
    if (!entry.is_object() || !entry.contains("name") || !entry.contains("template") ||
        !entry["template"].is_string()) {
      throw_broken(file, "chat_template has an entry without name and template");
    }
    if (entry["name"] == "default") return entry["template"].get<std::string>();
  }
  throw Error(ErrorCode::unsupported,
              file.string() + ": chat_template has no entry called 'default'");
}

Json read_object(const std::filesystem::path& file) {
  Json json = read_json_file(file, kMaxFile);
  if (!json.is_object()) throw_broken(file, "is no JSON object");
  return json;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  constexpr std::array<const char*, 12> kMonths = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                   "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%02d %s %d", local.tm_mday,
                kMonths.at(static_cast<std::size_t>(local.tm_mon)), local.tm_year + 1900);
  return text.data();
}

struct Source {
  std::string text;
  std::filesystem::path file;
  TemplateTokens tokens;
};

// The order is that of transformers.
Source read_source(const std::filesystem::path& checkpoint) {
  Source source;
  source.tokens.today = today();
  Json config = Json::object();
  const std::filesystem::path config_file = checkpoint / "tokenizer_config.json";
  if (file_exists(config_file)) config = read_object(config_file);
  source.tokens.bos = token_of(config, "bos_token", config_file);
  source.tokens.eos = token_of(config, "eos_token", config_file);
  std::optional<std::string> text;
  source.file = checkpoint / "chat_template.jinja";
  if (file_exists(source.file)) text = read_text_file(source.file, kMaxTemplate);
  for (const char* name : {"chat_template.json", "tokenizer_config.json"}) {
    if (text) break;
    source.file = checkpoint / name;
    if (!file_exists(source.file)) continue;
    const Json json = name == config_file.filename() ? config : read_object(source.file);
    text = template_of(json.value("chat_template", Json()), source.file);
  }
  if (!text) {
    throw Error(ErrorCode::unsupported,
                checkpoint.string() +
                    ": this checkpoint has no chat template, so nothing says how a conversation is "
                    "written for it; give generate a prompt to continue instead");
  }
  if (text->size() > kMaxTemplate)
    throw_broken(source.file, "chat_template is larger than 128 KiB");
  if (const auto offset = find_invalid_utf8(*text)) {
    throw_broken(source.file, "chat_template is not UTF-8 at offset " + std::to_string(*offset));
  }
  source.text = *std::move(text);
  return source;
}

// What Python's str.strip() removes.
bool is_stripped(char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); }

// Of valid UTF-8.
std::string_view trimmed(std::string_view text, bool trims) {
  if (!trims) return text;
  while (!text.empty() && is_stripped(first_code_point(text))) {
    text.remove_prefix(next_utf8_unit(text).length);
  }
  while (!text.empty()) {
    std::size_t last = text.size() - 1;
    while ((static_cast<unsigned char>(text[last]) & 0xC0u) == 0x80u) --last;
    if (!is_stripped(first_code_point(text.substr(last)))) break;
    text.remove_suffix(text.size() - last);
  }
  return text;
}

std::string_view without_thinking(std::string_view answer) {
  constexpr std::string_view kEnd = "</think>";
  const std::size_t at = answer.rfind(kEnd);
  if (at == std::string_view::npos) return answer;
  answer.remove_prefix(at + kEnd.size());
  answer.remove_prefix(std::min(answer.find_first_not_of('\n'), answer.size()));
  return answer;
}

}  // namespace

struct ChatFormat::Impl {
  Impl(ChatTemplate form_of, const Tokenizer& its_tokenizer)
      : form(std::move(form_of)), tokenizer(&its_tokenizer) {
    for (const std::string& text : form.controls) controls.push_back(control_id(text));
    for (const std::string& text : form.ends) ends.push_back(control_id(text));
  }

  TokenId control_id(const std::string& text) const {
    const std::optional<TokenId> id = tokenizer->added_token(text);
    if (!id) {
      throw Error(ErrorCode::tokenizer, "the chat template of " + form.family +
                                            " needs the token " + in_quotes(text) +
                                            ", which is no added token of tokenizer.json; take "
                                            "both files from the same checkpoint");
    }
    if (tokenizer->encode("\n" + text + "\n").size() < 3) {
      throw Error(ErrorCode::unsupported, "tokenizer.json: the token " + in_quotes(text) +
                                              " takes white space beside it along, and the chat "
                                              "template writes some there");
    }
    return *id;
  }

  ChatTemplate form;
  const Tokenizer* tokenizer;
  std::vector<TokenId> controls;  // of form.controls
  std::vector<TokenId> ends;
};

namespace {

// Text and control tokens in turn. Text that stands together is encoded together, wherever it
// comes from, as a tokenizer would that got all of it at once.
class Writer {
 public:
  Writer(const Tokenizer& tokenizer, const ChatTemplate& form, std::span<const TokenId> controls)
      : tokenizer_(&tokenizer), form_(&form), controls_(controls) {}

  // Of the template: control tokens in it are such.
  void write(std::string_view text) {
    while (!text.empty()) {
      std::size_t begin = text.size();
      std::size_t which = 0;
      for (std::size_t i = 0; i < controls_.size(); ++i) {
        const std::size_t at = text.find(form_->controls[i]);
        if (at >= begin) continue;
        begin = at;
        which = i;
      }
      pending_ += text.substr(0, begin);
      text.remove_prefix(begin);
      if (text.empty()) return;
      add(std::span(controls_).subspan(which, 1));
      text.remove_prefix(form_->controls[which].size());
    }
  }

  // Of a person or a model.
  void write_plain(std::string_view text) { pending_ += text; }

  void add(std::span<const TokenId> ids) {
    flush();
    ids_.insert(ids_.end(), ids.begin(), ids.end());
  }

  std::vector<TokenId> finish() {
    flush();
    return std::move(ids_);
  }

 private:
  void flush() {
    const std::vector<TokenId> ids = tokenizer_->encode_plain(pending_, controls_);
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    pending_.clear();
  }

  const Tokenizer* tokenizer_;
  const ChatTemplate* form_;
  std::span<const TokenId> controls_;  // by their place in form_->controls
  std::string pending_;
  std::vector<TokenId> ids_;
};

// An answer stays as it was drawn if that is what the template writes.
void write_answer(const ChatTemplate& form, const Tokenizer& tokenizer, const ChatTurn& turn,
                  Writer& writer) {
  const std::string_view kept =
      trimmed(form.drops_thinking ? without_thinking(turn.answer) : turn.answer, form.trims_answer);
  const std::string written = form.answer_before + std::string(kept);
  const bool as_drawn =
      !turn.tokens.empty() && form.answer_opens + tokenizer.decode(turn.tokens, true) == written;
  if (as_drawn) {
    writer.write(form.answer_opens);
    writer.add(turn.tokens);
  } else {
    writer.write(form.answer_before);
    writer.write_plain(kept);
  }
  writer.write(form.answer_after);
}

}  // namespace

ChatFormat::ChatFormat(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
ChatFormat::ChatFormat(ChatFormat&&) noexcept = default;
ChatFormat& ChatFormat::operator=(ChatFormat&&) noexcept = default;
ChatFormat::~ChatFormat() = default;

ChatFormat ChatFormat::load(const std::filesystem::path& checkpoint, const Tokenizer& tokenizer) {
  const Source source = read_source(checkpoint);
  try {
    return ChatFormat(
        std::make_unique<const Impl>(recognise_template(source.text, source.tokens), tokenizer));
  } catch (const Error& error) {
    throw Error(error.code(), source.file.string() + ": " + error.what());
  }
}

std::string_view ChatFormat::family() const { return impl_->form.family; }

std::span<const TokenId> ChatFormat::end_tokens() const { return impl_->ends; }

bool ChatFormat::moves_system() const { return impl_->form.system == SystemPlace::last_question; }

std::vector<TokenId> ChatFormat::render(std::string_view system,
                                        std::span<const ChatTurn> turns) const {
  const ChatTemplate& form = impl_->form;
  if (turns.empty()) throw Error(ErrorCode::prompt, "a conversation without a question");
  if (!system.empty() && form.system == SystemPlace::none) {
    throw Error(ErrorCode::unsupported,
                "the chat template has no place for a text of the system; leave it out");
  }
  if (system.empty() && form.needs_system) {
    throw Error(ErrorCode::unsupported,
                "the chat template computes a text of the system of its own, which Sluice does "
                "not; give one with `system`");
  }
  require_utf8(system);
  for (const ChatTurn& turn : turns) {
    require_utf8(turn.question);
    require_utf8(turn.answer);
  }
  Writer writer(*impl_->tokenizer, form, impl_->controls);
  writer.write(form.start);
  const std::string_view given = trimmed(system, form.trims_system);
  const bool is_default = system.empty() && form.default_system;
  if (form.system == SystemPlace::own && (!system.empty() || is_default || form.always_system)) {
    writer.write(form.system_before);
    writer.write(form.system_preamble);
    writer.write_plain(is_default ? std::string_view(*form.default_system) : given);
    writer.write(form.system_after);
  }
  for (const ChatTurn& turn : turns) {
    const bool last = &turn == &turns.back();
    const bool joins = !system.empty() &&
                       ((form.system == SystemPlace::last_question && last) ||
                        (form.system == SystemPlace::first_question && &turn == &turns.front()));
    writer.write(form.question_before);
    if (joins) writer.write_plain(std::string(given) + "\n\n");
    writer.write_plain(trimmed(turn.question, form.trims_question));
    writer.write(form.question_after);
    if (!last) write_answer(form, *impl_->tokenizer, turn, writer);
  }
  writer.write(form.answer_opens);
  return writer.finish();
}

}  // namespace sluice
