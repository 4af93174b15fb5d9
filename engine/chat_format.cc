#include <algorithm>
#include <ctime>
#include <optional>
#include <utility>

#include "engine/checkpoint_source.h"
#include "engine/jinja/template.h"
#include "engine/utf8.h"
#include "lib/text.h"
#include "sluice/chat.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

using jinja::Text;

// Origins that tell each text of a conversation from the template's; see jinja::Origin.
constexpr jinja::Origin kSystem = 1;
jinja::Origin question(std::size_t turn) { return static_cast<jinja::Origin>(2 * turn + 2); }
jinja::Origin answer(std::size_t turn) { return static_cast<jinja::Origin>(2 * turn + 3); }
bool is_answer(jinja::Origin origin) { return origin > kSystem && origin % 2 == 1; }
std::size_t turn_of(jinja::Origin origin) { return (origin - 2) / 2; }

constexpr std::size_t kMostTurns = 1'000'000;

// Budget for a conversation: a multiple of the steps and bytes that templates in use take.
std::uint64_t budget_of(std::size_t turns, std::size_t bytes) {
  return 2'000'000 + 20'000 * std::uint64_t{turns} + 64 * std::uint64_t{bytes};
}

std::tm local_time() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  return local;
}

// Consecutive bytes of one origin.
struct Run {
  std::size_t begin = 0;
  std::size_t end = 0;
  jinja::Origin origin = jinja::kTemplate;
};

std::vector<Run> runs_of(const Text& text) {
  std::vector<Run> runs;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const jinja::Origin origin = text.origins()[i];
    if (runs.empty() || runs.back().origin != origin) runs.push_back({i, i, origin});
    runs.back().end = i + 1;
  }
  return runs;
}

// The run of `origin` if there is exactly one, else nothing.
std::optional<Run> only_run(const Text& text, jinja::Origin origin) {
  std::optional<Run> found;
  for (const Run& run : runs_of(text)) {
    if (run.origin != origin) continue;
    if (found) return std::nullopt;
    found = run;
  }
  return found;
}

[[noreturn]] void throw_no_place() {
  throw Error(ErrorCode::unsupported,
              "the chat template has no place for a text of the system; leave it out");
}

bool is_blank(std::string_view text) { return strip(Text(text), jinja::Side::both).size() == 0; }

std::size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                                  a.begin());
}

}  // namespace

struct ChatFormat::Impl {
  Impl(const ChatSource& source, const Tokenizer& its_tokenizer)
      : form(source.text), tokens(source.tokens), tokenizer(&its_tokenizer), now(local_time()) {
    file = source.file;
    learn();
  }

  // The text of a conversation whose last turn is open.
  Text write(std::string_view system, std::span<const ChatTurn> turns) const;
  // Learns from a short conversation what is the same in all of them.
  void learn();
  void learn_system();
  void require_written(const Text& text, std::string_view system,
                       std::span<const ChatTurn> turns) const;
  // Returns true if the drawn tokens of the answer decode to its text at `run`.
  bool is_as_drawn(const Text& text, const Run& run, const ChatTurn& turn) const;

  jinja::Template form;
  std::vector<std::pair<std::string, std::string>> tokens;
  const Tokenizer* tokenizer;
  std::tm now;  // stays, so that the beginning of a conversation does not change at midnight
  std::filesystem::path file;
  std::vector<TokenId> controls;  // added tokens that the template writes
  std::vector<std::string> text_markers;
  std::vector<TokenId> ends;
  // The model's answer follows `opening` when it is generated and `header` when it is rendered as
  // an earlier turn; their common prefix is in neither.
  std::string opening;
  std::string header;
  bool moves_system = false;
  bool refuses_system = false;
};

namespace {

jinja::Value message(const char* role, std::string_view content, jinja::Origin origin) {
  jinja::Dict dict;
  dict.set("role", Text(role));
  dict.set("content", Text(content, origin));
  return jinja::Value::dict(std::move(dict));
}

std::vector<ChatTurn> short_conversation() { return {{"x", "x", {}}, {"x", {}, {}}}; }

// Throws if the text has a token that tokenizer_config.json names but tokenizer.json lacks, because
// the model cannot read it.
void require_tokens(std::string_view text,
                    const std::vector<std::pair<std::string, std::string>>& tokens) {
  for (const auto& [name, token] : tokens) {
    if (name != "bos_token" && name != "eos_token") continue;
    if (text.find(token) == std::string_view::npos) continue;
    throw Error(ErrorCode::tokenizer, "the chat template needs the token " + in_quotes(token) +
                                          ", which is no added token of tokenizer.json; take "
                                          "both files from the same checkpoint");
  }
}

// Adds text that looks like a control token ("<|user|>") to `markers`, each once.
void note_markers(std::string_view text, std::vector<std::string>& markers) {
  constexpr std::size_t kLongest = 64;
  for (std::size_t at = text.find("<|"); at != std::string_view::npos;
       at = text.find("<|", at + 1)) {
    const std::string_view marker = text.substr(at, kLongest);
    const std::size_t end = marker.find("|>", 2);
    if (end == std::string_view::npos) continue;
    const std::string found(marker.substr(0, end + 2));
    if (std::find(markers.begin(), markers.end(), found) == markers.end()) markers.push_back(found);
  }
}

// Encodes text and tokens in turn. Adjacent text is encoded together, whatever its origin, so that
// the ids equal those of encoding the whole text at once.
class Writer {
 public:
  Writer(const Tokenizer& tokenizer, std::vector<TokenId> controls)
      : tokenizer_(&tokenizer), controls_(std::move(controls)) {}

  // Writes the template's text; added tokens in it become tokens.
  void write(std::string_view text,
             const std::vector<std::pair<std::string, std::string>>& tokens) {
    std::size_t done = 0;
    for (const AddedTokenPlace& place : tokenizer_->find_added(text)) {
      const std::string_view between = text.substr(done, place.begin - done);
      write_between(between, tokens);
      note_control(place.id, text.substr(place.begin, place.end - place.begin));
      add(std::span(&place.id, 1));
      done = place.end;
    }
    write_between(text.substr(done), tokens);
  }

  // Writes a person's or a model's text; added tokens in it stay text.
  void write_plain(std::string_view text) { pending_ += text; }

  void add(std::span<const TokenId> ids) {
    flush();
    ids_.insert(ids_.end(), ids.begin(), ids.end());
  }

  std::vector<TokenId> finish() {
    flush();
    return std::move(ids_);
  }

  const std::vector<TokenId>& controls() const { return controls_; }
  // Markers in the template's text that are not tokens.
  const std::vector<std::string>& text_markers() const { return text_markers_; }

 private:
  void write_between(std::string_view text,
                     const std::vector<std::pair<std::string, std::string>>& tokens) {
    require_tokens(text, tokens);
    note_markers(text, text_markers_);
    pending_ += text;
  }

  void note_control(TokenId id, std::string_view text) {
    if (std::find(controls_.begin(), controls_.end(), id) != controls_.end()) return;
    if (id >= tokenizer_->vocabulary()) {
      throw Error(ErrorCode::tokenizer, "the chat template needs the token " + in_quotes(text) +
                                            ", whose id " + std::to_string(id) +
                                            " is none of the model's; take the tokenizer's files "
                                            "and the model from the same checkpoint");
    }
    controls_.push_back(id);
    if (tokenizer_->encode("\n" + std::string(text) + "\n").size() < 3) {
      throw Error(ErrorCode::unsupported, "tokenizer.json: the token " + in_quotes(text) +
                                              " takes white space beside it along, and the chat "
                                              "template writes it");
    }
  }

  void flush() {
    const std::vector<TokenId> ids = tokenizer_->encode_plain(pending_, controls_);
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    pending_.clear();
  }

  const Tokenizer* tokenizer_;
  std::vector<TokenId> controls_;
  std::vector<std::string> text_markers_;
  std::string pending_;
  std::vector<TokenId> ids_;
};

}  // namespace

Text ChatFormat::Impl::write(std::string_view system, std::span<const ChatTurn> turns) const {
  std::vector<jinja::Value> messages;
  std::size_t bytes = system.size();
  if (!system.empty()) messages.push_back(message("system", system, kSystem));
  for (std::size_t i = 0; i < turns.size(); ++i) {
    messages.push_back(message("user", turns[i].question, question(i)));
    bytes += turns[i].question.size() + turns[i].answer.size();
    if (i + 1 < turns.size()) {
      messages.push_back(message("assistant", turns[i].answer, answer(i)));
    }
  }
  jinja::Dict variables;
  for (const auto& [name, token] : tokens) variables.set(name, Text(token));
  variables.set("messages", jinja::Value::list(std::move(messages)));
  variables.set("add_generation_prompt", true);
  variables.set("tools", nullptr);
  variables.set("documents", nullptr);
  return form.render(variables, now, budget_of(turns.size(), bytes));
}

void ChatFormat::Impl::learn() {
  const std::vector<ChatTurn> turns = short_conversation();
  // A template may require a system text, or refuse one.
  std::string system;
  Text first;
  try {
    first = write(system, std::span(turns).first(1));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::prompt) throw;
    system = "x";
    first = write(system, std::span(turns).first(1));
  }
  const Text second = write(system, turns);
  const std::optional<Run> run = only_run(second, answer(0));
  if (!run || !only_run(second, question(0)) || !only_run(second, question(1))) {
    throw Error(ErrorCode::unsupported, "the chat template does not write every text once");
  }
  const std::size_t common = common_prefix(first.bytes(), second.bytes());
  if (common <= run->begin) {
    opening = first.bytes().substr(common);
    header = second.bytes().substr(common, run->begin - common);
  }
  const auto next = std::find_if(second.origins().begin() + static_cast<std::ptrdiff_t>(run->end),
                                 second.origins().end(),
                                 [](jinja::Origin origin) { return origin != jinja::kTemplate; });
  const auto behind = static_cast<std::size_t>(next - second.origins().begin());
  const std::string_view after =
      std::string_view(second.bytes()).substr(run->end, behind - run->end);
  const std::vector<AddedTokenPlace> places = tokenizer->find_added(after);
  if (!places.empty()) ends.push_back(places.front().id);
  Writer writer(*tokenizer, {});
  for (const Run& part : runs_of(second)) {
    if (part.origin != jinja::kTemplate) continue;
    writer.write(std::string_view(second.bytes()).substr(part.begin, part.end - part.begin),
                 tokens);
  }
  controls = writer.controls();
  text_markers = writer.text_markers();
  learn_system();
}

void ChatFormat::Impl::learn_system() {
  const std::vector<ChatTurn> turns = short_conversation();
  try {
    const Text first = write("x", std::span(turns).first(1));
    const std::optional<Run> asked = only_run(first, question(0));
    const Text second = write("x", turns);
    moves_system = asked && common_prefix(first.bytes(), second.bytes()) < asked->end;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::prompt) throw;
    refuses_system = true;
  }
}

void ChatFormat::Impl::require_written(const Text& text, std::string_view system,
                                       std::span<const ChatTurn> turns) const {
  std::vector<bool> written(2 * turns.size() + 2, false);
  for (const jinja::Origin origin : text.origins()) written[origin] = true;
  if (!is_blank(system) && !written[kSystem]) throw_no_place();
  for (std::size_t i = 0; i < turns.size(); ++i) {
    if (!is_blank(turns[i].question) && !written[question(i)]) {
      throw Error(ErrorCode::prompt, "the chat template drops a question");
    }
  }
}

bool ChatFormat::Impl::is_as_drawn(const Text& text, const Run& run, const ChatTurn& turn) const {
  if (turn.tokens.empty() || run.begin < header.size()) return false;
  // The text before the answer must be the template's, as it is before every answer.
  const auto before =
      text.origins().subspan(0, run.begin).last(header.size() + (run.begin > header.size()));
  if (std::any_of(before.begin(), before.end(),
                  [](jinja::Origin origin) { return origin != jinja::kTemplate; })) {
    return false;
  }
  const std::string written =
      text.bytes().substr(run.begin - header.size(), run.end - run.begin + header.size());
  return written.starts_with(header) && opening + tokenizer->decode(turn.tokens, true) == written;
}

ChatFormat::ChatFormat(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
ChatFormat::ChatFormat(ChatFormat&&) noexcept = default;
ChatFormat& ChatFormat::operator=(ChatFormat&&) noexcept = default;
ChatFormat::~ChatFormat() = default;

ChatFormat ChatFormat::load(const std::filesystem::path& checkpoint, const Tokenizer& tokenizer) {
  const ChatSource source = CheckpointSource::open(checkpoint)->chat();
  try {
    return ChatFormat(std::make_unique<const Impl>(source, tokenizer));
  } catch (const Error& error) {
    const ErrorCode code =
        error.code() == ErrorCode::prompt ? ErrorCode::unsupported : error.code();
    throw Error(code, source.file.string() + ": " + error.what());
  }
}

const ChatFormat::Impl& ChatFormat::impl() const {
  if (impl_ == nullptr) throw Error(ErrorCode::usage, "a chat format that was moved from");
  return *impl_;
}

const std::filesystem::path& ChatFormat::file() const { return impl().file; }

std::span<const TokenId> ChatFormat::end_tokens() const { return impl().ends; }

std::span<const std::string> ChatFormat::text_markers() const { return impl().text_markers; }

bool ChatFormat::moves_system() const { return impl().moves_system; }

std::vector<TokenId> ChatFormat::render(std::string_view system,
                                        std::span<const ChatTurn> turns) const {
  if (turns.empty()) throw Error(ErrorCode::prompt, "a conversation without a question");
  if (turns.size() > kMostTurns) {
    throw Error(ErrorCode::prompt, "a conversation of more than a million turns");
  }
  require_utf8(system);
  for (const ChatTurn& turn : turns) {
    require_utf8(turn.question);
    require_utf8(turn.answer);
  }
  if (!system.empty() && impl().refuses_system) throw_no_place();
  const Text text = impl().write(system, turns);
  impl().require_written(text, system, turns);
  const std::vector<Run> runs = runs_of(text);
  Writer writer(*impl().tokenizer, impl().controls);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const auto is_kept = [&](const Run& one) {
      return is_answer(one.origin) && impl().is_as_drawn(text, one, turns[turn_of(one.origin)]);
    };
    std::string_view bytes = std::string_view(text.bytes()).substr(run.begin, run.end - run.begin);
    if (run.origin == jinja::kTemplate) {
      const bool opens = i + 1 < runs.size() && is_kept(runs[i + 1]);
      if (opens) bytes.remove_suffix(impl().header.size());
      writer.write(opens ? std::string(bytes) + impl().opening : bytes, impl().tokens);
    } else if (is_kept(run)) {
      writer.add(turns[turn_of(run.origin)].tokens);
    } else {
      writer.write_plain(bytes);
    }
  }
  return writer.finish();
}

}  // namespace sluice
